"""The laws of composites: each holds for every mechanism that is made of several attentions."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch.autograd import gradcheck

import regard as rg
from cataloged import COMPOSITES
from regard.catalog import mechanisms

pytestmark = pytest.mark.usefixtures("small_blocks")
every_composite = pytest.mark.parametrize("name", COMPOSITES)
CAUSAL = [name for name in COMPOSITES if mechanisms()[name].example()[0].mask is not None]
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def example(name, **sizes):
    """A mechanism with parameters of size 1, and its inputs."""
    attention, *inputs = mechanisms()[name].example(**sizes)
    torch.manual_seed(4)
    for parameter in attention.parameters():
        parameter.data.normal_()
    return attention, *inputs


def attend(name, attention, *inputs, **options):
    """`rg.attend` with the tensors of the call that the mechanism needs."""
    return attention(*inputs, **mechanisms()[name].tensors(attention, *inputs), **options)


def values_of_heads(q, v):
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


@every_composite
@torch.no_grad()
def test_weights_times_values_are_the_output_and_tiles_are_parts_of_the_map(name):
    attention, q, k, v = example(name)
    seen = attend(name, attention, q, k, v)
    weights, (I, J) = seen.weights.dense(), (q.shape[2], k.shape[2])
    assert weights.shape == (*q.shape[:3], J) and weights.dtype == torch.float64
    torch.testing.assert_close(weights @ values_of_heads(q, v), seen.output, **CLOSE)
    torch.testing.assert_close(seen.weights[-1, -1, I // 3], weights[-1, -1, I // 3], **CLOSE)
    torch.testing.assert_close(seen.weights[..., [J - 1, 0, 0]], weights[..., [J - 1, 0, 0]], **CLOSE)
    torch.testing.assert_close(seen.weights.select([1], [2]).tile(rows=[5]), weights[1:, 2:3, 5:6], **CLOSE)
    assert seen.weights.is_signed or not (weights < 0).any()
    for engine in ("dense", "blocked"):
        torch.testing.assert_close(attend(name, attention, q, k, v, engine=engine).output, seen.output, **CLOSE)


@every_composite
@torch.no_grad()
def test_statistics_are_those_of_the_dense_weights(name):
    attention, q, k, v = example(name)
    seen = attend(name, attention, q, k, v).weights
    weights, close = seen.dense(), {"rtol": 1e-5, "atol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(seen.received(), weights.sum(2), **close)
    (mass,) = seen.summarize(rg.maps.SignedMass())
    torch.testing.assert_close(mass.positive, weights.clamp_min(0).sum(-1), **close)
    torch.testing.assert_close(seen.top(2).weights, weights.topk(2).values.clamp_min(0), **close)
    sizes = weights.abs()
    shares = sizes / sizes.sum(-1, keepdim=True).clamp_min(1e-300)
    torch.testing.assert_close(seen.shares().entropy(), torch.special.entr(shares).sum(-1), **close)


@every_composite
def test_gradients_agree_with_finite_differences(name):
    attention, *inputs = example(name, batch=1, queries=8, heads=4)
    inputs = [x.requires_grad_() for x in inputs]
    assert gradcheck(lambda *x: attend(name, attention, *x).output, inputs, fast_mode=True)
    parameters = list(attention.parameters())
    assert parameters or name in ("nsa", "nystrom", "pooled_keys")
    slopes = (
        torch.autograd.grad(attend(name, attention, *inputs).output.square().sum(), parameters) if parameters else ()
    )
    for parameter, slope in zip(parameters, slopes, strict=True):
        direction, ends = torch.randn_like(parameter), []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * 1e-6 * direction
                ends.append(attend(name, attention, *inputs).output.square().sum())
                parameter -= sign * 1e-6 * direction
        torch.testing.assert_close((slope * direction).sum(), (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_decoding_equals_one_call_and_later_tokens_change_nothing(name):
    attention, q, k, v = example(name)
    whole, tensors = attend(name, attention, q, k, v), mechanisms()[name].tensors(attention, q, k, v)
    for chunk in (1, 5):
        cache = rg.GrowingCache()
        for step in range(0, q.shape[2], chunk):
            part = (slice(None), slice(None), slice(step, step + chunk))
            of_rows = {name: tensor[part] for name, tensor in tensors.items()}
            seen = attention(q[part], k[part], v[part], cache=cache, **of_rows)
            cache = seen.cache
            torch.testing.assert_close(seen.output, whole.output[part], **CLOSE)
            rows = whole.weights[:, :, step : step + chunk, : seen.weights.shape[3]]
            torch.testing.assert_close(seen.weights.dense(), rows, **CLOSE)
    cut = q.shape[2] // 2
    q, k, v = (torch.cat((x[:, :, :cut], 3 * x[:, :, cut:] + 5), 2) for x in (q, k, v))
    torch.testing.assert_close(attend(name, attention, q, k, v).output[:, :, :cut], whole.output[:, :, :cut], **CLOSE)


@pytest.mark.parametrize(("batch", "length"), [(0, 4), (2, 0), (1, 1), (1, 2)])
@every_composite
def test_no_tokens_and_few(name, batch, length):
    attention, *inputs = example(name, batch=batch, queries=length)
    inputs = [x.requires_grad_() for x in inputs]
    seen = attend(name, attention, *inputs)
    assert seen.output.shape == (*inputs[0].shape[:3], inputs[2].shape[3]) and torch.isfinite(seen.output).all()
    assert seen.weights.dense().shape == (batch, 4, length, length)
    assert seen.weights.shares().entropy().shape == (batch, 4, length)
    for x, slope in zip(inputs, torch.autograd.grad(seen.output.sum(), inputs, allow_unused=True), strict=True):
        assert slope is None or (slope.shape == x.shape and torch.isfinite(slope).all())


@every_composite
@torch.no_grad()
def test_entries_of_a_batch_are_independent_and_copies_are_equal(name):
    attention, q, k, v = example(name, batch=3)
    whole, tensors = attend(name, attention, q, k, v), mechanisms()[name].tensors(attention, q, k, v)
    tensors = {name: tensor[1:2] for name, tensor in tensors.items()}
    alone = attention(q[1:2], k[1:2], v[1:2], **tensors)
    torch.testing.assert_close(whole.output[1:2], alone.output, **CLOSE)
    torch.testing.assert_close(whole.weights[1:2], alone.weights.dense(), **CLOSE)
    saved = io.BytesIO()
    torch.save(attention.state_dict(), saved)
    fresh = mechanisms()[name].build(**mechanisms()[name].tiny).double()
    fresh.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    for other in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention)), fresh):
        assert repr(other) == repr(attention)
        assert torch.equal(attend(name, other, q, k, v).output, whole.output)
    for other in (copy.deepcopy(whole.weights), pickle.loads(pickle.dumps(whole.weights))):
        assert torch.equal(other.dense(), whole.weights.dense())


@every_composite
@torch.no_grad()
def test_half_precision_is_near_and_autocast_sums_in_float32(name):
    attention, *inputs = example(name)
    exact, tensors = attend(name, attention, *inputs).output, mechanisms()[name].tensors(attention, *inputs)
    for dtype in (torch.float32, *(() if name == "nsa" else (torch.bfloat16,))):  # rounding changes what it selects
        given = {name: x.to(dtype) for name, x in tensors.items()}
        seen = copy.deepcopy(attention).to(dtype)(*(x.to(dtype) for x in inputs), **given)
        assert seen.output.dtype == dtype and seen.weights.dense().dtype == torch.float32
        bound = (1e-4 if dtype == torch.float32 else 0.2) * exact.abs().max()
        assert (seen.output.double() - exact).abs().max() < bound


@every_composite
@torch.no_grad()
def test_a_plan_has_one_part_for_each_attention_and_runs_none(name):
    attention, q, k, v = example(name)
    plan = rg.plan(q, k, v, attention=attention, **mechanisms()[name].tensors(attention, q, k, v))
    calls = []
    for part in plan.parts:
        calls.append(part.engine)
        assert part.engine not in part.refused
    assert plan.engine.split(", ") == list(dict.fromkeys(calls))
    assert f"It runs {len(calls)} attention" in str(plan) and "24 queries, 24 keys" in str(plan)


@every_composite
def test_one_map_of_the_whole_is_reported(name):
    attention, *inputs = example(name)
    seen = []

    class Listener:
        def on_attention(self, module, weights):
            seen.append(weights)

    with rg.attention_output.attend_listeners.to(Listener()):
        whole = attend(name, attention, *inputs)
    assert seen == [whole.weights]


def test_calls_that_a_composite_cannot_run_are_refused():
    attention, q, k, v = example("differential")
    with pytest.raises(rg.RegardError, match="Use GrowingCache"):
        attention(q, k, v, cache=rg.caches.RingCache(4))
    with pytest.raises(rg.RegardError, match="not a composite"):
        attention(q, k, v, engine="ring")
    with pytest.raises(rg.RegardError, match="cannot be cut into 2 equal parts"):
        attention(q[..., :7], k[..., :7], v)
    with pytest.raises(rg.RegardError, match="Create it with length=41"):
        attention, *inputs = example("linformer", queries=41)
        attention(*inputs)
    with pytest.raises(rg.RegardError, match="Leave the mask out, or use MeanGroups"):
        rg.composites.Grouped(rg.Attention(mask=rg.causal()), rg.composites.ProjectedGroups(40, 3))(q, q, v)
    with pytest.raises(rg.RegardError, match="made for a batch of 3, used with a batch of 2"):
        rg.composites.Grouped(rg.Attention(mask=rg.padding([9, 4, 1])), rg.composites.MeanGroups(2))(q, q, v)
    with pytest.raises(rg.RegardError, match="2 parts need as many factors, got 1"):
        rg.composites.Sum([rg.Attention(), rg.Attention()], [1.0])
    with pytest.raises(rg.RegardError, match=r"factor 0 has shape \(4, 1, 1\).*broadcasts against"):
        example("infini")[0](q[:, :3], k[:, :3], v[:, :3])
    with pytest.raises(rg.RegardError, match=r"GateFactors needs gates of shape \(B, H, I, 1\) = \(2, 4, 24, 1\)"):
        rg.composites.Sum([rg.Attention()], rg.composites.GateFactors(1))(q, q, v, gates=torch.ones(2, 4, 24, 2))


def test_a_map_refuses_when_the_matrix_of_its_groups_has_changed():
    attention, q, k, v = example("linformer")
    large = rg.composites.Grouped(rg.Attention(), rg.composites.ProjectedGroups(24, 400)).double()
    weights = large(q, k, v).weights
    with torch.no_grad():
        large.groups.of_values += 1
    with pytest.raises(rg.RegardError, match="changed in place"):
        weights.dense()
    before = attention(q, k, v).weights
    expected = before.dense()
    with torch.no_grad():
        attention.groups.of_values += 1  # a small matrix was copied
    torch.testing.assert_close(before.dense(), expected)


@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize(("length", "num_queries"), [(24, 24), (23, 6), (4, 3), (11, 1), (9, 12)])
def test_a_memory_of_segments_is_linear_attention_to_earlier_segments(length, num_queries, key_heads):
    """Output, weights and gradients of the plain attention with the same mask; queries may outnumber the keys."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, num_queries, 6).double().requires_grad_()
    k, v = (torch.randn(2, key_heads, length, 6).double().requires_grad_() for _ in range(2))
    memory = rg.composites.SegmentMemory(size=5)
    plain = memory.attention(q, k, v, engine="dense")
    seen = memory(q, k, v)
    torch.testing.assert_close(seen.output, plain.output)
    torch.testing.assert_close(seen.weights.dense(), plain.weights.dense())
    slopes = [torch.autograd.grad(x.output.square().sum(), (q, k, v)) for x in (seen, plain)]
    for mine, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, theirs)
