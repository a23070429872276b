"""The reductions of a map by the compiled kernels, where they can: one pass, and no tile is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from regard.attention import Attention, Prepared
from regard.base.positions import Positions
from regard.base.shapes import Sizes
from regard.base.spans import INFINITY, Spans
from regard.engine.kernel import KernelProblem
from regard.engine.kernel.attention import RowFolds
from regard.engine.kernel.library import load_fast
from regard.engine.kernel.similarity import HeadProducts, add_products
from regard.engine.kernel.statistics import DifferentiableStatistics, Parts, add_statistics
from regard.engine.problem import Problem
from regard.maps.reductions import (
    Distance,
    Entropy,
    KeyTotals,
    MassOn,
    MassWhere,
    Pool,
    Pyramid,
    Reduction,
    Similarity,
    State,
    TopLinks,
)
from regard.pieces.grid import Grid
from regard.pieces.normalizer import any_coarse

#: Fewest pairs of one head for which a compiled pass is worth its call.
FEWEST_PAIRS = 128 * 128


def compiled_terms(attention: Attention, prepared: Prepared, positions: Positions, grid: Grid) -> KernelProblem | None:
    """The map of these pieces as the kernels compute it; None if they cannot, or if tiles are as fast.

    A pass over a map asks this first, and `fill_compiled` and `differentiable` take the result.
    """
    if load_fast() is None or grid.device.type != "cpu":
        return None
    problem = map_problem(attention, prepared, positions, grid)
    if problem is None:
        return None
    terms = KernelProblem.of(problem)
    return terms if terms.refusal is None else None


def map_problem(attention: Attention, prepared: Prepared, positions: Positions, grid: Grid) -> Problem | None:
    """The problem of a map, without values; None if it is small or empty, or a part of a batch or of its heads."""
    (B, H, I, D), (G, J) = prepared.query.shape, prepared.key.shape[1:3]
    if 0 in (B, I, J) or I * J < FEWEST_PAIRS:
        return None
    entries, heads = (torch.arange(size, device=grid.device) for size in (B, H))
    if not (torch.equal(grid.batch, entries) and torch.equal(grid.head, heads)):
        return None  # a pass knows masks and biases of whole batches with all their heads
    facts = {"learns": False, "learns_bias": False, "hides_gradients": False, "piece_tensors": [], "template": None}
    return Problem.from_prepared(
        prepared=prepared,
        attention=attention,
        value=prepared.key[..., :0],
        positions=positions,
        sizes=Sizes(B, H, G, I, J, D, 0),
        **facts,
    )


#: Kind of reduction -> the `Parts` that the kernels (C or Triton) compute for it in one pass; None if they cannot.
#: Parts may have "products", a list of `HeadProducts`. Lists of several reductions are concatenated. Subclasses of a
#: kind do not inherit its entry.
_PARTS_OF: dict[type[Reduction], Callable[[Any, State, Sizes], Parts | None]] = {
    Entropy: lambda _reduction, state, _sizes: {"entropy": state[0]},
    Distance: lambda _reduction, state, _sizes: {"distance": state[0]},
    MassOn: lambda _reduction, state, _sizes: {"numbers": [(state[1][:, None], state[0])]},
    KeyTotals: lambda _reduction, state, _sizes: {"received": state[0]},
    Pool: lambda _reduction, state, _sizes: {"cells": state[0], "row_cells": state[1], "column_cells": state[2]},
    TopLinks: lambda _reduction, state, _sizes: {"top_weights": state[0], "top_keys": state[1]},
}
#: Kinds of reductions that the kernels compute with the output, of parts that are numbers for each row.
_FOLDED = (Entropy, Distance, TopLinks)
#: Parts that need keys without gaps between their positions.
BY_DISTANCE = frozenset({"distance", "offsets", "offset_sums", "later", "same"})


def computes(kind: type[Reduction], parts: Callable[[Any, State, Sizes], Parts | None]) -> None:
    """Register a kind of reduction for the kernels: `parts(reduction, state, sizes)` returns what they compute."""
    _PARTS_OF[kind] = parts


def knows(reduction: Reduction) -> bool:
    """Whether the kernels compute this reduction."""
    return type(reduction) in _PARTS_OF


def parts_of(reduction: Reduction, state: State, problem: Problem) -> Parts | None:
    """What the kernels compute for a reduction of this problem's map; None if they cannot compute it."""
    parts = _PARTS_OF[type(reduction)](reduction, state, problem.sizes) if knows(reduction) else None
    has_gaps = len(problem.positions.keys.intervals) > 1
    return None if parts is None or (has_gaps and BY_DISTANCE & parts.keys()) else parts


def folds_of(reductions: Iterable[Reduction], problem: Problem) -> RowFolds | None:
    """Those of the reductions that an engine may compute with the output of a call; None if there are none."""
    s, tensors, states = problem.sizes, {}, {}
    for reduction in reductions if problem.query.device.type == "cpu" and not problem.is_empty else ():
        if type(reduction) not in _FOLDED or reduction in states:
            continue
        state = reduction.init((s.B, s.H, s.I, s.J), problem.query.device)
        parts = parts_of(reduction, state, problem)
        # with the output, a kernel computes one link of each row, and each part once
        is_single = not isinstance(reduction, TopLinks) or state[0].shape[-1] == 1
        if parts is not None and is_single and not parts.keys() & tensors.keys():
            tensors, states = tensors | parts, states | {reduction: state}
    return RowFolds(tensors, states, first_shift(problem.positions)) if states else None


