"""Attention by the compiled kernels, with its gradients: the call of the library, and its place in autograd."""

from __future__ import annotations

from copy import copy
from ctypes import byref, c_int64
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.engine.kernel.layouts import MARGIN
from regard.engine.kernel.library import Library
from regard.engine.kernel.mask_layout import Layout
from regard.engine.kernel.running import (
    Workspace,
    empty,
    on_large_pages,
    run,
    run_in,
    scratch,
    threads_for,
    workspace_floats,
    zeros,
)
from regard.engine.kernel.structures import KernelCall
from regard.engine.transforms import gradients_once
from regard.pieces.dropout import dropped_words
from regard.pieces.normalizer import any_coarse

#: Lanes of the vectors of a level of the library.
LANES = {"baseline": 4, "avx2": 8, "avx512": 16}
#: Most rows of a key head (its query heads times the queries) for which keys and values are not packed.
FEW_ROWS = 48
#: Multiply-adds that take as long as a hidden unit of an additive score, forward and backward.
PER_HIDDEN_UNIT = 3, 9
#: Multiply-adds that take as long as reading a float from memory.
PER_FLOAT = 16
#: Floats of a cache line, at which buffers begin.
LINE = 16
#: Fewest parts of the backward pass. Each has its own sums for the keys, so their number must not depend on threads.
PARTS = 8


@dataclass(frozen=True)
class Dropout:
    """The share of weights that are dropped, and what their hash depends on: see regard.pieces.dropout.

    `query_position` and `key_position` are those of the first query and the first key.
    """

    rate: float
    seed: int
    query_position: int
    key_position: int

    def fill(self, call: KernelCall) -> None:
        """Set the fields of a call. Hashes are sums of 32-bit words, so larger numbers count modulo 2^32."""
        words = (number & 0xFFFFFFFF for number in (self.seed, self.query_position, self.key_position))
        call.seed, call.query_position, call.key_position = words
        call.dropped_words, call.kept_factor = dropped_words(self.rate), 1 / (1 - self.rate)


@dataclass(eq=False)
class RowFolds:
    """Statistics of rows that a forward call is asked to compute beside the output; for `backward`, their gradients.

    `tensors` have a number for each row, by the fields of `KernelCall`: `entropy`, `distance`, `top_weights` and
    `top_keys`, which the call fills, or `grad_entropy` and `grad_distance`. `states` holds the first four again, by the
    reduction (maps/reductions.py) that they are the state of. `shift` is the position of the first key minus that of
    the first query. The call of few rows, as in decoding, computes no statistics.
    """

    tensors: dict[str, Tensor]
    states: dict[Any, list[Tensor]]
    shift: int
    _logsumexp: Tensor | None = None

    def fill(self, call: KernelCall, logsumexp: Tensor) -> None:
        """Set the fields of a call, which computes the log-sum-exp too: `computed` reads it after the call."""
        call.point(**self.tensors)
        call.shift, self._logsumexp = self.shift, logsumexp

    def computed(self) -> dict[Any, list[Tensor]]:
        """The states after the call; none if no call computed them, or if a row is NaN or coarse."""
        rows = self._logsumexp
        return {} if rows is None or any_coarse(rows) or bool(rows.isnan().any()) else self.states


