"""What a plan says is so: who chose the engine, operations as torch counts them, and bytes as tensors hold them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from torch.utils.flop_counter import FlopCounterMode

import regard as rg
from drawn import examples, problems
from regard.base.shapes import Sizes
from regard.base.spans import Spans
from regard.engine import blocked, flash, speed_model
from regard.engine.blocked import Work
from regard.engine.blocks import Block, blocks
from regard.engine.flash import FlashRows
from regard.engine.formatting import size
from regard.engine.fused import block_of
from regard.engine.kernel.library import load_fast
from regard.engine.plan import plan
from regard.engine.problem import Engine, Problem
from regard.engine.rows import StatisticBuffer
from regard.pieces.tensor_bias import TensorBias

#: 4 query heads over 2 of keys, 300 queries and keys of width 8, values of width 6.
Q, K, V = torch.randn(2, 4, 300, 8), torch.randn(2, 2, 300, 8), torch.randn(2, 2, 300, 6)
WINDOW = rg.causal() & rg.window(20)


def problem(attention, q=Q, k=K, v=V):
    return Problem(attention, q, k, v, rg.types.Positions.aligned_to_end(q.shape[2], k.shape[2]), Sizes.of(q, k, v))


@pytest.mark.parametrize("mask", [None, rg.causal(), WINDOW], ids=str)
@pytest.mark.parametrize("engine", ["dense", "blocked"])
def test_operations_are_those_of_the_matrix_products_and_4_a_pair(engine, mask):
    attention = rg.Attention(
        bias=rg.biases.Softcap(3.0), mask=mask
    )  # no kernel of torch's, which would count for itself
    cost = rg.plan(Q, K, V, attention=attention, engine=engine).cost
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        attention(Q, K, V, engine=engine)
    assert cost.flops - 4 * cost.pairs == counter.get_total_flops()


@pytest.mark.parametrize("engine", ["fused", "blocked"])
def test_the_fused_kernel_computes_the_pairs_of_its_blocks(engine):
    """A causal block is a triangle; entries of a batch that end earlier have fewer keys, in blocks alone."""
    pairs = {None: 2 * 4 * 300 * 300, rg.causal(): 2 * 4 * 300 * 301 // 2}
    pairs[rg.padding([100, 300])] = 4 * 300 * (400 if engine == "blocked" else 600)
    for mask, expected in pairs.items():
        cost = rg.plan(Q, K, V, attention=rg.Attention(mask=mask), engine=engine).cost
        assert (cost.pairs, cost.flops) == (expected, expected * (2 * 8 + 2 * 6 + 4))


class OfEntries(rg.biases.AdditiveBias):
    """A number for each batch entry, head and key."""

    def term(self, grid, rows, cols):
        return 0.1 * (grid.batch[:, None, None, None] + grid.head[:, None, None]) * grid.key


BIASED = {
    "nothing": (rg.Attention(), 0),
    "a mask for all": (rg.Attention(mask=rg.masks.prefix(7)), 1),
    "a mask for each entry": (rg.Attention(mask=rg.padding([100, 300])), 2),
    "a mask for each head": (rg.Attention(mask=rg.mask_tensor(torch.rand(1, 4, 300, 300) < 0.5)), 4),
    "a mask for both": (rg.Attention(mask=rg.mask_tensor(torch.rand(2, 4, 300, 300) < 0.5)), 8),
    "diagonals": (rg.Attention(bias=rg.ALiBi(4), mask=WINDOW), 0),
    "a bias of distance with another mask": (rg.Attention(bias=rg.ALiBi(4), mask=rg.masks.prefix(7)), 4),
    "a bias of each query": (rg.Attention(bias=rg.biases.ShawBias(8, 3).requires_grad_(False)), 8),
    "a bias of each entry": (rg.Attention(bias=TensorBias(torch.randn(2, 1, 300, 300), 0)), 2),
    "a bias of each entry with a mask": (rg.Attention(bias=OfEntries(), mask=rg.masks.prefix(7)), 8),
    "a bias for all entries": (rg.Attention(bias=TensorBias(torch.randn(1, 4, 300, 300), 0)), 4),
    "a mask on diagonals": (rg.Attention(mask=WINDOW), 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("what", BIASED)
def test_the_bytes_of_a_mask_are_those_of_the_tensor_that_the_kernel_gets(what, dtype):
    """Numbers that are held for each pair, and 4 bytes of statistic for each row besides."""
    attention, floats = BIASED[what]
    tensors = [x.to(dtype) for x in (Q, K, V)]
    asked = problem(attention.to(dtype), *tensors)
    rows, block = FlashRows(asked), block_of(asked)
    assert rows.refusal is None and rows.floats_per_pair(block) == floats
    mask, _ = rows._mask(block, asked.prepared.tile(block.rows, slice(None)), dtype)
    held = 0 if mask is None or mask.untyped_storage().nbytes() < 300 * 300 else mask.numel()
    assert held == floats * 300 * 300
    cost = rg.plan(*tensors, attention=attention, engine="fused").cost
    assert cost.bytes == held * dtype.itemsize + 4 * Q.shape[:3].numel()


@examples(40)
@given(problem=problems())
def test_no_block_holds_more_than_it_may_unless_it_is_one_row(problem):
    limit, blocked.BLOCK_BYTES = blocked.BLOCK_BYTES, 2000
    try:
        work = Work(problem)
        for block in work.blocks:
            assert block.stop - block.start == 1 or block.pairs * work.bytes_per_pair(block) <= 2000
    finally:
        blocked.BLOCK_BYTES = limit


def test_blocks_that_read_two_intervals_of_keys_hold_no_more(monkeypatch):
    """All pairs of a relative mask are a view of their diagonals, but those of a block around a gap are not."""
    monkeypatch.setattr(blocked, "BLOCK_BYTES", 1 << 19)
    x = torch.zeros(1, 1, 2000, 8)
    work = Work(problem(rg.Attention(mask=~rg.window(400)), x, x, x))
    assert max(len(block.columns.intervals) for block in work.blocks) == 2
    assert max(block.pairs * work.bytes_per_pair(block) for block in work.blocks) <= 1 << 19


def test_what_the_kernel_takes_whole_is_one_block_of_any_length():
    """Cutting an unmasked or causal problem would save no pair; without the kernel it saves memory."""
    x = torch.randn(1, 1, 5000, 4)
    for mask in (None, rg.causal()):
        assert len(Work(problem(rg.Attention(mask=mask), x, x, x)).blocks) == 1
        assert len(Work(problem(rg.Attention(mask=mask, normalizer=rg.normalizers.Sparsemax()), x, x, x)).blocks) > 4
        assert len(Work(problem(rg.Attention(mask=mask, bias=rg.ALiBi(1)), x, x, x)).blocks) > 4


def test_the_pace_of_blocks_is_that_of_the_kernel_inside_them(monkeypatch):
    """A kernel that is fast for 256 queries alone gets blocks of 256; blocks without it are cut by pairs."""
    x = torch.randn(1, 1, 4096, 4)
    plain, sparse = (
        rg.Attention(mask=rg.window(300)),
        rg.Attention(mask=rg.window(300), normalizer=rg.normalizers.Sparsemax()),
    )
    before = Work(problem(sparse, x, x, x)).block_size
    monkeypatch.setattr("regard.engine.blocked._pace", lambda size: 1.0 if size == 256 else 50.0)
    assert Work(problem(plain, x, x, x)).block_size == 256
    assert Work(problem(sparse, x, x, x)).block_size == before


def test_blocks_that_share_a_call_are_shorter_than_those_that_learn():
    """Backward takes block after block, so each costs a call of its own, and longer ones are worth their pairs."""
    x = torch.randn(1, 1, 4096, 4)
    alone, learned = (problem(rg.Attention(mask=WINDOW), y, x, x) for y in (x, x.clone().requires_grad_()))
    assert Work(alone).block_size < Work(learned).block_size


def test_blocks_that_differ_by_a_shift_are_planned_once(monkeypatch):
    """The mask is asked about the blocks at both ends and one between, however long the sequence is."""
    plan_block, asked = blocks.__globals__["_block"], []
    monkeypatch.setitem(blocks.__globals__, "_block", lambda *given: asked.append(given) or plan_block(*given))
    monkeypatch.setitem(blocks.__globals__, "usual_width", lambda *given: 128)
    for n in (1024, 8192):
        asked.clear()
        planned = list(blocks(rg.causal() & rg.window(64), rg.types.Positions.aligned_to_end(n, n), n, 64))
        assert len(planned) == n // 64 and len(asked) <= 4


CHOSEN = {
    "linear": rg.Attention(rg.scores.FeatureScore(), normalizer=rg.normalizers.SumNormalizer()),
    "convolution": rg.Attention(bias=rg.transitions.Taps(torch.ones(4, 3)), normalizer=rg.normalizers.Unnormalized()),
    "fused": rg.Attention(),
    "dense": rg.Attention(normalizer=rg.normalizers.Sparsemax()),
    "blocked": rg.Attention(normalizer=rg.normalizers.Sparsemax(), mask=WINDOW),
}


@pytest.mark.parametrize("engine", CHOSEN)
def test_a_plan_says_whether_its_engine_was_asked_for(engine, monkeypatch):
    if engine == "blocked":
        monkeypatch.setitem(plan.__globals__, "DENSE_BYTES", 0)
    asked = "auto", engine
    free, forced = (rg.plan(Q, K, V, attention=CHOSEN[engine], engine=name) for name in asked)
    assert (free.engine, free.requested, forced.engine, forced.requested) == (engine, False, engine, True)
    assert f"The {engine} engine is chosen: " in str(free) and f"The {engine} engine is asked for: " in str(forced)


def test_inside_transformations_of_torch_the_dense_engine_is_chosen(monkeypatch):
    for function in (plan, Engine.refusal):
        monkeypatch.setitem(function.__globals__, "is_transformed", lambda: True)
    planned = rg.plan(Q, K, V, attention=rg.Attention(mask=WINDOW))
    assert (planned.engine, planned.requested) == ("dense", False) and "forward-mode" in planned.why


def test_the_dense_engine_is_taken_up_to_its_limit_where_blocks_have_no_kernel(monkeypatch):
    monkeypatch.setenv("REGARD_KERNEL", "off")
    sparse = rg.Attention(normalizer=rg.normalizers.Sparsemax(), mask=WINDOW)
    held = rg.plan(Q, K, V, attention=sparse, engine="dense").cost.bytes
    for limit, engine in ((held, "dense"), (held - 1, "blocked")):
        monkeypatch.setitem(plan.__globals__, "DENSE_BYTES", limit)
        assert rg.plan(Q, K, V, attention=sparse).engine == engine
    x = torch.randn(1, 1, 2048, 4)
    monkeypatch.setitem(plan.__globals__, "DENSE_BYTES", 1 << 40)
    assert rg.plan(x, x, x, attention=rg.Attention(mask=WINDOW)).engine == "blocked"


def test_an_engine_that_cannot_names_those_that_can():
    sparse = rg.Attention(normalizer=rg.normalizers.Sparsemax())
    with pytest.raises(rg.RegardError, match=r"Engines that can: reference, dense, blocked\."):
        sparse(Q, K, V, engine="fused")


@pytest.mark.parametrize("heads", [(8, 8), (32, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_our_kernels_are_chosen_for_one_query_and_many_keys(monkeypatch, dtype, heads):
    """From 2,097,152 numbers in keys and values on, 524,288 in half precision; never where gradients follow."""
    fast = load_fast() is not None and dtype != torch.float64
    enough = {torch.float32: 2048, torch.float64: 2048}.get(dtype, 512)
    (H, G), decoding = heads, rg.Attention(mask=rg.causal())
    query, cached = torch.zeros(1, H, 1, 64, dtype=dtype), torch.zeros(1, G, enough, 64, dtype=dtype)
    assert rg.plan(query, cached, cached, attention=decoding).engine == ("kernel" if fast else "fused")
    fewer = cached[:, :, 1:]
    assert rg.plan(query, fewer, fewer, attention=decoding).engine == "fused"
    assert rg.plan(query.clone().requires_grad_(), cached, cached, attention=decoding).engine == "fused"
    monkeypatch.setenv("REGARD_KERNEL", "off")
    assert rg.plan(query, cached, cached, attention=decoding).engine == "fused"


@pytest.mark.parametrize(
    ("fewest", "dtype", "learns"),
    [(64, torch.float32, False), (128, torch.float32, True), (64, torch.bfloat16, False), (64, torch.float16, True)],
    ids=str,
)
def test_masks_that_hide_much_need_fewer_queries(fewest, dtype, learns):
    """Causal masks and windows; padding and masks without spans hide too little, and no mask hides nothing."""
    x = torch.zeros(2, 2, 191, 8, dtype=dtype).requires_grad_(learns)
    some, fewer = x[:, :, :fewest], x[:, :, : fewest - 1]
    chosen = "kernel" if load_fast() is not None else "fused"
    for mask in (rg.causal(), rg.causal() & rg.window(fewest)):
        assert rg.plan(some, some, some, mask=mask).engine == chosen
        assert rg.plan(fewer, fewer, fewer, mask=mask).engine == "fused"
    for mask in (None, rg.padding([191, 150]), rg.mask_tensor(torch.ones(191, 191, dtype=torch.bool))):
        assert rg.plan(x, x, x, mask=mask).engine == "fused"


def test_our_kernels_are_chosen_where_they_are_faster(monkeypatch):
    """Where the library is built for a processor with AVX2, and nowhere else."""
    x, few = torch.randn(1, 1, 2048, 4), torch.randn(1, 1, 63, 4)
    windowed = rg.Attention(mask=WINDOW)
    fast = load_fast() is not None
    assert rg.plan(x, x, x, attention=windowed).engine == ("kernel" if fast else "blocked")
    assert rg.plan(x, x, x, attention=rg.Attention()).engine == ("kernel" if fast else "fused")
    assert rg.plan(few, few, few, attention=windowed).engine == "fused"
    assert rg.plan(x.double(), x.double(), x.double(), attention=windowed).engine == "blocked"
    monkeypatch.setenv("REGARD_KERNEL", "off")
    planned = rg.plan(x, x, x, attention=windowed)
    assert (
        planned.engine == "blocked" and planned.refused["kernel"] == "REGARD_KERNEL=off turns the compiled kernels off"
    )


def test_our_kernels_are_chosen_for_dropout_where_they_are_faster():
    """From 131,072 pairs of at least 48 queries on: torch's fused kernel computes no dropout of ours."""
    fast = load_fast() is not None
    for (heads, queries, keys), wins in {(8, 128, 128): True, (8, 127, 128): False, (128, 47, 32): False}.items():
        q, k = torch.randn(1, heads, queries, 4, requires_grad=True), torch.randn(1, heads, keys, 4)
        planned = rg.plan(q, k, k, attention=rg.Attention(dropout=0.1))
        assert planned.engine == ("kernel" if fast and wins else "dense")


