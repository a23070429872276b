"""`CompositePlan`: the plans of the attentions that a composite runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from regard.base.positions import Positions
from regard.base.shapes import Sizes
from regard.composites.composite import Composite
from regard.engine.formatting import number
from regard.engine.plan import ExecutionPlan
from regard.maps.attention_map import AttentionMap
from regard.maps.dense_map import DenseMap
from regard.pieces.grid import Grid


@dataclass(frozen=True, eq=False)
class CompositePlan:
    """How `attend` will run a composite: `parts` has the plan of each attention, in the order in which they run.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 2, 100, 8)
    >>> latents = rg.composites.ThroughLatents(num_latents=4, head_dim=8, num_heads=2)
    >>> plan = rg.plan(x, x, x, attention=latents, engine="dense")
    >>> [part.cost.pairs for part in plan.parts]  # 2 heads, 4 latents, 100 tokens
    [800, 800]
    """

    composite: Composite
    parts: tuple[ExecutionPlan, ...]
    sizes: Sizes

    @property
    def engine(self) -> str:
        """The engines of the parts, each once."""
        return ", ".join(dict.fromkeys(part.engine for part in self.parts))

    @property
    def seconds(self) -> float | None:
        """The predicted time of all parts; None if that of one is not known."""
        seconds = [part.seconds for part in self.parts]
        return None if None in seconds else sum(seconds)  # type: ignore[arg-type]

    def __str__(self) -> str:
        s = self.sizes
        given = f"{number(s.I, 'query', 'queries')}, {number(s.J, 'key')}, {number(s.H, 'head')} of width {s.D}"
        head = f"{self.composite!r}\n{given}, batch {s.B}. It runs {number(len(self.parts), 'attention')}."
        return "\n\n".join([head, *(f"Attention {n} of {len(self.parts)}: {p}" for n, p in enumerate(self.parts, 1))])


@dataclass(frozen=True)
class PlannedPart:
    """What a part would return: an output of zeros, and a map without weights."""

    output: Tensor
    weights: AttentionMap


def planned_map(query: Tensor, positions: Positions) -> DenseMap:
    """The map of a part that was planned and not run: it has sizes and positions only."""
    B, H, I, _ = query.shape
    return DenseMap(_no_weights, False, Grid.whole(positions, B, H, I, query.device))


def _no_weights() -> NoReturn:
    raise AssertionError("a plan has no weights")