@dataclass(eq=False)
class CallSettings:
    """What a call has besides its tensors: library, mask, scale of the scores, soft cap (0: none), whether a
    backward pass may follow, dropout, and the statistics that are computed with the output.

    Calls of the same sizes are copies of one template, since setting every field takes longer than a copy.
    """

    library: Library
    layout: Layout
    scale: float
    cap: float
    learns: bool
    dropout: Dropout | None = None
    #: The distance j - i of indices that the first numbers of `Inputs.clipped` belong to.
    first_clipped: int = 0
    folds: RowFolds | None = None

    def __post_init__(self) -> None:
        self.tables = self.layout.tables()
        self.lanes = LANES[self.library.vectors]
        self._templates: dict[tuple[int, ...], KernelCall] = {}
        self._forwards: dict[tuple[int, ...], ForwardTemplate] = {}

    def of_call(self, dropout: Dropout | None, folds: RowFolds | None) -> CallSettings:
        """The same setting with the dropout and the statistics of one call."""
        if dropout is None and folds is None:
            return self
        other = copy(self)
        other.dropout, other.folds = dropout, folds
        return other

    def call(self, *sizes: int) -> KernelCall:
        """A call of sizes B, H, G, I, J, D, E, which still points to no tensor of the caller."""
        if sizes not in self._templates:
            self._templates[sizes] = self._template(*sizes)
        call = self._templates[sizes].copy()
        if self.dropout is not None:
            self.dropout.fill(call)
        return call

    def _template(self, *sizes: int) -> KernelCall:
        """A call of these sizes with the fields that no tensor of the caller and no dropout changes."""
        layout, (tiles, segments, allowed), (_, _, _, I, J, _, _) = self.layout, self.tables, sizes
        call = KernelCall(*sizes, self.scale, self.cap, layout.low, layout.high)
        call.diagonals_stride = I + J - 1 + 2 * MARGIN
        call.point(tiles=tiles, segments=segments, allowed=allowed)
        call.allowed_head_stride = allowed.shape[1] if len(allowed) > 1 else 0
        call.num_tiles, call.tiles_have_entries = len(tiles), layout.has_entries
        call.kept_factor = 1.0
        return call

    def forward_template(self, *sizes: int, is_additive: bool) -> ForwardTemplate:
        """What forward calls of sizes B, H, G, I, J, D, E share."""
        kept = self._forwards.get(sizes)
        if kept is None:
            kept = self._forwards[sizes] = ForwardTemplate.of(self, self.call(*sizes), is_additive)
        return kept

    def padded(self, num_keys: int) -> int:
        """The keys of whole panels, which are two vectors wide."""
        return _rounded_up(num_keys, 2 * self.lanes)

    def whole(self, width: int) -> int:
        """The width of vectors in whole registers."""
        return _rounded_up(width, self.lanes)