@pytest.mark.parametrize("is_autocast", [False, True])
def test_the_speed_of_the_machine_is_measured_in_float32_and_draws_no_number(is_autocast, monkeypatch):
    """Whatever the caller's dtypes are, and without a trace in the numbers that the caller draws next."""
    timed = []
    monkeypatch.setattr(speed_model, "_seconds", lambda work, device: timed.append(work()) or 1.0)
    speed_model.forget()
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", enabled=is_autocast):
            assert rg.plan(Q, K, V, attention=rg.Attention()).seconds is not None
    finally:
        torch.set_default_dtype(torch.float32)
        speed_model.forget()
    assert [result.dtype for result in timed] == [torch.float32] * 2
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("start", [0, 5])
def test_the_pairs_of_the_causal_flag_are_those_of_its_triangle(start):
    for rows, keys in itertools.product((1, 3, 7), (1, 3, 7)):
        block = Block(start, start + rows, Spans.of((0, keys)), full=False, mask=None)
        assert block.causal_pairs == int(torch.ones(rows, keys).tril().sum())
        assert block.pairs == rows * keys


def test_a_group_is_the_rows_of_one_head_where_no_row_needs_a_mask_of_its_own():
    def folds(heads, key_heads, queries, mask_heads=None, causal=False):
        query, key = torch.zeros(1, heads, queries, 4), torch.zeros(1, key_heads, 7, 4)
        mask = None if mask_heads is None else torch.zeros(1, mask_heads, queries, 7)
        return flash._folds(query, key, causal, mask)

    for queries in (1, 2, 3):
        assert folds(4, 2, queries) and not folds(4, 4, queries) and not folds(4, 2, queries, causal=True)
        assert folds(4, 2, queries, mask_heads=1) is (queries == 1)
        assert not folds(4, 2, queries, mask_heads=4) and not folds(2, 1, queries, mask_heads=2)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_sums_over_keys_serve_query_heads_that_share_a_key_head_and_what_a_mask_of_keys_shows(key_heads):
    q, (k, v) = torch.randn(2, 4, 9, 6), torch.randn(2, 2, key_heads, 9, 6)
    sums = {"score": rg.scores.FeatureScore(), "normalizer": rg.normalizers.SumNormalizer()}
    for mask in (rg.padding([9, 5]), rg.causal() & rg.padding([4, 9]), ~rg.padding([3, 5])):
        attention = rg.Attention(**sums, mask=mask)
        found, expected = (attention(q, k, v, engine=engine).output for engine in ("linear", "dense"))
        torch.testing.assert_close(found, expected)


