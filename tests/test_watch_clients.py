"""Models of other packages are watched as they come: outputs keep their bits, weights are those of an eager formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regard as rg


@torch.no_grad()
def watched(model, *inputs, num_maps, **options):
    """The maps of a run; its output has the bits of a run without a watch, and every map was checked."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    model.eval()
    plain = model(*inputs, **options)
    with rg.watch(model) as seen:
        output = model(*inputs, **options)
    assert len(seen) == (num_maps or len(seen)) > 0 and not [
        r for r in seen.missing.values() if "was not called" not in r
    ]
    for one, other in zip(tensors(plain), tensors(output), strict=True):
        assert torch.equal(one, other)
    assert all(check.ok is not False for check in seen.verify().values())
    for weights in seen.values():
        assert torch.allclose(weights.dense().sum(-1), torch.ones(()), atol=1e-5)
    return seen


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    value = list(value.values()) if hasattr(value, "values") else value
    return [x for part in value for x in tensors(part)] if isinstance(value, tuple | list) else []


@pytest.mark.parametrize(
    "options",
    [
        {}, {"attn_flash": True}, {"rotary_pos_emb": True}, {"alibi_pos_bias": True}, {"rel_pos_bias": True},
        {"attn_kv_heads": 1}, {"attn_qk_norm": True}, {"attn_num_mem_kv": 2},
    ],
)  # fmt: skip
def test_x_transformers(options):
    library = pytest.importorskip("x_transformers", reason="x-transformers is not installed")
    layers = library.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    model = library.TransformerWrapper(num_tokens=20, max_seq_len=16, attn_layers=layers)
    kept = {}
    for name, module in model.named_modules():
        if name.endswith(".attend"):
            module.register_forward_hook(lambda *run, name=name: kept.update({name: run[-1][1].post_softmax_attn}))
    seen = watched(model, torch.randint(20, (2, 7)), num_maps=2)
    for name, weights in seen.items():
        assert kept[name] is None or torch.allclose(weights.dense(), kept[name], atol=1e-6)


def test_litgpt():
    library = pytest.importorskip("litgpt.model", reason="litgpt is not installed")
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 20, "padded_vocab_size": 20}
    watched(library.GPT(library.Config(**sizes)), torch.randint(20, (2, 7)), num_maps=2)


def test_gpt_2_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 12, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=None)).eval()
    ids = torch.tensor([[3, 1, 4, 1]])
    seen = watched(model, ids, num_maps=2)
    model.set_attn_implementation("eager")
    eager = model(ids, output_attentions=True).attentions
    for weights, returned in zip(seen.values(), eager, strict=True):
        assert torch.allclose(weights.dense(), returned, atol=1e-6)
