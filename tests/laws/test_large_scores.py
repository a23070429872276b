"""Rows whose scores are all large: their log-sum-exp in float32 cannot hold log n.

Scores are multiples of the step of float32 at the offset, so nothing rounds them, and the formula in float64 is exact.
"""

import copy
import math

import pytest
import torch

import regard as rg
from kernels import needs_kernel
from regard import reference
from regard.engine import rows
from regard.maps.scored_map import dot_tensors, is_dot
from regard.maps.stored import load_map, save_map

#: A log-sum-exp up to 1024 rounds by 1024 half units; the rest of a row sum is 16 sums of 40 terms.
ROUNDING = (1024 + 16 * 40) * torch.finfo(torch.float32).eps / 2
ENGINES = ("fused", "blocked", "dense", "reference")
OFFSETS = (-1e9, 0.0, 1e5, 2.0**20, 1e9, torch.finfo(torch.float32).min / 2)
I, J, D = 24, 40, 8


def step(offset):
    """The distance of neighboring floats at the offset, 1/8 at least."""
    x = torch.tensor(float(offset)).abs()
    return max(0.125, float(torch.nextafter(x, torch.tensor(torch.inf)) - x))


class Offset(rg.biases.AdditiveBias):
    """A number for each query and key."""

    def __init__(self, table):
        self.table = table

    def term(self, grid, rows, cols):
        return self.table[grid.i - (J - I), grid.j]


@reference.shift.register
def _(piece: Offset, s, q, k, place):
    return s + reference.array(piece.table)[place.i - (J - I), place.j]


def table(offset, rows="all"):
    """The offset on all keys of some rows, or on some keys of each row."""
    found = torch.zeros(I, J)
    where = {"all": ..., "one": 5, "some": slice(3, None, 4), "mixed": (..., slice(0, 30)), "none": slice(0, 0)}[rows]
    found[where] = offset
    return found


def inputs(offset, dtype=torch.float32, key_heads=2):
    """Queries of one channel that is not 0, and keys of -1, 0 or 1 there: scores are -1, 0 or 1 steps."""
    draw = torch.Generator().manual_seed(0)
    q, k = torch.zeros(2, 2, I, D, dtype=dtype), torch.zeros(2, key_heads, J, D, dtype=dtype)
    q[..., 0] = step(offset) if step(offset) < 1e3 else 0
    k[..., 0] = torch.randint(-1, 2, k.shape[:3], generator=draw).to(dtype)
    return q, k, torch.randn(2, key_heads, J, D, generator=draw).to(dtype)


