"""`ResidualStream` reads how a language model ends: the final norm, and whether heads reach it by sums alone.

The logit of a token is u . norm(x), where x is the residual stream and u the row of the language-model head. If x is a
sum of what the embedding, the heads and the MLPs write, and the scale of the norm is held as it was, then the logit is
the sum of their direct effects. So each block must add what its heads write to its input, and must hand on the sum: a
norm after attention (BERT, Gemma 2) or a factor does not. A few rows prove it while the model runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.shapes import at_least_float32, spread_indices
from regard.hf.output_projections import LinearLayer

#: Rows that are compared, spread over the tokens of the first and the last text.
ROWS = 4
#: The most parts beside a head's layer that a block may add to its input.
PARTS = 3
#: Sums are equal if they differ by at most this number of rounding errors of their terms.
ROUNDINGS = 4
#: Largest error of a norm, relative to its largest number.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 1e-2}
#: Names of the small number that norms add to the mean square.
EPSILONS = ("eps", "variance_epsilon", "epsilon")
NOT_A_SUM = (
    "this block, or one after it, does not add the result of its attention to its input and hand on the sum (a norm "
    "after attention, a factor, or several streams), so a head has no direct effect on the logit"
)


@dataclass(frozen=True, eq=False)
class FinalNorm:
    """norm(x) = gain * (x - mean) * scale + bias with the scale (B, I) of one call; `is_centered`: less the mean."""

    gain: Tensor
    scale: Tensor
    is_centered: bool

    def direction(self, of_logit: Tensor) -> Tensor:
        """d (C,), such that the part p of the residual stream adds scale * (p . d) to the logit u . norm(x)."""
        gained = self.gain * at_least_float32(of_logit)
        return gained - gained.mean() if self.is_centered else gained


@dataclass(frozen=True, eq=False)
class FinalRead:
    """One call of the language-model head: its final norm, and the attention modules whose sums reach it.

    `without` has the other ones, and why.
    """

    norm: FinalNorm | str
    reached: frozenset[str] = frozenset()
    without: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Block:
    """A few rows of one call of a block: its input, its output, and whether it is a sum."""

    names: tuple[str, ...]
    before: Tensor
    after: Tensor
    is_sum: bool


@dataclass(eq=False)
class _Running:
    """What the blocks of one run did so far."""

    parts: dict[nn.Module, list[Tensor]] = field(default_factory=dict)
    written: dict[str, Tensor] = field(default_factory=dict)
    blocks: list[_Block] = field(default_factory=list)
    #: The last norm that ended, its input and its output.
    norm: tuple[nn.Module, Tensor, Tensor] | None = None


class ResidualStream:
    """Observes the blocks, the final norm and the head of a language model."""

    def __init__(self, model: nn.Module, attending: Iterable[str]) -> None:
        self._head = language_model_head(model)
        self.head = LinearLayer.of(self._head)
        self.reads: list[FinalRead] = []
        self._blocks = _blocks_of(model, attending) if self._head is not None else {}
        self._parents = {child: block for block in self._blocks for child in block.children()}
        self._running = _Running()

    @property
    def kind(self) -> str:
        """The class of the language-model head."""
        return type(self._head).__name__

    @torch.no_grad()
    def module_ended(
        self, module: nn.Module, args: Iterable[Any], kwargs: Mapping[str, Any], output: Any, name: str | None
    ) -> None:
        """Follow a module that ended; `name` is the attention module whose output projection it is."""
        result = _first((output,))
        if self._head is None or result is None:
            return
        given, running = _first((*args, kwargs.get("hidden_states"), *kwargs.values())), self._running
        if name is not None:
            running.written[name] = result.detach()
        if module in self._parents and not _is_norm(module):
            running.parts.setdefault(self._parents[module], []).append(result.detach())
        if module in self._blocks and given is not None:
            self._keep_block(module, given, result)
        if _is_norm(module) and given is not None:
            running.norm = module, given.detach(), result.detach()
        if module is self._head and given is not None:
            self.reads.append(_final_read(running, given))
            self._running = _Running()

    def _keep_block(self, block: nn.Module, given: Tensor, result: Tensor) -> None:
        running, names = self._running, self._blocks[block]
        parts = running.parts.pop(block, [])
        written = [running.written.pop(name) for name in names if name in running.written]
        if given.ndim != 3 or result.shape != given.shape:
            return
        own, others = (
            [_rows(x.reshape(given.shape)) for x in tensors if x.numel() == given.numel()]
            for tensors in (written, parts)
        )
        before, after = _rows(given), _rows(result)
        is_sum = len(own) == len(written) > 0 and _is_sum(before, after, own, others, result.dtype)
        running.blocks.append(_Block(names, before, after, is_sum))


def language_model_head(model: nn.Module) -> nn.Module | None:
    """The layer that computes logits from the residual stream."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    head = getattr(model, "lm_head", None) if head is None else head
    return head if isinstance(head, nn.Module) else None


