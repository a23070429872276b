"""`ModuleStatistics`: the results of reductions for one attention module, kept instead of its queries and keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from regard.base.errors import RegardError, nearest
from regard.base.printing import Listing
from regard.maps import AttentionMap, Distance, Entropy, KeyTotals, Reduction, TopLinks
from regard.maps.reductions import State

#: The default reductions; their results take O(n) memory.
REDUCTIONS: tuple[Reduction, ...] = (Entropy(), TopLinks(1), Distance(), KeyTotals())


@dataclass(eq=False)
class ModuleStatistics:
    """The results of the reductions for one attention module, for each call and for all calls together.

    Name a reduction by its class, or by an equal reduction if there are several of one class. `calls` has the results
    of each call, and `_states` the merged state of each reduction; None if its results belong to one text.
    """

    name: str
    reductions: tuple[Reduction, ...]
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    _states: list[State | None] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"ModuleStatistics({self.name!r}, {self.results})"

    @property
    def results(self) -> str:
        """What was computed, and for how many calls: `Entropy(), KeyTotals() of 2 calls`."""
        names = ", ".join(map(repr, self.reductions))
        return f"{names} of {len(self.calls)} call{'s' * (len(self.calls) != 1)}"

    @torch.no_grad()
    def add(self, weights: AttentionMap) -> None:
        """Reduce the map of one call, in one pass over its tiles."""
        by_reduction = weights.reduction_states(self.reductions)
        states = [by_reduction[reduction] for reduction in self.reductions]
        first = not self.calls
        self.calls.append(
            tuple(reduction.finish(state) for reduction, state in zip(self.reductions, states, strict=True))
        )
        pairs = zip(self.reductions, states, strict=True)
        mergeable = [state if _is_mergeable(reduction, weights) else None for reduction, state in pairs]
        self._states = mergeable if first else list(map(_merged, self.reductions, self._states, mergeable))

    def of(self, reduction: Reduction | type[Reduction], call: int = -1) -> Any:
        """The result of a reduction for one call, by default the last."""
        return self.calls[call][self._number(reduction)]

    def merged(self, reduction: Reduction | type[Reduction]) -> Any:
        """The result of a reduction over all calls together; only for reductions whose state does not grow with the
        text.
        """
        number = self._number(reduction)
        state = self._states[number]
        if state is None:
            single = f"of({type(self.reductions[number]).__name__}, call=...)"
            raise RegardError(
                f"{self.name}: the results of {self.reductions[number]} belong to the tokens of one call and cannot be "
                f"merged over calls. {single} returns the result of each of the {len(self.calls)} calls."
            )
        return self.reductions[number].finish(state)

    def _number(self, wanted: Reduction | type[Reduction]) -> int:
        """The index of a reduction."""
        for number, reduction in enumerate(self.reductions):
            if reduction is wanted or type(reduction) is wanted or reduction == wanted:
                return number
        name = wanted.__name__ if isinstance(wanted, type) else type(wanted).__name__
        raise RegardError(
            f"{self.name}: {name} was not computed. "
            f"{nearest(name, [type(reduction).__name__ for reduction in self.reductions])} "
            "Name it before the model runs: watch(model, keep='statistics', reductions=[...])."
        )


class Statistics(Listing[ModuleStatistics]):
    """Module path -> the results of its reductions; printed, a line for each module."""

    title, header = "modules with statistics", ("module", "results")

    def row(self, name: str, value: ModuleStatistics) -> tuple[str, str]:
        return name, value.results


def _is_mergeable(reduction: Reduction, weights: AttentionMap) -> bool:
    """Whether the state of a reduction has the same size for every number of queries and keys."""
    B, H, I, J = weights.shape
    try:
        state, larger = (reduction.init((B, H, I + more, J + more), weights.device) for more in (0, 1))
    except RegardError:  # the reduction only takes this number of keys
        return False
    return [part.shape for part in state] == [part.shape for part in larger]


def _merged(reduction: Reduction, state: State | None, later: State | None) -> State | None:
    """The state of two texts together; None if one is not mergeable, or if their batches have other sizes."""
    if state is None or later is None or [a.shape for a in state] != [b.shape for b in later]:
        return None
    return reduction.merge(state, later)


def checked_reductions(reductions: Iterable[Reduction] | None, keep: str) -> tuple[Reduction, ...]:
    """The reductions that `watch` computes while the model runs: for keep="statistics", and none for other values."""
    if keep != "statistics":
        if reductions is not None:
            raise RegardError(
                f"watch(keep={keep!r}, reductions=...): reductions are computed while the model runs only with "
                "keep='statistics'. Later, ask any map for them: seen[name].summarize(*reductions)."
            )
        return ()
    reductions = REDUCTIONS if reductions is None else tuple(reductions)
    if not reductions:
        raise RegardError(
            "watch(keep='statistics', reductions=[]): name at least one reduction, such as regard.maps.Entropy()."
        )
    for reduction in reductions:
        if not isinstance(reduction, Reduction):
            raise RegardError(
                f"watch(reductions=...): expected reductions such as regard.maps.Entropy(), got {reduction!r}."
            )
    return reductions
