"""Edits of modules that people write: torch's function and modules, `regard.nn` and `regard.attend`."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regard as rg
from regard import RegardError
from zoo import Attending, B, C, H, N, Own


def knock_out(s):
    s[:, 2, 4, 1] = -torch.inf
    return s.softmax(-1)


def scale(s):
    w = s.softmax(-1).clone()
    w[:, 1:3, 3:] *= 0.3
    return w


def both(s):
    s[:, 2, 4, 1] = -torch.inf
    return scale(s)


KNOCK_OUT = rg.KnockOut(rg.Where(heads=2, queries=4, keys=1))
SCALE = rg.edits.ScaleWeights(rg.Where(heads=[1, 2], queries=slice(3, None)), 0.3)
EDITS = [(KNOCK_OUT, knock_out), (SCALE, scale), (KNOCK_OUT & SCALE, both)]
NAMES = ["knock-out", "scale", "both"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@torch.no_grad()
@pytest.mark.parametrize(("edit", "change"), EDITS, ids=NAMES)
def test_the_function_of_torch(edit, change):
    model, x = nn.Sequential(Own()).double(), torch.randn(B, N, C, dtype=torch.float64)
    plain = model(x)
    with rg.watch(model) as outside, rg.edit(model, edit), rg.watch(model) as inside:
        edited = model(x)
    model[0].change = change
    torch.testing.assert_close(edited, model(x), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(plain, edited) and torch.equal(inside[0].dense(), outside[0].dense())
    assert all(check.ok for seen in (inside, outside) for check in seen.verify().values())


def dense_twin(theirs):
    """`Own` with the weights of an `nn.MultiheadAttention`."""
    own = Own(causal=False).double()
    for projection, weight, bias in zip(
        (own.q_proj, own.k_proj, own.v_proj), theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True
    ):
        projection.weight.copy_(weight)
        projection.bias.copy_(bias)
    own.out_proj.load_state_dict(theirs.out_proj.state_dict())
    return own


@torch.no_grad()
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("edit", "change"), EDITS, ids=NAMES)
def test_multihead_attention_of_torch(edit, change, first):
    theirs = nn.MultiheadAttention(C, H, batch_first=first).double().eval()
    own, x = dense_twin(theirs), torch.randn(B, N, C, dtype=torch.float64)
    nn.init.normal_(theirs.out_proj.bias)
    own.out_proj.load_state_dict(theirs.out_proj.state_dict())
    given = x if first else x.transpose(0, 1)
    weights = []
    own.change = lambda s: weights.append(change(s)) or weights[-1]
    expected = own(x)
    for options in ({}, {"average_attn_weights": False}, {"need_weights": False}):
        with rg.watch(theirs) as outside, rg.edit(theirs, edit), rg.watch(theirs) as inside:
            output, returned = theirs(given, given, given, **options)
        torch.testing.assert_close(output if first else output.transpose(0, 1), expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(inside[0].dense(), weights[0], rtol=1e-10, atol=1e-10)
        assert torch.equal(inside[0].dense(), outside[0].dense()) and all(c.ok for c in inside.verify().values())
        if returned is not None:
            torch.testing.assert_close(returned, weights[0].mean(1) if not options else weights[0])


@torch.no_grad()
@pytest.mark.parametrize("norm_first", [True, False])
def test_the_encoder_of_torch_with_padding(norm_first):
    layer = nn.TransformerEncoderLayer(C, H, 8, batch_first=True, norm_first=norm_first)
    encoder, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(B, N, C)
    padded = torch.zeros(B, N, dtype=torch.bool)
    padded[1, 4:] = True
    edit = rg.KnockOut(rg.Where(layers=1, heads=0, queries=2, keys=0))
    plain = encoder(x, src_key_padding_mask=padded)
    with rg.edit(encoder, edit) as run, rg.watch(encoder) as seen:
        edited = encoder(x, src_key_padding_mask=padded)
    assert run.calls == {"layers.1.self_attn": 1}
    real = ~padded
    changed = ((plain - edited).abs() > 1e-5).any(-1)
    assert changed[:, 2].all() and not (changed & real)[:, [0, 1, 3, 4, 5]].any()
    zeros = (seen["layers.1.self_attn"].dense() == 0) & real[:, None, None]
    assert zeros.nonzero().tolist() == [[b, 0, 2, 0] for b in range(B)]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_in_words():
    layer = nn.TransformerEncoderLayer(C, H, 8, batch_first=True)
    encoder, padded = nn.TransformerEncoder(layer, 1).eval(), torch.arange(N).expand(B, N) > 3
    with pytest.raises(RegardError, match="inputs are nested tensors; give padded"), rg.edit(encoder, KNOCK_OUT):
        encoder(torch.randn(B, N, C), src_key_padding_mask=padded)


@torch.no_grad()
def test_a_module_with_another_layout_is_refused():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = nn.Linear(C, C)

        def forward(self, x):
            return F.scaled_dot_product_attention(self.q_proj(x), x, x)

    model = nn.Sequential(Flat())
    with (
        pytest.raises(RegardError, match=r"attention of Flat cannot be edited: .* no separate axes"),
        rg.edit(model, KNOCK_OUT),
    ):
        model(torch.randn(B, N, C))


@pytest.mark.parametrize(("edit", "change"), EDITS, ids=NAMES)
def test_attend_in_a_module(edit, change):
    model, x = nn.Sequential(Attending()).double(), torch.randn(B, N, C, dtype=torch.float64)
    with rg.watch(model) as outside, rg.edit(model, edit), rg.watch(model) as inside:
        edited = model(x)
    gradients = torch.autograd.grad(edited.square().sum(), model.parameters())
    model[0].change = change
    expected = model(x)
    torch.testing.assert_close(edited, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), model.parameters()))
    assert torch.equal(inside[0].dense(), outside[0].dense()) and inside[0].shape == (B, H, N, N)


@torch.no_grad()
@pytest.mark.parametrize(("edit", "change"), EDITS, ids=NAMES)
def test_modules_of_regard(edit, change):
    ours, own, x = (
        rg.nn.MultiHeadAttention(C, H, is_causal=True).double(),
        Own().double(),
        torch.randn(B, N, C).double(),
    )
    pairs = ("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "out_proj")
    for name, of_own in pairs:
        getattr(own, of_own).load_state_dict(getattr(ours, name).state_dict())
    own.change = change
    with rg.watch(ours) as outside, rg.edit(ours, edit), rg.watch(ours) as inside:
        edited = ours(x).output
    torch.testing.assert_close(edited, own(x), rtol=1e-10, atol=1e-10)
    assert torch.equal(inside[0].dense(), outside[0].dense())
    with rg.watch(ours, keep="qkv") as seen:
        ours(x)
    with rg.edit(ours, rg.edits.ActivationPatch(rg.Where(heads=1), source=torch.zeros(B, H, N, C // H, dtype=x.dtype))):
        gated = ours(x).output
    heads = (seen[0].dense() @ seen[0].value).transpose(1, 2)
    heads[:, :, 1] = 0
    torch.testing.assert_close(gated, ours.output(heads.flatten(2)), rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize(("edit", "change"), EDITS, ids=NAMES)
def test_a_decoder_of_regard_counts_queries_in_the_whole_sequence(edit, change):
    decoder = rg.nn.TransformerConfig(C, num_heads=H).decoder(layers=2, cross=False).double().eval()
    x, past, steps = torch.randn(B, N, C, dtype=torch.float64), None, []
    plain = decoder(x)
    with rg.edit(decoder, edit) as run:
        whole = decoder(x)
        for n in range(N):
            step, past = decoder.advance(x[:, n : n + 1], past=past)
            steps.append(step)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-10, atol=1e-10)
    assert len(run.calls) == 2 and not torch.allclose(plain, whole)


@torch.no_grad()
@pytest.mark.parametrize("edges", [(0, 3, N), (0, 1, 2, N), (0, N)])
def test_queries_that_continue_a_text_are_edited_where_they_stand(edges):
    """The mask of the module is asked whether it allows a pair, and not a causal one that begins at the first key."""
    model, x = rg.nn.MultiHeadAttention(C, H, is_causal=True).double(), torch.randn(B, N, C, dtype=torch.float64)
    edit = rg.KnockOut(rg.Where(queries=N - 1, keys=N - 1))
    with rg.edit(model, edit):
        whole = model(x).output
    with rg.edit(model, edit):
        parts = [model(x[:, start:stop], model.keys(x[:, :stop])).output for start, stop in pairwise(edges)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_attend_with_a_cache_or_a_composite_is_refused():
    class Cached(Own):
        def forward(self, x):
            q = self.q_proj(x).unflatten(-1, (H, -1)).transpose(1, 2)
            return rg.Attention()(q, q, q, cache=rg.GrowingCache()).output

    model = nn.Sequential(Cached())
    with pytest.raises(RegardError, match=r"calls regard.attend with a cache"), rg.edit(model, KNOCK_OUT):
        model(torch.randn(B, N, C))


@torch.no_grad()
def test_queries_of_a_module_of_torch_are_counted_only_if_it_is_known_where_they_stand():
    layer = nn.TransformerDecoderLayer(C, H, 8, batch_first=True).double().eval()
    target, source = torch.randn(2, 3, C).double(), torch.randn(2, 5, C).double()
    edit = rg.KnockOut(rg.Where(layers="multihead_attn", queries=1, keys=0))
    with pytest.raises(rg.RegardError, match=r"3 queries and 5 keys.*is_cross_attention = True"), rg.edit(layer, edit):
        layer(target, source)
    for is_cross, query in ((True, 1), (False, 3)):
        layer.multihead_attn.is_cross_attention = is_cross
        edit = rg.KnockOut(rg.Where(layers="multihead_attn", queries=query, keys=0))
        with rg.edit(layer, edit), rg.watch(layer) as seen:
            layer(target, source)
        assert seen["multihead_attn"][0, 0, :, 0].eq(0).tolist() == [False, True, False]


class Torch(nn.Module):
    """`nn.MultiheadAttention` with one input."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(C, H, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def llama(backend):
    transformers = pytest.importorskip("transformers")
    if backend == "regard":
        rg.register()
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=C, num_hidden_layers=1, intermediate_size=8, num_attention_heads=H
    )
    return transformers.LlamaModel._from_config(config, attn_implementation=backend)


