"""The folds of a map by the Triton kernel, where the tensors are on a GPU: one pass, and no tile is stored.

Each program that Triton compiles computes a few rows first. If they are not those of the dense formula in float64, or
the program does not compile, a warning says so, and tiles compute these statistics from then on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from regard.attention import Attention, Prepared, scores
from regard.engine.gpu.statistics import LARGEST_TOP, Statistics, add_statistics, is_installed, terms_of
from regard.engine.kernel import Terms
from regard.maps.compiled_folds import map_problem
from regard.maps.folds import Distance, Entropy, Fold, KeyTotals, Links, MassOn, Pool, State, Tile, TopLinks
from regard.pieces.grid import Grid
from regard.pieces.normalizer import any_coarse
from regard.positions import Positions
from regard.spans import Spans

#: The devices whose maps the kernel computes.
DEVICES = {"cuda"}
#: For each fold that it knows, the tensors of `Statistics` that the state begins with. A subclass is another fold.
TENSORS: dict[type[Fold], tuple[str, ...]] = {
    Entropy: ("entropy",),
    Distance: ("distance",),
    MassOn: ("mass", "flags"),
    KeyTotals: ("received",),
    Pool: ("cells",),
    TopLinks: ("top_weights", "top_keys"),
}
#: Queries that are verified together, at the start, in the middle and at the end.
ROWS = 2
#: The largest difference to the dense formula, relative to the largest number of the statistic, or to 1.
TOLERANCE = 1e-3
#: What is known of each program: the reason why it is not used, or None if its rows were right.
FAULTS: dict[tuple, str | None] = {}

#: Adds a map, whose log-sum-exp is given, to the states of the folds that it knows, and returns these folds.
Fill = Callable[[Tensor, Mapping[Fold, State]], set[Fold]]


def gpu_pass(attention: Attention, prepared: Prepared, positions: Positions, grid: Grid) -> Fill | None:
    """The pass over the map of these pieces; None if the kernel cannot compute it, or if tiles are as fast."""
    if grid.device.type not in DEVICES or not is_installed():
        return None
    problem = map_problem(attention, prepared, positions, grid)
    terms = None if problem is None else terms_of(problem)
    return None if terms is None else partial(fill, terms)


def fill(terms: Terms, logsumexp: Tensor, states: Mapping[Fold, State]) -> set[Fold]:
    """Add the whole map to the states of the folds that the kernel knows, and return these folds."""
    if any_coarse(logsumexp) or logsumexp.isnan().any():
        return set()
    wanted, done = wanted_statistics(states, terms.problem.positions)
    if not done:
        return done
    program = _program(terms, done)
    if program not in FAULTS:
        FAULTS[program] = fault = _fault(terms, logsumexp, done)
        if fault is not None:
            warnings.warn(f"The Triton kernel for statistics is not used: {fault}. Tiles compute them.", stacklevel=2)
    if FAULTS[program] is not None:
        return set()
    add_statistics(terms, logsumexp, wanted)
    return done


def wanted_statistics(states: Mapping[Fold, State], positions: Positions) -> tuple[Statistics, set[Fold]]:
    """The tensors that one pass fills, and the folds that they belong to: the first of each type."""
    keys = positions.keys.intervals
    shift, tensors, done = keys[0][0] - positions.start, {}, {}
    for fold, state in states.items():
        kind = type(fold)
        unfit = (kind is Distance and len(keys) > 1) or (isinstance(fold, TopLinks) and fold.k > LARGEST_TOP)
        if kind in TENSORS and kind not in done and not unfit:
            tensors |= zip(TENSORS[kind], state, strict=False)
            done[kind] = fold
    return Statistics(shift, **tensors), set(done.values())


def _program(terms: Terms, folds: set[Fold]) -> tuple:
    """What Triton compiles a program for."""
    query, attention = terms.problem.query, terms.problem.attention
    kinds = tuple(sorted(repr(fold) if isinstance(fold, TopLinks) else type(fold).__name__ for fold in folds))
    pieces = tuple(type(bias) for bias in attention.bias), terms.layout.num_bytes > 0, terms.layout.distances is None
    return query.device, query.dtype, query.shape[-1], kinds, pieces


def _fault(terms: Terms, logsumexp: Tensor, folds: set[Fold]) -> str | None:
    """Why the program is not used; None if its statistics of a few rows are those of the dense formula."""
    try:
        return next(_differences(terms, logsumexp, folds), None)
    except Exception as error:  # whatever compilers and drivers raise: tiles need neither
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _differences(terms: Terms, logsumexp: Tensor, folds: set[Fold]) -> Iterator[str]:
    problem, s = terms.problem, terms.problem.sizes
    shape = s.B, s.H, s.I, s.J
    for first in sorted({0, s.I // 2, max(0, s.I - ROWS)}):
        rows = slice(first, min(first + ROWS, s.I))
        mine, exact = ({fold: fold.init(shape, problem.query.device) for fold in folds} for _ in range(2))
        wanted, _ = wanted_statistics(mine, problem.positions)
        add_statistics(terms, logsumexp, wanted, range(rows.start, rows.stop))
        tile = _dense_tile(terms, logsumexp, rows)
        for fold in folds:
            fold.add(exact[fold], tile)
            if not _agree(fold, mine[fold], exact[fold], tile):
                name = type(fold).__name__
                yield f"{name} of the queries {rows.start} to {rows.stop - 1} is not that of the dense formula"


def _dense_tile(terms: Terms, logsumexp: Tensor, rows: slice) -> Tile:
    """All weights of some queries by the formula, in float64 before they are rounded."""
    problem, columns = terms.problem, slice(0, terms.problem.sizes.J)
    prepared = problem.prepared.tile(rows, columns)
    prepared = prepared.with_tensors(t.double() for t in prepared.tensors())
    grid = problem.grid.tile(rows, columns)
    statistic = logsumexp[:, :, rows, None].double()
    logs = scores(problem.attention, prepared, grid) - statistic.masked_fill(statistic.isneginf(), torch.inf)
    return Tile(logs.clamp(max=0).exp().float(), None, rows, columns, grid, Spans.of((0, columns.stop)))


def _agree(fold: Fold, mine: State, exact: State, tile: Tile) -> bool:
    ours, theirs = fold.finish(mine), fold.finish(exact)
    if isinstance(ours, Links):
        links = Links(*(part[:, :, tile.rows] for part in ours))
        weights = tile.weights.gather(-1, links.keys.clamp(min=0)) * (links.keys >= 0)
        return _is_close(ours.weights, theirs.weights) and _is_close(weights, links.weights)
    return _is_close(ours, theirs)


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    limit = TOLERANCE * theirs.abs().amax().clamp(min=1.0)
    return bool(((ours - theirs).abs() <= limit).all())
