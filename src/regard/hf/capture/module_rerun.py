"""Weights of modules that compute softmax themselves, where queries and keys cannot be had.

What is kept of a call is its inputs. When its weights are asked for, that one module runs again and
its softmax is overheard; the dense weights of one call at a time are held.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.attention import Attention
from regard.engine.rows import Collected
from regard.errors import RegardError
from regard.hf.calls import NO_NUMBERS, Untranslatable
from regard.hf.capture.softmax_trace import Trace
from regard.hf.capture.verification import Check
from regard.hf.masks.mask_tensors import recognise
from regard.maps import attention_map
from regard.maps.attention_map import AttentionMap, Part
from regard.pieces.grid import Grid
from regard.pieces.normalizer import Statistic
from regard.positions import Positions
from regard.shapes import at_least_float32, to_device

#: Weights of at most so many bytes are kept as they are: a step of generation is smaller than its inputs.
SMALL = 1 << 14
#: Rows of which the weights are kept, to know those again that come of running a module again.
ROWS = 4


@dataclass(eq=False)
class Slot:
    """The dense weights of the call that was looked at last."""

    owner: Held | None = None
    weights: Tensor | None = None


@dataclass(eq=False)
class Held:
    """One call of a module with a softmax of its own: how to run it again, and a few of its weights."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, int, int, int]
    number: int
    sample: Tensor
    slot: Slot
    check: Check
    small: Tensor | None = field(default=None, repr=False)

    @staticmethod
    def of(name: str, module: nn.Module, given: tuple[Any, Any], trace: Trace, slot: Slot) -> Held:
        """From the inputs of a module and the trace of its run."""
        if trace.softmaxes[0].is_meta:
            raise Untranslatable(NO_NUMBERS)
        number = trace.taken(type(module).__name__)
        weights = _four_axes(module, given, trace.softmaxes[number])
        B, H, I, J = weights.shape
        small = weights.clone() if weights.numel() * 4 <= SMALL else None
        args, kwargs = given if small is None else ((), {})
        check = Check(
            name, note="these are the weights of the module's own softmax, which its values are multiplied by"
        )
        sample = _rows(weights).clone()
        return Held(name, module, args, kwargs, (B, H, I, J), number, sample, slot, check, small)

    @property
    def map(self) -> AttentionMap:
        B, H, I, J = self.shape
        positions = Positions.aligned_to_end(I, J)
        return HeldMap(self.weights, positions, Grid.whole(positions, B, H, I, self.sample.device))

    def weights(self) -> Tensor:
        """The dense weights (B, H, I, J): those held, or of another run of the module."""
        if self.small is not None:
            return self.small
        if self.slot.owner is not self or self.slot.weights is None:
            self.slot.owner = self.slot.weights = None
            self.slot.owner, self.slot.weights = self, self._again()
        return self.slot.weights

    @torch.no_grad()
    def _again(self) -> Tensor:
        size = 4 * self.sample.new_empty(self.shape, device="meta").numel()
        if size > attention_map.BUDGET:
            raise RegardError(
                f"seen[{self.name!r}]: {type(self.module).__name__} computes its weights all at once, "
                f"{size / 2**20:,.0f} MiB of them; the budget is {attention_map.BUDGET / 2**20:,.0f} MiB. "
                "Watch a shorter text or a smaller batch."
            )
        devices = [self.sample.device] if self.sample.is_cuda else []
        with torch.random.fork_rng(devices), _Catch() as caught:
            self.module.forward(*_snapshot(self.args), **_snapshot(self.kwargs))
        weights = _four_axes(self.module, (self.args, self.kwargs), caught.trace.softmaxes[self.number])
        if weights.shape != self.shape or not torch.allclose(_rows(weights), self.sample, atol=1e-4, equal_nan=True):
            raise RegardError(
                f"seen[{self.name!r}]: {type(self.module).__name__} gives other weights now than when it was watched: "
                "its parameters or its inputs were changed since. Look at its map before, or watch again."
            )
        return weights


