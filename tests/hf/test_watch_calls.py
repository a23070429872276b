"""`watch()` without a model: every call of attention in a block, against the formula in float64 and a run without."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import _global_forward_hooks as hooks_of_all_modules
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import regard as rg
from miniatures import V, tokens
from watching import assert_identical

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
sdpa = F.scaled_dot_product_attention
C, H, T = 16, 4, 7
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def formula(q, k, attn_mask=None, is_causal=False, scale=None, **_):
    """The weights (B, H, I, J) in float64; rows without an allowed key are zeros."""
    q, k = q.double(), k.double()
    if q.ndim > 2:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    I, J = s.shape[-2:]
    if is_causal:  # torch aligns the first query with the first key
        s = s.masked_fill(~torch.ones(I, J, dtype=torch.bool).tril(), -torch.inf)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else s + attn_mask.double()
    w = s.softmax(-1).nan_to_num(0.0)
    return w.reshape(-1, *((1, *w.shape)[-3:]))


def strided(shape, dtype, draw):
    """Numbers with drawn strides: contiguous, the heads of a (B, I, H, D) tensor, a slice, or one that repeats."""
    kind = draw.choice(["contiguous", "transposed", "sliced", "expanded"])
    if kind == "transposed" and len(shape) > 2:
        return torch.randn(*shape[:-3], shape[-2], shape[-3], shape[-1], dtype=dtype).transpose(-2, -3)
    if kind == "sliced":
        return torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]
    if kind == "expanded" and len(shape) == 4:
        return torch.randn(1, *shape[1:], dtype=dtype).expand(shape)
    return torch.randn(shape, dtype=dtype)


def drawn_call(draw):
    """The arguments of a call of F.scaled_dot_product_attention."""
    dtype = draw.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
    lead = draw.choice([(2,), (2,), (1,), (), (2, 3)])
    I, J, heads, D = (
        draw.choice([1, 2, 5, 9]),
        draw.choice([1, 2, 5, 9]),
        draw.choice([1, 2, 4]),
        draw.choice([1, 3, 8]),
    )
    groups = draw.choice([g for g in (1, 2, 4) if heads % g == 0])
    q = strided((*lead, heads, I, D), dtype, draw) * draw.choice([0.1, 1.0, 30.0])
    k, v = (strided((*lead, groups, J, D), dtype, draw) for _ in range(2))
    options = {} if groups == heads else {"enable_gqa": True}
    mask = draw.choice(["none", "causal", "boolean", "float"])
    if mask == "causal":
        options["is_causal"] = True
    elif mask != "none":
        shape = draw.choice(
            [(I, J), (heads, I, J), (1, 1, J), *([(*lead, 1, I, J), (*lead, heads, I, J)] if lead else [])]
        )
        allowed = torch.rand(shape) < 0.7
        numbers = torch.randn(shape, dtype=dtype).masked_fill(~allowed, -torch.inf)
        options["attn_mask"] = allowed if mask == "boolean" else numbers
    if draw.random() < 0.3:
        options["scale"] = draw.choice([0.5, 1.0, 0.0])
    return (q, k, v), options


@pytest.mark.parametrize("seed", range(60))
def test_drawn_calls_have_the_weights_of_the_formula_and_unchanged_outputs(seed):
    torch.manual_seed(seed)
    tensors, options = drawn_call(random.Random(seed))
    plain = sdpa(*tensors, **options)
    if options.get("is_causal") and options.get("scale") == 0.0 and plain.isnan().any():  # a fault of torch's kernel
        with pytest.raises(rg.RegardError, match=r"WRONG, error nan"), rg.watch():
            sdpa(*tensors, **options)
        return
    with rg.watch() as seen:
        output = sdpa(*tensors, **options)
    assert_identical_bits(plain, output)
    assert not seen.missing, seen
    expected = formula(*tensors[:2], **options)
    torch.testing.assert_close(
        seen[0].dense().double(), expected, atol=TOLERANCE[output.dtype], rtol=0, msg=lambda text: f"{options} {text}"
    )
    assert next(iter(seen.verify().values())).ok is not False


def assert_identical_bits(plain, output):
    torch.testing.assert_close(output, plain, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("I", "J"), [(0, 3), (0, 0), (3, 0)])
def test_no_queries_and_no_keys(I, J):
    q, k = torch.randn(1, 2, I, 4), torch.randn(1, 2, J, 4)
    plain = sdpa(q, k, k)
    with rg.watch() as seen:
        assert_identical_bits(plain, sdpa(q, k, k))
    assert seen[0].shape == (1, 2, I, J) and seen[0].dense().shape == (1, 2, I, J)


@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4), (2, 3, 2, 5, 4)], ids=str)
def test_axes_before_the_last_three_are_the_batch(shape):
    q, k, v = torch.randn(3, *shape)
    with rg.watch() as seen:
        sdpa(q, k, v)
        sdpa(query=q, key=k, value=v, attn_mask=torch.ones(5, 5, dtype=torch.bool).tril())
    assert seen[0].shape == (6 if len(shape) == 5 else 1, *((1, *shape)[-3:-1]), 5)
    torch.testing.assert_close(seen[0].dense().double(), formula(q, k), atol=1e-6, rtol=0)
    torch.testing.assert_close(seen[1].dense().double(), formula(q, k, is_causal=True), atol=1e-6, rtol=0)


def test_a_batch_of_one_is_shared_by_the_other_tensors():
    q, k = torch.randn(1, 2, 5, 4), torch.randn(3, 2, 6, 4)
    with rg.watch() as seen:
        sdpa(q, k, k)
    torch.testing.assert_close(seen[0].dense().double(), formula(q.expand(3, -1, -1, -1), k), atol=1e-6, rtol=0)


def test_one_query_head_for_all_key_heads():
    q, k = torch.randn(2, 1, 5, 4), torch.randn(2, 3, 6, 4)
    with rg.watch() as seen:
        sdpa(q, k, k)
    torch.testing.assert_close(seen[0].dense().double(), formula(q.expand(-1, 3, -1, -1), k), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["causal_upper_left", "causal_lower_right"])
def test_masks_of_torch_that_are_no_tensors(name):
    from torch.nn.attention import bias

    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    plain = sdpa(q, k, k, attn_mask=getattr(bias, name)(3, 5))
    with rg.watch() as seen:
        output = sdpa(q, k, k, attn_mask=getattr(bias, name)(3, 5))
    allowed = torch.ones(3, 5, dtype=torch.bool).tril(2 if name == "causal_lower_right" else 0)
    assert_identical(plain, output)
    torch.testing.assert_close(seen[0].dense().double(), formula(q, k, allowed), atol=1e-6, rtol=0)


def test_dropout_leaves_the_weights_before_it_and_the_random_numbers():
    q = torch.randn(1, 2, 5, 4)
    torch.manual_seed(1)
    plain, after = sdpa(q, q, q, dropout_p=0.5), torch.rand(3)
    torch.manual_seed(1)
    with rg.watch() as seen:
        output = sdpa(q, q, q, dropout_p=0.5)
    assert_identical(plain, output)
    assert_identical(after, torch.rand(3))
    torch.testing.assert_close(seen[0].dense().double(), formula(q, q), atol=1e-6, rtol=0)
    assert "dropout 0.5" in seen.verify()[seen.names[0]].note


def test_gradients_are_bit_identical():
    def gradients():
        torch.manual_seed(2)
        layer = nn.TransformerEncoderLayer(C, H, 32, dropout=0.0, batch_first=True)
        q = torch.randn(2, T, C, requires_grad=True)
        heads = layer(q).unflatten(-1, (H, -1)).transpose(1, 2)
        loss = sdpa(heads, heads, heads, is_causal=True).square().sum() + rg.nn.MultiHeadAttention(C, H)(q).output.sum()
        return torch.autograd.grad(loss, [q, *layer.parameters()])

    plain = gradients()
    with rg.watch() as seen:
        watched = gradients()
    assert len(seen) == 3 and not seen.missing
    for mine, wanted in zip(watched, plain, strict=True):
        assert_identical(wanted, mine)


def test_maps_of_a_watch_with_grad_have_gradients():
    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    with rg.watch(grad=True) as seen:
        sdpa(q, q.detach(), q.detach())
    seen[0].entropy().sum().backward()
    mine, q.grad = q.grad, None
    w = formula(q, q.detach()).float()
    (-(w * w.log()).sum()).backward()
    torch.testing.assert_close(mine, q.grad, atol=1e-5, rtol=1e-4)


def test_tensors_that_change_in_place_after_the_call():
    q, k, mask = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 6, 4), torch.rand(5, 6) < 0.6
    numbers = torch.randn(5, 6)
    expected = [formula(q, k, mask), formula(q, k, numbers)]
    with rg.watch(keep="qkv") as seen:
        outputs = [sdpa(q, k, k, attn_mask=mask), sdpa(q, k, k, attn_mask=numbers)]
        q.zero_(), k.zero_(), mask.fill_(True), numbers.zero_()
    for number, (weights, output) in enumerate(zip(expected, outputs, strict=True)):
        torch.testing.assert_close(seen[number].dense().double(), weights, atol=1e-6, rtol=0)
        torch.testing.assert_close(seen.head_output(number), output, atol=1e-5, rtol=0)


# Modules of torch


def attention_weights(mha, x, **options):
    with torch.no_grad():
        return mha(x, x, x, average_attn_weights=False, **options)[1]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_on_both_paths(fast, batch_first):
    torch.manual_seed(3)
    mha, x = nn.MultiheadAttention(C, H, batch_first=batch_first).eval(), torch.randn(2, T, C)
    with torch.set_grad_enabled(not fast):
        plain = mha(x, x, x, need_weights=False)[0]
        with rg.watch() as seen:
            output = mha(x, x, x, need_weights=False)[0]
    assert_identical(plain, output)
    assert seen.num_calls == len(seen) == 1 and "nn.MultiheadAttention" in repr(seen)
    torch.testing.assert_close(seen[0].dense(), attention_weights(mha, x), atol=1e-6, rtol=0)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("around", [False, True], ids=["itself", "in a module"])
def test_torch_encoders_are_bit_identical(grad, padded, around):
    torch.manual_seed(4)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(C, H, 32, batch_first=True), 3).eval()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = encoder

        def forward(self, x, **options):
            return self.encoder(x, **options)

    model, x = Outer() if around else encoder, torch.randn(2, T, C)
    options = {"src_key_padding_mask": torch.arange(T) >= torch.tensor([[T], [4]])} if padded else {}
    with torch.set_grad_enabled(grad):
        plain = model(x, **options)
        with rg.watch() as seen:
            output = model(x, **options)
    assert_identical(plain, output)
    with rg.watch(model) as by_model, torch.set_grad_enabled(grad):
        model(x, **options)
    assert len(seen) == len(by_model) == 3 and not seen.missing
    for mine, wanted in zip(seen, by_model, strict=True):
        torch.testing.assert_close(mine.dense(), wanted.dense(), atol=1e-6, rtol=0)


def test_the_transformer_of_torch():
    torch.manual_seed(5)
    model = nn.Transformer(C, H, 2, 2, 32, batch_first=True).eval()
    x, y = torch.randn(2, T, C), torch.randn(2, 5, C)
    with torch.no_grad():
        plain = model(x, y)
        with rg.watch() as seen:
            assert_identical(plain, model(x, y))
    assert [weights.shape[2:] for weights in seen] == [(T, T)] * 2 + [(5, 5), (5, T)] * 2


class Inside(nn.Module):
    """A module of the user inside of torch's."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(C, H, 32, batch_first=True)

    def forward(self, x, *_, **__):
        return self.layer(sdpa(x, x, x))


