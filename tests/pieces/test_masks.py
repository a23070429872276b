"""The interval algebra against the predicates: what masks say of intervals is true of every pair."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard as rg
from drawn import coins, grids, masks, placings, simple_masks, trees
from regard.base.shapes import Sizes
from regard.base.spans import Spans
from regard.engine.blocks import blocks
from regard.pieces.contents import split_tensors
from regard.pieces.key_groups import GroupMask
from regard.pieces.same_group import SameGroup, groups_mask
from regard.reference.basics import Place
from regard.reference.masks import attends as attends_by_definition

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


@given(spans, st.integers(0, 12), st.integers(-5, 5))
def test_gaps_hull_and_shift_are_those_of_the_integers(a, size, by):
    filled, points = members(a), sorted(members(a))
    for left, right in pairwise(points):
        filled |= set(range(left, right)) if right - left - 1 <= size else set()
    assert members(a.gaps_up_to(size)) == filled
    assert a.hull().tensor().tolist() == (list(range(points[0], points[-1] + 1)) if points else [])
    assert a.shift(by).tensor().tolist() == [point + by for point in points]


@given(st.lists(st.booleans(), max_size=30))
def test_spans_of_flags_are_the_places_of_true(flags):
    assert Spans.where(torch.tensor(flags, dtype=torch.bool)).tensor().tolist() == [i for i, f in enumerate(flags) if f]


@settings(max_examples=300)
@given(st.data())
def test_may_and_all_bound_the_predicate(data):
    B, I, J = 2, data.draw(st.integers(1, 24)), data.draw(st.integers(1, 24))
    mask = data.draw(masks(B, I, J))
    positions = rg.types.Positions.aligned_to_end(I, J)
    allowed = mask.allowed(rg.types.Grid.whole(positions, B, 2, I)).expand(B, 2, I, J)
    assert mask.batched or allowed.equal(allowed[:1].expand(B, 2, I, J))
    size = data.draw(st.integers(1, 9))
    for start in range(0, I, size):
        stop = min(start + size, I)
        rows = allowed[:, :, start:stop].flatten(0, 2)
        where = (start + positions.start, stop + positions.start)
        some, every = (positions.columns(answer(*where)) for answer in (mask.any_allowed, mask.all_allowed))
        assert set(rows.any(0).nonzero().flatten().tolist()) <= set(some.tensor().tolist())
        assert set(every.tensor().tolist()) <= set(rows.all(0).nonzero().flatten().tolist())


@pytest.mark.parametrize("kind", simple_masks(1, 1, 1))
@settings(max_examples=20)
@given(data=st.data(), sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)).map(sorted))
def test_a_mask_answers_for_each_pair_alone(kind, data, sizes):
    """For any entries, heads, queries and keys, in any order and more than once, as for the whole grid."""
    sizes = (2, 2, *sizes)
    mask = data.draw(simple_masks(2, *sizes[2:])[kind])
    grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(*sizes[2:]), *sizes[:3])
    whole = mask.allowed(grid).expand(sizes)
    more = data.draw(st.booleans())
    entries, heads, rows, cols = (torch.randint(n, (5,)) if more else torch.randperm(n) for n in sizes)
    some = replace(grid, batch=entries, head=heads).tile(rows, cols)
    expected = whole[entries][:, heads][:, :, rows][..., cols]
    assert mask.allowed(some).expand(expected.shape).equal(expected)
    if (numbers := mask.numbers(some)) is not None:
        of_query, of_key = numbers[0].view(-1, 1, len(rows), 1), numbers[1].view(-1, 1, 1, len(cols))
        assert ((of_query == of_key) & (of_query >= 0)).expand(expected.shape).equal(expected)


@pytest.mark.parametrize("kind", [kind for kind in simple_masks(1, 1, 1) if kind not in ("tensor", "groups")])
@settings(max_examples=20)
@given(data=st.data(), sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)).map(sorted))
def test_a_mask_knows_the_keys_of_any_range_of_queries(kind, data, sizes):
    """Also of an empty one, and of one that begins before the first query or ends after the last.

    Masks of one tensor know the queries of its rows only.
    """
    (I, J), first = sizes, sizes[1] - sizes[0]
    mask = data.draw(simple_masks(2, I, J)[kind])
    rows = mask.dense(I, J, batch_size=2, num_heads=2).flatten(0, 1)
    start, stop = sorted(data.draw(st.tuples(st.integers(-2, J + 3), st.integers(-2, J + 3))))
    inside = rows[:, max(start - first, 0) : max(stop - first, 0)].flatten(0, 1)
    some, every = ({j for j in range(J) if j in answer(start, stop)} for answer in (mask.any_allowed, mask.all_allowed))
    assert set(inside.any(0).nonzero().flatten().tolist()) <= some
    assert not len(inside) or every <= set(inside.all(0).nonzero().flatten().tolist())


@settings(max_examples=200)
@given(data=st.data(), I=st.integers(1, 16), J=st.integers(1, 16))
def test_the_edges_of_a_mask_lie_in_order_between_the_first_and_the_last_query(data, I, J):
    mask = data.draw(masks(2, I, J))
    first, last = sorted((data.draw(st.integers(J - I, J)), data.draw(st.integers(J - I, J))))
    edges = list(mask.edges(first, last))
    assert edges == sorted(set(edges)) and all(first < edge < last for edge in edges)


CUT = [
    rg.masks.random_blocks(3, 2, 20),
    rg.masks.block_local(3),
    rg.documents([3, 8, 9]),
    rg.masks.sliding_tiles((4, 5), (2, 5), (1, 1)),
]


@pytest.mark.parametrize("mask", [*CUT, *(~mask for mask in CUT)], ids=str)
@pytest.mark.parametrize(("first", "last"), [(0, 20), (2, 19), (3, 12), (7, 8), (5, 5)])
def test_queries_between_two_edges_have_the_same_keys_and_those_of_an_edge_have_others(mask, first, last):
    rows = mask.dense(20)
    jumps = [i for i in range(first + 1, last) if not rows[i].equal(rows[i - 1])]
    assert list(mask.edges(first, last)) == jumps


@given(st.data())
def test_a_relative_mask_depends_on_distance_alone(data):
    mask = data.draw(masks(1, 12, 12))
    if mask.relative:
        a, b = (
            mask.allowed(rg.types.Grid.whole(rg.types.Positions(s, Spans(((s, s + 12),))), 1, 1, 12)) for s in (0, 37)
        )
        assert torch.equal(a.expand(1, 1, 12, 12), b.expand(1, 1, 12, 12))


@pytest.mark.parametrize("batch", [1, 2])
def test_the_spans_of_groups_without_gaps_are_exact(batch):
    """The keys that all of some queries share, and the hull of those that any of them has."""
    for length in 5 * (1, 2, 5, 9):
        numbers = torch.randint(-1, 3, (batch, length)).sort(1).values
        mask = SameGroup(numbers)
        allowed = (numbers[:, :, None] == numbers[:, None]) & (numbers >= 0)[:, None]
        for start, stop in combinations(range(length + 1), 2):
            rows = allowed[:, start:stop].flatten(0, 1)
            assert mask.all_allowed(start, stop) == Spans.where(rows.all(0))
            assert mask.any_allowed(start, stop) == Spans.where(rows.any(0)).hull()
        assert mask.all_allowed(-1, 1) == mask.all_allowed(length - 1, length + 1) == Spans(())
        assert mask.any_allowed(-1, 1) == mask.any_allowed(0, 1)
        assert not mask.any_allowed(-3, -1) and not mask.any_allowed(length, length + 2)


def test_groups_that_follow_each_other_in_all_entries_alike_are_documents():
    for n in range(100):
        numbers = torch.randint(-1, 2, (1 + n % 2, 1 + n % 4))
        rows, mask = numbers.tolist(), groups_mask(numbers)
        are_alike, is_packed = rows[0] == rows[-1], rows[0] == sorted(rows[0]) and min(rows[0]) >= 0
        assert (type(mask) is type(rg.documents([1]))) == (are_alike and is_packed)
        assert mask.own_sizes() == (None if are_alike else 2, None)
        allowed = (numbers[:, :, None] == numbers[:, None]) & (numbers >= 0)[:, None]
        assert mask.dense(len(rows[0]), batch_size=len(rows))[:, 0].equal(allowed)


@pytest.mark.parametrize("make", [groups_mask, SameGroup])
@pytest.mark.parametrize("shape", [(0, 5), (0, 0), (1, 0), (2, 0)])
def test_groups_of_no_entry_or_no_token_are_a_mask_without_pairs(make, shape):
    """A mask answers as for a batch that has entries and tokens, for all pairs, of which there are none."""
    mask, (B, n) = make(torch.zeros(shape, dtype=torch.int64)), shape
    grid = rg.types.Grid.whole(rg.types.Positions.of(0, n, n), B, 1, n)
    assert mask.allowed(grid).expand(B, 1, n, n).shape == (B, 1, n, n)
    assert mask.any_allowed(0, n) == mask.all_allowed(0, n) == Spans(())
    assert repr(mask) in (f"SameGroup(0 groups, batch {B})", "documents([])")
    q = torch.zeros(B, 2, n, 4)
    seen = rg.Attention(mask=mask)(q, q, q)
    assert seen.output.shape == q.shape and seen.weights.dense().shape == (B, 2, n, n)


EXACT = {
    "causal": (rg.causal(), 4, 4, ["1000", "1100", "1110", "1111"]),
    "causal, aligned to the end": (rg.causal(), 2, 4, ["1110", "1111"]),
    "causal, more queries than keys": (rg.causal(), 4, 2, ["00", "00", "10", "11"]),
    "window of 2 keys": (rg.causal() & rg.window(2), 4, 4, ["1000", "1100", "0110", "0011"]),
    "window on both sides": (rg.window(2), 4, 4, ["1100", "1110", "0111", "0011"]),
    "dilated": (rg.masks.dilated(2, 2), 5, 5, ["10100", "01010", "10101", "01010", "00101"]),
    "prefix": (rg.causal() | rg.masks.prefix(2), 4, 4, ["1100", "1100", "1110", "1111"]),
    "blocks": (rg.masks.block_local(2), 4, 4, ["1100", "1100", "0011", "0011"]),
    "blocks and the one before": (rg.masks.block_local(2, before=1), 4, 4, ["1100", "1100", "1111", "1111"]),
    "documents": (rg.documents([1, 3]), 4, 4, ["1000", "0111", "0111", "0111"]),
    "documents across": (rg.documents([1, 2], [3, 1]), 3, 4, ["1110", "0001", "0001"]),
    "global": (rg.masks.global_tokens([1]), 3, 3, ["010", "111", "010"]),
    "tree": (rg.masks.tree([-1, 0, 0, 2, 1]), 5, 5, ["10000", "11000", "10100", "10110", "11001"]),
    "tree after a context": (rg.masks.tree([-1, -1, 1], context=2), 3, 5, ["11100", "11010", "11011"]),
    "shared prefix": (rg.masks.shared_prefix(1, [2, 1]), 4, 4, ["1000", "1100", "1110", "1001"]),
    "neighborhood": (rg.masks.neighborhood((5,), 3), 5, 5, ["11100", "11100", "01110", "00111", "00111"]),
    "even neighborhood": (rg.masks.neighborhood((4,), 2), 4, 4, ["1100", "1100", "0110", "0011"]),
    "gaps": (rg.masks.neighborhood((5,), 2, 2), 5, 5, ["10100", "01010", "10100", "01010", "00101"]),
    "causal neighborhood": (rg.masks.neighborhood((4,), 2, is_causal=True), 4, 4, ["1000", "1100", "0110", "0011"]),
    "strides": (rg.masks.neighborhood((6,), 3, stride=3), 6, 6, ["111000"] * 3 + ["000111"] * 3),
    "tiles": (rg.masks.sliding_tiles((2, 4), (2, 2), (1, 1)), 8, 8, ["11110000"] * 4 + ["00001111"] * 4),
    "padding": (rg.padding([2]), 1, 4, ["1100"]),
    "padding by a reversed array": (rg.padding(np.array([9, 2])[:0:-1]), 1, 4, ["1100"]),
    "padding on the left": (rg.padding(torch.tensor([[False, True, True]])), 1, 3, ["011"]),
    "not": (~rg.causal(), 3, 3, ["011", "001", "000"]),
    "predicate": (rg.mask_mod(lambda b, h, i, j: i == j), 2, 2, ["10", "01"]),
    "tensor": (rg.mask_tensor(torch.tensor([[True, False, True]])), 1, 3, ["101"]),
}


@pytest.mark.parametrize("name", EXACT)
def test_masks_are_what_their_names_say(name):
    mask, I, J, rows = EXACT[name]
    grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(I, J), 1, 1, I)
    allowed = mask.allowed(grid).expand(1, 1, I, J)[0, 0]
    assert ["".join(str(int(x)) for x in row) for row in allowed] == rows


def test_bigbird_draws_distinct_blocks_from_its_seed():
    mask = rg.masks.random_blocks(size=4, count=3, length=64, seed=5)
    drawn = mask.table.tolist()
    assert all(len(set(row)) == 3 for row in drawn) and len({tuple(row) for row in drawn}) > 1
    assert mask.table.equal(rg.masks.random_blocks(4, 3, 64, seed=5).table)
    assert not mask.table.equal(rg.masks.random_blocks(4, 3, 64, seed=6).table)


def test_a_plan_costs_blocks_and_not_pairs():
    """Visits of the mask grow with n, not with n squared: counted, not timed."""

    def visits(n):
        return sum(1 for _ in blocks(rg.causal() & rg.window(64), rg.types.Positions.aligned_to_end(n, n), n, 64))

    assert visits(8192) == 2 * visits(4096)
    planned = list(blocks(rg.causal() & rg.window(64), rg.types.Positions.aligned_to_end(8192, 8192), 8192, 64))
    assert max(len(block.columns) for block in planned) == 127


def test_documents_plan_reads_each_document_alone():
    lengths = [100, 700, 30, 194]
    planned = blocks(rg.documents(lengths), rg.types.Positions.aligned_to_end(1024, 1024), 1024, 64)
    inside = [block for block in planned if block.start > 100 and block.stop <= 800]
    assert inside and all(block.columns == Spans(((100, 800),)) and block.full for block in inside)


class EvenKeysOfOddEntries(rg.masks.Mask):
    """A mask of one's own, which differs from one batch entry to the next and tells nothing of that."""

    def allowed(self, grid):
        return (grid.b % 2 == 0) | (grid.j % 2 == 0)


