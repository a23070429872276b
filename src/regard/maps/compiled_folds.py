"""The folds of a map by the compiled kernels, where they can: one pass, and no tile is stored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from regard.attention import Attention, Prepared
from regard.engine.kernel import Terms
from regard.engine.kernel.library import load_fast
from regard.engine.kernel.statistics import Statistics, add_statistics
from regard.engine.problem import Problem
from regard.maps.folds import Distance, Entropy, Fold, KeyTotals, MassOn, Pool, State, TopLinks
from regard.pieces.grid import Grid
from regard.pieces.normalizer import any_coarse
from regard.positions import Positions
from regard.shapes import Sizes

#: Fewest pairs of one head for which a compiled pass is worth its call.
FEWEST_PAIRS = 128 * 128


def compiled_terms(attention: Attention, prepared: Prepared, positions: Positions, grid: Grid) -> Terms | None:
    """The map of these pieces as the kernels compute it; None if they cannot, or if tiles are as fast."""
    if load_fast() is None or grid.device.type != "cpu":
        return None
    problem = map_problem(attention, prepared, positions, grid)
    if problem is None:
        return None
    terms = Terms.of(problem)
    return terms if terms.refusal is None else None


def map_problem(attention: Attention, prepared: Prepared, positions: Positions, grid: Grid) -> Problem | None:
    """The problem of a map, without values; None if it is small, or a part of a batch or of its heads."""
    (B, H, I, D), (G, J) = prepared.query.shape, prepared.key.shape[1:3]
    if B == 0 or I * J < FEWEST_PAIRS:
        return None
    entries, heads = (torch.arange(size, device=grid.device) for size in (B, H))
    if not (torch.equal(grid.batch, entries) and torch.equal(grid.head, heads)):
        return None  # a pass knows masks and biases of whole batches with all their heads
    facts = {"learns": False, "learns_bias": False, "hides_gradients": False, "piece_tensors": [], "skeleton": None}
    return Problem.from_prepared(
        prepared=prepared,
        attention=attention,
        value=prepared.key[..., :0],
        positions=positions,
        sizes=Sizes(B, H, G, I, J, D, 0),
        grid=grid,
        **facts,
    )


def fill_compiled(terms: Terms, logsumexp: Tensor, states: Mapping[Fold, State]) -> set[Fold]:
    """Add the whole map to the states of the folds that the kernels know, and return these folds."""
    if any_coarse(logsumexp) or logsumexp.isnan().any():
        return set()
    wanted, done = wanted_statistics(states, terms.problem.positions, frozenset(TENSORS))
    if done:
        add_statistics(terms.setting(), terms.inputs(), logsumexp, wanted)
    return done


def wanted_statistics(
    states: Mapping[Fold, State], positions: Positions, known: Collection[type[Fold]]
) -> tuple[Statistics, set[Fold]]:
    """The tensors that a pass fills, and the folds of the `known` types that they belong to: one of each type."""
    keys = positions.keys.intervals
    wanted, done = Statistics(keys[0][0] - positions.start), {}
    for fold, state in states.items():
        kind = type(fold)
        if kind in known and kind not in done and not (kind is Distance and len(keys) > 1):
            wanted = replace(wanted, **dict(zip(TENSORS[kind], state, strict=False)))
            done[kind] = fold
    return wanted, set(done.values())


def knows(fold: Fold) -> bool:
    """Whether the kernels compute this fold."""
    return type(fold) in TENSORS


#: For each fold that the kernels know, the tensors of `Statistics` that its state begins with.
TENSORS: dict[type[Fold], tuple[str, ...]] = {
    Entropy: ("entropy",),
    Distance: ("distance",),
    MassOn: ("mass", "flags"),
    KeyTotals: ("received",),
    Pool: ("cells",),
    TopLinks: ("top_weights", "top_keys"),
}