def test_modules_of_users_inside_of_torch_modules_and_the_reverse():
    model = nn.Transformer(C, H, 1, 1, 32, custom_encoder=Inside(), batch_first=True).eval()
    container = nn.TransformerEncoder(nn.TransformerEncoderLayer(C, H, 32, batch_first=True), 1).eval()
    container.layers.append(Inside().eval())
    x = torch.randn(2, T, C)
    with torch.no_grad():
        plain = model(x, x), container(x)
        with rg.watch() as seen:
            watched = model(x, x), container(x)
    for mine, wanted in zip(watched, plain, strict=True):
        assert_identical(wanted, mine)
    kinds = [line.split()[2] for line in repr(seen).splitlines()[1:]]
    mine, layer = "F.scaled_dot_product_attention", "nn.TransformerEncoderLayer"
    assert kinds == [mine, layer, "nn.MultiheadAttention", "nn.MultiheadAttention", layer, mine, layer]


class Delegating(nn.TransformerEncoderLayer):
    def forward(self, x, *args, **kwargs):
        return super().forward(x, *args, **kwargs)


class OwnForward(nn.TransformerEncoderLayer):
    def forward(self, x, *_, **__):
        return sdpa(x, x, x)


class OwnHeads(nn.MultiheadAttention):
    def forward(self, x, *_, **__):
        return sdpa(x, x, x), None


