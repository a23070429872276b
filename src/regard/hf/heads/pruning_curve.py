"""`pruning_curve` measures the quality of a model as heads are removed (Michel et al., 2019; Voita et al., 2019)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from regard.base.errors import RegardError, nearest
from regard.hf.heads.gates import gated
from regard.hf.heads.head_importance import ImportanceScores

#: Orders in which heads are removed, and what a chart calls them.
ORDERS = {"importance": "least important first", "random": "at random", "reversed": "most important first"}
TENTHS = tuple(tenth / 10 for tenth in range(11))


@dataclass(frozen=True)
class CurvePoint:
    """The quality of a model with `removed` heads gated to zero, which is a `share` of all heads, in one order.

    >>> import regard as rg
    >>> rg.hf.CurvePoint("random", share=0.5, removed=2, quality=-1.25)
    CurvePoint(order='random', share=0.5, removed=2, quality=-1.25)
    """

    order: str
    share: float
    removed: int
    quality: float


@dataclass(eq=False)
class QualityCurve:
    """The result of `pruning_curve`: points in the order of measurement; `complete` is False after an interrupt.

    >>> import regard as rg
    >>> points = [rg.hf.CurvePoint("random", share, round(4 * share), 1 - share) for share in (0.0, 0.5)]
    >>> rg.hf.QualityCurve(4, points, complete=True).qualities("random")
    {0.0: 1.0, 0.5: 0.5}
    """

    num_heads: int
    points: list[CurvePoint] = field(default_factory=list)
    complete: bool = False

    def qualities(self, order: str) -> dict[float, float]:
        """Share of heads removed -> quality, in one order of removal."""
        orders = {point.order for point in self.points}
        if order not in orders:
            raise RegardError(f"QualityCurve: the order {order!r} was not measured. {nearest(order, orders)}")
        return {point.share: point.quality for point in self.points if point.order == order}

    def table(self) -> str:
        """A plain-text table with one line per share and one column per order."""
        orders = list(dict.fromkeys(point.order for point in self.points))
        lines = ["share heads " + " ".join(f"{order:>10}" for order in orders)]
        cells = {(point.share, point.order): f"{point.quality:10.4f}" for point in self.points}
        for share, removed in dict.fromkeys((point.share, point.removed) for point in self.points):
            numbers = " ".join(f"{cells.get((share, order), '-'):>10}" for order in orders)
            lines.append(f"{share:5.2f} {removed:5d} {numbers}")
        return "\n".join(lines if self.complete else [*lines, "interrupted"])

    def __repr__(self) -> str:
        state = "complete" if self.complete else "interrupted"
        return f"QualityCurve({len(self.points)} points, {self.num_heads} heads, {state})"


def pruning_curve(
    model: nn.Module,
    quality: Callable[[Any], float],
    importance: ImportanceScores,
    shares: Sequence[float] = TENTHS,
    order: Sequence[str] = (*ORDERS,),
    seed: int = 0,
    progress: Callable[[CurvePoint], None] | None = None,
) -> QualityCurve:
    """The quality as more and more heads are removed: least important first, in random order, most important first.

    Heads are gated to zero, so the model is not changed. `quality(model)` runs without gradients. The random order,
    drawn once with `seed`, is the control: if its curve is as good, the ranking is worthless. `progress` is called with
    every point. After Ctrl-C the points so far are returned, with `complete` False. Heads are ranked by the values of
    `importance`; pass `importance.normalized()` to compare layers as Michel et al. (2019, arXiv:1905.10650) do.

    >>> import torch, transformers, regard as rg
    >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=4, vocab_size=9)
    >>> model = transformers.GPT2LMHeadModel(config).eval()
    >>> ids = torch.tensor([[1, 2, 3, 4]])
    >>> loss = lambda model, ids=ids: model(ids, labels=ids).loss
    >>> rg.hf.pruning_curve(model, lambda m: -float(loss(m)), rg.importance(model, loss, [ids]), shares=[0, 0.5])
    QualityCurve(6 points, 2 heads, complete)
    """
    shares, orders = _check(importance, shares, order)
    ranked = {name: _ordered(importance, name, seed) for name in orders}
    curve, known = QualityCurve(len(importance.ranking())), {}
    try:
        for share in shares:
            for name in orders:
                removed = round(share * curve.num_heads)
                heads = frozenset(ranked[name][:removed])
                if heads not in known:
                    known[heads] = _measure(model, quality, importance, heads)
                curve.points.append(CurvePoint(name, share, removed, known[heads]))
                if progress is not None:
                    progress(curve.points[-1])
        curve.complete = True
    except KeyboardInterrupt:
        pass
    return curve


def _check(importance: ImportanceScores, shares: Sequence[float], order: str | Sequence[str]) -> tuple[list, list[str]]:
    """The shares and the orders without duplicates; a `RegardError` for unknown ones."""
    if not isinstance(importance, ImportanceScores):
        raise RegardError(f"pruning_curve: expected the result of importance(), got {type(importance).__name__}.")
    for share in shares:
        if not 0 <= share <= 1:
            raise RegardError(f"pruning_curve: shares are numbers from 0 to 1, of all heads; got {share!r}.")
    orders = [order] if isinstance(order, str) else list(order)
    for name in orders:
        if name not in ORDERS:
            raise RegardError(f"pruning_curve: unknown order {name!r}. {nearest(str(name), ORDERS)}")
    return list(dict.fromkeys(shares)), list(dict.fromkeys(orders))


def _ordered(importance: ImportanceScores, order: str, seed: int) -> list[tuple[str, int]]:
    """All heads in the order of removal; the random order does not depend on the importance."""
    if order == "random":
        heads = [(name, head) for name, value in importance.values.items() for head in range(len(value))]
        drawn = torch.randperm(len(heads), generator=torch.Generator().manual_seed(seed))
        return [heads[position] for position in drawn.tolist()]
    return importance.ranking()[:: 1 if order == "importance" else -1]


def _measure(
    model: nn.Module, quality: Callable[[Any], float], importance: ImportanceScores, heads: frozenset
) -> float:
    """The quality of the model with these heads (module path, head) gated to zero, in the unit of `quality`."""
    gates = {name: torch.ones(len(value)) for name, value in importance.values.items()}
    for name, head in heads:
        gates[name][head] = 0
    with torch.no_grad(), gated(model, gates, importance.output, importance.num_heads):
        result = quality(model)
        try:
            return float(result)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RegardError(f"pruning_curve: quality(model) must return a number, got {result!r}.") from error
