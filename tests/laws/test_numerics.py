"""What rounding, half precision, autocast and changes in place may not do."""

from __future__ import annotations

import copy
import gc
import weakref
from itertools import product

import pytest
import torch

import map_kinds
import regard as rg
from cataloged import SELECTED, SINGLE, TRANSPORTED, WITH_TENSORS
from drawn import LAYOUTS
from regard.catalog import mechanisms
from regard.catalog.entry import call_tensors
from regard.diagnosis.laws import problem_of
from regard.engine import ENGINES
from regard.engine.blocked import Work
from regard.engine.blocks import query_edges
from regard.engine.flash import _as_rows
from regard.maps.indices import indices
from rounding import budget


def tensors(*shape, count=3, **options):
    return [torch.randn(*shape, **options) for _ in range(count)]


def test_half_precision_gradients_do_not_stagnate(monkeypatch):
    """The gradient of each value is the sum over rows of its weights; in bfloat16 such a sum stops at 0.5."""
    monkeypatch.setattr("regard.engine.blocked.LARGEST_BLOCK", 2)
    n = 1024
    attention = rg.Attention(bias=rg.biases.Softcap(2.0)).bfloat16()
    q = torch.zeros(1, 1, n, 4, dtype=torch.bfloat16)
    v = torch.ones(1, 1, n, 4, dtype=torch.bfloat16, requires_grad=True)
    attention(q, q, v, engine="blocked").output.sum().backward()
    torch.testing.assert_close(v.grad.float(), torch.ones(1, 1, n, 4), rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    "normalizer",
    [rg.normalizers.Softmax(), rg.normalizers.Sparsemax(), rg.normalizers.Entmax15(), rg.normalizers.TopK(3)],
    ids=repr,
)
@pytest.mark.parametrize("engine", ["dense", "blocked", "auto"])
def test_autocast_rounds_inputs_and_never_sums(normalizer, engine):
    attention = rg.Attention(bias=rg.biases.Softcap(3.0), normalizer=normalizer)
    q, k, v = tensors(1, 2, 40, 8)
    with torch.autocast("cpu", torch.bfloat16):
        seen = attention(q, k, v, engine=engine)
        inside = seen.weights.dense()
    assert seen.output.dtype == torch.bfloat16 and inside.dtype == torch.float32
    torch.testing.assert_close(inside.sum(-1), torch.ones(1, 2, 40), rtol=0, atol=1e-5)
    exact = attention(*(t.bfloat16().float() for t in (q, k, v)))
    torch.testing.assert_close(inside, exact.weights.dense(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("attention", "engine"),
    [
        (rg.Attention(normalizer=rg.normalizers.Sparsemax(), mask=rg.causal()), "blocked"),
        (mechanisms()["linear"].build(), "linear"),
        (rg.Attention(transition=rg.transitions.Decay(-0.3)), "recurrent"),
        (rg.Attention(transition=rg.transitions.Delta(), score=rg.Dot(torch.tensor(0.5))), "recurrent"),
        (rg.Attention(transition=rg.transitions.ChannelDecay()), "recurrent"),
    ],
    ids=str,
)
@pytest.mark.parametrize("of", ["output", "weights"])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_backward_pass_inside_autocast_rounds_no_sums(attention, engine, of, compiled, monkeypatch):
    """Of the engines that compute gradients themselves; a derivative of torch's own operations is torch's."""
    if not compiled:
        monkeypatch.setattr("regard.engine.linear.compiled_sums", lambda *_: None)
        monkeypatch.setattr("regard.engine.recurrent.engine.compiled_recurrence", lambda *_: None)
    (q, k, v), found = tensors(2, 2, 24, 8), []
    given = {name: -torch.rand(2, 2, 24, *((8,) * axes.count("D"))).abs() for name, axes in needed(attention).items()}
    for inside in (False, True):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)][: 3 if of == "output" else 2]
        with torch.autocast("cpu", torch.bfloat16):
            seen = attention(*leaves, *(() if of == "output" else (v,)), **given, engine=engine)
            total = (seen.output.float() if of == "output" else seen.weights.dense()).sin().sum()
            if inside:
                total.backward()
        if not inside:
            total.backward()
        found.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*found)


