"""Masks asked for queries, keys, batch entries and heads that they do not have: a true answer, or an error in words."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from test_masks import SAID, EvenKeysOfOddEntries

import regard as rg
from regard.base.spans import Spans
from regard.pieces.same_group import SameGroup

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
}
#: Tiles outside: the numbers of queries and keys, aligned to the end, of entries and of heads; and who refuses them.
OUTSIDE = {
    "a key too many": ((1, 13, 2, 2), "groups, real keys, blocks, pairs, pairs of heads, tree, chosen keys"),
    "a query before the first": ((5, 4, 2, 2), "groups, blocks, pairs, pairs of heads, tree, chosen keys"),
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
        rg.RegardError, match=r"its tensor \(.*\) has \d+ .* were asked for\. Ask for those that it has"
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
