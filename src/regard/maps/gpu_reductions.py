"""The reductions of a map by the Triton kernel, where the tensors are on a GPU: one pass, and no tile is stored.

Each program that Triton compiles computes a few rows first. If they are not those of the dense formula in float64, or
the program does not compile, a warning says so, and tiles compute these statistics from then on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping

import torch
from torch import Tensor

from regard.attention import Attention, Prepared, scores
from regard.base.positions import Positions
from regard.base.spans import Spans
from regard.engine.gpu.statistics import (
    LARGEST_TOP,
    add_statistics,
    blocks_of,
    is_installed,
    logsumexp_of,
    terms_of,
)
from regard.engine.kernel import KernelProblem
from regard.engine.kernel.statistics import Parts
from regard.engine.problem import Problem
from regard.maps.compiled_reductions import first_shift, map_problem, parts_of
from regard.maps.reductions import Reduction, RowLinks, State, Tile
from regard.pieces.grid import Grid
from regard.pieces.normalizer import any_coarse

#: The devices whose maps the kernel computes.
DEVICES = {"cuda"}
#: The parts that the kernel fills or reads. Cells are those of `Pool`, which have no maxima.
FIELDS = {"entropy", "distance", "numbers", "received", "cells", "row_cells", "column_cells", "top_weights", "top_keys"}
#: Queries that are verified together, at the start, in the middle and at the end.
ROWS = 2
#: The largest difference to the dense formula, relative to the largest number of the statistic, or to 1.
TOLERANCE = 1e-3
#: What is known of each program: the reason why it is not used, or None if its rows were right.
FAULTS: dict[tuple, str | None] = {}


def gpu_terms(attention: Attention, prepared: Prepared, positions: Positions, grid: Grid) -> KernelProblem | None:
    """The map of these pieces as the Triton kernels compute it; None if they cannot, or if tiles are as fast."""
    if not is_installed():
        return None
    problem = map_problem(attention, prepared, positions, grid)
    return None if problem is None else terms_of(problem)


def gpu_logsumexp(terms: KernelProblem) -> Tensor | None:
    """The log-sum-exp of every row, (B, H, I); None if the kernel is wrong."""
    blocks = blocks_of(terms, {})
    is_right = _is_right(_program(terms, "log-sum-exp", blocks), lambda: _wrong_rows(terms))
    return logsumexp_of(terms) if is_right else None


def fill_on_gpu(terms: KernelProblem, logsumexp: Tensor, states: Mapping[Reduction, State]) -> set[Reduction]:
    """Add the whole map to the states of the reductions that the kernel knows, and return these reductions.

    Here and below `terms` are the pieces of a call as the kernel reads them, and `logsumexp` (B, H, I) its row
    statistic. There are none for maps with NaN or a coarse row.
    """
    if any_coarse(logsumexp) or logsumexp.isnan().any():
        return set()
    wanted, done = wanted_statistics(states, terms.problem)
    if not done:
        return done
    kinds = tuple(sorted(type(reduction).__name__ for reduction in done))
    program = _program(terms, kinds, blocks_of(terms, wanted))
    if not _is_right(program, lambda: _wrong_reduction(terms, logsumexp, done)):
        return set()
    add_statistics(terms, logsumexp, wanted)
    return done


def wanted_statistics(states: Mapping[Reduction, State], problem: Problem) -> tuple[Parts, set[Reduction]]:
    """The tensors that one pass of the kernel fills, and the reductions that they belong to.

    The kernel has one tensor for each field. If two reductions need the same field, only the first is in this pass.
    """
    joined: Parts = {}
    done = set()
    for reduction, state in states.items():
        parts = parts_of(reduction, state, problem)
        if parts is not None and parts.keys() <= FIELDS - joined.keys() and _is_small(parts):
            joined |= parts
            done.add(reduction)
    return joined | {"shift": first_shift(problem.positions)}, done


def _is_small(parts: Parts) -> bool:
    """Whether there are few strongest links, and the numbers of keys are one list for all heads."""
    numbers = parts.get("numbers", [])
    has_few_links = "top_weights" not in parts or parts["top_weights"].shape[-1] <= LARGEST_TOP
    return has_few_links and len(numbers) <= 1 and all(x.shape[1] == 1 for x, _ in numbers)


def _program(terms: KernelProblem, kinds: Hashable, blocks: dict[str, int]) -> tuple:
    """The key of a program in FAULTS: Triton compiles one for each device, dtype, biases and kind of mask.

    `kinds` are the statistics that it computes, and `blocks` the sizes of its blocks.
    """
    query, attention = terms.problem.query, terms.problem.attention
    biases, mask = tuple(map(type, attention.bias)), (bool(terms.layout.num_bytes), type(terms.layout.distances))
    return query.device, query.dtype, biases, mask, kinds, *blocks.items()


def _is_right(program: tuple, fault: Callable[[], str | None]) -> bool:
    """Whether the rows of a program were right at its first use; `fault` computes them and says what is wrong."""
    if program not in FAULTS:
        try:
            FAULTS[program] = fault()
        except Exception as error:  # whatever compilers and drivers raise: tiles need neither
            FAULTS[program] = f"{type(error).__name__}: {error}".splitlines()[0]
        if FAULTS[program] is not None:
            said = f"The Triton kernel for statistics is not used: {FAULTS[program]}. Tiles compute them."
            warnings.warn(said, stacklevel=3)
    return FAULTS[program] is None


def _few_rows(terms: KernelProblem) -> Iterator[slice]:
    """The ranges of queries that are verified."""
    I = terms.problem.sizes.I
    return (slice(first, min(first + ROWS, I)) for first in sorted({0, I // 2, max(0, I - ROWS)}))


def _wrong_reduction(terms: KernelProblem, logsumexp: Tensor, reductions: set[Reduction]) -> str | None:
    """Which reduction of a few rows is not that of the dense formula, in words; None if all are right."""
    problem, s = terms.problem, terms.problem.sizes
    shape = s.B, s.H, s.I, s.J
    for rows in _few_rows(terms):
        mine, exact = (
            {reduction: reduction.init(shape, problem.query.device) for reduction in reductions} for _ in range(2)
        )
        wanted, _ = wanted_statistics(mine, problem)
        add_statistics(terms, logsumexp, wanted, range(rows.start, rows.stop))
        tile = _dense_tile(terms, logsumexp, rows)
        for reduction in reductions:
            reduction.add(exact[reduction], tile)
            if not _agree(reduction, mine[reduction], exact[reduction], tile):
                name = type(reduction).__name__
                return f"{name} of the queries {rows.start} to {rows.stop - 1} is not that of the dense formula"
    return None


def _wrong_rows(terms: KernelProblem) -> str | None:
    """Which of a few rows have a log-sum-exp that is not that of the dense formula, in words; None if all are right."""
    logsumexp = logsumexp_of(terms)
    for rows in _few_rows(terms):
        exact = terms.problem.attention.normalizer.row_statistic(*_dense_scores(terms, rows))
        ours, theirs = logsumexp[:, :, rows].double(), exact[0]
        if not ((ours == theirs) | ((ours - theirs).abs() <= TOLERANCE * theirs.abs().clamp(min=1.0))).all():
            return f"the log-sum-exp of the queries {rows.start} to {rows.stop - 1} is not that of the dense formula"
    return None


def _dense_scores(terms: KernelProblem, rows: slice) -> tuple[Tensor, Tensor]:
    """All scores of some queries in float64, and the indices of the keys."""
    problem, columns = terms.problem, slice(0, terms.problem.sizes.J)
    prepared = problem.prepared.tile(rows, columns)
    prepared = prepared.with_tensors(t.double() for t in prepared.tensors())
    indices = torch.arange(columns.stop, device=problem.query.device)
    return scores(problem.attention, prepared, problem.grid.tile(rows, columns)), indices


def _dense_tile(terms: KernelProblem, logsumexp: Tensor, rows: slice) -> Tile:
    """All weights of some queries by the formula, in float64 before they are rounded."""
    statistic, columns = logsumexp[:, :, rows, None].double(), slice(0, terms.problem.sizes.J)
    # an empty row has the log-sum-exp -inf; minus inf, its scores become -inf and its weights 0
    logs = _dense_scores(terms, rows)[0] - statistic.masked_fill(statistic.isneginf(), torch.inf)
    grid = terms.problem.grid.tile(rows, columns)
    return Tile(logs.clamp(max=0).exp().float(), None, rows, columns, grid, Spans.of((columns.start, columns.stop)))


def _agree(reduction: Reduction, mine: State, exact: State, tile: Tile) -> bool:
    """Whether two states of a reduction have the same result. `exact` is that of the tile.

    Of nearly equal weights either key may be the strongest link, so keys are compared by their weights.
    """
    ours, theirs = reduction.finish(mine), reduction.finish(exact)
    if isinstance(ours, RowLinks):
        links = RowLinks(*(part[:, :, tile.rows] for part in ours))
        weights = tile.weights.gather(-1, links.keys.clamp(min=0)) * (links.keys >= 0)
        return _is_close(ours.weights, theirs.weights) and _is_close(weights, links.weights)
    return _is_close(ours, theirs)


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether no two numbers differ by more than TOLERANCE."""
    limit = TOLERANCE * theirs.abs().amax().clamp(min=1.0)
    return bool(((ours - theirs).abs() <= limit).all())