def needed(attention):
    return getattr(attention.transition, "needs", {})


LEARNED = [
    rg.scores.Additive(8, 8, 4),
    rg.scores.Bilinear(8, 8),
    rg.scores.Concat(8, 8, 4),
    rg.Dot(torch.tensor(0.5)),
    rg.scores.Cosine(),
]


@pytest.mark.parametrize("score", LEARNED, ids=lambda s: type(s).__name__)
@torch.no_grad()
def test_learned_scores_run_under_autocast_in_every_engine(score):
    attention, inputs = rg.Attention(score), tensors(1, 2, 20, 8)
    rounded = copy.deepcopy(attention).bfloat16().double(), *(t.bfloat16().double() for t in inputs)
    exact, allowed = budget(problem_of(*rounded), torch.bfloat16)
    for engine in set(ENGINES) - {"reference", "flex", *rg.plan(*inputs, attention=attention).refused}:
        with torch.autocast("cpu", torch.bfloat16):
            output = attention(*inputs, engine=engine).output
        assert output.dtype == torch.bfloat16
        assert ((output.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("score", LEARNED, ids=lambda s: type(s).__name__)
def test_learned_scores_take_inputs_of_lower_precision(score):
    q, k, v = tensors(1, 2, 5, 8, dtype=torch.bfloat16)
    seen = rg.Attention(score)(q, k, v)
    exact = rg.Attention(score)(q.float(), k.float(), v.float())
    torch.testing.assert_close(seen.weights.dense(), exact.weights.dense(), rtol=1e-4, atol=1e-5)
    assert seen.output.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "normalizer", [rg.normalizers.Sparsemax(), rg.normalizers.Entmax15(), rg.normalizers.Softmax()], ids=repr
)
def test_a_common_offset_of_the_scores_changes_no_sum(normalizer):
    q, k = torch.full((1, 1, 1, 1), 500.0), 1 + torch.randn(1, 1, 512, 1) * 1e-3 / 500
    weights = rg.Attention(rg.Dot(scale=1.0), normalizer=normalizer)(q, k, k).weights.dense()
    assert abs(weights.sum() - 1) < 1e-4


def test_the_cosine_of_a_zero_vector_is_zero_in_half_precision():
    q, k, v = tensors(1, 1, 4, 8, dtype=torch.float16)
    k[:, :, 0] = 0
    assert rg.Attention(rg.scores.Cosine())(q, k, v).output.isfinite().all()


def test_rows_of_a_map_come_in_any_order():
    seen = rg.Attention(bias=rg.biases.TransformerXLBias(4, 8))(*tensors(1, 4, 6, 8))
    torch.testing.assert_close(seen.weights[0, 1, [5, 2]], seen.weights.dense()[0, 1, [5, 2]])


@pytest.mark.parametrize("cache", [rg.GrowingCache(), rg.caches.RingCache(3)], ids=lambda c: type(c).__name__)
def test_decoding_steps_can_be_differentiated_together(cache):
    q = torch.randn(1, 1, 4, 4, requires_grad=True)
    k, v = tensors(1, 1, 4, 4, count=2)
    outputs = []
    for step in range(4):
        seen = rg.Attention()(*(t[:, :, step : step + 1] for t in (q, k, v)), cache=cache)
        cache = seen.cache
        outputs.append(seen.output)
    assert torch.autograd.grad(sum(o.sum() for o in outputs), q)[0].isfinite().all()


def test_a_cache_made_in_inference_mode_goes_on_without_it():
    with torch.inference_mode():
        cache = rg.Attention()(*tensors(1, 1, 3, 4), cache=rg.GrowingCache()).cache
        cache = rg.Attention()(*tensors(1, 1, 1, 4), cache=cache).cache
    with torch.no_grad():
        assert rg.Attention()(*tensors(1, 1, 1, 4), cache=cache).cache.length == 5


def test_weights_of_changed_inputs_are_refused():
    q, k, v = tensors(1, 2, 5, 8)
    seen = rg.Attention(bias=rg.biases.T5Bias(2))(q, k, v)
    seen.weights.dense()
    q.mul_(2)
    with pytest.raises(rg.RegardError, match="changed in place since attend ran"):
        seen.weights.dense()


@pytest.mark.parametrize("name", ["self_attention", "deltanet", "alibi", "nystrom"])
def test_weights_read_in_inference_mode_are_those_of_the_call(name):
    """An inference tensor counts no changes in place."""
    with torch.inference_mode():
        attention, q, k, v = rg.mechanism(name).example()
        own = rg.mechanism(name).tensors(attention, q, k, v)
        weights = attention(q, k, v, **own).weights
        expected = weights.dense().clone()
        weights = attention(q, k, v, **own).weights
        for changed in (q, k, v, *own.values()):
            changed.mul_(2)
        torch.testing.assert_close(weights.dense(), expected)


@pytest.mark.parametrize("name", ["self_attention", "deltanet", "alibi", "nystrom"])
def test_an_inference_tensor_among_others_may_change_after_the_call(name):
    """Any one that the weights depend on."""
    attention, *inputs = rg.mechanism(name).example()
    own = rg.mechanism(name).tensors(attention, *inputs)
    given = dict(zip("qkv", inputs, strict=True)) | own
    for label in given:
        with torch.inference_mode():
            alone = given[label].clone()
        q, k, v, *others = (given | {label: alone}).values()
        with torch.no_grad():
            weights = attention(q, k, v, **dict(zip(own, others, strict=True))).weights
            expected = attention(*inputs, **own).weights.dense()
        with torch.inference_mode():
            alone.mul_(2)
        torch.testing.assert_close(weights.dense(), expected)


@pytest.mark.parametrize("size", [0, 1, 5])
def test_slices_of_indices_are_those_of_a_range(size):
    ends = (None, -7, -2, 0, 1, 3, 9)
    for part in (slice(*parts) for parts in product(ends, ends, (None, 1, 2, -1, -3))):
        found = indices("weights[...]", "key", part, size)
        assert found.tolist() == list(range(size)[part]) and found.dtype == torch.int64


def test_a_slice_of_weights_may_go_backwards():
    weights = rg.Attention()(*tensors(2, 3, 6, 4)).weights
    torch.testing.assert_close(weights[0, 0, ::-1], weights.dense()[0, 0].flip(0))


@pytest.mark.parametrize(
    "normalizer", [rg.normalizers.TopK(2), rg.normalizers.Hardmax(), rg.normalizers.Sparsemax()], ids=repr
)
def test_no_columns_give_no_weights(normalizer):
    weights = rg.Attention(normalizer=normalizer)(*tensors(1, 1, 4, 4)).weights
    assert weights[0, 0, 0:3, 0:0].shape == (3, 0)


def test_nothing_keeps_the_tensors_of_a_call_alive():
    gc.disable()
    try:
        q, k, v = tensors(1, 1, 600, 4)
        q, k, v = (t.clone() for t in (q, k, v))
        alive = weakref.ref(v)
        for engine in ("blocked", "dense", "fused"):
            rg.Attention(mask=rg.causal())(q, k, v, engine=engine)
        rg.plan(q, k, v, attention=rg.Attention())
        del v
        assert alive() is None
    finally:
        gc.enable()


def test_rows_that_see_everything_are_cut_out_of_their_blocks():
    """Scattered global tokens must not make every block as wide as the text."""
    n = 4096
    attention = rg.Attention(mask=rg.window(33) | rg.masks.global_tokens(range(0, n, 512)))
    x = torch.randn(1, 1, n, 4)
    plan = rg.plan(x, x, x, attention=attention, engine="blocked")
    allowed = attention.mask.allowed(rg.types.Grid.whole(rg.types.Positions.aligned_to_end(n, n), 1, 1, n)).sum()
    assert plan.cost.pairs < 4 * int(allowed)


@pytest.mark.parametrize(
    "bias",
    [rg.ALiBi(4), rg.biases.T5Bias(4).requires_grad_(False), rg.biases.LearnedTable(4, 9).requires_grad_(False)],
    ids=lambda b: type(b).__name__,
)
def test_a_relative_bias_is_held_as_its_diagonals(bias):
    x = torch.randn(1, 4, 2048, 8)
    for mask in (None, rg.causal()):
        plan = rg.plan(x, x, x, attention=rg.Attention(bias=bias, mask=mask))
        assert plan.cost.bytes < 2**20 < 4 * 2048 * 2048


def test_a_sum_needs_scores_that_are_not_negative():
    with pytest.raises(rg.RegardError, match=r"not negative.*FeatureScore"):
        rg.Attention(rg.Dot(), normalizer=rg.normalizers.SumNormalizer())


def test_heads_of_a_bilinear_score_are_those_of_the_query():
    with pytest.raises(rg.RegardError, match="made for 4 heads, the query has 1"):
        rg.Attention(rg.scores.Bilinear(8, 8, num_heads=4))(*tensors(1, 1, 3, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_how_tensors_lie_in_memory_changes_nothing(layout, dtype):
    """Output, statistic and gradients are those of contiguous copies, in every engine that calls torch's kernel."""
    skip_where_torch_refuses(dtype)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    given = [LAYOUTS[layout](torch.randn(2, 2, 80, 6).to(dtype)) for _ in range(4)]
    copies = [t.clone(memory_format=torch.contiguous_format) for t in given]
    for attention in (
        rg.Attention(),
        rg.Attention(position=rg.RoPE(2)),
        rg.Attention(mask=rg.causal() & rg.window(9)),  # blocks that differ by a shift are one call over views
        rg.Attention(bias=rg.ALiBi(2)),
    ):
        for engine in ("fused", "blocked"):
            ours, expected = (_all_of(attention, engine, *tensors) for tensors in (given, copies))
            for found, wanted in zip(ours, expected, strict=True):
                torch.testing.assert_close(found, wanted, **close)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_how_tensors_lie_in_memory_changes_no_causal_sum(layout):
    """The compiled kernels compute no sums in float64, so these are those of torch."""
    attention = rg.Attention(rg.scores.FeatureScore(), normalizer=rg.normalizers.SumNormalizer(), mask=rg.causal())
    given = [LAYOUTS[layout](torch.randn(2, 2, 80, 6).double()) for _ in range(4)]
    copies = [t.clone(memory_format=torch.contiguous_format) for t in given]
    for found, wanted in zip(*(_all_of(attention, "linear", *tensors) for tensors in (given, copies)), strict=True):
        torch.testing.assert_close(found, wanted)


def skip_where_torch_refuses(dtype):
    """With AMX, torch packs bfloat16 for it even where ATEN_CPU_CAPABILITY rules AVX-512 out, and then cannot."""
    q = torch.ones(2, 2, 80, 6, dtype=dtype)
    try:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    except RuntimeError as error:
        if "pack_vnni2" not in str(error):
            raise
        pytest.skip(f"torch's own attention: {error}")


def _all_of(attention, engine, *tensors):
    *inputs, grad = tensors
    inputs = [t.detach().requires_grad_() for t in inputs]
    seen = attention(*inputs, engine=engine)
    with torch.no_grad():
        alone = attention(*inputs, engine=engine)
    gradients = torch.autograd.grad(seen.output, inputs, grad)
    return seen.output, alone.output, seen.weights.dense(), alone.weights.row_statistic[0], *gradients


class Synthesizer(rg.scores.Score):
    """Scores that are a learned table, whatever the vectors (Tay et al. 2021): tiles are views of a parameter."""

    def __init__(self, n):
        self.table = torch.nn.Parameter(torch.randn(1, 1, n, n))

    def tile(self, query, key, grid):
        first, last = int(grid.query[0]), int(grid.query[-1]) + 1
        return self.table.expand(*query.shape[:2], -1, -1)[:, :, first:last, int(grid.key[0]) : int(grid.key[-1]) + 1]

    def check(self, sizes, key_dim):
        pass


class Replaced(rg.biases.Bias):
    """A bias that puts a table in the place of the scores."""

    def __init__(self, n):
        self.score = Synthesizer(n)

    def transform(self, score, grid, rows, cols):
        return self.score.tile(score, score, grid)


@pytest.mark.parametrize("mask", [None, rg.causal(), rg.window(3)], ids=str)
@pytest.mark.parametrize(
    "normalizer", [rg.normalizers.Softmax(), rg.normalizers.Softmax(sink=0.0), rg.normalizers.LearnedSink(1)], ids=repr
)
@pytest.mark.parametrize("kind", ["score", "bias"])
def test_looking_changes_no_tensor_of_a_piece(small_blocks, kind, normalizer, mask):
    """Scores may be views of what a piece keeps, so statistics must not be computed in their place."""
    own = Synthesizer(13) if kind == "score" else Replaced(13)
    attention = rg.Attention(**{kind: own}, mask=mask, normalizer=normalizer)
    table = (own if kind == "score" else own.score).table
    before = table.detach().clone()
    seen = attention(*tensors(1, 1, 13, 4))
    weights = seen.weights.dense()
    found = seen.weights.summarize(rg.maps.Entropy(), rg.maps.KeyTotals(), rg.maps.TopLinks(2))
    assert torch.equal(table, before)
    torch.testing.assert_close(found[1], weights.sum(-2))
    torch.testing.assert_close(found[0], -torch.xlogy(weights, weights).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_statistics_do_not_follow_the_default_dtype(dtype):
    attention, inputs = rg.Attention(mask=rg.causal()), tensors(1, 2, 40, 8)
    reductions = (
        rg.maps.Entropy(),
        rg.maps.KeyTotals(),
        rg.maps.Distance(),
        rg.maps.MassOn([0, 3]),
        rg.maps.Pool(4, 4),
        rg.maps.Similarity(),
        rg.maps.TopLinks(2),
    )
    expected = attention(*inputs).weights.summarize(*reductions)
    torch.set_default_dtype(dtype)
    try:
        found = attention(*inputs).weights.summarize(*reductions)
    finally:
        torch.set_default_dtype(torch.float32)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(tuple(mine), tuple(theirs))


@pytest.mark.parametrize("name", [*SINGLE, *WITH_TENSORS, *TRANSPORTED, *SELECTED])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@torch.no_grad()
def test_mechanisms_do_not_follow_the_default_dtype(name, dtype):
    """Tables, masks and factors are made in dtypes that the mechanism names, whatever a user's program has set."""
    attention, *inputs = mechanisms()[name].example()
    inputs = [t.float() for t in inputs]
    attention, other = attention.float(), copy.deepcopy(attention).float()
    given = call_tensors(attention, *inputs)
    expected = attention(*inputs, **given)
    torch.set_default_dtype(dtype)
    try:
        found = other(*inputs, **given)
        weights = found.weights.dense()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found.output, expected.output, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(weights, expected.weights.dense(), rtol=1e-6, atol=1e-7)


NORMALIZERS = [
    rg.normalizers.Softmax(),
    rg.normalizers.Softmax(sink=0.5),
    rg.normalizers.LearnedSink(1),
    rg.normalizers.Sparsemax(),
    rg.normalizers.Entmax15(),
    rg.normalizers.TopK(2),
]


@pytest.mark.parametrize("engine", ["auto", "dense", "blocked"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("normalizer", [*NORMALIZERS, rg.normalizers.Hardmax()], ids=repr)
def test_a_score_that_is_no_number_makes_its_row_none_and_no_other(normalizer, value, engine):
    q, k, v = tensors(1, 1, 6, 4)
    attention = rg.Attention(normalizer=normalizer)
    expected = attention(q, k, v)
    q = q.clone()
    q[0, 0, 2, 1] = value
    seen = attention(q, k, v, engine=engine)
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(seen.output[:, :, others], expected.output[:, :, others])
    torch.testing.assert_close(seen.weights[:, :, others], expected.weights[:, :, others])
    if not (isinstance(normalizer, rg.normalizers.Hardmax) and value > 0):  # an infinite score may be the greatest
        assert seen.output[0, 0, 2].isnan().all() and seen.weights[0, 0, 2].isnan().all()


@pytest.mark.parametrize("engine", ["auto", "fused", "blocked"])
@pytest.mark.parametrize("num_heads", [2, 4])
def test_a_key_that_is_no_number_changes_no_row_of_another_text_or_head(num_heads, engine):
    """The rows of one key and a query of zeros have the log-sum-exp 0, which torch's kernel returns for NaN too."""
    q, k, v = torch.zeros(2, num_heads, 3, 4), torch.randn(2, 2, 1, 4), torch.randn(2, 2, 1, 4)
    k[0, 0, 0, 1] = torch.nan
    seen = rg.attend(q, k, v, engine=engine)
    of_group = num_heads // 2
    assert seen.output[0, :of_group].isnan().all()
    expected = v.repeat_interleave(of_group, 1).expand_as(q)  # a row of one key has its value
    assert torch.equal(seen.output[0, of_group:], expected[0, of_group:]) and torch.equal(seen.output[1], expected[1])


@pytest.mark.parametrize("normalizer", [*NORMALIZERS, rg.normalizers.Hardmax()], ids=repr)
def test_no_weight_is_above_one_however_large_the_scores(normalizer):
    """Near 1e6 a score has steps of 1/16, and one that is computed in a tile of another shape differs by many."""
    attention = rg.Attention(normalizer=normalizer)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 1, 130, 64, generator=generator) * size for size in (1500, 1500, 1))
        for engine in ("dense", "auto"):
            weights = attention(q, k, v, engine=engine).weights
            entropy, top = weights.summarize(rg.maps.Entropy(), rg.maps.TopLinks(1))
            tiles = [weights[0, 0, i, j] for i in range(0, 130, 7) for j in [int(top.keys[0, 0, i, 0])]]
            for some in (weights.dense(), weights[:, :, 5], weights[..., ::3], top.weights, torch.stack(tiles)):
                assert some.max() <= 1 and some.min() >= 0
            assert entropy.min() >= 0


def test_rows_of_first_blocks_with_fewer_keys_than_k_keep_them_all(monkeypatch):
    monkeypatch.setattr("regard.engine.blocked.LARGEST_BLOCK", 2)
    q, k, v = (x.double() for x in tensors(1, 2, 9, 4))
    attention = rg.Attention(mask=rg.causal(), normalizer=rg.normalizers.TopK(5))
    weights = attention(q, k, v, engine="blocked").weights.dense()
    for i in range(9):
        scores = q[:, :, i : i + 1] @ k[:, :, : i + 1].mT / 2
        kept = scores.topk(min(5, i + 1)).indices
        expected = torch.zeros(1, 2, 1, 9).double().scatter(-1, kept, scores.gather(-1, kept).softmax(-1))
        torch.testing.assert_close(weights[:, :, i : i + 1], expected)


@pytest.mark.parametrize("n", [1024, 1000])
def test_one_call_makes_no_more_output_than_it_may(n, monkeypatch):
    """Blocks of 64 queries, 2 heads of width 4 in float32 make 64 * 2 * 4 * 4 bytes each; the last may be shorter."""
    x = torch.randn(1, 2, n, 4)
    problem = rg.plan(x, x, x, attention=rg.Attention(mask=rg.causal() & rg.window(9)), engine="blocked").problem
    monkeypatch.setattr("regard.engine.blocked.LARGEST_BLOCK", 64)
    for call, most in ((64 * 2 * 4 * 4 - 1, 1), (64 * 2 * 4 * 4, 1), (3 * 64 * 2 * 4 * 4, 3)):
        monkeypatch.setattr("regard.engine.blocked.CALL_BYTES", call)
        runs = Work(problem).runs
        assert max(run.count for run in runs) == most and sum(run.count * run.size for run in runs) == n


class PreferFirst(rg.biases.AdditiveBias):
    def term(self, grid, rows, cols):
        return (grid.j == 0).float()


def test_blocks_of_a_bias_that_is_not_relative_are_calls_of_their_own(monkeypatch):
    monkeypatch.setattr("regard.engine.blocked.LARGEST_BLOCK", 64)
    x = torch.randn(1, 1, 512, 4)
    attention = rg.Attention(mask=rg.causal() & rg.window(9), bias=PreferFirst())
    runs = Work(rg.plan(x, x, x, attention=attention, engine="blocked").problem).runs
    assert [run.count for run in runs] == [1] * 8


def test_queries_are_cut_at_the_edges_of_documents_of_64_tokens_or_more():
    def first_edges(lengths, key_lengths=None):
        mask, num_queries = rg.documents(lengths, key_lengths), sum(lengths)
        positions = rg.types.Positions.aligned_to_end(num_queries, sum(key_lengths or lengths))
        return query_edges(mask, positions, num_queries)

    assert first_edges((64, 64, 64)) == [0, 64, 128, 192]
    assert first_edges((63, 65, 64)) == [0, 128, 192]
    assert first_edges((10, 118), (100, 128)) == [0, 128]  # the first query stands at 100, the edge at 110
    assert first_edges((70, 80), (100, 128)) == [0, 70, 150]


@pytest.mark.parametrize("axis", range(3))
def test_rows_are_copied_only_where_vectors_overlap(axis):
    """One entry, one head or one token has no neighbor, so its stride does not matter."""
    for count in (1, 2, 3):
        shape, strides = [3, 3, 3], [3 * 3 * 4, 3 * 4, 4]
        shape[axis], strides[axis] = count, 1
        x = torch.randn(200).as_strided((*shape, 4), (*strides, 1))
        assert (_as_rows(x) is x) is (count == 1)
        assert _as_rows(x).equal(x)


READS = {
    "dense": lambda w, v: w.dense(),
    "row": lambda w, v: w[0, -1, -1],
    "rows": lambda w, v: w.tile(rows=[0, w.shape[2] - 1]),
    "entropy": lambda w, v: w.entropy(),
    "received": lambda w, v: w.received(),
    "mass": lambda w, v: w.mass([0, 1]),
    "distance": lambda w, v: w.distance(),
    "pool": lambda w, v: w.pool(2, 3),
    "similarity": lambda w, v: w.similarity(),
    "sum": lambda w, v: w.sum(-1),
    "mean": lambda w, v: w.mean(1),
    "top": lambda w, v: w.top(2).weights,
    "product": lambda w, v: w @ v,
    "product of more": lambda w, v: w @ torch.stack((v, v)).detach(),
    "states": lambda w, v: w.reduction_states([rg.maps.KeyTotals()])[rg.maps.KeyTotals()],
    "value weighted": lambda w, v: rg.stats.value_weighted(w, v).dense(),
}
COMPOSITES = ("differential", "infini", "linformer", "moba", "nsa", "nystrom")
MAPS = {name: make for name, make in map_kinds.MADE.items() if not name.startswith(("no ", "one "))}
MAPS |= {name: lambda name=name: map_kinds.of_mechanism(name) for name in (*TRANSPORTED, *COMPOSITES)}


def _read(read, weights):
    """The numbers, and the gradients of the values if there are some; None if this kind of map has no such numbers."""
    values = torch.randn(1, 1, weights.shape[3], 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    try:
        result = read(weights, values)
    except rg.RegardError:
        return None
    numbers = result if isinstance(result, list) else [result]
    learning = [x for x in numbers if x.requires_grad]
    given = [torch.ones_like(x) for x in learning]
    return [*numbers, *torch.autograd.grad(learning, values, given, allow_unused=True)] if learning else numbers


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", MAPS)
def test_a_map_read_inside_autocast_has_the_same_numbers(name, read):
    outside, inside = (torch.manual_seed(0) and MAPS[name]() for _ in range(2))  # one map may keep what it has read
    expected = _read(READS[read], outside)
    with torch.autocast("cpu", torch.bfloat16):
        found = _read(READS[read], inside)
    torch.testing.assert_close(found, expected)
