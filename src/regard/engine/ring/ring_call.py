"""One call of the ring on one rank: keys are exchanged while earlier ones are computed, and gradients are returned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.attention import Attention
from regard.base.spans import Spans
from regard.engine.gradients import GradientSums, zeros_like
from regard.engine.problem import Problem, Result
from regard.engine.ring.chunk_gradients import ChunkGradients, OutputGrads
from regard.engine.ring.exchange import Exchange, Transfer
from regard.engine.ring.kv_chunk import KVChunk, Rows, chunk_attention, merge
from regard.engine.ring.route import Route
from regard.engine.rows import finished_rows
from regard.engine.transforms import differentiable_once
from regard.pieces.contents import tensor_snapshot, tensors_of
from regard.pieces.normalizer import RowStatistic


@dataclass(frozen=True, eq=False)
class RingCall:
    """One call on one rank: `own` is its share of the problem, `route` says which keys it needs of the other ranks.

    At step t a rank sends keys to the t-th rank after it, and receives keys from the t-th rank before it. So a rank
    receives only keys that it needs, and holds the keys of at most two other ranks: the ones it computes with, and the
    next. `shared` tensors are the value and the prepared tensors. Tensors of queries are among them, and stay on their
    rank. `number` distinguishes the calls of a group.
    """

    own: Problem
    route: Route
    exchange: Exchange
    number: int = 0
    #: The reason why `plan` cannot plan it; None if it can.
    unplanned: ClassVar[str | None] = None

    def run(self) -> Result:
        """The output of the own queries, and their statistic. Collective."""
        output, *row_statistic = _RingCall.apply(self, *differentiable_once("ring", *self.own.tensors()))  # type: ignore[misc]
        return Result(output, tuple(row_statistic))

    @cached_property
    def attention(self) -> Attention:
        """The pieces of a chunk: without position encoding, which prepared keys contain, and without a sink."""
        return chunk_attention(self.own.attention)

    @cached_property
    def travels(self) -> list[bool]:
        """For each shared tensor, whether it belongs to keys and so is sent."""
        return [True, *(not rows for rows in self.own.prepared.on_rows())]

    def keys(self, shared: Sequence[Tensor]) -> list[Tensor]:
        """The shared tensors of keys."""
        return [t for t, travels in zip(shared, self.travels, strict=True) if travels]

    def with_keys(self, shared: Sequence[Tensor], received: Sequence[Tensor]) -> list[Tensor]:
        """The shared tensors with the keys of another rank instead of the own keys."""
        source = iter(received)
        return [next(source) if travels else t for t, travels in zip(shared, self.travels, strict=True)]

    def visits(self, keys: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """The keys of each step: the own keys first, then received ones. The next transfer runs during a step.

        Yielded buffers are reused; copy to keep. Two sets are used in turn: gloo keeps a buffer for some time after its
        last byte arrived, so new buffers would accumulate.
        """
        buffers = [self._buffers(keys, range(first, self.route.ranks, 2)) for first in (2, 1)]  # of even and odd steps
        transfer = self._start(keys, 1, buffers)
        yield 0, list(keys)
        for step in range(1, self.route.ranks):
            assert transfer is not None
            received = transfer.wait()
            transfer = self._start(keys, step + 1, buffers)
            yield step, received

    def chunks(self, step: int, shared: Sequence[Tensor]) -> Iterator[tuple[slice, slice | Tensor, KVChunk]]:
        """The chunks of a step, each with its rows and columns in the shared tensors.

        `shared` has the own queries, and the keys of this step: at step 0 all own keys, later those that were received.
        """
        rank, owner = self.exchange.rank, self._source(step)
        held = self.route.needs(rank, owner) if step else self.route.keys[rank]
        value, prepared = shared[0], self.own.prepared.with_tensors(shared[1:])
        for queries, keys in self.route.chunks(rank, owner):
            ((first, last),) = _places(self.route.queries[rank], queries)
            columns = _index(_places(held, keys), value.device)
            tile = prepared.tile(slice(first, last), columns)
            own_values, seed = value[:, :, columns], self.own.seed
            yield slice(first, last), columns, KVChunk.of(self.attention, tile, own_values, queries, keys, seed)

    def send_gradients(self, own_keys: Sequence[Tensor], step: int, gradients: Sequence[Tensor]) -> Transfer:
        """Send the gradients of the keys received at this step, and receive those of the own keys sent at this step.

        `gradients` are the wanted ones, none if no key was received. `own_keys` give the shapes of what is received.
        """
        count = len(self.route.needs(self._target(step), self.exchange.rank))
        buffers = [t.new_empty(*t.shape[:2], count, *t.shape[3:]) for t in own_keys] if count else []
        return self.exchange.swap(self._source(step), gradients, self._target(step), buffers)

    def add_received(self, transfer: Transfer, step: int, sums: Sequence[Tensor]) -> None:
        """Add the gradients that another rank returns for the keys of a step to `sums`, those of all own keys."""
        index = self._sent_keys(step)
        for total, gradient in zip(sums, transfer.wait(), strict=False):
            total.index_add_(2, index, gradient)

    def _buffers(self, keys: Sequence[Tensor], steps: Iterable[int]) -> list[Tensor]:
        """Buffers that are long enough for each of these steps, reused since gloo releases a buffer late."""
        most = max((len(self.route.needs(self.exchange.rank, self._source(step))) for step in steps), default=0)
        return [t.new_empty(t.shape[0] * t.shape[1] * most * t.shape[3]) for t in keys]

    def _start(self, keys: Sequence[Tensor], step: int, buffers: Sequence[Sequence[Tensor]]) -> Transfer | None:
        """Start the transfer of keys at a step; None after the last step.

        `buffers` are two lists of flat tensors, which receive keys in turn: those of even and of odd steps.
        """
        if step >= self.route.ranks:
            return None
        index, source = self._sent_keys(step), self._source(step)
        sends_all = len(index) == keys[0].shape[2]
        sent = [t if sends_all else t.index_select(2, index) for t in keys] if len(index) else []
        count = len(self.route.needs(self.exchange.rank, source))
        sizes = [(*t.shape[:2], count, t.shape[3]) for t in keys] if count else []
        received = [buffer[: prod(size)].view(size) for buffer, size in zip(buffers[step % 2], sizes, strict=False)]
        return self.exchange.swap(self._target(step), sent, source, received)

    def _target(self, step: int) -> int:
        """The rank that receives the own keys at a step."""
        return (self.exchange.rank + step) % self.route.ranks

    def _source(self, step: int) -> int:
        """The rank whose keys are received at a step."""
        return (self.exchange.rank - step) % self.route.ranks

    def _sent_keys(self, step: int) -> Tensor:
        """Indices of the own keys that are sent at a step."""
        rank = self.exchange.rank
        needed = self.route.needs(self._target(step), rank)
        return _places(self.route.keys[rank], needed).tensor(self.own.query.device)


def _places(held: Spans, positions: Spans) -> Spans:
    """Positions -> their indices among the held positions, which ascend."""
    places, before = [], 0
    for start, stop in held:
        places += (positions & Spans(((start, stop),))).shift(before - start).intervals
        before += stop - start
    return Spans.union(places)


def _index(places: Spans, device: torch.device) -> slice | Tensor:
    """An index of these places; a slice if they are contiguous."""
    return slice(*places.intervals[0]) if len(places.intervals) == 1 else places.tensor(device)


class _RingCall(torch.autograd.Function):
    """Forward exchanges the keys once. Backward exchanges them again, and returns their gradients to their ranks."""

    @staticmethod
    def forward(ctx: Any, ring_call: RingCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        outline, rows = ring_call.own.outline(), _empty_rows(ring_call)
        shared, piece_tensors = tensors[: len(outline.on_rows)], ring_call.own.piece_tensors
        for step, received in ring_call.visits(ring_call.keys(shared)):
            if received:
                _merge_step(ring_call, rows, step, ring_call.with_keys(shared, received))
        output, row_statistic = finished_rows(ring_call.own.attention.normalizer, *rows)
        output = output.to(ring_call.own.value.dtype)
        ctx.outline, ctx.ring_call = outline, replace(ring_call, own=None)  # autograd saves its tensors
        ctx.save_for_backward(
            output, *rows[1], *row_statistic, *(t.detach() for t in shared), *map(tensor_snapshot, piece_tensors)
        )
        ctx.num_statistics = len(row_statistic)
        ctx.mark_non_differentiable(*row_statistic)
        return output, *row_statistic

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (output, *saved), num = ctx.saved_tensors, ctx.num_statistics
        # the statistics before and after the sink was added
        sinkless_statistic, row_statistic, tensors = saved[:num], saved[num : 2 * num], saved[2 * num :]
        # before any message: all ranks must be in the backward pass of the same call
        ctx.ring_call.exchange.agree("backward", {"attend": f"number {ctx.ring_call.number}"})
        wanted, count = ctx.needs_input_grad[1:], len(ctx.outline.on_rows)
        leaves = [t.detach().requires_grad_(w) for t, w in zip(tensors[count:], wanted[count:], strict=True)]
        ring_call = replace(ctx.ring_call, own=ctx.outline.around([*tensors[:count], *leaves]))
        output_grads = OutputGrads.of(output, grad, tuple(row_statistic))
        backward = _Backward(ring_call, tensors[:count], leaves, wanted)
        backward.add_all_steps(output_grads)
        backward.add_sink(tuple(sinkless_statistic), output_grads)
        return None, *(g if g is None else g.to(t.dtype) for g, t in zip(backward.sums.sums, tensors, strict=True))


def _merge_step(ring_call: RingCall, rows: Rows, step: int, shared: Sequence[Tensor]) -> None:
    """Compute the chunks of one step and merge them into the rows."""
    for place, _, chunk in ring_call.chunks(step, shared):
        chunk_rows = rows[0][:, :, place], tuple(t[:, :, place] for t in rows[1])
        merge(ring_call.attention.normalizer, chunk_rows, chunk.attend())


def _empty_rows(ring_call: RingCall) -> Rows:
    """Rows before the first merge: the output (B, H, I, E) is 0, and the statistic that of rows without keys."""
    s, value = ring_call.own.sizes, ring_call.own.value
    precision = torch.promote_types(value.dtype, torch.float32)
    output = torch.zeros(s.B, s.H, s.I, s.E, dtype=precision, device=value.device)
    return output, ring_call.attention.normalizer.empty_statistic(output.new_empty(output.shape[:3]))


class _Backward:
    """Gradients of the shared tensors and parameters of one rank, over a second exchange of keys."""

    def __init__(
        self, ring_call: RingCall, shared: Sequence[Tensor], parameters: Sequence[Tensor], wanted: Sequence[bool]
    ) -> None:
        self.ring_call, self.shared, self.parameters, self.wanted = ring_call, shared, parameters, wanted
        on_rows = [not travels for travels in ring_call.travels]
        self.sums = GradientSums.zeros((*shared, *parameters), wanted, on_rows)

    def add_all_steps(self, output_grads: OutputGrads) -> None:
        """Add the gradients of every step. Gradients of received keys are returned while the next step runs."""
        ring_call, transfer = self.ring_call, None
        own = self._of_keys(self.sums.sums)
        for step, received in ring_call.visits(ring_call.keys(self.shared)):
            key_gradients = self._add_step(step, received, output_grads) if received else []
            if not step:
                continue
            if transfer is not None:
                ring_call.add_received(transfer, step - 1, own)
            transfer = ring_call.send_gradients(own, step, key_gradients)
        if transfer is not None:
            ring_call.add_received(transfer, ring_call.route.ranks - 1, own)

    def _of_keys(self, totals: Sequence[Tensor | None]) -> list[Tensor]:
        """The wanted ones of the gradients of shared tensors that belong to keys."""
        return [t for t, travels in zip(totals, self.ring_call.travels, strict=False) if travels and t is not None]

    def _add_step(self, step: int, received: Sequence[Tensor], output_grads: OutputGrads) -> list[Tensor]:
        """Add the gradients of one step, and return those of the received keys, which other ranks own."""
        ring_call, whole = self.ring_call, self.ring_call.own.attention.normalizer
        shared = ring_call.with_keys(self.shared, received)
        sums = list(self.sums.sums)
        for n, travels in enumerate(ring_call.travels) if step else ():
            if travels and self.wanted[n]:
                sums[n] = zeros_like(shared[n])
        for rows, columns, chunk in ring_call.chunks(step, shared):
            grads = ChunkGradients(chunk, whole, output_grads.rows(rows), self.wanted, self.parameters).compute()
            GradientSums(sums, self.sums.on_rows).add(grads, rows, columns)
        return self._of_keys(sums)

    def add_sink(self, sinkless_statistic: RowStatistic, output_grads: OutputGrads) -> None:
        """Add the gradient of a learned sink. It changes the output by the log-sum-exp r alone: d out / d r = -out.

        `sinkless_statistic` is the row statistic (B, H, I) before the sink, and `output_grads` has grad . out.
        """
        normalizer = self.ring_call.own.attention.normalizer
        ids = {id(t) for t in tensors_of(normalizer)}
        numbers = [n for n, t in enumerate(self.parameters) if id(t) in ids and t.requires_grad]
        if not numbers:
            return
        with torch.enable_grad():
            logsumexp = normalizer.finish(sinkless_statistic)[0]
            if not logsumexp.requires_grad:
                return
            learned = [self.parameters[n] for n in numbers]
            grads = torch.autograd.grad(logsumexp, learned, -output_grads.dot.to(logsumexp.dtype), allow_unused=True)
        for n, grad in zip(numbers, grads, strict=True):
            if grad is not None:
                self.sums.sums[len(self.shared) + n] += grad  # type: ignore[operator]
