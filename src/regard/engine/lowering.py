"""Biases and masks as functions of one pair, as FlexAttention calls them: a changed score, and whether it is allowed.

The functions take the indices of batch entry, head, query and key. They may only calculate and read tensors. Each
constant is a tensor, since FlexAttention compiles again for each new Python number. A piece that depends on j - i
alone becomes a table of I + J - 1 numbers. A piece that depends on one token becomes a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_

import torch
from torch import Tensor

from regard.base.shapes import to_device
from regard.engine.problem import Problem
from regard.pieces.bias import Bias, ShawBias, Softcap, is_additive
from regard.pieces.data_masks import documents, global_tokens, mask_mod, mask_tensor, random_blocks
from regard.pieces.grid import Grid
from regard.pieces.mask import Both, Either, Mask, Not, block_local, causal, window
from regard.pieces.neighborhoods import neighborhood, sliding_tiles
from regard.pieces.piece import by_class
from regard.pieces.same_group import SameGroup
from regard.pieces.tensor_bias import LearnedBias, TensorBias
from regard.pieces.trees import tree

#: Whether a pair is allowed, from the indices of batch entry, head, query and key.
PairMask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
#: The changed score, from the score and the same indices.
PairScore = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
#: The position of a token, from its index.
Place = Callable[[Tensor], Tensor]


class NoLowering(Exception):
    """A piece cannot be written as a function of one pair; the message says why."""


def number(value: float, problem: Problem, dtype: torch.dtype = torch.int32) -> Tensor:
    """A constant as a tensor on the device."""
    return to_device(torch.tensor(value, dtype=dtype, device="cpu"), problem.query.device)


def query_position(problem: Problem) -> Place:
    """From the index of a query to its position."""
    start = number(problem.positions.start, problem)
    return lambda q: q + start


def key_position(problem: Problem) -> Place:
    """From the index of a key to its position."""
    keys = problem.positions.keys
    if len(keys.intervals) == 1:
        first = number(keys.intervals[0][0], problem)
        return lambda k: k + first
    places = problem.grid.key.int()  # the positions have gaps, such as after the sinks of a ring cache: a table
    return lambda k: places[k]


def diagonals(problem: Problem) -> tuple[Grid, Callable[[Tensor, Tensor], Tensor]]:
    """A grid with one pair for each j - i, the least first, and a function: query and key indices -> place in it."""
    distances = problem.positions.distances(problem.sizes.I)
    of_query, of_key, offset = query_position(problem), key_position(problem), number(distances.start, problem)
    return problem.grid.line(distances), lambda q, k: of_key(k) - of_query(q) - offset


# Scores


@by_class("transform", "term")
def change_of(bias: Bias, problem: Problem, rows: Tensor | None, cols: Tensor | None) -> PairScore:
    """A bias as a function of one score; `NoLowering` if there is none.

    `rows` and `cols` are what the bias prepared for queries (B, H, I, ...) and keys, as in `Prepared`.
    """
    if not (is_additive(bias) and bias.relative):
        raise NoLowering(f"{type(bias).__name__} has no form for single pairs")
    line, place = diagonals(problem)
    precision = torch.promote_types(problem.query.dtype, torch.float32)
    table = bias.term(line, rows, cols)[0, :, 0].to(precision)
    table = table.expand(problem.sizes.H, -1).contiguous()
    return lambda score, b, h, q, k: score + table[h, place(q, k)]


@change_of.register
def _(bias: Softcap, problem: Problem, rows: Tensor | None, cols: Tensor | None) -> PairScore:
    if isinstance(bias.cap, Tensor):
        raise NoLowering("the cap is a tensor, which may learn; FlexAttention takes a number")
    cap = number(bias.cap, problem, torch.promote_types(problem.query.dtype, torch.float32))
    return lambda score, b, h, q, k: cap * torch.tanh(score / cap)


@change_of.register
def _(bias: ShawBias, problem: Problem, rows: Tensor | None, cols: Tensor | None) -> PairScore:
    assert rows is not None  # (B, H, I, 2 reach + 1), the terms of the distances -reach to reach
    of_query, of_key, reach = query_position(problem), key_position(problem), number(bias.reach, problem)

    def add(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = torch.minimum(torch.maximum(of_key(k) - of_query(q), -reach), reach)
        return score + rows[b, h, q, distance + reach]

    return add


@change_of.register
def _(bias: TensorBias, problem: Problem, rows: Tensor | None, cols: Tensor | None) -> PairScore:
    s = problem.sizes
    added = bias.tensor.expand(s.B, s.H, s.I, s.J)
    return lambda score, b, h, q, k: score + added[b, h, q, k]


@change_of.register
def _(bias: LearnedBias, problem: Problem, rows: Tensor | None, cols: Tensor | None) -> PairScore:
    assert rows is not None  # (B or 1, H, I, J)
    added = rows.expand(problem.sizes.B, -1, -1, -1)
    return lambda score, b, h, q, k: score + added[b, h, q, k]


# Masks


@by_class("allowed")
def pairs_of(mask: Mask, problem: Problem) -> PairMask:
    """A mask as a function of one pair; `NoLowering` if there is none."""
    if mask.keys_only:
        of_first_query = mask.allowed(problem.grid.tile(slice(0, 1), slice(None)))[:, :, 0]  # (B or 1, H or 1, J)
        is_shown = of_first_query.expand(problem.sizes.B, problem.sizes.H, -1).contiguous()
        return lambda b, h, q, k: is_shown[b, h, k]
    if mask.relative:
        line, place = diagonals(problem)
        allowed = mask.allowed(line)[0, 0, 0]
        return lambda b, h, q, k: allowed[place(q, k)]
    raise NoLowering(f"the mask {type(mask).__name__} has no form for single pairs")


@pairs_of.register
def _(mask: mask_mod, problem: Problem) -> PairMask:
    raise NoLowering(
        "the predicate of mask_mod(...) may read more than one pair at once; use regard.mask_tensor(tensor)"
    )


@pairs_of.register
def _(mask: Both, problem: Problem) -> PairMask:
    left, right = pairs_of(mask.left, problem), pairs_of(mask.right, problem)
    return lambda b, h, q, k: left(b, h, q, k) & right(b, h, q, k)


@pairs_of.register
def _(mask: Either, problem: Problem) -> PairMask:
    left, right = pairs_of(mask.left, problem), pairs_of(mask.right, problem)
    return lambda b, h, q, k: left(b, h, q, k) | right(b, h, q, k)


@pairs_of.register
def _(mask: Not, problem: Problem) -> PairMask:
    inner = pairs_of(mask.mask, problem)
    return lambda b, h, q, k: ~inner(b, h, q, k)


@pairs_of.register
def _(mask: causal, problem: Problem) -> PairMask:
    of_query, of_key = query_position(problem), key_position(problem)
    return lambda b, h, q, k: of_key(k) <= of_query(q)


@pairs_of.register
def _(mask: window, problem: Problem) -> PairMask:
    of_query, of_key, size = query_position(problem), key_position(problem), number(mask.size, problem)
    return lambda b, h, q, k: (of_key(k) - of_query(q)).abs() < size


@pairs_of.register
def _(mask: block_local, problem: Problem) -> PairMask:
    """A query may attend to its own block, to `before` blocks before it and to `after` blocks after it."""
    # the numbers of blocks, counted by position: a vector for the queries, and one for the keys
    query_blocks, key_blocks = problem.grid.query // mask.size, problem.grid.key // mask.size
    before, after = number(mask.before, problem), number(mask.after, problem)

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = key_blocks[k] - query_blocks[q]
        return (distance >= -before) & (distance <= after)

    return near


@pairs_of.register
def _(mask: documents, problem: Problem) -> PairMask:
    query_documents, key_documents = mask.numbers(problem.grid)
    return same_number(query_documents[None], key_documents[None], problem)


def same_number(query_numbers: Tensor, key_numbers: Tensor, problem: Problem) -> PairMask:
    """Allow pairs of equal numbers of at least 0. Queries have numbers (B or 1, I), keys (B or 1, J)."""
    query_numbers, key_numbers = (x.expand(problem.sizes.B, -1).contiguous() for x in (query_numbers, key_numbers))
    zero = number(0, problem)
    return lambda b, h, q, k: (query_numbers[b, q] == key_numbers[b, k]) & (query_numbers[b, q] >= zero)


@pairs_of.register
def _(mask: SameGroup, problem: Problem) -> PairMask:
    groups = to_device(mask.groups, problem.query.device)
    return same_number(groups[:, problem.grid.query], groups[:, problem.grid.key], problem)


@pairs_of.register
def _(mask: global_tokens, problem: Problem) -> PairMask:
    positions = to_device(torch.tensor(mask.positions, dtype=torch.int64, device="cpu"), problem.query.device)
    query_is_global, key_is_global = (torch.isin(x, positions) for x in (problem.grid.query, problem.grid.key))
    return lambda b, h, q, k: query_is_global[q] | key_is_global[k]


@pairs_of.register
def _(mask: random_blocks, problem: Problem) -> PairMask:
    table = to_device(mask.table, problem.query.device)
    # row n of the table has the numbers of the blocks of keys that were drawn for block n of queries
    drawn = torch.zeros(len(table), len(table), dtype=torch.bool, device=table.device).scatter_(1, table, True)
    query_blocks, key_blocks = problem.grid.query // mask.size, problem.grid.key // mask.size
    return lambda b, h, q, k: drawn[query_blocks[q], key_blocks[k]]


@pairs_of.register
def _(mask: tree, problem: Problem) -> PairMask:
    # where a walk through the tree enters and leaves each token: it enters a descendant in between
    entered, left = (to_device(steps, problem.query.device) for steps in mask.intervals)
    at, first, stop = entered[problem.grid.query], entered[problem.grid.key], left[problem.grid.key]
    return lambda b, h, q, k: (first[k] <= at[q]) & (at[q] < stop[k])


@pairs_of.register
def _(mask: neighborhood, problem: Problem) -> PairMask:
    return _near(mask, problem.grid.query, problem.grid.key, problem)


@pairs_of.register
def _(mask: sliding_tiles, problem: Problem) -> PairMask:
    return _near(mask.near, problem.grid.query // mask.area, problem.grid.key // mask.area, problem)


def _near(mask: neighborhood, queries: Tensor, keys: Tensor, problem: Problem) -> PairMask:
    """Allow pairs of points of a grid where the key is in the window of the query along every axis.

    `queries` (I,) and `keys` (J,) are the numbers of the points, row by row. A window has every `dilation`-th key from
    its first to its last.
    """
    windows = zip(mask.windows, mask.places(queries), strict=True)
    ends = [to_device(window, queries.device)[coordinate].unbind(1) for window, coordinate in windows]
    gaps = [number(gap, problem) for gap in mask.dilation]
    axes = list(zip(ends, mask.places(keys), gaps, strict=True))

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        flags = [
            (key[k] >= first[q]) & (key[k] <= last[q]) & ((key[k] - first[q]) % gap == 0)
            for (first, last), key, gap in axes
        ]
        return reduce(and_, flags)

    return near


@pairs_of.register
def _(mask: mask_tensor, problem: Problem) -> PairMask:
    flags = mask.allowed(problem.grid).expand(problem.sizes.B, problem.sizes.H, -1, -1)
    return lambda b, h, q, k: flags[b, h, q, k]
