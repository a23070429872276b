"""The kernel engine: softmax attention by the compiled kernels of kernels/, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.engine.blocked import Blocked
from regard.engine.dense import flops_per_pair
from regard.engine.formatting import size
from regard.engine.kernel.attention import (
    CallSettings,
    Dropout,
    Inputs,
    KernelAttention,
    RepeatedForward,
    forward,
    is_few,
)
from regard.engine.kernel.layouts import CLIPPED_MARGIN, PART_KEYS, TILE_QUERIES
from regard.engine.kernel.library import load, load_fast, reason
from regard.engine.kernel.mask_layout import Layout
from regard.engine.kernel.structures import DTYPES, has_address
from regard.engine.problem import Cost, Engine, Problem, Result
from regard.engine.transforms import HIDDEN_GRADIENTS, is_transformed
from regard.pieces.bias import Bias, clipped, is_additive, is_shaw, is_softcap
from regard.pieces.grid import Grid
from regard.pieces.mask import Mask
from regard.pieces.normalizer import LogSumExpNormalizer, any_coarse
from regard.pieces.piece import computes_as
from regard.pieces.score import TanhScore

#: Widest query and value that the kernels compute, and most hidden units of an additive score.
LARGEST_WIDTH, MOST_HIDDEN_UNITS = 256, 1024
#: Most bytes of the parts of a mask that need one byte a pair.
MASK_BYTES = 64 << 20
#: Names in `Problem.plan_cache`.
PLANNED_SETTING, PLANNED_VECTORS = "kernel setting", "kernel vectors"
#: Most bytes of a mask that is kept with a plan.
PLANNED_BYTES = 1 << 20
#: Fewest queries for which the kernels are chosen, and fewest pairs of one head if there is no mask. Measured against
#: torch's fused kernel: without a mask as fast at 256 x 256, 1.1 times as fast at 384 x 384; causal 1.2 times at 192.
FEWEST_QUERIES, FEWEST_PAIRS = 192, 384 * 384
#: Fewest queries if the mask hides at least LEAST_HIDDEN of all pairs, as causal masks and windows do. Measured with 4
#: to 12 heads of 32 to 128: causal 1.0 to 1.2 times as fast at 64 and 1.2 to 1.5 at 96 in float32, with gradients 1.1
#: to 1.4 times at 128; 1.1 to 2 times in bfloat16; windows 2.2 to 3 times. Masks that hide less are as fast as torch's
#: kernel there, or slower.
FEWEST_MASKED, FEWEST_MASKED_LEARNING, LEAST_HIDDEN = 64, 128, 0.375
#: The same for additive scores: fewest queries, and fewest pairs times hidden units, without and with gradients.
#: Measured against the dense engine: forward 1.2 to 3 times as fast at 16 x 30, with backward 1.2 to 1.5 times at
#: 30 x 30 with 256 hidden units, 32 times as many 3 to 5 times; one query of 30 keys is as fast or slower.
FEWEST_ADDITIVE_QUERIES, FEWEST_TANGENTS = 16, {False: 1 << 15, True: 1 << 18}
#: Fewest numbers in keys and values for which the kernels are chosen for few rows (`is_few`), in float32 and in half
#: precision. Measured against torch's fused kernel: as fast at half as many, 1.1 to 2.9 times as fast at these.
FEWEST_NUMBERS = {torch.float32: 1 << 21, torch.bfloat16: 1 << 19, torch.float16: 1 << 19}
#: With dropout torch's fused kernel does not run. Fewest queries, and fewest pairs of all heads and batch entries, for
#: which the kernels are chosen. Measured against the dense engine, forward and backward: 1.3 to 3.7 times as fast. With
#: 30 queries it is 1.1 to 1.8 times, and a whole training step is no faster.
FEWEST_DROPPING_QUERIES, FEWEST_DROPPING_PAIRS = 48, 1 << 17


class Kernel(Engine):
    """Softmax of dot products or additive scores by kernels of our own, in tiles that stay in the processor's cache."""

    name = "kernel"
    description = "is one call of Regard's compiled kernel, which reads only the keys that the mask allows"

    def _refusal(self, problem: Problem) -> str | None:
        return KernelProblem.of(problem).refusal

    def run(self, problem: Problem) -> Result:
        terms = KernelProblem.of(problem)
        inputs, setting = terms.inputs(), terms.setting()
        if not problem.learns:
            output, logsumexp = forward(setting, inputs)
            return Result(output, (logsumexp,))
        output, logsumexp = KernelAttention.apply(setting, *inputs)  # type: ignore[misc]
        if any_coarse(logsumexp):
            return Blocked().run(problem)  # backward would divide by exp of the coarse log-sum-exp
        return Result(output, (logsumexp,))

    def cost(self, problem: Problem) -> Cost:
        """The pairs of the tiles, and the bytes of packed keys or partial rows, mask and log-sum-exp."""
        s, terms = problem.sizes, KernelProblem.of(problem)
        layout, width = terms.layout, problem.prepared.key.shape[-1]
        pairs = layout.num_pairs * s.H
        rows = s.B * s.H * s.I
        if terms.direction is None and is_few(s.R * s.I, problem.learns):
            buffers = 4 * rows * -(-s.J // PART_KEYS) * (s.E + 2)  # rows of each part of the keys
        else:  # packed keys and values
            buffers = 4 * s.B * s.G * s.J * (width + s.E)
        return Cost(pairs, pairs * flops_per_pair(problem), buffers + layout.num_bytes + 4 * rows)

    def kept_facts(self, problem: Problem) -> dict[str, Any]:
        """The layout of the mask with its tables, and the vectors of biases without parameters."""
        if KernelProblem.of(problem).layout.num_bytes > PLANNED_BYTES:
            return {}
        names = (PLANNED_SETTING,) if problem.piece_tensors else (PLANNED_SETTING, PLANNED_VECTORS)
        return {name: problem.plan_cache[name] for name in names if name in problem.plan_cache}

    def repeated(self, problem: Problem) -> Callable[[Tensor, Tensor, Tensor], Result | None] | None:
        """The call of the kernel alone; with gradients its result is None if a row is coarse, which needs a plan."""
        terms = KernelProblem.of(problem)
        inputs, setting = terms.inputs(), terms.setting()
        if inputs.clipped is not None or terms.layout.num_bytes > PLANNED_BYTES:
            return None  # the terms of a ShawBias depend on the queries
        if not problem.learns:
            repeat = RepeatedForward(setting, inputs)
            return lambda query, key, value: Result(*repeat(query, key, value))
        others = inputs[3:]

        def learn(query: Tensor, key: Tensor, value: Tensor) -> Result | None:
            output, logsumexp = KernelAttention.apply(setting, query, key, value, *others)  # type: ignore[misc]
            return None if any_coarse(logsumexp) else Result(output, (logsumexp,))

        return learn


def pays(problem: Problem) -> bool:
    """Whether the kernels are measured to be faster than the other engines for problems of this size."""
    if load_fast() is None:
        return False
    s = problem.sizes
    if isinstance(problem.attention.score, TanhScore):
        tangents = s.B * s.H * s.I * s.J * problem.prepared.query.shape[-1]
        return s.I >= FEWEST_ADDITIVE_QUERIES and tangents >= FEWEST_TANGENTS[problem.learns]
    if problem.dropout:
        return s.I >= FEWEST_DROPPING_QUERIES and s.B * s.H * s.I * s.J >= FEWEST_DROPPING_PAIRS
    if is_few(s.R * s.I, problem.learns):
        return few_rows_pay(s.B * s.G * s.J * (s.D + s.E), problem.key.dtype)
    if problem.attention.mask is None:
        return s.I >= FEWEST_QUERIES and s.I * s.J >= FEWEST_PAIRS
    learns_in_float32 = problem.learns and problem.query.dtype is torch.float32
    fewest = FEWEST_MASKED_LEARNING if learns_in_float32 else FEWEST_MASKED
    return s.I >= FEWEST_QUERIES or (fewest <= s.I and _hides_much(problem))


def _hides_much(problem: Problem) -> bool:
    """Whether the kernels can run, and the tiles of the mask leave out so many pairs that they are faster."""
    terms, s = KernelProblem.of(problem), problem.sizes
    return terms.refusal is None and terms.layout.num_pairs <= (1 - LEAST_HIDDEN) * s.B * s.I * s.J


def few_rows_pay(num_numbers: int, dtype: torch.dtype) -> bool:
    """Whether the kernels are measured to be faster for few rows and so many numbers in keys and values."""
    return num_numbers >= FEWEST_NUMBERS.get(dtype, math.inf)


def can_run(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels are built, fast, and can read these tensors."""
    tensors = query, key, value
    return (
        load_fast() is not None
        and not is_transformed()
        and all(t.device.type == "cpu" and t.dtype in DTYPES and has_address(t) for t in tensors)
        and max(query.shape[-1], value.shape[-1]) <= LARGEST_WIDTH
    )


class KernelProblem:
    """A problem as the kernels compute it: the layout of its mask, and its biases and sink as vectors."""

    def __init__(self, problem: Problem, tile_queries: int = TILE_QUERIES) -> None:
        self.problem = problem
        self.tile_queries = tile_queries

    @staticmethod
    def of(problem: Problem) -> KernelProblem:
        """The terms of a problem, created at the first call and then reused."""
        return problem.planned("kernel", KernelProblem)

    @cached_property
    def refusal(self) -> str | None:
        """Why the kernels cannot compute the problem; None if they can."""
        p = self.problem
        if self.scale is None:
            return "its weights are no softmax of scaled dot products or additive scores"
        if (unfit := self._unfit_tensors()) is not None:
            return unfit
        if p.dropout and len(p.positions.keys.intervals) != 1:
            return "the keys have gaps between their positions, and dropout counts positions from the first key"
        if p.hides_gradients:
            return HIDDEN_GRADIENTS
        if (unfit := self.unfit_bias()) is not None:
            return unfit
        if self._softmax.sink is not None and any_coarse(self._softmax.sink):
            return "the sink is so large that float32 is too coarse for its share of the row"
        if (num_bytes := self.mask_bytes) > MASK_BYTES:
            return f"its mask has no spans and would take {size(num_bytes)}"
        return None if load() is not None else reason().rstrip(".")

    def _unfit_tensors(self) -> str | None:
        """Why the kernels cannot read the queries, keys and values; None if they can."""
        p = self.problem
        query, value = p.prepared.query, p.value
        if query.device.type != "cpu":
            return f"it runs on CPU, and the tensors are on {query.device}"
        if not all(map(has_address, (query, p.prepared.key, value))):
            return "the numbers of a tensor cannot be read from memory"
        if wrong := {t.dtype for t in (query, p.prepared.key, value)} - set(DTYPES):
            return f"it sums in float32, and a tensor is {wrong.pop()}"
        most_channels = LARGEST_WIDTH if self.direction is None else MOST_HIDDEN_UNITS
        for width, most in ((query.shape[-1], most_channels), (value.shape[-1], LARGEST_WIDTH)):
            if width > most:
                return f"vectors of width {width} are wider than {most}"
        return None

    def unfit_bias(self) -> str | None:
        """Why the biases are not numbers for each distance, before and after one soft cap; None if they are."""
        biases = self.problem.attention.bias
        caps = [bias.cap for bias in biases if is_softcap(bias)]
        if len(caps) > 1:
            return "it computes one soft cap, and there are several"
        if any(isinstance(cap, Tensor) for cap in caps):
            return "its soft cap is a number without a gradient, and here it is a tensor"
        for bias in biases:
            if not (is_softcap(bias) or is_shaw(bias) or (is_additive(bias) and bias.relative)):
                return f"{type(bias).__name__} is no number for each head and each distance j - i"
        if (unfit := self._unfit_shaw()) is not None:
            return unfit
        if any(is_additive(bias) for bias in biases) and len(self.problem.positions.keys.intervals) != 1:
            return "the keys have gaps between their positions, so a bias is no vector of distances"
        return None

    def _unfit_shaw(self) -> str | None:
        """Why the kernels cannot add the terms of `ShawBias`, one for each row and distance; None if they can."""
        biases = self.problem.attention.bias
        shaw = [n for n, bias in enumerate(biases) if is_shaw(bias)]
        if len(shaw) > 1:
            return "it computes one ShawBias, and there are several"
        if shaw and any(map(is_softcap, biases[: shaw[0]])):
            return "it adds a ShawBias before the soft cap, and here the cap comes first"
        return None

    @property
    def mask(self) -> Mask | None:
        """The mask that the layout describes."""
        return self.problem.attention.mask

    @property
    def mask_bytes(self) -> int:
        """Bytes of the parts of the mask that need one byte a pair, for all heads that differ."""
        mask, num_bytes = self.mask, self.layout.num_bytes
        if mask is None or not num_bytes:
            return 0
        return num_bytes * mask.allowed(self.problem.grid.first_pair()).shape[1]

    @cached_property
    def layout(self) -> Layout:
        """The mask as tiles of queries with their keys."""
        p = self.problem
        return Layout.of(self.mask, p.positions, p.sizes, self.tile_queries)

    @cached_property
    def direction(self) -> Tensor | None:
        """v of additive scores v . tanh(q + k); None for all other scores."""
        score = self.problem.attention.score
        return score.direction if computes_as(score, TanhScore, "tile") else None

    @cached_property
    def scale(self) -> float | None:
        """The factor of dot products or additive scores under the softmax; None for other weights."""
        softmax = self.problem.attention.normalizer.as_softmax
        if self.direction is None or softmax is None:
            return self.problem.scale
        return None if isinstance(softmax.temperature, Tensor) else 1 / softmax.temperature

    @property
    def _softmax(self) -> LogSumExpNormalizer:
        """The softmax: its temperature and sink."""
        softmax = self.problem.attention.normalizer.as_softmax
        assert softmax is not None, "there is a scale"
        return softmax

    def setting(self) -> CallSettings:
        """What does not depend on the numbers of tensors, and the seed of dropout."""
        p = self.problem
        kept = p.planned(PLANNED_SETTING, lambda problem: self._setting())
        if not p.dropout:
            return kept.of_call(None, p.folds)
        first_key = p.positions.keys.intervals[0][0]
        return kept.of_call(Dropout(p.dropout, p.seed or 0, p.positions.start, first_key), p.folds)

    def _setting(self) -> CallSettings:
        """The settings without dropout and statistics, which may be kept for later calls."""
        library, scale = load(), self.scale
        assert library is not None and scale is not None, "the refusal is None"
        cap, first_clipped = self.cap or 0.0, self._first_clipped()
        return CallSettings(library, self.layout, scale, cap, self.problem.learns, first_clipped=first_clipped)

    @property
    def cap(self) -> float | None:
        """The soft cap divided by the temperature, since the scores are divided before it; None: no soft cap."""
        caps = [bias.cap for bias in self.problem.attention.bias if is_softcap(bias)]
        return caps[0] / self._temperature if caps else None

    @property
    def _temperature(self) -> float:
        """What all scores, caps and biases are divided by."""
        temperature = self._softmax.temperature
        assert not isinstance(temperature, Tensor), "the scale is a number"
        return temperature

    def inputs(self) -> Inputs:
        """The tensors of the call: prepared queries and keys, values, and the numbers of biases and sinks."""
        prepared = self.problem.prepared
        before, after, sink = self.problem.planned(PLANNED_VECTORS, lambda problem: self._vectors())
        vectors = prepared.query, prepared.key, self.problem.value
        return Inputs(*vectors, before, after, sink, self.direction, self._clipped())

    def _vectors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The numbers that are added before and after the soft cap for each head and distance, and the sinks.

        The first two are (H, I + J - 1), the sinks (H,); None for what there is not. If the allowed distances are no
        range (`Layout.distances`), the numbers after the cap are -inf at the others.
        """
        biases = self.problem.attention.bias
        cap = next((n for n, bias in enumerate(biases) if is_softcap(bias)), len(biases))
        before, after = self._by_distance(biases[:cap]), self._by_distance(biases[cap + 1 :])
        if self.layout.distances is not None:
            allowed = self.layout.distances.allowed(self._line)[:, :, 0].expand(1, self.problem.sizes.H, -1)[0]
            after = torch.zeros_like(allowed, dtype=torch.float32) if after is None else after
            after = after.masked_fill(~allowed, -torch.inf)
        if (sink := self._softmax.sink) is not None:
            sink = torch.as_tensor(sink, dtype=torch.float32, device=self.problem.query.device)
            sink = sink.expand(self.problem.sizes.H)
        return before, after, sink

    def _clipped(self) -> Tensor | None:
        """The terms of a ShawBias, (B, H, I, 2 reach + 1 and a margin at both ends); None if there is none."""
        for bias, rows in zip(self.problem.attention.bias, self.problem.prepared.rows, strict=True):
            if is_shaw(bias) and rows is not None:
                reach = bias.reach + CLIPPED_MARGIN
                return clipped(rows, range(-reach, reach + 1), bias.reach).float() / self._temperature
        return None

    def _first_clipped(self) -> int:
        """The distance of indices at which the rows of `_clipped` begin."""
        positions = self.problem.positions
        reach = next((bias.reach for bias in self.problem.attention.bias if is_shaw(bias)), 0)
        return positions.start - positions.keys.intervals[0][0] - reach - CLIPPED_MARGIN

    @property
    def _line(self) -> Grid:
        """One pair for each distance j - i."""
        p = self.problem
        return p.grid.line(p.positions.distances(p.sizes.I))

    def _by_distance(self, biases: tuple[Bias, ...]) -> Tensor | None:
        """The sum of biases for each head and distance, (H, I + J - 1), without ShawBias: `_clipped` has its terms.

        None without such biases.
        """
        biases = tuple(bias for bias in biases if not is_shaw(bias))
        if not biases:
            return None
        line = self._line
        total = torch.zeros(1, 1, 1, len(line.key), dtype=torch.float32, device=line.device)
        for bias in biases:
            total = bias.transform(total, line, None, None)
        return (total / self._temperature)[0, :, 0].float().expand(self.problem.sizes.H, -1)


def logsumexp_of(terms: KernelProblem) -> Tensor:
    """The log-sum-exp of every row, (B, H, I), from scores alone: values of width 0."""
    inputs = terms.inputs()
    return forward(terms.setting(), inputs._replace(value=inputs.key[..., :0]))[1]