def formula(q, k, bias, allowed=None, sink=None):
    """Weights in float64, of scores as they are."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = q.double() @ k.mT + bias.double()
    s = s if allowed is None else s.masked_fill(~allowed, -torch.inf)
    if sink is None:
        return torch.softmax(s, -1)
    greatest = s.amax(-1, keepdim=True).clamp_min(sink).detach()
    exps = (s - greatest).exp()
    return exps / (exps.sum(-1, keepdim=True) + (sink - greatest).exp())


def attention(bias, **pieces):
    return rg.Attention(rg.Dot(scale=1.0), bias=Offset(bias), **pieces)


def in_channels(bias, q, k):
    """Queries and keys whose second channel gives the numbers of a bias, as the kernel engine takes them."""
    column = bias[bias.abs().amax(-1).argmax()]
    row = bias[:, column.abs().argmax()]
    q, k = q.clone(), k.clone()
    q[..., 1], k[..., 1] = row, (column != 0).to(k.dtype)
    assert torch.equal(q[0, 0, :, 1:2] * k[0, 0, :, 1], bias)
    return q, k


def check_map(weights, expected):
    """Every look at a map against weights in float64."""
    close = {"rtol": ROUNDING, "atol": ROUNDING * 1e-3}
    torch.testing.assert_close(weights[0, 1, 5].double(), expected[0, 1, 5], **close)
    torch.testing.assert_close(weights[..., 3:9, 7:].double(), expected[..., 3:9, 7:], **close)
    torch.testing.assert_close(weights.dense().double(), expected, **close)
    torch.testing.assert_close(weights.select([1], [0]).dense().double(), expected[1:, :1], **close)
    entropy, received, top, distance = weights.summarize(
        rg.maps.Entropy(), rg.maps.KeyTotals(), rg.maps.TopLinks(3), rg.maps.Distance()
    )
    logs = expected.log().clamp_min(torch.finfo(torch.float32).min)
    torch.testing.assert_close(entropy.double(), -(expected * logs).sum(-1), rtol=2 * ROUNDING, atol=2 * ROUNDING)
    torch.testing.assert_close(received.double(), expected.sum(2), rtol=ROUNDING, atol=ROUNDING * I)
    torch.testing.assert_close(top.weights.double(), expected.topk(3).values, **close)
    far = (torch.arange(J) - torch.arange(J - I, J)[:, None]).abs().double()
    torch.testing.assert_close(distance.double(), (expected * far).sum(-1), rtol=2 * ROUNDING, atol=1e-4)


def problem(offset, rows, **sizes):
    """Queries, keys, values and biases. Scores beside the offset are multiples of the step of the greatest of a row."""
    q, k, v = inputs(offset if rows == "all" or offset > 0 else 0.0, **sizes)
    if rows in ("one", "some"):
        q[..., 0] = 0
    return q, k, v, table(offset, rows)


@pytest.mark.parametrize("rows", ["all", "some", "mixed"])
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("engine", ENGINES)
@torch.no_grad()
def test_maps_of_large_scores_are_those_of_the_formula(engine, offset, rows):
    q, k, v, bias = problem(offset, rows)
    check_map(attention(bias)(q, k, v, engine=engine).weights, formula(q, k, bias))


@pytest.mark.parametrize("rows", ["all", "one", "mixed"])
@pytest.mark.parametrize("offset", [-1e9, 1e5])
@pytest.mark.parametrize("engine", ENGINES)
@torch.no_grad()
def test_statistics_add_up_from_tile_to_tile(engine, offset, rows, monkeypatch):
    monkeypatch.setattr("regard.maps.attention_map.TILE", (4, 8))
    monkeypatch.setattr("regard.engine.rows.RECOMPUTED_BYTES", 1)
    q, k, v, bias = problem(offset, rows)
    check_map(attention(bias)(q, k, v, engine=engine).weights, formula(q, k, bias))


@pytest.mark.parametrize("engine", ENGINES)
@torch.no_grad()
def test_rows_may_be_large_in_one_head_of_one_entry_alone(engine):
    """2^30 for all keys there, 0 elsewhere: all weights are 1 / J."""
    q, k, v = (torch.zeros(2, 2, n, D) for n in (I, J, J))
    q[1, 0, :, 0] = k[..., 0] = 2.0**15
    weights = rg.Attention(rg.Dot(scale=1.0))(q, k, v, engine=engine).weights
    torch.testing.assert_close(weights.dense(), torch.full((2, 2, I, J), 1 / J), rtol=ROUNDING, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
@torch.no_grad()
def test_the_entropy_of_a_row_without_scores_is_log_n(engine):
    q, k, v = inputs(0.0)
    seen = attention(table(-1e9, "some"))(0 * q, k, v, engine=engine)
    torch.testing.assert_close(seen.weights.entropy(), torch.full((2, 2, I), math.log(J)), rtol=1e-5, atol=0)
    torch.testing.assert_close(seen.weights.dense().sum(-1), torch.ones(2, 2, I), rtol=1e-5, atol=0)


@pytest.mark.parametrize("offset", [-1e9, 1e5, 1e9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("engine", ENGINES)
@torch.no_grad()
def test_half_precision_and_grouped_heads(engine, dtype, offset):
    q, k, v = inputs(offset, dtype, key_heads=1)
    seen = attention(table(offset, "all"))(q, k, v, engine=engine)
    check_map(seen.weights, formula(q, k, table(offset, "all")))


@needs_kernel
@pytest.mark.parametrize("rows", ["all", "one", "some", "mixed"])
@pytest.mark.parametrize("offset", OFFSETS)
def test_the_kernel_engine_takes_large_products(offset, rows):
    """Its biases are numbers by distance, so the offset lies in a channel."""
    q, k, v, bias = problem(offset, rows)
    leaves = [x.requires_grad_() for x in (*in_channels(bias, q, k), v)]
    plain = rg.Attention(rg.Dot(scale=1.0))
    with torch.no_grad():
        check_map(plain(*leaves, engine="kernel").weights, formula(q, k, bias))
    along = torch.randn(2, 2, I, D, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(plain(*leaves, engine="kernel").output, leaves[2], along)[0]
    expected = formula(q, k, bias).mT @ along.double()
    size = max(float(expected.abs().max()), 1.0)
    torch.testing.assert_close(found.double(), expected, rtol=ROUNDING, atol=ROUNDING * size)


@pytest.mark.parametrize("offset", [-1e9, 1e5, 1e9])
@pytest.mark.parametrize("engine", [*ENGINES, pytest.param("kernel", marks=needs_kernel)])
@torch.no_grad()
def test_masks_and_large_products_of_queries_and_keys(engine, offset):
    """The kernel's own causal flag, windows, and scores that are large without a bias."""
    q, k, v = inputs(offset)
    q[..., 1], k[..., 1] = offset, 1.0
    i, j = torch.arange(I)[:, None] + J - I, torch.arange(J)
    for mask, allowed in ((rg.causal(), j <= i), (rg.causal() & rg.window(5), (j <= i) & (i - j < 5))):
        seen = rg.Attention(rg.Dot(scale=1.0), mask=mask)(q, k, v, engine=engine)
        check_map(seen.weights, formula(q, k, torch.tensor(offset), allowed))