class HeldMap(AttentionMap):
    """A map whose weights are dense and come from running one module again; asked like any other map."""

    def __init__(self, source: Callable[[], Tensor], positions: Positions, grid: Grid) -> None:
        self.positions, self.grid, self._source = positions, grid, source

    @cached_property
    def attention(self) -> Attention:  # type: ignore[override]
        """Pieces that say what is known, which is the mask: where weights are 0 by a short rule."""
        B, _, I, J = self.shape
        rule = recognise(self._dense() > 0, B, I, J).mask
        return Attention(mask=None if "given" in repr(rule) else rule).eval()

    @property
    def statistic(self) -> Statistic:  # type: ignore[override]
        """None: these weights are normalised already."""
        return ()

    @property
    def _item_bytes(self) -> int:
        return 4

    @property
    def _bytes_per_weight(self) -> int:
        return 8

    def select(self, batch: Tensor, head: Tensor) -> AttentionMap:
        b, h = (to_device(x, self.device) for x in (batch, head))
        grid = replace(self.grid, batch=self.grid.batch[b], head=self.grid.head[h])
        return HeldMap(self._source, self.positions, grid)

    def _dense(self) -> Tensor:
        weights = self._source()
        B, H, _, _ = self.shape
        return weights if weights.shape[:2] == (B, H) else weights[self.grid.batch][:, self.grid.head]

    @property
    def _is_solved(self) -> bool:
        return True

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        rows, cols = (x if isinstance(x, slice) else to_device(x, self.device) for x in (rows, cols))
        weights = self._source()[:, :, rows][..., cols]
        return at_least_float32(weights[self.grid.batch][:, self.grid.head])

    def _looks(self, rows: slice, parts: list[Part], collected: Collected) -> Iterator[tuple[Tensor, Tensor | None]]:
        for cols, _ in parts:
            yield self._weights(rows, cols), None


class _Catch(TorchFunctionMode):
    """Traces what softmax returns."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self.trace.follow(func, args, kwargs, output)
        return output


def _four_axes(module: nn.Module, given: tuple[Any, Any], weights: Tensor) -> Tensor:
    """(B, H, I, J), where the batch and the queries of the softmax are those of the inputs."""
    inputs = [x for x in (*given[0], *given[1].values()) if isinstance(x, Tensor) and x.ndim == 3]
    for B, I in _batch_and_length(module, inputs):
        shaped = _shaped(weights, B)
        one_head = weights.ndim == 3 and weights.shape[::2] == (B, I)  # queries may then be of the module's own
        if shaped is not None and (shaped.shape[2] == I or one_head):
            return shaped.detach()
    shapes = ", ".join(str(tuple(x.shape)) for x in inputs) or "no tensor of three axes"
    raise Untranslatable(
        f"the softmax of {type(module).__name__} has shape {tuple(weights.shape)}, and which of its axes are batch, "
        f"heads and queries cannot be told from the inputs: {shapes}"
    )


def _shaped(weights: Tensor, num_batch: int) -> Tensor | None:
    if weights.ndim == 3 and num_batch > 0 and len(weights) % num_batch == 0:
        weights = weights.unflatten(0, (num_batch, -1))
    return weights if weights.ndim == 4 and len(weights) == num_batch else None


def _batch_and_length(module: nn.Module, inputs: list[Tensor]) -> Iterator[tuple[int, int]]:
    """Candidates for the batch size and the number of queries, the likeliest first."""
    yield from ((x.shape[0], x.shape[1]) for x in inputs)
    alike = [x for x in inputs if (x.shape[0], x.shape[2]) == (inputs[0].shape[0], inputs[0].shape[2])]
    if len(alike) > 1:  # words and entities, which attend to each other
        yield alike[0].shape[0], sum(x.shape[1] for x in alike)
    if any(isinstance(child, nn.Conv1d) for child in module.children()):
        yield from ((x.shape[0], x.shape[2]) for x in inputs)
    yield from ((x.shape[1], x.shape[0]) for x in inputs)


def _rows(weights: Tensor) -> Tensor:
    I = weights.shape[2]
    return weights[:, :, torch.linspace(0, I - 1, min(ROWS, I), device=weights.device).round().long()]


def snapshot(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Inputs as they are before the module runs: caches grow by new tensors, so their lists are copied."""
    return _snapshot(args), _snapshot(kwargs)


def _snapshot(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_snapshot(part) for part in value) if type(value) in (tuple, list) else value
    if type(value) is dict:
        return {key: _snapshot(part) for key, part in value.items()}
    if type(value).__module__.startswith("transformers.cache_utils"):
        copied = copy.copy(value)
        copied.__dict__ = {key: _snapshot(part) for key, part in vars(value).items()}
        return copied
    return value
