"""One call to `attend`, as engines see it, and what they give back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.attention import Attention, Prepared
from regard.pieces.grid import Grid
from regard.pieces.normalizer import LearnedSink, Softmax, Statistic
from regard.positions import Positions
from regard.shapes import Sizes


@dataclass(frozen=True, eq=False)
class Problem:
    """The pieces, the tensors and where they stand.

    `seed` decides which weights dropout drops, None: no dropout. `state` sums up keys of earlier
    calls that are not kept (recurrent decoding of kernel scores). `notes` are what engines worked
    out while planning, so that running need not do it again.
    """

    attention: Attention
    query: Tensor
    key: Tensor
    value: Tensor
    positions: Positions
    sizes: Sizes
    seed: int | None = None
    state: Tensor | None = None
    notes: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Whether gradients are wanted is asked now: inside an autograd function they are always off."""
        _ = self.learns, self.learns_bias

    @cached_property
    def prepared(self) -> Prepared:
        return Prepared.of(self.attention, self.query, self.key, self.positions)

    @cached_property
    def grid(self) -> Grid:
        return Grid.whole(self.positions, self.sizes.B, self.sizes.H, self.sizes.I, self.query.device)

    @property
    def dropout(self) -> float:
        return 0.0 if self.seed is None else self.attention.dropout

    @cached_property
    def scale(self) -> float | None:
        """The factor before q.k if these scores are a scaled dot product under softmax, else None."""
        normalizer = self.attention.normalizer
        if not isinstance(normalizer, Softmax | LearnedSink):
            return None
        scale = self.attention.score.scale(self.prepared.query.shape[-1])
        return None if scale is None else scale / normalizer.temperature

    def needs_gradient(self, *tensors: Tensor | None) -> bool:
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    @cached_property
    def learns_bias(self) -> bool:
        """Whether gradients must reach the biases, which no fused kernel on CPU offers."""
        states = (*self.prepared.rows, *self.prepared.cols)
        modules = [b for b in self.attention.bias if isinstance(b, torch.nn.Module)]
        return self.needs_gradient(*states, *(p for m in modules for p in m.parameters()))

    @cached_property
    def learns(self) -> bool:
        tensors = (self.query, self.key, self.value, *self.attention.parameters())
        return self.needs_gradient(*tensors)


@dataclass(frozen=True, eq=False)
class Result:
    """The output (B, H, I, E), the row statistic (None where the kernel does not tell it), a new state."""

    output: Tensor
    statistic: Statistic | None
    state: Tensor | None = None


@dataclass(frozen=True)
class Cost:
    """What a run takes: pairs of query and key it scores (all heads), operations, and bytes beyond the inputs."""

    pairs: int
    flops: int
    bytes: int


class Engine(ABC):
    """Base: an engine runs a problem exactly, or says why it cannot. It never falls back silently."""

    name: str
    does: str

    @abstractmethod
    def refusal(self, problem: Problem) -> str | None:
        """Why this engine cannot run the problem, or None: it can."""

    @abstractmethod
    def run(self, problem: Problem) -> Result: ...

    @abstractmethod
    def cost(self, problem: Problem) -> Cost: ...