def sinks(sink):
    learned = rg.normalizers.LearnedSink(2)
    torch.nn.init.constant_(learned.sink, sink)
    return rg.normalizers.Softmax(sink=sink), learned


@pytest.mark.parametrize(("offset", "sink"), [(-1e9, 0.0), (1e9, 0.0), (1e5, 1e5), (-1e9, -1e9), (1e9, 1e9)])
@pytest.mark.parametrize("engine", ["blocked", "dense", "reference"])
@torch.no_grad()
def test_sinks_take_their_share(engine, offset, sink):
    q, k, v = inputs(offset)
    expected = formula(q, k, table(offset), sink=torch.tensor(sink, dtype=torch.float64))
    for normalizer in sinks(sink):
        seen = attention(table(offset), normalizer=normalizer)(q, k, v, engine=engine)
        check_map(seen.weights, expected)
        torch.testing.assert_close(seen.output.double(), expected @ v.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["blocked", "dense"])
@torch.no_grad()
def test_top_k_of_large_scores(engine):
    q, k, v = inputs(-1e9)
    seen = attention(table(-1e9), normalizer=rg.normalizers.TopK(4))(0 * q, k, v, engine=engine)
    kept = seen.weights.dense()
    assert torch.equal((kept > 0).sum(-1), torch.full((2, 2, I), 4))
    torch.testing.assert_close(kept.sum(-1), torch.ones(2, 2, I))
    torch.testing.assert_close(seen.output, kept @ v, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", ["all", "some", "mixed"])
@pytest.mark.parametrize("offset", [-1e9, -1e5, 1e9])
@pytest.mark.parametrize("engine", ["fused", "blocked", "dense"])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_gradients_are_those_of_the_formula(engine, offset, rows, key_heads):
    *tensors, bias = problem(offset, rows, key_heads=key_heads)
    leaves = [x.requires_grad_() for x in tensors]
    along = torch.randn(2, 2, I, D, generator=torch.Generator().manual_seed(1))
    attention(bias)(*leaves, engine=engine).output.backward(along)
    twins = [x.detach().double().requires_grad_() for x in leaves]
    (formula(twins[0], twins[1], bias) @ twins[2].repeat_interleave(2 // key_heads, 1)).backward(along.double())
    for leaf, twin in zip(leaves, twins, strict=True):
        size = float(twin.grad.abs().max())
        torch.testing.assert_close(leaf.grad.double(), twin.grad, rtol=ROUNDING, atol=ROUNDING * max(size, 1.0))


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("engine", ["blocked", "dense"])
def test_gradients_beside_sinks(engine, learned):
    leaves = [x.requires_grad_() for x in inputs(1e5)]
    normalizer = sinks(1e5)[learned]
    attention(table(1e5), normalizer=normalizer)(*leaves, engine=engine).output.sum().backward()
    twins = [x.detach().double().requires_grad_() for x in leaves]
    sink = torch.tensor(1e5, dtype=torch.float64, requires_grad=True)
    (formula(twins[0], twins[1], table(1e5), sink=sink) @ twins[2]).sum().backward()
    for leaf, twin in zip(leaves, twins, strict=True):
        torch.testing.assert_close(leaf.grad.double(), twin.grad, rtol=1e-3, atol=1e-3)
    if learned:
        torch.testing.assert_close(normalizer.sink.grad.sum().double(), sink.grad, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_stored_and_copied_maps_stay_right(tmp_path):
    q, k, v = inputs(0.0)
    q[..., 1], k[..., 1] = 2.0**20, -1.0
    weights = rg.Attention(rg.Dot(scale=1.0))(q, k, v).weights
    expected = formula(q, k, torch.tensor(0.0))
    save_map(tmp_path / "map.safetensors", weights)
    for again in (load_map(tmp_path / "map.safetensors"), copy.deepcopy(weights)):
        check_map(again, expected)


@torch.no_grad()
def test_a_page_does_not_send_a_coarse_statistic():
    x = torch.ones(1, 1, 4, 4)
    assert is_dot(rg.Attention()(x, x, x).weights)
    assert not is_dot(rg.Attention()(1e6 * x, x, x).weights)


@torch.no_grad()
def test_a_page_sends_one_mask_for_all_heads_or_the_weights():
    x, of_heads = torch.ones(1, 2, 4, 4), torch.ones(2, 4, 4).tril().bool()
    for mask, is_one in (
        (rg.causal(), True),
        (rg.mask_tensor(of_heads[0]), True),
        (rg.mask_tensor(of_heads[None]), False),
    ):
        assert is_dot(rg.Attention(mask=mask)(x, x, x).weights) is is_one


@torch.no_grad()
@pytest.mark.parametrize(("start", "num_keys"), [(0, 12), (7, 12), (3, 40)])
def test_a_coarse_row_is_computed_again_from_the_keys_that_it_may_attend_to(start, num_keys, monkeypatch):
    """Whatever the position of the first query."""
    q, k = torch.randn(1, 1, 5, 4), torch.randn(1, 1, num_keys, 4)
    q[:, :, 2:4] *= 1e6
    mask, widths = rg.causal() & rg.window(3), []
    scores = rows.scores
    monkeypatch.setattr(rows, "scores", lambda *given: widths.append(scores(*given)) or widths[-1])
    positions = rg.types.Positions.of(start, 5, num_keys)
    weights = rg.Attention(mask=mask)(q, k, k, positions=positions, engine="fused").weights
    assert not weights.row_statistic[1][:, :, [0, 1, 4]].any() and len(widths) == 1
    seen = mask.dense(start + 5, max(start + 5, num_keys))[start + 2 : start + 4].any(0).sum()
    assert widths[0].shape == (1, 1, 2, seen)


@torch.no_grad()
def test_a_page_computes_the_weights_from_numbers_that_are_all_finite():
    """Padding hides every key of the first text; the page knows the mask, and no row statistic of an empty row."""
    q, k = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 6, 8)
    mask = rg.padding([0, 4])
    weights = rg.Attention(mask=mask)(q, k, k).weights
    for entry, allowed in enumerate(mask.dense(5, 6)[:, 0]):
        query, key, row = dot_tensors(weights.select([entry], [0, 1]))
        found = (query @ key.mT - row[..., None]).exp() * allowed
        torch.testing.assert_close(found, weights[entry])
        assert row.isfinite().all() and (entry or not row.any())


@torch.no_grad()
def test_float64_has_its_own_rounding():
    q, k, v = (x.double() for x in inputs(-1e9))
    weights = attention(table(-1e9).double())(q, k, v).weights
    torch.testing.assert_close(weights.dense(), formula(q, k, table(-1e9)), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("offset", OFFSETS)
def test_the_share_of_a_part_is_that_of_its_exact_sum(offset):
    """The rounding of both log-sum-exps counts: at 1e9 it is up to 32."""
    generator, normalizer = torch.Generator().manual_seed(1), rg.normalizers.Softmax()
    scores = offset + step(offset) * torch.randint(-2, 3, (2, 3, I, J), generator=generator)
    whole = normalizer.row_statistic(scores, torch.arange(J))
    exact = scores.double() - scores.double().amax(-1, keepdim=True)
    for keys in (slice(0, 1), slice(3, 20), slice(0, J)):
        part = normalizer.row_statistic(scores[..., keys], torch.arange(J)[keys])
        expected = (exact[..., keys].logsumexp(-1) - exact.logsumexp(-1)).exp()
        torch.testing.assert_close(normalizer.share(part, whole).double(), expected, rtol=2 * ROUNDING, atol=1e-7)