@settings(max_examples=100)
@given(st.data())
def test_a_selected_mask_is_the_mask_of_the_selected_entries(data):
    """Reordered, repeated and dropped batch entries, as in a beam search, for any mask."""
    B, I, J = 3, data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    mask = data.draw(masks(B, I, J) | st.just(EvenKeysOfOddEntries() & rg.causal()))
    index = torch.tensor(data.draw(st.lists(st.integers(0, B - 1), min_size=1, max_size=5)))
    again = torch.tensor(data.draw(st.lists(st.integers(0, len(index) - 1), min_size=1, max_size=4)))
    positions = rg.types.Positions.aligned_to_end(I, J)
    whole = mask.allowed(rg.types.Grid.whole(positions, B, 2, I)).expand(B, 2, I, J)
    for selected, entries in ((mask.select(index), index), (mask.select(index).select(again), index[again])):
        n = len(entries)
        assert torch.equal(
            selected.allowed(rg.types.Grid.whole(positions, n, 2, I)).expand(n, 2, I, J), whole.index_select(0, entries)
        )
        assert_spans_bound(selected, whole.index_select(0, entries), positions)
        for entry in range(n):
            assert_spans_bound(selected.of_entry(entry), whole.index_select(0, entries[entry : entry + 1]), positions)


def assert_spans_bound(mask, allowed, positions):
    I = allowed.shape[2]
    where = (positions.start, positions.start + I)
    some, every = (
        set(positions.columns(answer(*where)).tensor().tolist()) for answer in (mask.any_allowed, mask.all_allowed)
    )
    assert set(allowed.flatten(0, 2).any(0).nonzero().flatten().tolist()) <= some
    assert every <= set(allowed.flatten(0, 2).all(0).nonzero().flatten().tolist())


