"""The plan of a ring: what every rank will hold, send and compute. It needs no process group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from regard.attention import Attention, Prepared
from regard.base.spans import Spans
from regard.engine.formatting import duration, number, rough, size
from regard.engine.problem import Cost
from regard.engine.ring.kv_chunk import KVChunk, chunk_attention
from regard.engine.ring.rank_share import RankShare
from regard.engine.ring.route import Route
from regard.engine.speed_model import seconds


@dataclass(frozen=True, eq=False)
class RingPlan:
    """How `attend(..., engine=Ring())` will run on each rank. `print(plan)` gives it in words.

    `inputs` are one query, one key and one value; `prepared` holds them prepared. They give sizes and dtypes. `rank`
    is the rank of this process, None if it is not in the group.
    """

    attention: Attention = field(repr=False)
    prepared: Prepared = field(repr=False)
    inputs: tuple[Tensor, Tensor, Tensor] = field(repr=False)
    route: Route = field(repr=False)
    layout: str
    rank: int | None = None

    @staticmethod
    def of(share: RankShare, route: Route, layout: str, rank: int | None = None) -> RingPlan:
        """The plan for tensors of any length, from their first tokens."""
        first = share.first_token()
        inputs = first.query, first.key, first.value
        return RingPlan(share.attention, share.prepared_token(), inputs, route, layout, rank)

    @property
    def value(self) -> Tensor:
        """One value, (B, G, 1, E)."""
        return self.inputs[2]

    @property
    def ranks(self) -> int:
        return self.route.ranks

    @cached_property
    def _traveling(self) -> list[Tensor]:
        """One key of each tensor that is sent."""
        on_rows = self.prepared.on_rows()
        return [self.value, *(t for t, rows in zip(self.prepared.tensors(), on_rows, strict=True) if not rows)]

    @cached_property
    def key_bytes(self) -> int:
        """Bytes of one sent key with its value, over all batch entries and heads."""
        return sum(t.numel() * t.element_size() for t in self._traveling)

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of the wanted gradients of one key with its value, in float32 at least."""
        return sum(t.numel() * max(t.element_size(), 4) for t in self._traveling if t.requires_grad)

    def sent(self, rank: int) -> int:
        """Bytes of keys and values that a rank sends in a forward pass."""
        return self.key_bytes * sum(len(self.route.needs(to, rank)) for to in range(self.ranks) if to != rank)

    def returned(self, rank: int) -> int:
        """Bytes of gradients that a rank returns in a backward pass, which also sends the keys once more."""
        return self.gradient_bytes * self.received(rank)

    def received(self, rank: int) -> int:
        """Number of keys that a rank receives."""
        return sum(len(self.route.needs(rank, owner)) for owner in range(self.ranks) if owner != rank)

    def gathered(self, rank: int) -> int:
        """Bytes that a rank would send if it sent all its keys to all other ranks."""
        return self.key_bytes * len(self.route.keys[rank]) * (self.ranks - 1)

    def partners(self, rank: int) -> list[int]:
        """The ranks that receive keys of this one."""
        return [to for to in range(self.ranks) if to != rank and self.route.needs(to, rank)]

    def cost(self, rank: int) -> Cost:
        """Pairs and operations of a forward pass, and the bytes of its largest block."""
        costs = [cost for cost, _ in self._work(rank)]
        return Cost(sum(c.pairs for c in costs), sum(c.flops for c in costs), max((c.bytes for c in costs), default=0))

    def seconds(self, rank: int) -> float | None:
        """Predicted seconds that a rank computes in a forward pass on this machine, as `ExecutionPlan.seconds`."""
        times = [time for _, time in self._work(rank) if time is not None]
        return sum(times) if len(times) == len(self._work(rank)) else None

    def _work(self, rank: int) -> list[tuple[Cost, float | None]]:
        """Cost and predicted seconds of each chunk."""
        if rank not in self._work_of_ranks:
            costs = [(chunk, chunk.engine.cost(chunk)) for chunk in self._chunks(rank)]
            self._work_of_ranks[rank] = [(cost, seconds(chunk.engine.name, chunk, cost)) for chunk, cost in costs]
        return self._work_of_ranks[rank]

    @cached_property
    def _work_of_ranks(self) -> dict[int, list[tuple[Cost, float | None]]]:
        """The results of `_work` so far."""
        return {}

    def memory(self, rank: int) -> int:
        """Bytes of a rank in a forward pass: inputs, prepared tensors, received and sent keys, rows, and a block."""
        rows, keys = len(self.route.queries[rank]), len(self.route.keys[rank])
        traveling = self.key_bytes * (self._received_at_once(rank) + self._copied_to_send(rank))
        held = zip([*self.inputs, *self._copies], [True, False, False, *self._copies_on_rows], strict=True)
        own = sum(t.numel() * t.element_size() * (rows if is_row else keys) for t, is_row in held)
        return own + traveling + self._row_bytes(rank) + self.cost(rank).bytes

    def _row_bytes(self, rank: int) -> int:
        """Bytes of the merged rows, and of those of one chunk, twice; half precision is copied to float32."""
        rows, longest = len(self.route.queries[rank]), max(b - a for a, b in self.route.queries[rank])
        (B, H), E, item = self.prepared.query.shape[:2], self.value.shape[3], self.value.element_size()
        whole, copies = max(item, 4), item < 4
        statistics = 6  # two numbers of the rows, of a chunk, and of both merged
        merged = rows * ((E + statistics) * whole + E * item * copies)
        chunk = longest * E * (2 * item + whole * copies)
        return B * H * (merged + chunk)

    def _received_at_once(self, rank: int) -> int:
        """Keys that both buffers hold: one is as long as the longest odd step, the other as the longest even step."""
        counts = [len(self.route.needs(rank, (rank - step) % self.ranks)) for step in range(1, self.ranks)]
        return max(counts[0::2], default=0) + max(counts[1::2], default=0)

    def _copied_to_send(self, rank: int) -> int:
        """Most own keys that are copied into a message; a message of all keys needs no copy."""
        held = len(self.route.keys[rank])
        counts = [len(self.route.needs(to, rank)) for to in range(self.ranks) if to != rank]
        return max((count for count in counts if count < held), default=0)

    @cached_property
    def _copies(self) -> list[Tensor]:
        """Prepared tensors that do not share the memory of an input."""
        pointers = {t.data_ptr() for t in self.inputs}
        return [t for t in self.prepared.tensors() if t.data_ptr() not in pointers]

    @cached_property
    def _copies_on_rows(self) -> list[bool]:
        """For each of `_copies`, whether it has a vector for each query (else for each key)."""
        ids = {id(t) for t in self._copies}
        return [r for t, r in zip(self.prepared.tensors(), self.prepared.on_rows(), strict=True) if id(t) in ids]

    def _chunks(self, rank: int) -> Iterator[KVChunk]:
        """The chunks of a rank, around expanded tensors that take no memory: for their cost, not to run."""
        attention = chunk_attention(self.attention)
        seed = 0 if self.attention.training and self.attention.dropout else None
        for owner in range(self.ranks):
            for queries, keys in self.route.chunks(rank, owner):
                prepared = self._as_long(queries, keys).detach()
                value = self.value.detach().expand(-1, -1, len(keys), -1)
                with torch.no_grad():
                    chunk = KVChunk.of(attention, prepared, value, queries, keys, seed)
                yield chunk

    def _as_long(self, queries: Spans, keys: Spans) -> Prepared:
        """The prepared tensors, expanded to these numbers of queries and keys."""
        lengths = [len(queries) if rows else len(keys) for rows in self.prepared.on_rows()]
        tensors = zip(self.prepared.tensors(), lengths, strict=True)
        return self.prepared.with_tensors(t.expand(*t.shape[:2], length, *t.shape[3:]) for t, length in tensors)

    def __str__(self) -> str:
        return "\n".join(words(self))