class OwnPart(nn.TransformerEncoderLayer):
    """Its attention is called under another name, in a method that torch's forward calls."""

    def _sa_block(self, x, *_, **__):
        return sdpa(x, x, x)


@pytest.mark.parametrize("fast", [False, True])
def test_layers_with_code_of_their_own_are_seen_or_missing_in_words(fast):
    kinds = [Delegating, OwnForward, OwnPart]
    layers, x = [kind(C, H, 32, batch_first=True).train(not fast) for kind in kinds], torch.randn(2, T, C)
    layers.append(OwnHeads(C, H))
    patched = nn.MultiheadAttention(C, H, batch_first=True).eval()
    patched.forward = lambda x: (sdpa(x, x, x), None)
    layers.append(patched)

    def run():
        torch.manual_seed(7)
        return [layer(x) if isinstance(layer, nn.TransformerEncoderLayer) else layer(x)[0] for layer in layers]

    with torch.set_grad_enabled(not fast):
        plain = run()
        with rg.watch() as seen:
            watched = run()
    for mine, wanted in zip(watched, plain, strict=True):
        assert_identical(wanted, mine)
    assert seen.num_calls == 5
    assert [seen[number].shape for number in (0, 1, 3)] == [(2, H, T, T), (1, 2, T, T), (1, 2, T, T)]
    unseen = [(4, "forward of|changes this module")] + ([] if fast else [(2, "changes this module")])
    for number, reason in unseen:
        with pytest.raises(rg.RegardError, match=rf"not captured: .*{reason}"):
            seen[number]