@pytest.mark.parametrize("engine", ["dense", "blocked", "reference"])
def test_engines_follow_a_selected_predicate(engine):
    q, k, v = torch.randn(3, 2, 1, 7, 4)
    mask, index = rg.causal() & (rg.mask_mod(lambda b, h, i, j: (i + j) % 2 == b) | EvenKeysOfOddEntries()), [1, 1, 0]
    mask = mask if engine != "reference" else mask.left & mask.right.left
    expected = rg.Attention(mask=mask)(q, k, v).output[index]
    rows = rg.Attention(mask=mask.select(torch.tensor(index)))
    torch.testing.assert_close(rows(q[index], k[index], v[index], engine=engine).output, expected)


def test_a_mask_that_checks_its_sizes_says_itself_what_its_rows_are():
    class Own(EvenKeysOfOddEntries):
        def check(self, sizes, positions):
            assert sizes.B == 2

    with pytest.raises(rg.RegardError, match=r"Define select\(index\)"):
        Own().select(torch.tensor([0]))
    with pytest.raises(rg.RegardError, match="made for a batch of 1, used with a batch of 2"):
        x = torch.randn(2, 1, 3, 4)
        rg.Attention(mask=EvenKeysOfOddEntries().select(torch.tensor([0])))(x, x, x)