MADE = {
    "torch's function": lambda: nn.Sequential(Own()),
    "torch's module": Torch,
    "rg.attend": lambda: nn.Sequential(Attending()),
    "rg.nn": lambda: rg.nn.MultiHeadAttention(C, H, is_causal=True),
} | {backend: lambda backend=backend: llama(backend) for backend in ("sdpa", "eager", "regard")}
WITHIN = [
    KNOCK_OUT,
    SCALE,
    rg.edits.AddToScores(rg.Where(keys=2), 1.5),
    rg.edits.ReplaceWeights(rg.Where(heads=1), "uniform"),
]


@torch.no_grad()
@pytest.mark.parametrize("name", MADE)
def test_what_a_watch_inside_an_edit_returns_is_what_the_model_ran(name):
    """Patching with it reproduces the edited run; the heads of a layer and its bias are the output of the layer."""
    model = MADE[name]().double().eval()
    x, other = (
        torch.randint(0, 20, (2, B, N)) if name in ("sdpa", "eager", "regard") else torch.randn(2, B, N, C).double()
    )
    output = {"torch's function": "out_proj", "rg.attend": "out_proj", "rg.nn": "output"}.get(name, "o_proj")

    def run(x):
        result = model(x)
        return getattr(result, "last_hidden_state", getattr(result, "output", result))

    projected = []
    found = [module for path, module in model.named_modules() if path.rpartition(".")[2] == output]
    hooks = [module.register_forward_hook(lambda *call: projected.append(call[2])) for module in found]
    with rg.watch(model, keep="qkv") as source:
        run(other)
    parts = ["output", *(["value"] if name in ("rg.attend", "rg.nn") else ["query", "key", "value"])]
    patches = [(part, rg.edits.ActivationPatch(rg.Where(heads=[1, 2]), part, source)) for part in parts]
    for part, edit in [*(("output", edit) for edit in WITHIN), *patches, ("output", patches[0][1] & patches[-1][1])]:
        with rg.watch(model, keep="qkv") as outside, rg.edit(model, edit), rg.watch(model, keep="qkv") as inside:
            expected = run(x)
        assert not torch.allclose(expected, run(x)), repr(edit)
        error = 1e-4 if name == "eager" else 1e-9  # it rounds its weights to float32
        for seen in (inside, outside):
            for again in {part, "output"}:
                with rg.edit(model, rg.edits.ActivationPatch(rg.Where(), again, seen)):
                    torch.testing.assert_close(run(x), expected, rtol=error, atol=error, msg=f"{edit!r} {again}")
            with rg.edit(model, edit):
                projected.clear()
                layer = run(x)
            whole = seen.head_part(0).sum(1) + seen.bias_part(0)
            torch.testing.assert_close(whole, projected[0] if found else layer, rtol=error, atol=error)
    if name != "torch's module":  # it does not call its output projection
        gates = [{source.names[0]: torch.tensor([0.5, 1, 0, -2])}, {source.names[0]: [2, 1, 1, 0.5]}]
        for edit in (None, *WITHIN, patches[0][1]):
            with ExitStack() as stack:
                outside = stack.enter_context(rg.watch(model, keep="qkv"))
                for gate in gates:
                    stack.enter_context(rg.hf.gated(model, gate, num_heads=H))
                if edit is not None:
                    stack.enter_context(rg.edit(model, edit))
                inside = stack.enter_context(rg.watch(model, keep="qkv"))
                projected.clear()
                expected = run(x)
            for seen in (inside, outside):
                with rg.edit(model, rg.edits.ActivationPatch(rg.Where(), "output", seen)):
                    torch.testing.assert_close(run(x), expected, rtol=error, atol=error, msg=f"gates {edit!r}")
                assert not seen.head_output(0, 2).any()
                whole = seen.head_part(0).sum(1) + seen.bias_part(0)
                torch.testing.assert_close(whole, projected[0], rtol=error, atol=error)
    for hook in hooks:
        hook.remove()