def test_the_function_of_multihead_attention():
    mha, x = nn.MultiheadAttention(C, H).eval(), torch.randn(T, 2, C)
    weights = mha.in_proj_weight, mha.in_proj_bias, None, None, False, 0.0, mha.out_proj.weight, mha.out_proj.bias
    plain = F.multi_head_attention_forward(x, x, x, C, H, *weights, training=False)[0]
    with rg.watch() as seen:
        output = F.multi_head_attention_forward(x, x, x, C, H, *weights, training=False)[0]
    assert_identical(plain, output)
    torch.testing.assert_close(seen[0].dense(), attention_weights(mha, x), atol=1e-6, rtol=0)


# transformers and Regard


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_model_of_transformers_in_the_block(backend):
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": V}
    model = transformers.GPT2Model._from_config(transformers.GPT2Config(**sizes), attn_implementation=backend).eval()
    ids = tokens(6)
    with torch.no_grad():
        plain = model(ids)[0]
        with rg.watch(model) as by_model:
            model(ids)
        with rg.watch() as seen:
            assert_identical(plain, model(ids)[0])
    assert seen.num_calls == len(seen) == 2 and "modeling_gpt2.py" in seen.names[0] and "GPT2Attention" in repr(seen)
    for mine, wanted in zip(seen, by_model, strict=True):
        torch.testing.assert_close(mine.dense(), wanted.dense(), atol=1e-6, rtol=0)


def test_calls_of_regard_count_once():
    torch.manual_seed(6)
    module, decoder = rg.nn.MultiHeadAttention(C, H), rg.nn.TransformerConfig(C, num_heads=H).decoder(layers=1).eval()
    x, attention = torch.randn(2, T, C), rg.Attention(mask=rg.causal(), bias=rg.ALiBi(H))
    q = x.unflatten(-1, (H, -1)).transpose(1, 2)
    plain = attention(q, q, q), module(x).output, decoder(x, decoder.keys(x))
    with rg.watch() as seen:
        watched = attention(q, q, q), module(x).output, decoder(x, decoder.keys(x))
    assert_identical(plain[0].output, watched[0].output)
    assert_identical(plain[1], watched[1])
    assert_identical(*(torch.as_tensor(run[2]) for run in (plain, watched)))
    assert seen.num_calls == 4 and not seen.missing
    torch.testing.assert_close(seen[0].dense(), plain[0].weights.dense(), atol=1e-6, rtol=0)