GIVEN = {
    "lengths": (lambda: torch.tensor([6, 3]), rg.padding, lambda x: x.fill_(2)),
    "numbers of NumPy": (lambda: np.array([6, 3]), rg.padding, lambda x: x.fill(2)),
    "real keys": (lambda: torch.ones(2, 6).bool(), rg.padding, lambda x: x[:, 3:].fill_(False)),
    "one row for all": (lambda: torch.ones(1, 6).bool(), lambda x: rg.padding(x.expand(2, -1)), lambda x: x.fill_(0)),
    "pairs": (lambda: torch.ones(6, 6).bool(), rg.mask_tensor, lambda x: x[:, 1:].fill_(False)),
    "pairs of entries": (
        lambda: torch.ones(2, 1, 6, 6).bool(),
        lambda x: rg.causal() & ~rg.mask_tensor(~x) & rg.mask_tensor(x),
        lambda x: x[..., 2:].fill_(False),
    ),
    "documents": (lambda: torch.tensor([4, 2]), rg.documents, lambda x: x.fill_(3)),
    "chosen tokens": (
        lambda: torch.tensor([0, 1]),
        lambda x: rg.masks.global_tokens(x) & rg.causal(),
        lambda x: x.fill_(5),
    ),
    "selected rows": (
        lambda: torch.tensor([1, 0]),
        lambda x: rg.mask_mod(lambda b, h, i, j: j > b).select(x),
        lambda x: x.fill_(0),
    ),
    "groups": (lambda: torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]]), groups_mask, lambda x: x.fill_(0)),
}