def test_a_plan_says_what_all_pairs_at_once_would_take():
    """4 bytes a pair, and for additive scores as many for each hidden unit."""
    x = torch.randn(1, 2, 128, 8)
    for score, numbers in ((rg.Dot(), 1), (rg.scores.Additive(8, 8, hidden=32), 32)):
        plan = rg.plan(x, x, x, attention=rg.Attention(score))
        assert f"All pairs at once would take {size(4 * 2 * 128 * 128 * numbers)}." in str(plan)


def test_a_buffer_of_statistics_is_complete_once_every_row_of_every_entry_is_written():
    whole, buffer = torch.randn(3, 2, 7), StatisticBuffer(3, 7)
    for rows in (slice(4, 7), slice(0, 4)):
        for entries in (slice(1, 3), slice(0, 1)):
            assert not buffer.is_complete
            buffer.write(rows, (whole[entries, :, rows],), entries)
    assert buffer.is_complete and buffer.tensors()[0].equal(whole)


def test_rows_that_keep_fewer_keys_than_later_ones_name_none_in_their_place():
    kept, buffer = torch.arange(24).view(1, 2, 4, 3), StatisticBuffer(1, 4)
    for rows, width in ((slice(0, 2), 1), (slice(2, 4), 3)):
        buffer.write(rows, (kept[:, :, rows, :width],))
    expected = kept.clone()
    expected[:, :, :2, 1:] = -1
    assert buffer.tensors()[0].equal(expected)