def test_watches_with_and_without_a_model_in_each_other():
    model, q = nn.TransformerEncoderLayer(C, H, 32, batch_first=True).eval(), torch.randn(1, 2, 5, 4)
    x = torch.randn(2, T, C)
    with torch.no_grad():
        plain = model(x)
        with rg.watch() as outer, rg.watch(model) as by_model, rg.watch() as inner:
            outputs = [model(x)]
            sdpa(q, q, q)
        with rg.watch(model) as around, rg.watch() as within:
            outputs.append(model(x))
    for output in outputs:
        assert_identical(plain, output)
    assert (len(outer), len(by_model), len(inner), len(around), len(within)) == (2, 1, 2, 1, 1)
    for seen in (outer, inner, around, within):
        torch.testing.assert_close(seen[0].dense(), by_model[0].dense(), atol=1e-6, rtol=0)


def test_an_edited_call_is_seen_once_as_it_was_edited():
    model, mha, x = Traced(), nn.MultiheadAttention(C, H, batch_first=True).eval(), torch.randn(2, T, C)
    q, outer = torch.randn(1, 2, 5, 4), nn.Sequential(model)
    edit = rg.KnockOut(rg.Where(heads=1, queries=4, keys=2))
    with torch.no_grad(), rg.edit(outer, edit), rg.watch() as of_function:
        outer(q)
    with torch.no_grad(), rg.edit(mha, edit), rg.watch() as of_module:
        mha(x, x, x)
    for seen in (of_function, of_module):
        weights = seen[0].dense()
        assert seen.num_calls == 1
        assert int((weights == 0).sum()) == len(weights) and not weights[:, 1, 4, 2].any()


# What is kept


def test_numbers_lines_and_the_newest_calls():
    q = torch.randn(1, 2, 5, 4)
    line = test_numbers_lines_and_the_newest_calls.__code__.co_firstlineno + 5
    with rg.watch(keep_calls=2) as seen:
        for length in range(1, 6):
            sdpa(q[:, :, :length], q, q)
    assert seen.names == [f"{number} {Path(__file__).name}:{line}" for number in (3, 4)]
    assert [seen[number].shape[2] for number in (3, 4, -1, -2)] == [4, 5, 5, 4]
    assert seen.num_calls == 5 and len(seen) == 2 and seen[seen.names[0]].shape[2] == 4
    assert repr(seen).splitlines() == [
        "WatchedCalls(the newest 2 of 5 calls)",
        f"  {seen.names[0]} F.scaled_dot_product_attention (1 x 2 heads x 4 x 5)",
        f"  {seen.names[1]} F.scaled_dot_product_attention (1 x 2 heads x 5 x 5)",
    ]
    for number in (0, 2, 5, -3):
        with pytest.raises(KeyError, match=r"calls 3 to 4 are kept \(only the newest of 5, by keep_calls=2\)"):
            seen[number]


def test_a_block_without_calls():
    with rg.watch() as seen:
        torch.ones(3).softmax(0)
    assert repr(seen) == "WatchedCalls(0 calls)" and not seen.names
    with pytest.raises(rg.RegardError, match="no attention was called"):
        seen[0]


def test_what_has_no_map_has_its_line_and_a_reason():
    q = torch.randn(3, 1, 2, 5, 4)
    nested = torch.nested.nested_tensor([torch.randn(2, 5, 4), torch.randn(2, 3, 4)], layout=torch.strided)
    with rg.watch() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.vmap(lambda q: sdpa(q, q, q))(q)
        sdpa(nested, nested, nested)
        torch.func.grad(lambda q: sdpa(q, q, q).sum())(q[0])
    assert seen.num_calls == 3 and all(Path(__file__).name in name for name in seen.missing)
    for number, reason in ((0, "torch.func"), (1, "nested tensors"), (2, "torch.func")):
        with pytest.raises(rg.RegardError, match=rf"not captured: F.scaled_dot_product_attention: .*{reason}"):
            seen[number]


class Traced(nn.Module):
    def forward(self, q):
        return F.scaled_dot_product_attention(q, q, q)


