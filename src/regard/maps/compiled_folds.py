"""The folds of a map by the compiled kernels, where they can: one pass, and no tile is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.engine.kernel import Terms, logsumexp_of
from regard.engine.kernel.library import load
from regard.engine.kernel.statistics import Statistics, add_statistics
from regard.engine.problem import Problem
from regard.maps.folds import Distance, Entropy, Fold, KeyTotals, MassOn, Pool, State, TopLinks
from regard.pieces.normalizer import any_coarse
from regard.shapes import Sizes

if TYPE_CHECKING:
    from regard.maps.attention_map import AttentionMap

#: Fewest pairs of one head for which a compiled pass is worth its call.
FEWEST_PAIRS = 128 * 128


def compiled_terms(weights: AttentionMap) -> Terms | None:
    """The map as the kernels compute it; None if they cannot, or if tiles are as fast."""
    B, H, I, J = weights.shape
    library, grid = load(), weights.grid
    if library is None or library.level == 0 or I * J < FEWEST_PAIRS or weights.device.type != "cpu":
        return None
    if not (
        torch.equal(grid.batch, torch.arange(B, device="cpu")) and torch.equal(grid.head, torch.arange(H, device="cpu"))
    ):
        return None  # the kernels know masks and biases of whole batches with all their heads
    prepared = weights._prepared
    sizes = Sizes(B, H, prepared.key.shape[1], I, J, prepared.query.shape[-1], 0)
    facts = {"learns": False, "learns_bias": False, "hides_gradients": False, "piece_tensors": [], "skeleton": None}
    problem = Problem.from_prepared(
        prepared=prepared,
        attention=weights.attention,
        value=prepared.key[..., :0],
        positions=weights.positions,
        sizes=sizes,
        grid=grid,
        **facts,
    )
    terms = Terms.of(problem)
    return terms if terms.refusal is None else None


def compiled_logsumexp(weights: AttentionMap) -> Tensor | None:
    """The log-sum-exp of every row, (B, H, I), by the kernels; None if they cannot compute it."""
    terms = compiled_terms(weights)
    return None if terms is None else logsumexp_of(terms)


def fill_compiled(weights: AttentionMap, states: Mapping[Fold, State]) -> set[Fold]:
    """Add the whole map to the states of the folds that the kernels know, and return these folds."""
    if not any(type(fold) in TENSORS for fold in states) or (terms := compiled_terms(weights)) is None:
        return set()
    logsumexp = weights.row_statistic[0]
    if any_coarse(logsumexp) or logsumexp.isnan().any():
        return set()
    keys = weights.positions.keys.intervals
    wanted, done = Statistics(keys[0][0] - weights.positions.start), {}
    for fold, state in states.items():
        kind = type(fold)
        if kind in TENSORS and kind not in done and not (kind is Distance and len(keys) > 1):
            wanted = replace(wanted, **dict(zip(TENSORS[kind], state, strict=False)))
            done[kind] = fold
    add_statistics(terms.setting(), terms.inputs(), logsumexp, wanted)
    return set(done.values())


#: For each fold that the kernels know, the tensors of `Statistics` that its state begins with.
TENSORS: dict[type[Fold], tuple[str, ...]] = {
    Entropy: ("entropy",),
    Distance: ("distance",),
    MassOn: ("mass", "flags"),
    KeyTotals: ("received",),
    Pool: ("cells",),
    TopLinks: ("top_weights", "top_keys"),
}
