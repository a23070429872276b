"""`Case`: one computation, run by Regard and by its peers, with goals for time and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import regard as rg
from benchmarks.measure import Goal
from benchmarks.peers.package import TORCH, Package
from regard.catalog import mechanism
from regard.diagnosis.laws import Example
from regard.engine.kernel.library import load

Run = Callable[[], Any]


@dataclass(frozen=True)
class Computes:
    """The function that a side computes from the inputs, and its parameters, which need gradients."""

    function: Callable[..., Any]
    learned: tuple[Tensor, ...] = ()


#: Takes the inputs and prepares everything that is not timed: layers, masks, compiled code.
Build = Callable[..., Computes | Callable[..., Any]]


@dataclass(frozen=True)
class Aim:
    """A goal without its measurement: `kind` is a key of `UNITS`."""

    kind: str
    limit: float


@dataclass(frozen=True)
class BenchSettings:
    """The device, and whether all cases are measured (`full`)."""

    device: str = "cpu"
    full: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def inputs(self, *shapes: tuple[int, ...], dtype: torch.dtype | None = None) -> Callable[[], tuple[Tensor, ...]]:
        """Random tensors of these shapes, made when they are needed."""
        return partial(random_inputs, shapes, self.device, dtype or self.dtype)

    def aims(self, kind: str, avx512: float, avx2: float) -> tuple[Aim, ...]:
        """A goal for the vector width of the compiled kernels that run on this device; none for other widths."""
        library = load() if self.device == "cpu" else None
        limits = {"avx512": avx512, "avx2": avx2}
        return (Aim(kind, limits[library.vectors]),) if library and library.vectors in limits else ()


def random_inputs(shapes: tuple[tuple[int, ...], ...], device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Normal random tensors, the same for every side and process."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)


#: The unit of each kind of goal, and whether its limit is an upper limit.
UNITS = {
    "time": ("x its time", True),
    "faster": ("x faster", False),
    "memory": ("x its memory", True),
    "products": ("% of the matmul rate", False),
    "reading": ("% of the reading rate", False),
    "limit": ("% of the multiply-adds", False),
    "milliseconds": ("ms", True),
    "mebibytes": ("MiB", True),
    "overhead": ("microseconds a call over it", True),
}
#: Calls of one run of a case with the aim "overhead".
CALLS = 100


def goal(aim: Aim, work: str, measured: float) -> Goal:
    """The goal of an aim and a measurement."""
    unit, at_most = UNITS[aim.kind]
    return Goal(work, measured, aim.limit, unit, at_most)


@dataclass(frozen=True)
class Side:
    """A peer in a case.

    Its result must agree with Regard's. If the peer computes something else, `differs` says what, and `witness` is a
    run of the peer that can be compared. A side with `differs` and without a witness is not compared. The side is
    skipped if the memory has less than `needs` free bytes. If it `compiles`, the first run is not timed.
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
    """One computation at one size.

    `example` is the small problem on which the laws must hold before anything is timed; the default is the example of
    `mechanism` in the catalog. `ours` is the run of Regard; the default is `attention`. `flops` and `moved` (bytes)
    are the least that the definition needs. `series` and `length` give the curve and the point in the picture. Memory
    is measured if `weighs` is true.
    """

    group: str
    work: str
    inputs: Callable[[], tuple[Tensor, ...]]
    mechanism: str = ""
    attention: rg.Attention | rg.composites.Composite | None = None
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
        """The small problem for the laws."""
        return (self.example or mechanism(self.mechanism).example)()

    @property
    def builds_ours(self) -> Build:
        if self.ours is not None:
            return self.ours
        assert self.attention is not None, f"{self.work}: neither `attention` nor `ours` is given"
        return partial(attending, self.attention)


def attending(attention: rg.Attention | rg.composites.Composite, *inputs: Tensor) -> Computes:
    """`regard.attend` with this attention, which also returns the map of its weights."""
    attention = attention.to(inputs[0].device)
    learned = tuple(p for p in attention.parameters() if p.requires_grad)
    return Computes(lambda q, k, v: attention(q, k, v), learned)


def prepared(build: Build, learns: bool, inputs: tuple[Tensor, ...]) -> Run:
    """The run that is timed: forward, or (`learns`) forward and backward, which returns output and gradients."""
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
    output = result.output if isinstance(result, rg.types.AttentionOutput) else result
    if "toward" not in kept:
        (kept["toward"],) = random_inputs((tuple(output.shape),), str(output.device), output.dtype)
    gradients = torch.autograd.grad(output, [*kept["inputs"], *computes.learned], kept["toward"])
    return output.detach(), *gradients


def built(build: Build, learns: bool, inputs: Callable[[], tuple[Tensor, ...]], threads: int) -> Run:
    """The same as `prepared`, in a separate process."""
    torch.set_num_threads(threads)
    return prepared(build, learns, inputs())


def allowed_pairs(mask: rg.masks.Mask | None, queries: int, keys: int, block: int = 512) -> int:
    """The number of pairs of one head that the mask allows, counted over its spans.

    >>> allowed_pairs(rg.causal() & rg.window(3), 5, 5)
    12
    """
    if mask is None:
        return queries * keys
    positions = rg.types.Positions.aligned_to_end(queries, keys)
    grid, count = rg.types.Grid.whole(positions, 1, 1, queries), 0
    for start in range(0, queries, block):
        stop = min(start + block, queries)
        for left, right in positions.columns(mask.any_allowed(positions.start + start, positions.start + stop)):
            tile = mask.allowed(grid.tile(slice(start, stop), slice(left, right)))
            count += int(tile.expand(1, 1, stop - start, right - left).sum())
    return count
