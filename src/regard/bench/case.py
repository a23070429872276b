"""A case: one piece of work, run by Regard and by its peers, and what should come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import regard as rg
from regard.bench.laws import Example
from regard.bench.measure import Goal
from regard.bench.peers.package import TORCH, Package
from regard.catalog import mechanism

Run = Callable[[], Any]


@dataclass(frozen=True)
class Computes:
    """What a side computes from the inputs, and the parameters whose gradients belong to it."""

    function: Callable[..., Any]
    learned: tuple[Tensor, ...] = ()


#: Makes ready all that is not timed: layers, masks, compiled code. Takes the inputs.
Build = Callable[..., Computes | Callable[..., Any]]


@dataclass(frozen=True)
class Setting:
    """Where and how much is measured."""

    device: str = "cpu"
    full: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def inputs(self, *shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
        return partial(random_inputs, shapes, self.device, self.dtype)


def random_inputs(shapes: tuple[tuple[int, ...], ...], device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The same normal numbers for every side and process."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)


@dataclass(frozen=True)
class Aim:
    """A goal before it is measured: `kind` is a key of `UNITS`."""

    kind: str
    limit: float


#: Unit, and whether the limit is an upper one.
UNITS = {
    "time": ("x its time", True),
    "faster": ("x faster", False),
    "memory": ("x its memory", True),
    "products": ("% of the products' rate", False),
    "copying": ("% of the copy's rate", False),
    "milliseconds": ("ms", True),
    "mebibytes": ("MiB", True),
}


def goal(aim: Aim, work: str, measured: float) -> Goal:
    """The aim with its number."""
    unit, at_most = UNITS[aim.kind]
    return Goal(work, measured, aim.limit, unit, at_most)


@dataclass(frozen=True)
class Side:
    """A peer in a case.

    `witness` is how it is run when its result is compared, where its usual way computes something else; what that
    is stands in `differs`. A side with `differs` and no witness is not compared. `needs` are bytes it takes at
    least: where they are not free it is left out. One that `compiles` spends its first run on that.
    """

    name: str
    build: Build
    aims: tuple[Aim, ...] = ()
    package: Package = TORCH
    witness: Build | None = None
    differs: str = ""
    tolerance: float = 1e-4
    needs: int = 0
    compiles: bool = False


@dataclass(frozen=True)
class Case:
    """One work at one size.

    `example` is the small problem on which the laws must hold before anything is timed: that of `mechanism` in the
    catalogue unless given. `ours` runs `attention` unless given. `flops` and `moved` (bytes) are what the
    definition asks for at least; `series` and `length` place the case in the picture. Memory is measured where it
    `weighs`.
    """

    group: str
    work: str
    inputs: Callable[[], tuple[Tensor, ...]]
    mechanism: str = ""
    attention: rg.Attention | None = None
    ours: Build | None = None
    peers: tuple[Side, ...] = ()
    aims: tuple[Aim, ...] = ()
    learns: bool = False
    example: Callable[[], Example] | None = None
    flops: Callable[[], int] | None = None
    moved: int = 0
    series: str = ""
    length: int = 0
    weighs: bool = True

    def small(self) -> Example:
        """The problem of the law."""
        return (self.example or mechanism(self.mechanism).example)()

    @property
    def builds_ours(self) -> Build:
        if self.ours is not None:
            return self.ours
        assert self.attention is not None, f"{self.work}: neither an attention nor another work"
        return partial(attending, self.attention)


def attending(attention: rg.Attention, *inputs: Tensor) -> Computes:
    """`regard.attend` with this attention; the map of its weights comes with it."""
    attention = attention.to(inputs[0].device)
    learned = tuple(p for p in attention.parameters() if p.requires_grad)
    return Computes(lambda q, k, v: rg.attend(attention, q, k, v), learned)


def prepared(build: Build, learns: bool, inputs: tuple[Tensor, ...]) -> Run:
    """The work, ready to be timed: forward, or forward and backward with output and gradients as its result."""
    computes = build(*inputs)
    if not isinstance(computes, Computes):
        computes = Computes(computes)
    return partial(_learn if learns else _compute, computes, inputs, {})


@torch.no_grad()
def _compute(computes: Computes, inputs: tuple[Tensor, ...], kept: dict[str, Any]) -> Any:
    return computes.function(*inputs)


def _learn(computes: Computes, inputs: tuple[Tensor, ...], kept: dict[str, Any]) -> tuple[Tensor, ...]:
    if not kept:
        kept["inputs"] = [t.detach().requires_grad_() for t in inputs]
    result = computes.function(*kept["inputs"])
    output = result.output if isinstance(result, rg.AttentionOutput) else result
    if "toward" not in kept:
        (kept["toward"],) = random_inputs((tuple(output.shape),), str(output.device), output.dtype)
    gradients = torch.autograd.grad(output, [*kept["inputs"], *computes.learned], kept["toward"])
    return output.detach(), *gradients


def built(build: Build, learns: bool, inputs: Callable[[], tuple[Tensor, ...]], threads: int) -> Run:
    """`prepared`, in a process of its own."""
    torch.set_num_threads(threads)
    return prepared(build, learns, inputs())


def allowed_pairs(mask: rg.Mask | None, queries: int, keys: int, block: int = 512) -> int:
    """Pairs that the mask allows, of one head, counted over the spans it tells.

    >>> allowed_pairs(rg.causal() & rg.window(3), 5, 5)
    12
    """
    if mask is None:
        return queries * keys
    positions = rg.Positions.aligned_to_end(queries, keys)
    grid, found = rg.Grid.whole(positions, 1, 1, queries), 0
    for start in range(0, queries, block):
        stop = min(start + block, queries)
        for left, right in positions.columns(mask.any_allowed(positions.start + start, positions.start + stop)):
            tile = mask.allowed(grid.tile(slice(start, stop), slice(left, right)))
            found += int(tile.expand(1, 1, stop - start, right - left).sum())
    return found