@pytest.mark.parametrize("engine", ["dense", "blocked"])
@pytest.mark.parametrize("what", GIVEN)
def test_a_mask_keeps_what_it_was_given(what, engine):
    """A tensor that its owner reuses for the next batch changes neither outputs, gradients nor maps."""
    make, mask_of, change = GIVEN[what]
    q, k, v = torch.randn(3, 2, 2, 6, 4, dtype=torch.float64).requires_grad_()

    def run(attention):
        seen = attention(q, k, v, engine=engine)
        return seen, seen.output

    expected = rg.Attention(mask=mask_of(make()))(q, k, v, engine="dense")
    (gradient,) = torch.autograd.grad(expected.output.square().sum(), k)
    given = make()
    attention = rg.Attention(mask=mask_of(given))
    seen, output = run(attention)
    change(given)
    torch.testing.assert_close(torch.autograd.grad(output.square().sum(), k)[0], gradient)
    torch.testing.assert_close(seen.weights.dense(), expected.weights.dense())
    torch.testing.assert_close(run(attention)[1], expected.output)
    untouched = rg.Attention(mask=mask_of(given_before := make()))  # changed before its first call
    change(given_before)
    torch.testing.assert_close(run(untouched)[1], expected.output)


def test_a_copy_of_an_expanded_mask_takes_no_more_memory():
    tensor = torch.rand(1, 1, 5, 6) < 0.5
    kept = rg.mask_tensor(tensor.expand(3, 4, 5, 6)).tensor
    assert kept.untyped_storage().nbytes() == 30 and kept.data_ptr() != tensor.data_ptr()
    assert torch.equal(kept, tensor.expand(3, 4, 5, 6))


@pytest.mark.parametrize(
    "ask",
    [
        lambda m: m and rg.window(3),
        lambda m: m or rg.window(3),
        lambda m: not m,
        lambda m: bool(m & rg.window(3)),
        lambda m: 1 if ~m else 2,
        lambda m: any([rg.padding([1]) | m]),
    ],
)
def test_a_mask_has_no_truth_value(ask):
    with pytest.raises(rg.RegardError, match=r"no truth value.*& \(both\), \| \(either\) and ~ \(not\)"):
        ask(rg.causal())


def test_queries_beyond_the_documents_are_in_none():
    mask = rg.documents((2, 3))
    numbers, keys = mask.numbers(rg.types.Grid.whole(rg.types.Positions.of(0, 7, 5), 1, 1, 7))
    assert numbers[:5].tolist() == keys.tolist() == [0, 0, 1, 1, 1]
    assert (numbers[5:] < 0).all()


def test_the_mask_of_an_entry_takes_both_sides_of_that_entry():
    batched = rg.padding(torch.tensor([2, 3]))
    for one, other in ((rg.causal(), batched), (batched, rg.causal()), (batched, batched)):
        for mask in (one & other, one | other, ~(one & other)):
            allowed = mask.allowed(rg.types.Grid.whole(rg.types.Positions.aligned_to_end(4, 4), 2, 1, 4))
            for b in range(2):
                entry = mask.of_entry(b)
                assert not entry.batched
                seen = entry.allowed(rg.types.Grid.whole(rg.types.Positions.aligned_to_end(4, 4), 1, 1, 4))
                assert torch.equal(seen, allowed[b : b + 1])
    for mask in (rg.causal() & rg.window(2), ~rg.causal()):
        assert mask.of_entry(1) is mask


@settings(max_examples=100)
@given(data=st.data(), I=st.integers(1, 12), J=st.integers(1, 12))
def test_a_grid_names_its_distances_where_they_are_one_interval(data, I, J):
    """By the positions on the host, or by those of the tensors, which on the CPU may be read."""
    whole = rg.types.Grid.whole(data.draw(placings(I, J)), 1, 1, I)
    rows, cols = (slice(*sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2)))) for n in (I, J))
    lists = (torch.tensor(data.draw(st.lists(st.integers(0, n - 1), max_size=4)), dtype=torch.int64) for n in (I, J))
    for grid in (whole, whole.tile(rows, cols), replace(whole.tile(rows, cols), positions=None), whole.tile(*lists)):
        distances = grid.distances()
        query, key = grid.query.tolist(), grid.key.tolist()
        one_interval = all(x and x == list(range(x[0], x[0] + len(x))) for x in (query, key))
        if query and key:
            assert (distances is not None) == one_interval
        if distances is not None and one_interval:
            assert list(distances) == sorted({j - i for i in query for j in key})


class Elsewhere:
    """A tensor on another device: its numbers can only be copied, and each copy is counted."""

    ndim, device = 4, torch.device("meta")

    def __init__(self, tensor):
        self.tensor, self.copies = tensor, 0

    shape = property(lambda self: self.tensor.shape)

    def __getitem__(self, index):
        assert index == (), "no number of it can be read on the host"
        return self

    def cpu(self):
        self.copies += 1
        return self.tensor


def test_a_mask_on_another_device_is_copied_to_the_host_once():
    flags = torch.rand(1, 1, 9, 9) < 0.5
    mask, here = rg.mask_tensor(flags), rg.mask_tensor(flags)
    object.__setattr__(mask, "tensor", elsewhere := Elsewhere(flags))
    for start in range(0, 9, 3):
        assert mask.any_allowed(start, start + 3) == here.any_allowed(start, start + 3)
        assert mask.all_allowed(start, start + 3) == here.all_allowed(start, start + 3)
    assert elsewhere.copies == 1


