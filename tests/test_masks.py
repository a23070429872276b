"""The interval algebra against the predicates: what masks say of stretches is true of every pair."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard as rg
from regard.engine.blocks import blocks
from regard.spans import Spans
from test_combinations import masks

spans = st.lists(st.tuples(st.integers(-20, 20), st.integers(-20, 20)), max_size=6).map(Spans.union)
POINTS = range(-25, 25)


def members(s):
    return {p for p in POINTS if p in s}


@given(spans, spans)
def test_spans_are_a_set_algebra(a, b):
    assert members(a & b) == members(a) & members(b)
    assert members(a | b) == members(a) | members(b)
    assert members(~a) == set(POINTS) - members(a)
    assert len(a) == len(members(a))
    assert a.covers(b) == (members(a) >= members(b))
    assert a.tensor().tolist() == sorted(members(a))
    assert ~~a == a


@given(st.lists(st.booleans(), max_size=30))
def test_spans_of_flags_are_the_places_of_true(flags):
    assert Spans.where(torch.tensor(flags, dtype=torch.bool)).tensor().tolist() == [i for i, f in enumerate(flags) if f]


@settings(max_examples=300)
@given(st.data())
def test_may_and_all_bound_the_predicate(data):
    B, I, J = 2, data.draw(st.integers(1, 24)), data.draw(st.integers(1, 24))
    mask = data.draw(masks(B, I, J))
    positions = rg.Positions.aligned_to_end(I, J)
    allowed = mask.allowed(rg.Grid.whole(positions, B, 2, I)).expand(B, 2, I, J)
    size = data.draw(st.integers(1, 9))
    for start in range(0, I, size):
        stop = min(start + size, I)
        rows = allowed[:, :, start:stop].flatten(0, 2)
        where = (start + positions.start, stop + positions.start)
        some, every = (positions.columns(answer(*where)) for answer in (mask.may, mask.all))
        assert set(rows.any(0).nonzero().flatten().tolist()) <= set(some.tensor().tolist())
        assert set(every.tensor().tolist()) <= set(rows.all(0).nonzero().flatten().tolist())


@given(st.data())
def test_a_relative_mask_depends_on_distance_alone(data):
    mask = data.draw(masks(1, 12, 12))
    if mask.relative:
        a, b = (mask.allowed(rg.Grid.whole(rg.Positions(s, Spans(((s, s + 12),))), 1, 1, 12)) for s in (0, 37))
        assert torch.equal(a.expand(1, 1, 12, 12), b.expand(1, 1, 12, 12))


EXACT = {
    "causal": (rg.causal(), 4, 4, ["1000", "1100", "1110", "1111"]),
    "causal, aligned to the end": (rg.causal(), 2, 4, ["1110", "1111"]),
    "causal, more queries than keys": (rg.causal(), 4, 2, ["00", "00", "10", "11"]),
    "window of 2 keys": (rg.causal() & rg.window(2), 4, 4, ["1000", "1100", "0110", "0011"]),
    "window on both sides": (rg.window(2), 4, 4, ["1100", "1110", "0111", "0011"]),
    "dilated": (rg.dilated(2, 2), 5, 5, ["10100", "01010", "10101", "01010", "00101"]),
    "prefix": (rg.causal() | rg.prefix(2), 4, 4, ["1100", "1100", "1110", "1111"]),
    "blocks": (rg.block_local(2), 4, 4, ["1100", "1100", "0011", "0011"]),
    "blocks and the one before": (rg.block_local(2, before=1), 4, 4, ["1100", "1100", "1111", "1111"]),
    "documents": (rg.documents([1, 3]), 4, 4, ["1000", "0111", "0111", "0111"]),
    "documents across": (rg.documents([1, 2], [3, 1]), 3, 4, ["1110", "0001", "0001"]),
    "global": (rg.global_tokens([1]), 3, 3, ["010", "111", "010"]),
    "padding": (rg.padding([2]), 1, 4, ["1100"]),
    "padding on the left": (rg.padding(torch.tensor([[False, True, True]])), 1, 3, ["011"]),
    "not": (~rg.causal(), 3, 3, ["011", "001", "000"]),
    "predicate": (rg.where(lambda b, h, i, j: i == j), 2, 2, ["10", "01"]),
    "tensor": (rg.given(torch.tensor([[True, False, True]])), 1, 3, ["101"]),
}


@pytest.mark.parametrize("name", EXACT)
def test_masks_are_what_their_names_say(name):
    mask, I, J, rows = EXACT[name]
    grid = rg.Grid.whole(rg.Positions.aligned_to_end(I, J), 1, 1, I)
    allowed = mask.allowed(grid).expand(1, 1, I, J)[0, 0]
    assert ["".join(str(int(x)) for x in row) for row in allowed] == rows


def test_bigbird_draws_distinct_blocks_from_its_seed():
    mask = rg.random_blocks(size=4, count=3, length=64, seed=5)
    drawn = mask.table.tolist()
    assert all(len(set(row)) == 3 for row in drawn) and len({tuple(row) for row in drawn}) > 1
    assert mask.table.equal(rg.random_blocks(4, 3, 64, seed=5).table)
    assert not mask.table.equal(rg.random_blocks(4, 3, 64, seed=6).table)


def test_a_plan_costs_blocks_and_not_pairs():
    """Visits of the mask grow with n, not with n squared: counted, not timed."""

    def visits(n):
        return sum(1 for _ in blocks(rg.causal() & rg.window(64), rg.Positions.aligned_to_end(n, n), n, 64))

    assert visits(8192) == 2 * visits(4096)
    planned = list(blocks(rg.causal() & rg.window(64), rg.Positions.aligned_to_end(8192, 8192), 8192, 64))
    assert max(len(block.columns) for block in planned) == 127


def test_documents_plan_reads_each_document_alone():
    lengths = [100, 700, 30, 194]
    planned = blocks(rg.documents(lengths), rg.Positions.aligned_to_end(1024, 1024), 1024, 64)
    inside = [block for block in planned if block.start > 100 and block.stop <= 800]
    assert inside and all(block.columns == Spans(((100, 800),)) and block.full for block in inside)
