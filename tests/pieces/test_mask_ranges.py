"""Masks asked for queries, keys, batch entries and heads that they do not have: a true answer, or an error in words."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from test_masks import SAID, EvenKeysOfOddEntries

import regard as rg
from regard.base.spans import Spans
from regard.pieces.same_group import SameGroup
from regard.pieces.tensor_bias import bias_of

GROUPS = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3], [0, 1, 1, 1, 1, 1, 1, -1, -1, 2, 2, 0]])
SELECTED = EvenKeysOfOddEntries().select(torch.tensor([1, 0]))
ALL = [*SAID, SameGroup(GROUPS), SameGroup(GROUPS[:1]), rg.padding(GROUPS >= 0), SELECTED]
#: Masks of 12 positions, 2 batch entries or 2 heads that read a tensor by the coordinates of a tile.
HELD = {
    "groups": SameGroup(GROUPS),
    "lengths": rg.padding([9, 12]),
    "real keys": rg.padding(GROUPS >= 0),
    "blocks": rg.masks.random_blocks(3, 1, 12),
    "pairs": rg.mask_tensor(torch.ones(12, 12, dtype=torch.bool)),
    "pairs of heads": rg.mask_tensor(torch.ones(2, 2, 12, 12, dtype=torch.bool)),
    "tree": rg.masks.tree([n // 2 - 1 for n in range(12)]),
    "chosen keys": rg.masks.chosen_keys(torch.zeros(2, 2, 12, 1, dtype=torch.int64)),
    "selected": SELECTED,
    "line": rg.masks.neighborhood((12,), 3),
    "image": rg.masks.neighborhood((3, 4), (1, 2), dilation=(1, 2)),
    "tiles": rg.masks.sliding_tiles((4, 3), (2, 3), (1, 1)),
}
GRIDS = "line, image, tiles"
#: Tiles outside: the numbers of queries and keys, aligned to the end, of entries and of heads; and who refuses them.
OUTSIDE = {
    "a key too many": ((1, 13, 2, 2), f"groups, real keys, blocks, pairs, pairs of heads, tree, chosen keys, {GRIDS}"),
    "a query before the first": ((5, 4, 2, 2), f"groups, blocks, pairs, pairs of heads, tree, chosen keys, {GRIDS}"),
    "an entry too many": ((12, 12, 3, 2), "groups, lengths, real keys, pairs of heads, chosen keys, selected"),
    "a head too many": ((12, 12, 2, 3), "pairs of heads, chosen keys"),
}
REFUSED = [(case, name) for case, (_, names) in OUTSIDE.items() for name in names.split(", ")]


def tile(num_queries, num_keys, entries, heads):
    return rg.types.Grid.whole(rg.types.Positions.aligned_to_end(num_queries, num_keys), entries, heads, num_queries)


@pytest.mark.parametrize("mask", ALL, ids=lambda mask: str(mask).partition("<")[0])
def test_spans_of_queries_outside_of_a_mask_say_nothing_wrong_of_those_inside(mask):
    """`any_allowed` has all keys of the queries that exist, and `all_allowed` none that one of them may not see."""
    dense = mask.dense(12, batch_size=2, num_heads=2)
    for start, stop in product(range(-3, 16), repeat=2):
        some, every = mask.any_allowed(start, stop), mask.all_allowed(start, stop)
        rows = dense[:, :, max(start, 0) : max(stop, 0)].flatten(0, 2)
        if len(rows):
            assert some.covers(Spans.where(rows.any(0)))
            assert Spans.where(rows.all(0)).covers(every & Spans.of((0, 12)))


@pytest.mark.parametrize(("case", "name"), REFUSED)
def test_a_tile_outside_of_a_mask_is_refused(case, name):
    with pytest.raises(
        rg.RegardError, match=r"(its tensor \(.*\)|it) has \d+ .* were asked for\. Ask for those that it has"
    ):
        HELD[name].allowed(tile(*OUTSIDE[case][0]))


@pytest.mark.parametrize("name", ["groups", "lengths", "real keys", "pairs of heads", "chosen keys", "selected"])
def test_entries_that_a_mask_does_not_have_cannot_be_selected(name):
    mask = HELD[name]
    for outside in ([2], [-1], [0, 7]):
        with pytest.raises(rg.RegardError, match=r"has 2 batch entries, 0 to 1; batch entries .* were asked for"):
            mask.select(torch.tensor(outside))
    for no_index in ([0], torch.tensor([0.0]), torch.tensor([[0]]), torch.tensor([True])):
        with pytest.raises(rg.RegardError, match=r"\.select: the index must be a vector of integers, got "):
            mask.select(no_index)
        with pytest.raises(rg.RegardError, match=r"\.select: the index must be a vector of integers, got "):
            EvenKeysOfOddEntries().select(no_index)


@pytest.mark.parametrize("name", ["groups", "lengths", "real keys", "chosen keys"])
@pytest.mark.parametrize("entry", [2, -1])
def test_an_entry_that_a_mask_does_not_have_has_no_mask(name, entry):
    with pytest.raises(rg.RegardError, match="has 2 batch entries, 0 to 1"):
        HELD[name].of_entry(entry)


class FactorsOfHeads(rg.scores.Score):
    def scale(self, head_dim):
        return torch.ones(2, 1, 1)

    def check(self, sizes, key_dim):
        pass


HEADS = torch.tensor([0, 2])  # of two heads
#: Pieces of two heads, and what they compute for the heads of a tile.
OF_HEADS = {
    "ALiBi": rg.ALiBi(2),
    "T5Bias": rg.biases.T5Bias(2),
    "LearnedTable": rg.biases.LearnedTable(2, reach=3),
    "KERPLEBias": rg.biases.KERPLEBias(2),
    "FIREBias": rg.biases.FIREBias(2),
    "FIREBias of a length": rg.biases.FIREBias(2, fixed_length=8),
    "DiagonalBias": bias_of(torch.zeros(1, 2, 4, 4), rg.types.Positions.of(0, 4, 4), 4, 4),
    "TensorBias": bias_of(torch.rand(1, 2, 4, 4), rg.types.Positions.of(0, 4, 4), 4, 4),
    "Taps": rg.transitions.Taps.random(2, 3),
    "TokenShift": rg.transitions.TokenShift(2),
    "score": FactorsOfHeads(),
    "LearnedSink": rg.normalizers.LearnedSink(2),
}


def of_tile(piece, head):
    """What a piece computes for these heads of a tile of 4 queries and 4 keys."""
    grid = replace(tile(4, 4, 1, 1), head=head)
    ones = torch.ones(1, len(head), 4, 1)
    if hasattr(piece, "term"):
        return piece.term(grid, None, None)
    if hasattr(piece, "transform"):
        return piece.transform(ones @ ones.mT, grid, None, None)
    return piece.tile(ones, ones, grid) if hasattr(piece, "tile") else piece.of_heads(head).sink[None]


@pytest.mark.parametrize("name", OF_HEADS)
def test_a_piece_for_each_head_refuses_heads_that_it_does_not_have(name):
    for outside in (HEADS, torch.tensor([-1])):
        with pytest.raises(rg.RegardError, match=rf"{name.split()[0]}.* has 2 heads, 0 to 1; heads .* were asked"):
            of_tile(OF_HEADS[name], outside)


@pytest.mark.parametrize("name", OF_HEADS)
def test_a_piece_for_each_head_answers_for_heads_in_any_order(name):
    both, swapped = (of_tile(OF_HEADS[name], torch.tensor(heads)) for heads in ([0, 1], [1, 0, 1]))
    torch.testing.assert_close(swapped, both[:, [1, 0, 1]], rtol=0, atol=0)