def exact_masks(length):
    """Masks that know their spans exactly."""
    size = st.integers(1, 5)
    return st.one_of(
        st.just(rg.causal()),
        st.builds(rg.window, size),
        st.builds(rg.masks.prefix, st.integers(0, length)),
        st.builds(rg.masks.block_local, size, st.integers(0, 2), st.integers(0, 2)),
        st.lists(size, min_size=length, max_size=length).map(lambda x: rg.documents(x[: -(-length // 5)])),
        st.lists(st.integers(0, length), min_size=2, max_size=2).map(rg.padding),
        st.integers(0, 99).map(lambda seed: rg.mask_tensor(coins(seed, 2, 1, length, length))),
        trees(length),
        grids(length, gaps=False),
    )


@settings(max_examples=200)
@given(data=st.data(), length=st.integers(1, 20))
def test_the_spans_of_simple_masks_are_exact(data, length):
    """`any_allowed` is no larger and `all_allowed` no smaller than what the predicate says; otherwise blocks read or
    ask too much.
    """
    mask = data.draw(exact_masks(length))
    mask = ~mask if data.draw(st.booleans()) else mask
    start, stop = sorted(data.draw(st.tuples(st.integers(0, length), st.integers(0, length))))
    grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(length, length), 2, 1, length)
    rows = mask.allowed(grid).expand(-1, -1, length, length)[:, :, start:stop].flatten(0, 2)
    if start < stop:
        assert [j in mask.any_allowed(start, stop) for j in range(length)] == rows.any(0).tolist()
        assert [j in mask.all_allowed(start, stop) for j in range(length)] == rows.all(0).tolist()


def test_a_map_keeps_the_tensors_of_a_predicate_for_selected_entries():
    keep = torch.tensor([[True, True, False], [True, False, True]])
    mask = rg.mask_mod(lambda b, h, i, j: keep[b, j]).select(torch.tensor([1, 0]))
    x = torch.randn(2, 1, 3, 4)
    weights = rg.Attention(mask=mask)(x, x, x).weights
    keep.fill_(True)
    assert weights.dense()[:, 0, 0].ne(0).tolist() == [[True, False, True], [True, True, False]]


@settings(max_examples=200)
@given(data=st.data(), B=st.integers(1, 3), H=st.integers(1, 2), I=st.integers(1, 12), J=st.integers(1, 12))
def test_a_dense_mask_is_its_definition(data, B, H, I, J):
    mask = data.draw(masks(B, I, J))
    mask = data.draw(st.sampled_from([mask, mask & rg.mask_tensor(coins(2, 1, H, I, J))]))
    try:
        dense = mask.dense(I, J, batch_size=B, num_heads=H)
    except rg.RegardError:  # documents and drawn blocks that do not cover the positions
        with pytest.raises(rg.RegardError):
            mask.check(Sizes(B, H, H, I, J, 1, 1), rg.types.Positions.aligned_to_end(I, J))
        return
    assert dense.dtype == torch.bool and dense.shape == (B, H, I, J)
    i, j = np.arange(I)[:, None] + J - I, np.arange(J)
    for b, h in np.ndindex(B, H):
        expected = np.broadcast_to(attends_by_definition(mask, Place(b, h, i, j)), (I, J))
        assert (dense[b, h].numpy() == expected).all()


@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        (rg.causal() & ~rg.window(2), (4, 4)),
        (rg.mask_mod(lambda b, h, i, j: i == j), (4, 4)),
        (rg.mask_tensor(torch.ones(4, 4, dtype=torch.bool)), (4, 4)),
        (rg.padding([3]), (1, 1, 4, 4)),
        (rg.causal() & rg.padding([3, 1]), (2, 1, 4, 4)),
        (~rg.padding(torch.ones(2, 4, dtype=torch.bool)), (2, 1, 4, 4)),
        (rg.mask_tensor(torch.ones(1, 3, 4, 4, dtype=torch.bool)), (1, 3, 4, 4)),
        (rg.padding([3, 1]) | rg.mask_tensor(torch.ones(1, 3, 4, 4, dtype=torch.bool)), (2, 3, 4, 4)),
        (rg.mask_mod(lambda b, h, i, j: j > b).select(torch.tensor([1, 0, 1])), (3, 1, 4, 4)),
        (groups_mask(torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])), (2, 1, 4, 4)),
    ],
)
def test_a_dense_mask_has_the_axes_that_the_mask_has(mask, shape):
    """So it goes back into `mask_tensor`, and into attention as the mask itself does."""
    dense = mask.dense(4)
    assert dense.shape == shape and mask.dense(4, 4).equal(dense)
    assert rg.mask_tensor(dense).dense(4).equal(dense)
    x = torch.randn(shape[0] if len(shape) == 4 else 2, 3, 4, 8)
    by_tensor, by_mask = (rg.Attention(mask=m)(x, x, x).output for m in (rg.mask_tensor(dense), mask))
    torch.testing.assert_close(by_tensor, by_mask)