class Inputs(NamedTuple):
    """The tensors of a call. `before` and `after` the soft cap, a number is added for each head and distance.

    Distances are those of indices, j - i, in ascending order from 1 - I.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    before: Tensor | None  # (H, I + J - 1)
    after: Tensor | None
    sink: Tensor | None  # (H,)
    direction: Tensor | None = None  # (D,), of additive scores
    clipped: Tensor | None = None  # (B, H, I, n): before the soft cap, a number for each row and clipped distance

    def call(self, setting: CallSettings) -> KernelCall:
        """A call with the fields that the forward and the backward pass share."""
        (B, H, I, D), (_, G, J, E) = self.query.shape, self.value.shape
        return self.filled(setting.call(B, H, G, I, J, D, E), setting)

    def filled(self, call: KernelCall, setting: CallSettings) -> KernelCall:
        """A call of these sizes with the fields of all inputs that are given.

        Whole vectors of `before` and `after` are read, so there are numbers before the first and behind the last.
        """
        call.point(query=self.query, key=self.key, value=self.value)
        if self.before is not None:
            call.point(before=F.pad(self.before.float(), (MARGIN, MARGIN))[:, MARGIN:])
        if self.after is not None:
            call.point(after=F.pad(self.after.float(), (MARGIN, MARGIN))[:, MARGIN:])
        if self.sink is not None:
            call.point(sink=self.sink.float().contiguous())
        if self.clipped is not None:
            call.point(clipped=self.clipped.float().contiguous())
            call.first_clipped, call.clipped_width = setting.first_clipped, self.clipped.shape[-1]
        if self.direction is not None:
            call.point(direction=F.pad(self.direction.float(), (0, MARGIN)))
        return call


class KernelAttention(torch.autograd.Function):
    """softmax(after + cap(scale s + before + clipped)) v, s dot products or additive scores, and its log-sum-exp.

    The arguments after the settings are the fields of `Inputs`.
    """

    @staticmethod
    def forward(ctx: Any, setting: CallSettings, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        inputs = Inputs(*(None if t is None else t.detach() for t in tensors))  # type: ignore[arg-type]
        output, logsumexp = forward(setting, inputs)
        ctx.setting = setting
        ctx.save_for_backward(*tensors, output, logsumexp)
        ctx.mark_non_differentiable(logsumexp)
        return output, logsumexp

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, output, logsumexp = ctx.saved_tensors
        inputs, wanted = Inputs(*tensors), Inputs(*ctx.needs_input_grad[1:])
        with torch.no_grad():
            grads = gradients(ctx.setting, inputs, wanted, grad, output, logsumexp)
        return None, *gradients_once("kernel", grads, grad, *tensors)


def gradients(
    setting: CallSettings, inputs: Inputs, wanted: Inputs, grad: Tensor, output: Tensor, logsumexp: Tensor
) -> list[Tensor | None]:
    """Gradients of the inputs in their dtypes, from the gradient of the output, `grad`, and the results of `forward`.

    The fields of `wanted` are True or False: whether an input needs its gradient.
    """
    delta = (grad.float() * output.float()).sum(-1)
    grads = backward(setting, inputs, wanted, grad, delta, logsumexp)
    if wanted.sink and inputs.sink is not None:
        grads = grads._replace(sink=sink_gradient(inputs.sink, logsumexp, delta))
    return [None if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)]


def sink_gradient(sink: Tensor, logsumexp: Tensor, delta: Tensor) -> Tensor:
    """The gradient of the sinks (H,); `delta` (B, H, I) is the gradient of the output times the output, over channels.

    A sink takes the share exp(sink - log-sum-exp) of a row from all its weights.
    """
    share = torch.exp(sink.float()[:, None] - logsumexp)
    return -(share * delta).sum((0, 2))


def multiply_adds(D: int, E: int, is_additive: bool) -> tuple[int, int]:
    """Multiply-adds of a pair, forward and backward. Of additive scores, a hidden unit counts for several."""
    if is_additive:
        return PER_HIDDEN_UNIT[0] * D + E, PER_HIDDEN_UNIT[1] * D + 2 * E
    return D + E, 3 * D + 2 * E


@dataclass(frozen=True, eq=False)
class ForwardTemplate:
    """What forward calls of the same sizes share: the function, its time in multiply-adds, the places of its buffers.

    "decode" reads keys and values where they are, for few rows of a key head, as in decoding. "forward" packs them.
    All buffers of a call are one block of memory, of `num_floats`; the scratch memory of its threads follows, with
    `workspace` floats each. `places` has the offset of each field in bytes. Counters are zeros of their own.
    """

    function: str
    multiply_adds: int
    places: tuple[tuple[str, int], ...]
    num_floats: int
    num_counters: int
    workspace: int

    @staticmethod
    def of(setting: CallSettings, call: KernelCall, is_additive: bool) -> ForwardTemplate:
        """The template of calls with the sizes of `call`. `is_additive`: the scores are additive, not dot products."""
        B, H, G, I, J, D, E = call.B, call.H, call.G, call.I, call.J, call.D, call.E
        library, work = setting.library, setting.layout.num_pairs * H * multiply_adds(D, E, is_additive)[0]
        if not is_additive and is_few(H // G * I, setting.learns):
            function, work = "decode", int(work * reading_factor(H // G * I))
            floats = {"partials": _count(library, "decode_partials", call)}
            num_counters = _count(library, "decode_counters", call)
        else:
            function, num_counters, num_keys = "forward", 3, B * G * setting.padded(J)
            floats = {"packed_keys": num_keys * D, "packed_values": num_keys * _rounded_up(E, setting.lanes)}
        places, used = [], 0
        for field, count in floats.items():
            places.append((field, 4 * used))
            used += _rounded_up(count, LINE)
        workspace = _rounded_up(workspace_floats(library, function, call), LINE)
        return ForwardTemplate(function, work, tuple(places), used, num_counters, workspace)

    def workspace_of(self, call: KernelCall) -> Workspace:
        """Give a call its buffers and counters, and return the scratch memory of its threads."""
        num_threads = threads_for(self.multiply_adds)
        # an interrupted call leaves other threads that still compute: only a call of one thread reuses memory
        memory = (scratch if num_threads == 1 else empty)(self.num_floats + num_threads * self.workspace)
        address = call.place(memory, self.places)
        call.count(self.num_counters)
        return Workspace(address + 4 * self.num_floats, 4 * self.workspace, num_threads)


def forward(
    setting: CallSettings, inputs: Inputs, dtype: torch.dtype | None = None, output: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output (B, H, I, E) and the log-sum-exp (B, H, I). No gradients.

    The output is written to `output`; by default to a new tensor in `dtype`, or in the dtype of the value.
    """
    if output is None:
        output = new_output(inputs.query, inputs.value, dtype)
    logsumexp = empty(*inputs.query.shape[:3])
    run_in(*forward_call(setting, inputs, output, logsumexp))
    return output, logsumexp


