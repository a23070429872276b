"""Architectures of transformers in miniature: random weights, a vocabulary of 50, two layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

transformers.logging.set_verbosity_error()

V, T = 50, 9
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
BERT |= {"vocab_size": V, "max_position_embeddings": 40}
LLAMA = BERT | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA |= {"tie_word_embeddings": False}
MOE = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
LLAMA4 = {"attention_chunk_size": 4, "intermediate_size_mlp": 16, "no_rope_layers": [1, 0]}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
LATENT |= {"head_dim": 4, "num_key_value_heads": 4, "first_k_dense_replace": 2}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": V, "n_positions": 40}
BART = {"vocab_size": V, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 40}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
BART |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
T5 = {"vocab_size": V, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6}
IMAGE = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE |= {"intermediate_size": 16}


@dataclass
class Model:
    """An architecture in miniature: its configuration, what it eats, and which backends it has."""

    name: str
    config: dict[str, Any]
    kind: str = "decoder"
    backends: tuple[str, ...] = ("sdpa", "eager")
    config_class: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def make(self, backend: str) -> Any:
        torch.manual_seed(1)
        config_class = getattr(transformers, self.config_class or f"{self.name.removesuffix('Model')}Config")
        model = getattr(transformers, self.name)._from_config(config_class(**self.config), attn_implementation=backend)
        return sharpened(model.eval())

    def inputs(self, padded: str = "") -> dict[str, Any]:
        if self.kind == "image":
            return {"pixel_values": torch.randn(2, 3, 8, 8), **self.options}
        if self.kind == "audio":
            return {"input_features": torch.randn(2, 8, 18), "decoder_input_ids": tokens(6), **self.options}
        inputs = {"input_ids": tokens(T), **self.options}
        if padded:
            inputs["attention_mask"] = padding(padded)
        return inputs | ({"decoder_input_ids": tokens(6)} if self.kind == "seq2seq" else {})


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(3, V, (batch, length))


def padding(side: str) -> torch.Tensor:
    mask = torch.ones(2, T, dtype=torch.long)
    mask[1, -3:] = 0
    return mask.flip(-1) if side == "left" else mask


def sharpened(model: Any) -> Any:
    """Matrices large enough for weights far from uniform: at the usual scale every map looks alike."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim >= 2:
                p.normal_(0, 1.0 if "embed" in name else 1.6 * p[0].numel() ** -0.5)
            elif "sink" in name:
                p.normal_()
    return model


ENCODERS = [
    Model("BertModel", BERT, "encoder"),
    Model("RobertaModel", BERT | {"pad_token_id": 0}, "encoder"),
    Model("XLMRobertaModel", BERT | {"pad_token_id": 0}, "encoder"),
    Model("ElectraModel", BERT | {"embedding_size": 16}, "encoder"),
    Model("CamembertModel", BERT | {"pad_token_id": 0}, "encoder"),
    Model("ErnieModel", BERT, "encoder"),
    Model("DistilBertModel", {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 16, "vocab_size": V}, "encoder"),
    Model(
        "ModernBertModel", BERT | {"local_attention": 4, "pad_token_id": 0, "global_attn_every_n_layers": 2}, "encoder"
    ),
]
DECODERS = [
    Model("GPT2Model", GPT2),
    Model("GPT2Model", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    Model("LlamaModel", LLAMA),
    Model("MistralModel", LLAMA | {"sliding_window": 4}),
    Model("MixtralModel", LLAMA | MOE | {"sliding_window": 4}),
    Model("Qwen2Model", LLAMA | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    Model("Qwen3Model", LLAMA),
    Model("Gemma2Model", LLAMA | {"sliding_window": 4, "attn_logit_softcapping": 1.5}, backends=("eager",)),
    Model("Gemma3TextModel", LLAMA | {"sliding_window": 4}, config_class="Gemma3TextConfig"),
    Model("GptOssModel", LLAMA | MOE | {"sliding_window": 4}, backends=("eager",)),
    Model("OlmoModel", LLAMA),
    Model("Olmo2Model", LLAMA),
    Model("GraniteModel", LLAMA | {"attention_multiplier": 0.9}),
    Model("CohereModel", LLAMA),
    Model("Phi3Model", LLAMA),
    Model("StableLmModel", LLAMA),
    Model("Starcoder2Model", LLAMA | {"sliding_window": 4}),
    Model("SmolLM3Model", LLAMA),
    Model("GPTNeoXModel", BERT | {"rotary_pct": 0.5}),
    Model("OPTModel", BERT | {"ffn_dim": 16, "word_embed_proj_dim": 16}),
    Model("GPTBigCodeModel", GPT2),
    Model("BioGptModel", BERT),
    Model("Glm4Model", LLAMA),
    Model("Cohere2Model", LLAMA | {"sliding_window": 4}),
    Model("DogeModel", LLAMA),
    Model("DeepseekV3Model", LLAMA | MOE | LATENT),
    Model("Llama4TextModel", LLAMA | MOE | LLAMA4, config_class="Llama4TextConfig"),
]
SEQ2SEQ = [
    Model("T5Model", T5, "seq2seq"),
    Model("MT5Model", T5, "seq2seq"),
    Model("UMT5Model", T5, "seq2seq"),
    Model("BartModel", BART, "seq2seq"),
    Model("MarianModel", BART, "seq2seq"),
    Model("MBartModel", BART, "seq2seq"),
    Model("PegasusModel", BART, "seq2seq"),
    Model("M2M100Model", BART, "seq2seq"),
]
OTHERS = [
    Model("ViTModel", IMAGE, "image"),
    Model("DeiTModel", IMAGE, "image"),
    Model("BeitModel", IMAGE | {"use_relative_position_bias": True}, "image"),
    Model("Dinov2Model", IMAGE, "image"),
    Model("CLIPVisionModel", IMAGE, "image"),
    Model("SiglipVisionModel", IMAGE | {"vision_use_head": False}, "image"),
    Model("WhisperModel", BART | {"num_mel_bins": 8, "max_source_positions": 9, "max_target_positions": 12}, "audio"),
]
TEXTS = ENCODERS + DECODERS + SEQ2SEQ