def differentiable(
    terms: KernelProblem, logsumexp: Tensor, states: Mapping[Reduction, State]
) -> dict[Reduction, State]:
    """Those of the known states whose gradients the kernels compute, in the graph of the tensors of `terms`.

    Here and below `terms` are the pieces of a call as the kernels read them, and `logsumexp` (B, H, I) its row
    statistic. {} for maps with NaN or a coarse row (`pieces/normalizer.py`), whose log-sum-exp alone is not precise
    enough.
    """
    if any_coarse(logsumexp) or logsumexp.isnan().any():
        return {}
    all_parts = {reduction: parts_of(reduction, state, terms.problem) for reduction, state in states.items()}
    parts = {reduction: part for reduction, part in all_parts.items() if part is not None}
    known = {name: tensor for part in parts.values() for name, tensor in part.items()}
    if not known:
        return {}
    shift = first_shift(terms.problem.positions)
    results = DifferentiableStatistics.apply(terms.setting(), logsumexp, known, shift, *terms.inputs())
    return {reduction: [result] for reduction, result in zip(parts, results, strict=True)}  # type: ignore[arg-type]


def first_shift(positions: Positions) -> int:
    """The position of the first key minus that of the first query."""
    return positions.keys.intervals[0][0] - positions.start


def fill_compiled(terms: KernelProblem, logsumexp: Tensor, states: Mapping[Reduction, State]) -> set[Reduction]:
    """Add the whole map to the states of the reductions that the kernels know, and return these reductions.

    None of them for maps with NaN or a coarse row, as in `differentiable`.
    """
    if any_coarse(logsumexp) or logsumexp.isnan().any():
        return set()
    all_parts = {reduction: parts_of(reduction, state, terms.problem) for reduction, state in states.items()}
    waiting = {reduction: parts for reduction, parts in all_parts.items() if parts is not None}
    if terms.direction is not None:  # additive scores are computed for queries that follow each other
        waiting = {reduction: parts for reduction, parts in waiting.items() if "products" not in parts}
    done = set(waiting)
    while waiting:
        _pass(terms, logsumexp, _joined(waiting))
    return done


def _joined(waiting: dict[Reduction, Parts]) -> Parts:
    """Remove from `waiting` the reductions that one pass computes, and return their parts as one dict.

    Lists of the same name are concatenated. Of two reductions with another part of the same name (both have "cells"),
    the second waits for the next pass, because a pass has one tensor for each name.
    """
    joined: Parts = {}
    for reduction, parts in list(waiting.items()):
        lists = {name for name, part in parts.items() if isinstance(part, list)}
        if not joined.keys() & (parts.keys() - lists):
            joined |= {name: joined.get(name, []) + part if name in lists else part for name, part in parts.items()}
            del waiting[reduction]
    return joined


def _pass(terms: KernelProblem, logsumexp: Tensor, parts: Parts) -> None:
    """Compute these parts: one pass for each one or two products of heads (`_pairs`), and one for everything else."""
    setting, inputs = terms.setting(), terms.inputs()
    for whole, part in _pairs(parts.pop("products", [])):
        add_products(setting, inputs, logsumexp, whole, part)
    if parts:
        add_statistics(setting, inputs, logsumexp, parts | {"shift": first_shift(terms.problem.positions)})


def _pairs(wanted: list[HeadProducts]) -> Iterator[tuple[HeadProducts | None, HeadProducts]]:
    """The `wanted` products by passes: for each pass (whole, part), where `whole` contains `part`; None if none does.

    Products over all keys contain those over some or all keys of the same queries, or of fewer. Those of chosen keys
    come first, because they contain no others.
    """
    waiting = list(wanted)
    while waiting:
        part = waiting.pop(next((n for n, products in enumerate(waiting) if products.keys is not None), 0))
        whole = next((n for n, products in enumerate(waiting) if products.contains(part)), None)
        yield None if whole is None else waiting.pop(whole), part


def _similarity(reduction: Similarity, state: State, sizes: Sizes) -> Parts:
    """The products of every two heads, over all keys of every n-th query."""
    return {"products": [HeadProducts(torch.arange(sizes.I, device="cpu") % reduction.every == 0, None, state[0])]}


def _pyramid(reduction: Pyramid, state: State, sizes: Sizes) -> Parts:
    """The sums and maxima of cells, and the cell of each query and key."""
    rows, columns = (torch.arange(length, device="cpu") >> reduction.level for length in (sizes.I, sizes.J))
    return {"cells": state[0], "cell_maxima": state[1], "row_cells": rows, "column_cells": columns}


def _mass_where(reduction: MassWhere, state: State, _sizes: Sizes) -> Parts | None:
    """The weight on later keys, if the mask allows exactly these; the kernels know no other mask."""
    mask, first_query, after = reduction.mask, (0, 1), Spans(((1, INFINITY),))
    is_later = mask.relative and mask.any_allowed(*first_query) == after == mask.all_allowed(*first_query)
    return {"later": state[0]} if is_later else None


computes(MassWhere, _mass_where)
computes(Similarity, _similarity)
computes(Pyramid, _pyramid)
