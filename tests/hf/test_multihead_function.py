"""Modules that give their own weights to `F.multi_head_attention_forward`, against the formula in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regard as rg
from miniatures import sharpened
from watching import assert_identical, assert_verified

C, H, T = 16, 4, 7
CAUSAL = torch.ones(T, T).triu(1).bool()
PADDED = torch.tensor([[False] * T, [False] * 4 + [True] * (T - 4)])


class Mixer(nn.Module):
    """No name says that this attends. Three projections, or one of all; (T, B, C), as torch's function takes it."""

    def __init__(self, packed=False, **options):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(C, C)) for _ in range(4))
        self.shift, self.added = nn.Parameter(torch.randn(3 * C)), nn.Parameter(torch.randn(2, 1, 1, C))
        self.packed, self.options = packed, options

    def forward(self, x, **given):
        own = {"in_proj_weight": torch.cat(list(self.parts[:3]))} if self.packed else {"in_proj_weight": None}
        if not self.packed:
            names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            own |= {"use_separate_proj_weight": True, **dict(zip(names, self.parts, strict=False))}
        own |= {"bias_k": None, "bias_v": None, "add_zero_attn": False, "dropout_p": 0.0, "training": self.training}
        own |= {"in_proj_bias": self.shift, "out_proj_weight": self.parts[3], "out_proj_bias": None}
        if self.options.get("bias_k"):
            own |= dict(zip(("bias_k", "bias_v"), self.added, strict=True))
        own |= {name: value for name, value in self.options.items() if name != "bias_k"}
        return F.multi_head_attention_forward(x, x, x, C, H, **own, **given)