def _blocks_of(model: nn.Module, attending: Iterable[str]) -> dict[nn.Module, tuple[str, ...]]:
    """The blocks of a model: the entries of lists of modules that hold attention modules, with their names."""
    modules = dict(model.named_modules())
    names: dict[nn.Module, tuple[str, ...]] = {}
    for name in attending:
        path = name
        while path and not isinstance(modules[path.rpartition(".")[0]], nn.ModuleList):
            path = path.rpartition(".")[0]
        if path:
            names[modules[path]] = (*names.get(modules[path], ()), name)
    return names


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() or type(module).__name__.endswith("LN")


def _first(values: Iterable[Any]) -> Tensor | None:
    """The first tensor of numbers in arguments or results."""
    for value in values:
        if isinstance(value, tuple | list):
            value = _first(value)
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    return None


def _rows(x: Tensor) -> Tensor:
    """A few rows of (B, I, C), of the first and the last text."""
    rows = spread_indices(x.shape[1], ROWS, x.device)
    return at_least_float32(x[[0, -1]][:, rows].detach())


def _are_equal(left: Tensor, right: list[Tensor], dtype: torch.dtype) -> bool:
    """Whether left is the sum of the others, up to the rounding of each number."""
    size = left.abs() + sum(term.abs() for term in right)
    limit = ROUNDINGS * max(torch.finfo(dtype).eps, torch.finfo(left.dtype).eps)
    return left.shape == right[0].shape and bool(((left - sum(right)).abs() <= limit * size).all())


def _is_sum(before: Tensor, after: Tensor, own: list[Tensor], others: list[Tensor], dtype: torch.dtype) -> bool:
    """Whether a block adds what its heads wrote, and a few other parts, to its input."""
    counts = range(min(PARTS, len(others)) + 1)
    choices = (chosen for count in counts for chosen in combinations(others, count))
    return any(_are_equal(after, [before, *own, *chosen], dtype) for chosen in choices)


def _final_read(running: _Running, given: Tensor) -> FinalRead:
    """How this run ended: the norm that the head reads, and the blocks whose sums do not reach it."""
    if running.norm is None or given.untyped_storage().data_ptr() != running.norm[2].untyped_storage().data_ptr():
        return FinalRead("the language-model head does not read the result of a norm of the residual stream")
    module, x, y = running.norm
    if x.ndim != 3:
        return FinalRead(f"the final norm reads a tensor of shape {tuple(x.shape)}, not (batch, tokens, channels)")
    without: dict[str, str] = {}
    known: set[str] = set()
    stream, reaches = _rows(x), True
    for block in reversed(running.blocks):
        if known.isdisjoint(block.names):  # else of an earlier run that did not reach the head
            reaches = reaches and block.is_sum and _are_equal(block.after, [stream], x.dtype)
            without |= {} if reaches else dict.fromkeys(block.names, NOT_A_SUM)
            known |= {*block.names}
            stream = block.before
    return FinalRead(_linearized(module, x, y), frozenset(known - without.keys()), without)


def _linearized(module: nn.Module, x: Tensor, y: Tensor) -> FinalNorm | str:
    """The norm with its scale held, if it is a LayerNorm or an RMSNorm: the form that fits its output best."""
    wide, weight, bias = at_least_float32(x), getattr(module, "weight", None), getattr(module, "bias", None)
    weight = torch.ones_like(wide[0, 0]) if weight is None else at_least_float32(weight.detach())
    found: dict[float, FinalNorm] = {}
    for is_centered in (True,) if isinstance(module, nn.LayerNorm) else (False, True):
        centered = wide - wide.mean(-1, keepdim=True) if is_centered else wide
        scale = (centered.square().mean(-1) + _epsilon(module, x.dtype)).rsqrt()
        for gain in (weight, 1 + weight):
            expected = _rows(centered) * _rows(scale[..., None]) * gain + (0 if bias is None else bias.detach())
            error = float((expected - _rows(y)).abs().max())
            found.setdefault(error, FinalNorm(gain.clone(), scale, is_centered))
    if min(found) <= TOLERANCE.get(y.dtype, 1e-4) * max(float(y.abs().max()), 1e-6):
        return found[min(found)]
    return f"the final norm, {type(module).__name__}, is neither a LayerNorm nor an RMSNorm"


def _epsilon(module: nn.Module, dtype: torch.dtype) -> float:
    """The small number that a norm adds to the mean square."""
    given = [getattr(module, name, None) for name in EPSILONS]
    default = torch.finfo(dtype).eps if isinstance(module, nn.RMSNorm) else 1e-5
    return next((eps for eps in given if isinstance(eps, float)), default)
