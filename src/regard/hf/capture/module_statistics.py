"""`ModuleStatistics`: the results of folds for one attention module, kept instead of its queries and keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from regard.errors import RegardError, nearest
from regard.maps import AttentionMap, Distance, Entropy, Fold, KeyTotals, TopLinks
from regard.maps.folds import State

#: The default folds; their results take O(n) memory.
FOLDS: tuple[Fold, ...] = (Entropy(), TopLinks(1), Distance(), KeyTotals())


@dataclass(eq=False)
class ModuleStatistics:
    """The results of the folds for one attention module, for each call and for all calls together.

    Name a fold by its class, or by an equal fold if there are several of one class.
    """

    name: str
    folds: tuple[Fold, ...]
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    _states: list[State | None] = field(default_factory=list)

    @torch.no_grad()
    def add(self, weights: AttentionMap) -> None:
        """Fold the map of one call, in one pass over its tiles."""
        by_fold = weights.fold_states(self.folds)
        states = [by_fold[fold] for fold in self.folds]
        first = not self.calls
        self.calls.append(tuple(fold.finish(state) for fold, state in zip(self.folds, states, strict=True)))
        pairs = zip(self.folds, states, strict=True)
        mergeable = [state if _is_mergeable(fold, weights) else None for fold, state in pairs]
        self._states = mergeable if first else list(map(_merged, self.folds, self._states, mergeable))

    def of(self, fold: Fold | type[Fold], call: int = -1) -> Any:
        """The result of a fold for one call, by default the last."""
        return self.calls[call][self._number(fold)]

    def merged(self, fold: Fold | type[Fold]) -> Any:
        """The result of a fold over all calls together; only for folds whose state does not grow with the text."""
        number = self._number(fold)
        state = self._states[number]
        if state is None:
            single = f"of({type(self.folds[number]).__name__}, call=...)"
            raise RegardError(
                f"{self.name}: the results of {self.folds[number]} belong to the tokens of one call and cannot be "
                f"merged over calls. {single} returns the result of each of the {len(self.calls)} calls."
            )
        return self.folds[number].finish(state)

    def _number(self, wanted: Fold | type[Fold]) -> int:
        for number, fold in enumerate(self.folds):
            if fold is wanted or type(fold) is wanted or fold == wanted:
                return number
        name = wanted.__name__ if isinstance(wanted, type) else type(wanted).__name__
        raise RegardError(
            f"{self.name}: {name} was not computed. {nearest(name, [type(fold).__name__ for fold in self.folds])} "
            "Name it before the model runs: watch(model, keep='statistics', folds=[...])."
        )


def _is_mergeable(fold: Fold, weights: AttentionMap) -> bool:
    """Whether the state of a fold has the same size for every number of queries and keys."""
    B, H, I, J = weights.shape
    try:
        state, larger = (fold.init((B, H, I + more, J + more), weights.device) for more in (0, 1))
    except RegardError:  # the fold only takes this number of keys
        return False
    return [part.shape for part in state] == [part.shape for part in larger]


def _merged(fold: Fold, state: State | None, later: State | None) -> State | None:
    if state is None or later is None or [a.shape for a in state] != [b.shape for b in later]:
        return None
    return fold.merge(state, later)


def checked_folds(folds: Iterable[Fold] | None, keep: str) -> tuple[Fold, ...]:
    """The folds for keep="statistics", and no folds for keep="qk"."""
    if keep != "statistics":
        if folds is not None:
            raise RegardError(
                f"watch(keep={keep!r}, folds=...): folds are computed while the model runs only with "
                "keep='statistics'. Later, ask any map for them: seen[name].summarize(*folds)."
            )
        return ()
    folds = FOLDS if folds is None else tuple(folds)
    if not folds:
        raise RegardError("watch(keep='statistics', folds=[]): name at least one fold, such as regard.Entropy().")
    for fold in folds:
        if not isinstance(fold, Fold):
            raise RegardError(f"watch(folds=...): expected folds such as regard.Entropy(), got {fold!r}.")
    return folds