def formula(model, x, cut=(), **given):
    """Outputs and weights in float64; without the weights of the keys `cut`."""
    x = x[:, None] if x.ndim == 2 else x
    kinds = zip(model.parts[:3], model.shift.chunk(3), strict=True)
    q, k, v = (x.double() @ weight.double().T + shift.double() for weight, shift in kinds)
    ends = [] if not model.options.get("bias_k") else [model.added.double().expand(2, 1, x.shape[1], C)]
    ends += [torch.zeros(2, 1, x.shape[1], C).double()] if model.options.get("add_zero_attn") else []
    k, v = torch.cat([k, *(e[0] for e in ends)]), torch.cat([v, *(e[1] for e in ends)])
    q, k, v = (y.unflatten(-1, (H, -1)).permute(1, 2, 0, 3) for y in (q, k, v))
    scores = q @ k.mT / math.sqrt(C // H)
    added = torch.zeros(1, 1, T, T).double()
    if (mask := given.get("attn_mask")) is not None:
        mask = mask[None, None] if mask.ndim == 2 else mask.unflatten(0, (-1, H))
        added = added.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else added + mask
    if (padded := given.get("key_padding_mask")) is not None:
        added = added.masked_fill(padded[:, None, None], -torch.inf)
    scores = scores + F.pad(added, (0, scores.shape[-1] - T))
    scores[..., list(cut)] = -torch.inf
    weights = scores.softmax(-1)
    return (weights @ v).permute(2, 0, 1, 3).flatten(2) @ model.parts[3].double().T, weights


CASES = {
    "separate": ({}, {}),
    "packed": ({"packed": True}, {}),
    "boolean mask": ({}, {"attn_mask": CAUSAL}),
    "causal hint": ({}, {"attn_mask": CAUSAL, "is_causal": True}),
    "numbers of each head": ({}, {"attn_mask": torch.linspace(-2, 2, 2 * H * T * T).sin().view(2 * H, T, T)}),
    "padding and mask": ({"packed": True}, {"attn_mask": CAUSAL, "key_padding_mask": PADDED}),
    "own keys": ({"bias_k": True}, {"attn_mask": CAUSAL}),
    "zero key": ({"add_zero_attn": True}, {}),
    "own keys and a zero key": ({"bias_k": True, "add_zero_attn": True, "packed": True}, {}),
}


@torch.no_grad()
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_module_that_gives_its_weights_to_the_function_of_torch(case, need_weights):
    torch.manual_seed(0)
    options, given = CASES[case]
    model, x = sharpened(Mixer(**options).eval()), torch.randn(T, 2, C)
    given = given | {"need_weights": need_weights, "average_attn_weights": False}
    plain = model(x, **given)[0]
    with rg.watch(model) as seen:
        assert_identical(plain, model(x, **given)[0])
    assert_verified(seen)
    expected, weights = formula(model, x, **given)
    torch.testing.assert_close(seen[0].dense().double(), weights, atol=1e-6, rtol=0)
    torch.testing.assert_close(plain.double(), expected, atol=1e-5, rtol=0)
    with rg.edit(model, rg.KnockOut(rg.Where(keys=[0, 2]))), rg.watch(model) as cut:
        output, returned = model(x, **given)
    expected, weights = formula(model, x, cut=(0, 2), **given)
    rows = (
        ~CAUSAL.new_zeros(T) if "attn_mask" not in given or given["attn_mask"].dtype != torch.bool else slice(1, None)
    )
    torch.testing.assert_close(output[rows].double(), expected[rows], atol=1e-5, rtol=0)
    torch.testing.assert_close(cut[0].dense()[:, :, rows].double(), weights[:, :, rows], atol=1e-6, rtol=0)
    assert (returned is not None) == need_weights
    if need_weights:
        torch.testing.assert_close(returned[:, :, rows].double(), weights[:, :, rows], atol=1e-6, rtol=0)
    torch.testing.assert_close(model(x, **given)[0], plain, atol=0, rtol=0)


@torch.no_grad()
def test_an_input_without_a_batch():
    model, x = sharpened(Mixer().eval()), torch.randn(T, C)
    plain, mean = model(x)
    with rg.watch(model) as seen:
        assert_identical(plain, model(x)[0])
    weights = formula(model, x)[1]
    torch.testing.assert_close(seen[0].dense().double(), weights, atol=1e-6, rtol=0)
    with rg.edit(model, rg.KnockOut(rg.Where(keys=0))):
        output, returned = model(x)
    expected, weights = formula(model, x, cut=(0,))
    torch.testing.assert_close(output.double(), expected[:, 0], atol=1e-5, rtol=0)
    assert returned.shape == mean.shape
    torch.testing.assert_close(returned.double(), weights[0].mean(0), atol=1e-6, rtol=0)


@torch.no_grad()
def test_dropout_and_given_keys_are_told():
    model, x = Mixer(dropout_p=0.5, training=True).eval(), torch.randn(T, 2, C)
    with rg.watch(model) as seen:
        model(x)
    assert "dropout 0.5 drops weights" in str(seen.verify())
    model = Mixer(static_k=torch.randn(2 * H, 3, C // H), static_v=torch.randn(2 * H, 3, C // H)).eval()
    with pytest.raises(rg.RegardError, match="was given static_k and static_v; give key and value"), rg.watch(model):
        model(x)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("padded", [False, True])
def test_wavlm(padded):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": C, "num_hidden_layers": 2, "num_attention_heads": H, "intermediate_size": 16}
    sizes |= {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2}
    sizes |= {
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "num_buckets": 8,
        "max_bucket_distance": 6,
    }
    model = sharpened(transformers.WavLMModel(transformers.WavLMConfig(**sizes, feat_extract_norm="layer")).eval())
    inputs = {"input_values": torch.randn(2, 160)}
    if padded:
        inputs["attention_mask"] = torch.arange(160) < torch.tensor([[160], [90]])
    attended = [(name, part) for name, part in model.named_modules() if type(part).__name__ == "WavLMAttention"]
    plain, calls = model(**inputs, output_attentions=True), []
    hooks = [part.register_forward_hook(lambda *run: calls.append(run), with_kwargs=True) for _, part in attended]
    with rg.watch(model) as seen:
        # transformers 4 computes the output in another way where it returns weights, so both calls ask for them
        assert_identical(plain.last_hidden_state, model(**inputs, output_attentions=True).last_hidden_state)
    for hook in hooks:
        hook.remove()
    assert_verified(seen)
    assert seen.names == [name for name, _ in attended]
    for weights, (part, args, given, output), mean in zip(seen, calls, plain.attentions, strict=True):
        expected = weights_of_wavlm(part.double(), args[0].double(), output[2].double(), given["attention_mask"])
        part.float()
        torch.testing.assert_close(weights.dense().double(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(weights.dense().mean(1), mean[:, 0], atol=1e-6, rtol=0)
    with rg.edit(model, rg.KnockOut(rg.Where(layers=1, heads=2, keys=0))), rg.watch(model) as cut:
        edited = model(**inputs, output_attentions=True)
    full, left = (x.dense() for x in (seen[1], cut[1]))
    expected = full.clone()
    expected[:, 2, :, 0] = 0
    expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(left, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(edited.attentions[1][:, 0], expected.mean(1), atol=1e-6, rtol=0)
    assert not torch.equal(edited.last_hidden_state, plain.last_hidden_state)
    with pytest.raises(rg.RegardError, match="gated"), rg.hf.gated(model, {attended[0][0]: [0.0] * H}):
        model(**inputs)


def weights_of_wavlm(part, x, bias, mask):
    """softmax(q k / sqrt(d) + gate . bias), with a gate of the inputs of each query, in float64."""
    q, k = (f(x).unflatten(-1, (H, -1)).transpose(1, 2) for f in (part.q_proj, part.k_proj))
    own = part.gru_rel_pos_linear(x.unflatten(-1, (H, -1)).transpose(1, 2))
    a, b = own.unflatten(-1, (2, 4)).sum(-1).sigmoid().unbind(-1)
    gate = a * (b * part.gru_rel_pos_const[..., 0] - 1) + 2
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + gate[..., None] * bias.unflatten(0, (-1, H))
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None].bool(), -torch.inf)
    return scores.softmax(-1)