def new_output(query: Tensor, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for the output (B, H, I, E), by default in the dtype of the value.

    Heads are neighbors in memory if they are in the query, as in torch's kernel: a model joins them without copies.
    """
    (B, H, I, _), E, dtype = query.shape, value.shape[3], value.dtype if dtype is None else dtype
    if query.stride(1) < query.stride(2):
        return on_large_pages(torch.empty((B, I, H, E), dtype=dtype, device="cpu")).transpose(1, 2)
    return on_large_pages(torch.empty((B, H, I, E), dtype=dtype, device="cpu"))


def forward_call(
    setting: CallSettings, inputs: Inputs, output: Tensor, logsumexp: Tensor
) -> tuple[Workspace, Library, str, KernelCall]:
    """The arguments of `run_in` for the call that writes `output` (B, H, I, E) and `logsumexp` (B, H, I)."""
    (_, H, I, D), (B, G, J, E) = inputs.query.shape, inputs.value.shape
    template = setting.forward_template(B, H, G, I, J, D, E, is_additive=inputs.direction is not None)
    call = inputs.call(setting)
    call.point(output=output, logsumexp=logsumexp)
    if setting.folds is not None and template.function == "forward":
        setting.folds.fill(call, logsumexp)
    return template.workspace_of(call), setting.library, template.function, call


class RepeatedForward:
    """`forward` for later queries, keys and values of the same shapes: a call differs in addresses only."""

    def __init__(self, setting: CallSettings, inputs: Inputs) -> None:
        (B, H, I, D), (_, G, J, E) = inputs.query.shape, inputs.value.shape
        sizes = B, H, G, I, J, D, E
        self._template = setting.forward_template(*sizes, is_additive=inputs.direction is not None)
        self._call = inputs._replace(query=None, key=None, value=None).filled(setting.call(*sizes), setting)  # type: ignore[arg-type]
        self._library, self._is_float = setting.library, inputs.value.dtype is torch.float32
        self._rows_shape = B, H, I

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        """The output and the row statistic."""
        template, call = self._template, self._call.copy()
        output = new_output(query, value)
        logsumexp = value.new_empty(self._rows_shape) if self._is_float else empty(*self._rows_shape)
        call.point_in_order("query", query.resolve_neg(), key.resolve_neg(), value.resolve_neg(), output)
        call.logsumexp = logsumexp.data_ptr()
        call.tensors.append(logsumexp)
        run_in(template.workspace_of(call), self._library, template.function, call)
        return output, (logsumexp,)


def is_few(num_rows: int, learns: bool) -> bool:
    """Whether the rows of a key head are so few, and no gradients follow, that keys are not packed."""
    return num_rows <= FEW_ROWS and not learns


def reading_factor(num_rows: int) -> float:
    """How many times longer than its multiply-adds a call of few rows takes: it waits for keys and values.

    `num_rows` are those of a key head: the queries, times the query heads that share it.
    """
    return max(1.0, PER_FLOAT / num_rows)


def pack_keys(call: KernelCall, setting: CallSettings) -> None:
    """Give a call room for packed keys, and three counters of work: of packing, of packed blocks, of tiles."""
    call.point(packed_keys=empty(call.B * call.G, setting.padded(call.J), call.D))
    call.count(3)


def backward(
    setting: CallSettings,
    inputs: Inputs,
    wanted: Inputs,
    grad: Tensor,
    delta: Tensor,
    logsumexp: Tensor,
    folds: RowFolds | None = None,
) -> Inputs:
    """Gradients of all but the sink, in float32; `wanted` as in `gradients`, and `delta` (B, H, I) is grad . output.

    `folds` are gradients of statistics, whose part of `delta` kernels/folds.h defines. The keys may be a part of those
    of the rows, if `delta` and `logsumexp` are those of the whole rows. Each part of the work has its own sums for
    keys, distances and the direction, in whole registers; they are added up after the call.
    """
    (B, H, I, D), (G, J, E) = inputs.query.shape, inputs.value.shape[1:]
    length, lanes, num_parts = setting.padded(J), setting.lanes, -(-PARTS // (B * G))
    call = inputs.call(setting)
    pack_keys(call, setting)
    panels, rows = empty(B * G, length, E), empty(B * G, length, _rounded_up(D, lanes))
    num_keys = _count(setting.library, "backward_length", call)  # with room for the last block
    grad_query = zeros(B, H, I, D)
    grad_key, grad_value = (zeros(B, G, num_parts, num_keys, _rounded_up(width, lanes)) for width in (D, E))
    diagonals = [zeros(B, H, num_parts, I + J - 1 + 2 * MARGIN) if want else None for want in wanted[3:5]]
    grad_clipped = zeros(*inputs.clipped.shape) if wanted.clipped and inputs.clipped is not None else None
    call.num_parts = num_parts
    call.point(grad_output=grad, delta=delta.contiguous(), logsumexp=logsumexp.contiguous())
    call.point(packed_value_panels=panels, packed_key_rows=rows)
    call.point(grad_query=grad_query, grad_key=grad_key, grad_value=grad_value)
    call.point(grad_before=diagonals[0], grad_after=diagonals[1], grad_clipped=grad_clipped)
    if folds is not None:
        folds.fill(call, logsumexp)
    grad_direction = None if inputs.direction is None else zeros(B * G, num_parts, _rounded_up(D, lanes))
    call.point(grad_direction=grad_direction)
    work = setting.layout.num_pairs * H * multiply_adds(D, E, inputs.direction is not None)[1]
    run(setting.library, "backward", call, work)
    before, after = (None if t is None else t[..., MARGIN:-MARGIN].sum((0, 2)) for t in diagonals)
    direction = None if grad_direction is None or not wanted.direction else grad_direction.sum((0, 1))[:D]
    key, value = sum_of_parts(grad_key)[:, :, :J, :D], sum_of_parts(grad_value)[:, :, :J, :E]
    return Inputs(grad_query, key, value, before, after, None, direction, grad_clipped)


def sum_of_parts(parts: Tensor) -> Tensor:
    """Sums (B, G, keys, width) over axis 2 of (B, G, parts, keys, width). One part is its own sum and is not copied."""
    return parts[:, :, 0] if parts.shape[2] == 1 else parts.sum(2)


def _count(library: Library, name: str, call: KernelCall) -> int:
    """The length of a buffer for the sizes of a call: the function `name` of the library knows it."""
    function = library.function(name)
    function.restype = c_int64
    return function(byref(call))


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
