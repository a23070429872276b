"""Oracles of masks for trees, images and videos: each path by itself, NATTEN, and the definitions point by point."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import regard as rg
from oracles import by_torch, oracle, pairs
from regard.catalog import mechanism
from regard.engine.blocks import blocks
from regard.maps.stored import load_map, save_map


@oracle("tree", queries=36)
def test_a_token_of_a_tree_attends_as_in_the_text_of_its_own_path(attention, q, k, v):
    """The tokens from the root to each token, behind the context, as an ordinary causal text."""
    parents, context = attention.mask.parents, attention.mask.context
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for token in range(36 - context):
        path = [token]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        text = [*range(context), *(context + t for t in reversed(path))]
        alone = F.scaled_dot_product_attention(*(x[:, :, text] for x in (q, k, v)), is_causal=True)
        output[:, :, context + token] = alone[:, :, -1]
    return output


@oracle("shared_prefix", queries=19)
def test_each_continuation_attends_as_if_it_stood_alone_behind_the_prefix(attention, q, k, v):
    edges = np.cumsum([5, 4, 7, 3])
    output = torch.empty_like(v)
    for start, stop in pairwise(edges):
        text = [*range(5), *range(start, stop)]
        alone = F.scaled_dot_product_attention(*(x[:, :, text] for x in (q, k, v)), is_causal=True)
        output[:, :, text] = alone
    return output


def near(i, j, length, size, gap, stride, is_causal):
    """One axis, by counting: the points `gap` apart from i are a line, and its window of `size` slides along it."""
    line = list(range(i % gap, length, gap))
    place = line.index(i)
    group = [p for p in range(len(line)) if p // stride == place // stride]
    if is_causal:
        leader = min(place // stride * stride + stride - 1, len(line) - 1)
        window = range(leader - size + 1, place + 1)
    else:
        leader = min(group[0] + stride // 2, len(line) - 1)
        window = range(leader - size // 2, leader - size // 2 + size)
        while window[0] < 0:
            window = range(window[0] + 1, window[-1] + 2)
        while window[-1] >= len(line):
            window = range(window[0] - 1, window[-1])
    return any(0 <= p < len(line) and line[p] == j for p in window)


def near_on_grid(shape, size, gap, stride, is_causal):
    points = list(product(*map(range, shape)))
    return pairs(
        len(points), len(points), lambda i, j: all(map(near, points[i], points[j], shape, size, gap, stride, is_causal))
    )


@oracle("neighborhood", queries=42)
def test_neighborhood_point_by_point(attention, q, k, v):
    return by_torch(q, k, v, near_on_grid((6, 7), (3, 4), (2, 1), (1, 1), (False, True)))


GRIDS = [
    ((13,), (4,), (3,), (1,), (False,)),
    ((11,), (5,), (2,), (3,), (True,)),
    ((6, 5), (3, 2), (2, 2), (2, 1), (False, False)),
    ((3, 4, 4), (2, 3, 1), (1, 1, 3), (2, 3, 1), (True, False, False)),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_neighborhood_is_that_of_natten(grid):
    """The mask that NATTEN gives to FlexAttention, and the loops above, which stand in where NATTEN is missing."""
    allowed = rg.masks.neighborhood(*grid).dense(int(np.prod(grid[0])))
    assert allowed.equal(near_on_grid(*grid))
    flex = pytest.importorskip("natten.backends.flex", reason="natten is not installed")
    shape, size, gap, stride, is_causal = grid
    theirs = flex.get_na_flex_mask("cpu", len(shape), shape, size, stride, gap, is_causal)
    i, j = torch.meshgrid(torch.arange(len(allowed)), torch.arange(len(allowed)), indexing="ij")
    assert allowed.equal(theirs.mask_mod(torch.tensor(0), torch.tensor(0), i, j))


@oracle("sliding_tiles", queries=48, arguments={"shape": (2, 4, 6), "tile": (1, 2, 2), "size": (1, 1, 3)})
def test_sliding_tiles_are_those_of_fastvideo(attention, q, k, v):
    """Odd sizes: a tile sees those at most size // 2 from the center of its window, which stays inside the canvas."""

    def tile(token):
        return np.unravel_index(token // 4, (2, 2, 3))

    def sees(i, j):
        axes = zip(tile(i), tile(j), (2, 2, 3), (1, 1, 3), strict=True)
        return all(abs(np.clip(a, w // 2, n - 1 - w // 2) - b) <= w // 2 for a, b, n, w in axes)

    return by_torch(q, k, v, pairs(48, 48, sees))


def test_tokens_in_the_order_of_tiles_see_the_points_of_near_tiles():
    """A picture row by row, reordered: the same output as a mask of the points themselves."""
    mask = rg.masks.sliding_tiles((4, 6), (2, 3), (1, 2))
    q, k, v = torch.randn(3, 1, 2, 24, 8, dtype=torch.float64)
    seen = rg.Attention(mask=mask)(*(x[:, :, mask.order] for x in (q, k, v))).output
    points = list(product(range(4), range(6)))
    same_row = pairs(24, 24, lambda i, j: points[i][0] // 2 == points[j][0] // 2)  # both tiles of a row are near
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=same_row)
    torch.testing.assert_close(seen, expected[:, :, mask.order])


def test_a_tree_of_one_branch_is_causal_and_long_branches_are_intervals():
    n = 5000
    assert rg.masks.tree(range(-1, 7), context=3).dense(11).equal(rg.causal().dense(11))
    mask = rg.masks.tree([*range(-1, n - 1), 999, *range(n, n + 999)])  # a trunk, and a branch that leaves it at 1,000
    assert mask.any_allowed(n, n + 50) == rg.types.Spans.of((0, 1000), (n, n + 50))
    assert mask.all_allowed(n, n + 50) == rg.types.Spans.of((0, 1000), (n, n + 1))
    assert mask.depths[:2] == (0, 1) and mask.depths[n] == 1000 and mask.depths[-1] == 1999


def test_blocks_of_a_video_read_few_keys():
    """64 queries are four rows of a frame, which see at most eight rows of three frames: counted, not timed."""
    mask = rg.masks.neighborhood((8, 16, 16), (3, 5, 5))
    planned = list(blocks(mask, rg.types.Positions.aligned_to_end(2048, 2048), 2048, 64))
    assert max(len(block.columns) for block in planned) <= 3 * 8 * 16


@pytest.mark.parametrize("name", ["tree", "shared_prefix", "neighborhood", "sliding_tiles"])
def test_a_saved_map_has_its_mask(name, tmp_path):
    attention, q, k, v = mechanism(name).example()
    seen = attention(q, k, v).weights
    save_map(tmp_path / "map.safetensors", seen)
    again = load_map(tmp_path / "map.safetensors")
    assert repr(again.attention.mask) == repr(attention.mask) and torch.equal(again.dense(), seen.dense())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rg.masks.tree([-1, 1]), "token 1 has the parent 1.*parents come first"),
        (lambda: rg.masks.tree([0]), "token 0 has the parent 0"),
        (lambda: rg.masks.tree([-2]), "token 0 has the parent -2"),
        (lambda: rg.masks.shared_prefix(3, []), "length of each continuation"),
        (lambda: rg.masks.shared_prefix(3, [2, 0]), "at least 1"),
        (lambda: rg.masks.neighborhood((4, 4), 5), "size times dilation is at most 4"),
        (lambda: rg.masks.neighborhood((4, 4), (2, 2, 2)), "one integer of at least 1 for all 2 axes"),
        (lambda: rg.masks.neighborhood((4,), 2, stride=3), "stride is at most size"),
        (lambda: rg.masks.neighborhood((4, 4), 2, is_causal=(True, 1)), "give True or False for all 2 axes"),
        (lambda: rg.masks.neighborhood((), 2), "length of each axis"),
        (lambda: rg.masks.neighborhood((4, 4), 2, is_causal=[True]), r"is_causal=\[True\]"),
        (lambda: rg.masks.sliding_tiles((4, 5), 2, 1), "whole number of tiles"),
        (lambda: rg.masks.sliding_tiles((4, 4), 2, 3), "an axis of 2 has no window of 3"),
        (lambda: rg.masks.tree([-1]).dense(2), "tree: covers queries 0 to 0"),
        (lambda: rg.masks.neighborhood((2, 2), 1).dense(5), r"neighborhood of \(2, 2\): covers queries 0 to 3"),
        (lambda: rg.masks.sliding_tiles((2, 2), 1, 1).dense(5), r"sliding_tiles of \(2, 2\): covers queries 0 to 3"),
    ],
)
def test_masks_that_make_no_sense_are_refused(make, message):
    with pytest.raises(rg.RegardError, match=message):
        make()