#: Up to this number of ranks, each has a line. Of more, only the first, the last and those that exchange most.
LINES = 16
#: Widths of the columns in characters.
WIDTHS = (13, 10, 10, 10, 9, 9)


def words(plan: RingPlan) -> Iterator[str]:
    """The plan in words, line by line, with a line for each rank."""
    queries, keys = (sum(map(len, held)) for held in (plan.route.queries, plan.route.keys))
    yield f"{plan.attention!r}"
    yield (
        f"{number(queries, 'query', 'queries')} and {number(keys, 'key')} in {plan.layout} shares over "
        f"{number(plan.ranks, 'rank')}. The ring engine sends keys and values to the ranks that need them, "
        f"{plan.key_bytes:,} bytes each with all heads, and computes earlier ones meanwhile."
    )
    names = ("pairs", "sends", "all-gather", "backward", "holds", "takes")
    yield " rank  " + " ".join(f"{name:>{width}}" for name, width in zip(names, WIDTHS, strict=True)) + "  keys go to"
    for rank in _listed(plan):
        yield _line(plan, rank)
    sent, gathered = (sum(map(bytes_of, range(plan.ranks))) for bytes_of in (plan.sent, plan.gathered))
    share = f", {sent / gathered:.1%} of what an all-gather would" if gathered else ""
    yield f"All together send {size(sent)} in a forward pass{share}."
    if plan.seconds(0) is not None:
        yield "The time is that of the forward pass on these processors, with one rank alone on them and no transfers."


def _listed(plan: RingPlan) -> list[int]:
    """The ranks that have a line."""
    ranks = range(plan.ranks)
    if len(ranks) <= LINES:
        return list(ranks)
    return sorted({0, len(ranks) - 1, max(ranks, key=plan.sent), max(ranks, key=plan.received)})


def _line(plan: RingPlan, rank: int) -> str:
    """The line of a rank in the table; a star marks the rank of this process."""
    seconds, backward = plan.seconds(rank), plan.sent(rank) + plan.returned(rank)
    cells = [rough(plan.cost(rank).pairs)]
    cells += [size(count) for count in (plan.sent(rank), plan.gathered(rank), backward, plan.memory(rank))]
    cells += ["-" if seconds is None else duration(seconds)]
    columns = " ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))
    return f"{rank:>5}{'*' if rank == plan.rank else ' '} {columns}  {_names(plan.partners(rank))}"


def _names(ranks: list[int]) -> str:
    """Ranks as text; consecutive ranks by their ends."""
    intervals = Spans.union((rank, rank + 1) for rank in ranks)
    return ", ".join(f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in intervals) or "nobody"
