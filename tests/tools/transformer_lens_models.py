"""Models in transformers and in TransformerLens."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

HOW = (
    "transformer_lens 4 is not installed: pip install --no-deps transformer-lens einops fancy-einsum jaxtyping beartype"
)


def bridge_of(model, tokenizer):
    """The model in TransformerLens, which runs a copy of it."""
    pytest.importorskip("transformer_lens", reason=HOW)
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers("gpt2", hf_model=copy.deepcopy(model), tokenizer=tokenizer)


def small_gpt2(folder):
    """A small GPT-2 with random weights, and a tokenizer for it."""
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({str(n): n for n in range(20)}, unk_token="0"))
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=20, bos_token_id=0, eos_token_id=0)
    config.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="0", eos_token="0").save_pretrained(folder)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model, transformers.AutoTokenizer.from_pretrained(folder)