def test_torchscript_is_missing_in_words_and_exported_programs_are_seen():
    q = torch.randn(1, 2, 5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.trace(Traced(), (q,))
    exported = torch.export.export(Traced(), (q,)).module()
    with rg.watch() as seen:
        scripted(q)
        exported(q)
    assert all(Path(__file__).name in name for name in seen.names)
    with pytest.raises(rg.RegardError, match="TorchScript, which runs without Python"):
        seen[0]
    torch.testing.assert_close(seen[1].dense().double(), formula(q, q), atol=1e-6, rtol=0)


def test_statistics_and_values():
    q = torch.randn(3, 1, 2, 5, 4)
    with rg.watch(keep="statistics") as kept:
        sdpa(*q)
    torch.testing.assert_close(
        kept.statistics[kept.names[0]].of(rg.maps.Entropy),
        torch.special.entr(formula(*q[:2])).sum(-1).float(),
        atol=1e-5,
        rtol=0,
    )
    with rg.watch(keep="qkv") as seen:
        output = sdpa(*q)
    assert_identical(seen[0].value, q[2])
    torch.testing.assert_close(seen.head_output(0), output, atol=1e-6, rtol=0)
    with pytest.raises(rg.RegardError, match=r"seen.head_part\(0\): .*output projection"):
        seen.head_part(0)


def test_pages_and_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("anywidget")
    q = torch.randn(1, 2, 5, 4)
    with rg.watch() as seen:
        sdpa(q, q, q)
        sdpa(q[:, :, :3], q, q)
        sdpa(q, q, q, is_causal=True)
    page = seen.save(tmp_path / "attention.html").read_text()
    assert all(name.split()[1] in page for name in seen.names)
    assert seen.show() is not None
    assert seen.heatmap(2, 0, tokens=list("abcde")).axes[0].get_title() == "call 2, head 0"
    assert seen.figure(layer=2).rows and seen.figure().rows


# Blocks


class Counting(TorchFunctionMode):
    """A mode of the user."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_errors_end_the_block_and_leave_nothing():
    class Failing(nn.Module):
        def forward(self, x):
            raise ValueError("mine")

    q, layer = torch.randn(1, 2, 5, 4), nn.TransformerEncoderLayer(C, H, 32, dropout=0.0, batch_first=True)
    layer.linear1 = Failing()
    encoder, hooks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), dict(hooks_of_all_modules)
    with pytest.raises(ValueError, match="mine"), rg.watch() as seen:
        sdpa(q, q, q)
        encoder(torch.randn(2, T, C))
    assert len(seen) == 2 and seen[0].shape == (1, 2, 5, 5) and seen[1].shape == (2, H, T, T)
    assert not _get_current_function_mode_stack() and hooks_of_all_modules == hooks
    with rg.watch() as after:
        with pytest.raises(ValueError, match="mine"):
            encoder(torch.randn(2, T, C))
        sdpa(q, q, q)
    assert len(after) == 2 and not _get_current_function_mode_stack()


def test_modes_of_users_stay_in_their_order():
    q, mode, encoder = (
        torch.randn(1, 2, 5, 4),
        Counting(),
        nn.TransformerEncoderLayer(C, H, 32, batch_first=True).eval(),
    )
    block = rg.watch()
    seen = block.__enter__()
    with mode, torch.no_grad():
        encoder(torch.randn(2, T, C))
        sdpa(q, q, q)
        block.__exit__(None, None, None)
        assert _get_current_function_mode_stack() == [mode]
        sdpa(q, q, q)
    assert len(seen) == 2 and not _get_current_function_mode_stack()


def test_only_the_thread_of_the_block():
    q, encoder = torch.randn(1, 2, 5, 4), nn.TransformerEncoderLayer(C, H, 32, batch_first=True).eval()

    def run():
        sdpa(q, q, q)
        encoder(torch.randn(2, T, C))
        rg.Attention()(q, q, q)

    with rg.watch() as seen:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        sdpa(q, q, q)
    assert seen.num_calls == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_is_no_call(reentrant):
    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    mha = nn.MultiheadAttention(4, 2, batch_first=True)

    def run(q):
        return sdpa(q, q, q).sum() + mha(q[0], q[0], q[0])[0].sum()

    with rg.watch() as seen:
        torch.utils.checkpoint.checkpoint(run, q, use_reentrant=reentrant).backward()
        sdpa(q, q, q)
    assert seen.num_calls == len(seen) == 3


# Compiled code


def attended(q):
    return sdpa(q * 2, q, q, is_causal=True) + 1


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("before", [False, True], ids=["first run inside", "ran before"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_run_eagerly(backend, before, fullgraph):
    torch._dynamo.reset()
    q, compiled = torch.randn(1, 2, 5, 4), torch.compile(attended, backend=backend, fullgraph=fullgraph)
    if before:
        compiled(q)
    with rg.watch() as seen:
        outputs = [compiled(q), compiled(q)]
    outputs.append(compiled(q))
    for output in outputs:
        assert_identical(attended(q), output)
    assert len(seen) == 2 and Path(__file__).name in seen.names[0]
    torch.testing.assert_close(seen[1].dense().double(), formula(q * 2, q, is_causal=True), atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_compiled_modules_that_ran_before_run_eagerly(in_place, around):
    torch._dynamo.reset()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(C, H, 32, batch_first=True), 2).eval()
    x, part = torch.randn(2, T, C), encoder.layers[0] if around else encoder
    with torch.no_grad():
        plain = encoder(x)
        if in_place:
            part.compile(backend="eager")
        elif around:
            encoder.layers[0] = torch.compile(part, backend="eager")
        model = torch.compile(encoder, backend="eager") if not (in_place or around) else encoder
        if not (around and not in_place):
            model(x)
        with rg.watch() as seen:
            output = part(x) if around and not in_place else model(x)
    assert len(seen) == (1 if around and not in_place else 2) and not seen.missing
    if not (around and not in_place):
        assert_identical(plain, output)


FIRST_INSIDE = """
import sys, torch, regard as rg
from torch.nn.functional import scaled_dot_product_attention as sdpa
assert "torch._dynamo" not in sys.modules
q = torch.randn(1, 2, 5, 4)
with rg.watch() as seen:
    try:
        torch.compile(lambda q: sdpa(q * 2, q, q), backend="eager", fullgraph=True)(q)
    except torch._dynamo.exc.Unsupported as error:
        assert "regard.watch() does not see attention inside of a graph" in str(error)
    else:
        raise AssertionError("silently missing")
    output = torch.compile(lambda q: sdpa(q * 2, q, q), backend="eager")(q)
assert len(seen) == 1 and not seen.missing, seen
assert torch.equal(output, sdpa(q * 2, q, q))
"""


def test_a_compiler_that_is_loaded_inside_of_the_block():
    run = subprocess.run([sys.executable, "-c", FIRST_INSIDE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_regard_computes_without_the_mode_and_with_its_compiled_code():
    torch._dynamo.reset()
    graphs, modes = [], []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @dataclass(frozen=True)
    class Compiled(rg.masks.Mask):
        def allowed(self, grid):
            modes.extend(_get_current_function_mode_stack())
            compiled = torch.compile(lambda x: x + 1, backend=backend)
            compiled(torch.ones(2))
            return grid.key[None, None, None] <= grid.query[None, None, :, None]

    q = torch.randn(1, 2, 5, 4)
    with rg.watch() as seen:
        output = rg.Attention(mask=Compiled())(q, q, q).output
    assert graphs and not modes and seen.num_calls == 1
    assert_identical(output, rg.Attention(mask=Compiled())(q, q, q).output)


# What is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": [0]}, r"watch\(layers=\.\.\.\): without a model there are no layers"),
        ({"tokenizer": transformers.PreTrainedTokenizerFast}, r"watch\(tokenizer=\.\.\.\)"),
        ({"on_step": print, "keep_steps": 2}, r"watch\(on_step=\.\.\., keep_steps=\.\.\.\)"),
        ({"keep_calls": 0}, "keep_calls"),
        ({"model": None}, "model"),
        ({"model": nn.Linear(2, 2), "keep_calls": 2}, r"watch\(model, keep_steps=\.\.\.\)"),
    ],
    ids=str,
)
def test_arguments_that_have_no_meaning_are_refused(options, words):
    with pytest.raises(rg.RegardError, match=words), rg.watch(**options):
        pass
