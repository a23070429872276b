"""One turn of the ring: keys go from rank to rank while those that came before are computed; gradients go home."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.attention import Attention
from regard.engine.gradients import GradientSums, zeros_like
from regard.engine.problem import Problem, Result
from regard.engine.ring.exchange import Exchange, Transfer
from regard.engine.ring.kv_chunk import (
    KVChunk,
    OutputGrads,
    Rows,
    finished,
    gradients,
    merge,
    without_sink,
)
from regard.engine.ring.route import Route
from regard.engine.transforms import differentiable_once
from regard.pieces.contents import tensor_snapshot, tensors_of
from regard.pieces.normalizer import RowStatistic, has_logsumexp
from regard.spans import Spans


@dataclass(frozen=True, eq=False)
class RingCall:
    """One call as one rank sees it: its own share, where everything stands, and the other ranks.

    At step t a rank sends to the t-th after it and receives from the t-th before it, so every message is
    wanted by who gets it, and a rank holds the keys of two others at most: those it computes and the next.
    What is shared is listed as value, then the prepared tensors; some of these are of queries and stay. `number` tells
    the calls of a group apart.
    """

    own: Problem
    route: Route
    exchange: Exchange
    number: int = 0

    def run(self) -> Result:
        output, *row_statistic = _RingCall.apply(self, *differentiable_once("ring", *self.own.tensors()))  # type: ignore[misc]
        return Result(output, tuple(row_statistic))

    @cached_property
    def attention(self) -> Attention:
        """The pieces that a part needs: positions are in its keys already, sinks come last."""
        mine = self.own.attention
        return Attention(mine.score, bias=mine.bias, mask=mine.mask, normalizer=without_sink(mine.normalizer))

    @cached_property
    def travels(self) -> list[bool]:
        """Of what is shared: which belongs to keys."""
        return [True, *(not rows for rows in self.own.prepared.on_rows())]

    def keys(self, shared: Sequence[Tensor]) -> list[Tensor]:
        return [t for t, travels in zip(shared, self.travels, strict=True) if travels]

    def with_keys(self, shared: Sequence[Tensor], came: Sequence[Tensor]) -> list[Tensor]:
        """What is shared with the keys of another rank in place of one's own."""
        source = iter(came)
        return [next(source) if travels else t for t, travels in zip(shared, self.travels, strict=True)]

    def visits(self, keys: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """At each step what arrived, one's own keys first; the next are on their way meanwhile.

        What was yielded is overwritten once more is asked for, so whoever takes it keeps no part of it.
        """
        rooms = [self._wide_room(keys, range(first, self.route.ranks, 2)) for first in (2, 1)]
        coming = self._ask(keys, 1, rooms)
        yield 0, list(keys)
        for step in range(1, self.route.ranks):
            assert coming is not None
            arrived = coming.wait()
            coming = self._ask(keys, step + 1, rooms)
            yield step, arrived

    def chunks(self, step: int, shared: Sequence[Tensor]) -> Iterator[tuple[slice, slice | Tensor, KVChunk]]:
        """Each stretch of queries with each of the keys that came: where they lie in what is shared, and the part."""
        mine, owner = self.exchange.rank, self._source(step)
        held = self.route.needs(mine, owner) if step else self.route.keys[mine]
        value, prepared = shared[0], self.own.prepared.with_tensors(shared[1:])
        for queries, keys in self.route.chunks(mine, owner):
            ((first, last),) = _places(self.route.queries[mine], queries)
            columns = _index(_places(held, keys), value.device)
            tile = prepared.tile(slice(first, last), columns)
            yield slice(first, last), columns, KVChunk.of(self.attention, tile, value[:, :, columns], queries, keys)

    def send_home(self, keys: Sequence[Tensor], step: int, found: Sequence[Tensor]) -> Transfer:
        """Gradients of the keys that came at this step, against those of one's own `keys` that went."""
        room = _room(keys, self.route.needs(self._goal(step), self.exchange.rank))
        return self.exchange.swap(self._source(step), found, self._goal(step), room)

    def come_home(self, home: Transfer, step: int, totals: Sequence[Tensor]) -> None:
        """Add the gradients that come back to those of one's own keys."""
        index = self._leaving(step)
        for total, new in zip(totals, home.wait(), strict=False):
            total.index_add_(2, index, new)

    def _wide_room(self, keys: Sequence[Tensor], steps: Iterable[int]) -> list[Tensor]:
        """Room for what comes at any of these steps: gloo may hold on to a buffer after its last byte has come."""
        most = max((len(self.route.needs(self.exchange.rank, self._source(step))) for step in steps), default=0)
        return [t.new_empty(t.shape[0] * t.shape[1] * most * t.shape[3]) for t in keys]

    def _ask(self, keys: Sequence[Tensor], step: int, rooms: Sequence[Sequence[Tensor]]) -> Transfer | None:
        if step >= self.route.ranks:
            return None
        leaving, source = self._leaving(step), self._source(step)
        whole = len(leaving) == keys[0].shape[2]
        sent = [t if whole else t.index_select(2, leaving) for t in keys] if len(leaving) else []
        count = len(self.route.needs(self.exchange.rank, source))
        sizes = [(*t.shape[:2], count, t.shape[3]) for t in keys] if count else []
        room = [wide[: prod(size)].view(size) for wide, size in zip(rooms[step % 2], sizes, strict=False)]
        return self.exchange.swap(self._goal(step), sent, source, room)

    def _goal(self, step: int) -> int:
        return (self.exchange.rank + step) % self.route.ranks

    def _source(self, step: int) -> int:
        return (self.exchange.rank - step) % self.route.ranks

    def _leaving(self, step: int) -> Tensor:
        """Which of one's own keys go out at a step."""
        mine = self.exchange.rank
        needed = self.route.needs(self._goal(step), mine)
        return _places(self.route.keys[mine], needed).tensor(self.own.query.device)


def _places(held: Spans, some: Spans) -> Spans:
    """Positions as places among those that are held."""
    found, before = [], 0
    for start, stop in held:
        found += (some & Spans(((start, stop),))).shift(before - start).intervals
        before += stop - start
    return Spans.union(found)


def _index(places: Spans, device: torch.device) -> slice | Tensor:
    return slice(*places.intervals[0]) if len(places.intervals) == 1 else places.tensor(device)


def _room(like: Sequence[Tensor], keys: Spans) -> list[Tensor]:
    count = len(keys)
    return [t.new_empty(*t.shape[:2], count, *t.shape[3:]) for t in like] if count else []


class _RingCall(torch.autograd.Function):
    """Forward, keys travel once; backward, they travel again, and their gradients come home."""

    @staticmethod
    def forward(ctx: Any, ring_call: RingCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        outline, whole, rows = ring_call.own.outline(), ring_call.own.attention.normalizer, _nothing(ring_call)
        shared, piece_tensors = tensors[: len(outline.on_rows)], ring_call.own.piece_tensors
        for step, came in ring_call.visits(ring_call.keys(shared)):
            if came:
                _take(ring_call, rows, step, ring_call.with_keys(shared, came))
        output, row_statistic = finished(whole, rows)
        output = output.to(ring_call.own.value.dtype)
        ctx.outline, ctx.ring_call = outline, replace(ring_call, own=None)  # its tensors are saved by autograd
        ctx.save_for_backward(
            output, *rows[1], *row_statistic, *(t.detach() for t in shared), *map(tensor_snapshot, piece_tensors)
        )
        ctx.numbers = len(row_statistic)
        ctx.mark_non_differentiable(*row_statistic)
        return output, *row_statistic

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (output, *saved), numbers = ctx.saved_tensors, ctx.numbers
        total, row_statistic, tensors = saved[:numbers], saved[numbers : 2 * numbers], saved[2 * numbers :]
        ctx.ring_call.exchange.agree("backward", {"attend": f"number {ctx.ring_call.number}"})
        wanted, count = ctx.needs_input_grad[1:], len(ctx.outline.on_rows)
        leaves = [t.detach().requires_grad_(w) for t, w in zip(tensors[count:], wanted[count:], strict=True)]
        ring_call = replace(ctx.ring_call, own=ctx.outline.around([*tensors[:count], *leaves]))
        output_grads = OutputGrads.of(output, grad, tuple(row_statistic))
        gathered = _Return(ring_call, tensors[:count], leaves, wanted)
        gathered.take_all(output_grads)
        gathered.add_sink(tuple(total), output_grads)
        return None, *(g if g is None else g.to(t.dtype) for g, t in zip(gathered.sums.sums, tensors, strict=True))


def _take(ring_call: RingCall, rows: Rows, step: int, shared: Sequence[Tensor]) -> None:
    """The keys that came, merged into the rows that have seen others."""
    for place, _, chunk in ring_call.chunks(step, shared):
        some = rows[0][:, :, place], tuple(t[:, :, place] for t in rows[1])
        merge(ring_call.own.attention.normalizer, some, chunk.attend())


def _nothing(ring_call: RingCall) -> Rows:
    """Rows before any key came."""
    s, value = ring_call.own.sizes, ring_call.own.value
    precision = torch.promote_types(value.dtype, torch.float32)
    nothing = (-torch.inf, 0.0) if has_logsumexp(ring_call.own.attention.normalizer) else (0.0,)
    output = torch.zeros(s.B, s.H, s.I, s.E, dtype=precision, device=value.device)
    return output, tuple(output.new_full(output.shape[:3], number) for number in nothing)


class _Return:
    """Gradients of what one rank holds, gathered over a second turn."""

    def __init__(
        self, ring_call: RingCall, shared: Sequence[Tensor], parameters: Sequence[Tensor], wanted: Sequence[bool]
    ) -> None:
        self.ring_call, self.shared, self.parameters, self.wanted = ring_call, shared, parameters, wanted
        on_rows = [not travels for travels in ring_call.travels]
        self.sums = GradientSums.zeros((*shared, *parameters), wanted, on_rows)

    def take_all(self, output_grads: OutputGrads) -> None:
        """Every step's gradients: those of queries and parameters stay, those of keys go home a step later."""
        ring_call, home = self.ring_call, None
        own = self._of_keys(self.sums.sums)
        for step, came in ring_call.visits(ring_call.keys(self.shared)):
            found = self._taken(step, came, output_grads) if came else []
            if not step:
                continue
            if home is not None:
                ring_call.come_home(home, step - 1, own)
            home = ring_call.send_home(own, step, found)
        if home is not None:
            ring_call.come_home(home, ring_call.route.ranks - 1, own)

    def _of_keys(self, totals: Sequence[Tensor | None]) -> list[Tensor]:
        """Those that are wanted of keys."""
        return [t for t, travels in zip(totals, self.ring_call.travels, strict=False) if travels and t is not None]

    def _taken(self, step: int, came: Sequence[Tensor], output_grads: OutputGrads) -> list[Tensor]:
        """The gradients of the keys that came; those of one's own are added where they belong."""
        ring_call, whole = self.ring_call, self.ring_call.own.attention.normalizer
        shared = ring_call.with_keys(self.shared, came)
        sums = list(self.sums.sums)
        for n, travels in enumerate(ring_call.travels) if step else ():
            if travels and self.wanted[n]:
                sums[n] = zeros_like(shared[n])
        for rows, columns, chunk in ring_call.chunks(step, shared):
            grads = gradients(chunk, whole, output_grads.rows(rows), self.wanted, self.parameters)
            GradientSums(sums, self.sums.on_rows).add(grads, rows, columns)
        return self._of_keys(sums)

    def add_sink(self, total: RowStatistic, output_grads: OutputGrads) -> None:
        """What a learned sink takes from each row: d out / d r = -out, and r is known from the row's total."""
        normalizer = self.ring_call.own.attention.normalizer
        own = {id(t) for t in tensors_of(normalizer)}
        chosen = [n for n, t in enumerate(self.parameters) if id(t) in own and t.requires_grad]
        if not chosen or not has_logsumexp(normalizer):
            return
        with torch.enable_grad():
            row_statistic, _ = normalizer.with_sink(total)
            learned = [self.parameters[n] for n in chosen]
            found = torch.autograd.grad(
                row_statistic, learned, -output_grads.along.to(row_statistic.dtype), allow_unused=True
            )
        for n, new in zip(chosen, found, strict=True):
            if new is not None:
                self.sums.sums[len(self.shared) + n] += new  # type: ignore[operator]