def test_a_dense_mask_of_unknown_sizes_asks_for_them():
    by_entry, by_head = rg.mask_mod(lambda b, h, i, j: j > b), rg.mask_mod(lambda b, h, i, j: j > h)
    with pytest.raises(rg.RegardError, match=r"index of the batch entry .* mask\.dense\(3, batch_size=\.\.\.\)"):
        by_entry.dense(3)
    with pytest.raises(rg.RegardError, match=r"index of the head .* mask\.dense\(3, num_heads=\.\.\.\)"):
        (by_head & rg.padding([1, 2])).dense(3)
    assert by_entry.dense(3, batch_size=2).shape == (2, 1, 3, 3)
    assert by_entry.dense(0, 3).shape == (0, 3) and by_head.dense(3, 0).shape == (3, 0)  # no pair, no question
    assert by_head.dense(3, num_heads=2)[0, :, 0].tolist() == [[False, True, True], [False, False, True]]
    assert EvenKeysOfOddEntries().dense(2, batch_size=2)[1, 0].tolist() == [[True, False]] * 2


class TwoAxes(rg.masks.Mask):
    """A mask of one's own whose answer has no axes of entries and heads."""

    def allowed(self, grid):
        return (grid.distance <= 0)[0, 0]


def test_a_mask_whose_answer_has_two_axes_has_one_entry_and_one_head():
    assert TwoAxes().dense(3).equal(torch.ones(3, 3).tril().bool())


def test_a_dense_mask_refuses_sizes_that_do_not_fit():
    with pytest.raises(rg.RegardError, match="made for a batch of 2, used with a batch of 3"):
        rg.padding([1, 2]).dense(4, batch_size=3)
    with pytest.raises(rg.RegardError, match="the mask is for 4 queries and 4 keys, this call has 5 queries"):
        rg.mask_tensor(torch.ones(4, 4, dtype=torch.bool)).dense(5)
    with pytest.raises(rg.RegardError, match="num_queries must be an integer of at least 0"):
        rg.causal().dense(-1)
    assert rg.causal().dense(0).shape == (0, 0) and rg.padding([1, 2]).dense(0, 3).shape == (2, 1, 0, 3)


