"""The folds of a map by the compiled kernels, where they can: one pass, and no tile is stored."""

from __future__ import annotations

from collections.abc import Mapping
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
    (B, H, I, D), (G, J) = prepared.query.shape, prepared.key.shape[1:3]
    if load_fast() is None or B == 0 or I * J < FEWEST_PAIRS or grid.device.type != "cpu":
        return None
    if not (
        torch.equal(grid.batch, torch.arange(B, device="cpu")) and torch.equal(grid.head, torch.arange(H, device="cpu"))
    ):
        return None  # the kernels know masks and biases of whole batches with all their heads
    facts = {"learns": False, "learns_bias": False, "hides_gradients": False, "piece_tensors": [], "skeleton": None}
    problem = Problem.from_prepared(
        prepared=prepared,
        attention=attention,
        value=prepared.key[..., :0],
        positions=positions,
        sizes=Sizes(B, H, G, I, J, D, 0),
        grid=grid,
        **facts,
    )
    terms = Terms.of(problem)
    return terms if terms.refusal is None else None


def fill_compiled(terms: Terms, logsumexp: Tensor, states: Mapping[Fold, State]) -> set[Fold]:
    """Add the whole map to the states of the folds that the kernels know, and return these folds."""
    if any_coarse(logsumexp) or logsumexp.isnan().any():
        return set()
    positions = terms.problem.positions
    keys = positions.keys.intervals
    wanted, done = Statistics(keys[0][0] - positions.start), {}
    for fold, state in states.items():
        kind = type(fold)
        if knows(fold) and kind not in done and not (kind is Distance and len(keys) > 1):
            wanted = replace(wanted, **dict(zip(TENSORS[kind], state, strict=False)))
            done[kind] = fold
    if done:
        add_statistics(terms.setting(), terms.inputs(), logsumexp, wanted)
    return set(done.values())


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