CAUSAL, PADDED = rg.causal(), rg.padding([9, 12])
SAID = [
    *(CAUSAL, rg.window(3), CAUSAL & rg.window(3), CAUSAL | rg.window(3), rg.masks.dilated(2, 2), CAUSAL & CAUSAL),
    *(PADDED, PADDED & rg.padding([12, 7]), CAUSAL & PADDED, PADDED | CAUSAL, rg.window(3) & PADDED),
    *(rg.masks.prefix(4), rg.masks.block_local(3), rg.masks.global_tokens([1, 5]), rg.documents([4, 8])),
    *(CAUSAL & rg.masks.prefix(4), rg.masks.random_blocks(3, 1, 12), rg.masks.tree([n // 2 - 1 for n in range(12)])),
    *(
        rg.mask_tensor(torch.arange(144).view(12, 12) % 5 > 1),
        rg.mask_tensor(torch.arange(288).view(2, 1, 12, 12) % 5 > 1),
    ),
    *(
        rg.mask_mod(lambda b, h, i, j: (i + j) % 3 == b),
        rg.masks.neighborhood((12,), 3),
        rg.masks.neighborhood((3, 4), 3),
    ),
    *(rg.masks.sliding_tiles((3, 4), (1, 2), (1, 1)), rg.masks.chosen_keys(torch.arange(72).view(2, 1, 12, 3) % 7)),
    rg.masks.chosen_keys(torch.arange(36).view(1, 1, 12, 3) % 7),
]


@pytest.mark.parametrize("mask", [*SAID, *(~mask for mask in SAID)], ids=lambda mask: str(mask).partition("<")[0])
def test_what_a_mask_says_of_itself_is_what_its_matrix_shows(mask):
    dense = mask.dense(12, batch_size=2, num_heads=2)
    assert mask.relative is dense[..., 1:, 1:].equal(dense[..., :-1, :-1])
    assert mask.keys_only is dense.equal(dense[:, :, :1].expand_as(dense))
    assert mask.batched is not dense[0].equal(dense[1])
    assert mask.is_lower_triangular is dense.equal(torch.ones(12, 12).tril().bool().expand_as(dense))


@pytest.mark.parametrize(
    "mask", [mask for mask in SAID if not mask.is_lower_triangular], ids=lambda mask: str(mask).partition("<")[0]
)
def test_what_a_mask_of_groups_says_of_itself_is_true_of_its_matrix(mask):
    """The keys of the grid are groups, which lie where their last tokens do: every second place."""
    grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(12, 12), 2, 2, 12)
    _, of_groups = rg.composites.MeanGroups(2).visible(mask, Sizes(2, 2, 2, 12, 12, 4, 4), grid)
    assert isinstance(of_groups, GroupMask)
    dense = of_groups.allowed(replace(grid, key=of_groups.last, positions=None)).expand(2, 2, 12, -1)
    assert of_groups.keys_only <= dense.equal(dense[:, :, :1].expand_as(dense)) >= mask.keys_only
    assert of_groups.relative <= dense[..., 2:, 1:].equal(dense[..., :-2, :-1])
    assert (not dense[0].equal(dense[1])) <= of_groups.batched <= (mask.batched or len(of_groups.tokens) > 1)


def test_a_window_with_gaps_fits_in_its_axis():
    for length, size, dilation in ((4, 2, 2), (6, 3, 2), (9, 3, 3)):
        rg.masks.neighborhood((length,), size, dilation=dilation)
        with pytest.raises(rg.RegardError, match=f"size times dilation is at most {length - 1}"):
            rg.masks.neighborhood((length - 1,), size, dilation=dilation)


def test_the_first_pair_of_a_grid_has_all_entries_and_heads():
    grid = rg.types.Grid.whole(rg.types.Positions.of(4, 3, 9), 2, 5, 3)
    pair = grid.first_pair()
    assert (pair.batch.tolist(), pair.head.tolist()) == ([0, 1], [0, 1, 2, 3, 4])
    assert (pair.query.tolist(), pair.key.tolist()) == ([4], [0])


def test_a_composition_has_the_tensors_of_its_predicates():
    allowed = torch.ones(12, dtype=torch.bool)
    predicate = rg.mask_mod(lambda b, h, i, j: allowed[j])
    for mask in (predicate, ~predicate, predicate & CAUSAL, PADDED | predicate, ~(CAUSAL & ~predicate)):
        (tensor,), _ = split_tensors(mask)
        assert tensor is allowed


def test_groups_of_another_batch_are_refused_also_for_a_call_without_tokens():
    x, groups = torch.zeros(2, 1, 0, 4), torch.zeros(3, 4, dtype=torch.long)
    with pytest.raises(rg.RegardError, match="made for a batch of 3 and 4 positions, used with a batch of 2 and no"):
        rg.attend(x, x, x, mask=SameGroup(groups))
    x = torch.zeros(2, 1, 5, 4)
    with pytest.raises(rg.RegardError, match="used with a batch of 2 and positions up to 4"):
        rg.attend(x, x, x, mask=SameGroup(groups))


@pytest.mark.parametrize("parents", [[-1, 0, 1, 2], [-1, 0, 0, 1, 2, 4, 3], [-1, -1, -1, 1, 3, 0]])
@pytest.mark.parametrize("context", [0, 3])
def test_a_tree_has_exact_spans_and_edges_where_a_token_does_not_continue_the_one_before(parents, context):
    mask, stop = rg.masks.tree(parents, context), context + len(parents)
    dense = mask.dense(stop)
    starts = [context + token for token, parent in enumerate(parents) if parent != token - 1]
    for first in range(stop):
        for last in range(first + 1, stop + 1):
            assert list(mask.edges(first, last)) == [start for start in starts if first < start < last]
            some, every = (ask(first, last) for ask in (mask.any_allowed, mask.all_allowed))
            assert [j in some for j in range(stop)] == dense[first:last].any(0).tolist()
            assert [j in every for j in range(stop)] == dense[first:last].all(0).tolist()


@pytest.mark.parametrize("wrong", [(3, 3, 3), (3,), (), 0, (3, 0), -1])
@pytest.mark.parametrize("name", ["size", "dilation", "stride"])
def test_each_axis_of_a_neighborhood_has_a_number(name, wrong):
    with pytest.raises(rg.RegardError, match=rf"neighborhood\({name}=.*one integer of at least 1 for all 2 axes"):
        rg.masks.neighborhood((4, 5), **{"size": 3, name: wrong})


def test_long_lists_of_a_mask_are_printed_by_their_ends():
    assert repr(rg.masks.tree(range(-1, 7))) == "tree([-1, 0, 1, 2, 3, 4, 5, 6], context=0)"
    assert repr(rg.masks.tree(range(-1, 8))) == "tree([-1, 0, 1, ..., 7] (9 of them), context=0)"


def test_positions_of_some_queries_are_those_at_their_indices():
    positions = rg.types.Positions(7, rg.types.Spans.of((0, 20)))
    assert positions.query(slice(2, 5)).tolist() == [9, 10, 11]


@given(st.sets(st.integers(0, 20), min_size=1), st.data())
def test_indices_and_positions_of_keys_lead_to_each_other(keys, data):
    """Whatever gaps are between the positions."""
    ordered = sorted(keys)
    positions = rg.types.Positions(0, rg.types.Spans.union((key, key + 1) for key in keys))
    chosen = data.draw(st.sets(st.integers(0, len(ordered) - 1)))
    indices = rg.types.Spans.union((n, n + 1) for n in chosen)
    assert positions.at(indices).tensor().tolist() == [ordered[n] for n in sorted(chosen)]
    assert positions.columns(positions.at(indices)) == indices
