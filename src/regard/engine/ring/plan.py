"""What every rank of a ring will hold, send and compute: a cost model that needs no process group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from regard.attention import Attention, Prepared
from regard.engine.blocked import Blocked
from regard.engine.formatting import duration, number, rough, size
from regard.engine.problem import Cost
from regard.engine.ring.kv_chunk import KVChunk, chunk_attention
from regard.engine.ring.route import Route
from regard.engine.speed_model import seconds
from regard.positions import Positions
from regard.spans import Spans


@dataclass(frozen=True, eq=False)
class RingPlan:
    """What `attend(..., engine=Ring())` does on each rank. `print(plan)` tells it in words.

    `inputs` are one query, key and value, and `prepared` is what becomes of them: sizes and formats are read
    off these. `rank` is who asks, None: nobody of the group.
    """

    attention: Attention = field(repr=False)
    prepared: Prepared = field(repr=False)
    inputs: tuple[Tensor, Tensor, Tensor] = field(repr=False)
    route: Route = field(repr=False)
    layout: str
    rank: int | None = None

    @staticmethod
    def of(
        attention: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        route: Route,
        layout: str,
        rank: int | None = None,
    ) -> RingPlan:
        """The plan for tensors of any length: only their first tokens are looked at."""
        first = query[:, :, :1], key[:, :, :1], value[:, :, :1]
        prepared = Prepared.of(attention, first[0], first[1], Positions.aligned_to_end(1, 1))
        return RingPlan(attention, prepared, first, route, layout, rank)

    @property
    def value(self) -> Tensor:
        return self.inputs[2]

    @property
    def ranks(self) -> int:
        return self.route.ranks

    @cached_property
    def _travelling(self) -> list[Tensor]:
        """One key of all that travels."""
        on_rows = self.prepared.on_rows()
        return [self.value, *(t for t, rows in zip(self.prepared.tensors(), on_rows, strict=True) if not rows)]

    @cached_property
    def key_bytes(self) -> int:
        """Bytes of one key with its value, all batch entries and heads, as it travels."""
        return sum(t.numel() * t.element_size() for t in self._travelling)

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of those of their gradients that are wanted, in float32 at least."""
        return sum(t.numel() * max(t.element_size(), 4) for t in self._travelling if t.requires_grad)

    def sent(self, rank: int) -> int:
        """Bytes of keys and values that a rank sends in a forward pass."""
        return self.key_bytes * sum(len(self.route.needs(to, rank)) for to in range(self.ranks) if to != rank)

    def returned(self, rank: int) -> int:
        """Bytes of gradients that a rank sends home in a backward pass, besides sending keys once more."""
        return self.gradient_bytes * self.received(rank)

    def received(self, rank: int) -> int:
        """Keys that come to a rank."""
        return sum(len(self.route.needs(rank, owner)) for owner in range(self.ranks) if owner != rank)

    def gathered(self, rank: int) -> int:
        """Bytes that a rank would send if all keys went to everyone."""
        return self.key_bytes * len(self.route.keys[rank]) * (self.ranks - 1)

    def partners(self, rank: int) -> list[int]:
        """The ranks that get keys of this one."""
        return [to for to in range(self.ranks) if to != rank and self.route.needs(to, rank)]

    def cost(self, rank: int) -> Cost:
        """Pairs and operations of a forward pass, and bytes that its blocks hold."""
        costs = [cost for cost, _ in self._work(rank)]
        return Cost(sum(c.pairs for c in costs), sum(c.flops for c in costs), max((c.bytes for c in costs), default=0))

    def seconds(self, rank: int) -> float | None:
        """How long a rank computes in a forward pass on this machine, as `Plan.seconds`; None: not known."""
        times = [time for _, time in self._work(rank) if time is not None]
        return sum(times) if len(times) == len(self._work(rank)) else None

    def _work(self, rank: int) -> list[tuple[Cost, float | None]]:
        """What each part takes."""
        if rank not in self._known:
            costs = [(chunk, Blocked().cost(chunk)) for chunk in self._chunks(rank)]
            self._known[rank] = [(cost, seconds("blocked", chunk, cost)) for chunk, cost in costs]
        return self._known[rank]

    @cached_property
    def _known(self) -> dict[int, list[tuple[Cost, float | None]]]:
        return {}

    def memory(self, rank: int) -> int:
        """Bytes of a rank in a forward pass: its share, as given and prepared, keys that come and go, rows, a block."""
        rows, keys = len(self.route.queries[rank]), len(self.route.keys[rank])
        travelling = self.key_bytes * (self._two_that_come(rank) + self._copies_that_go(rank))
        shared = zip([*self.inputs, *self._made], [True, False, False, *self._made_on_rows], strict=True)
        own = sum(t.numel() * t.element_size() * (rows if is_row else keys) for t, is_row in shared)
        return own + travelling + self._row_bytes(rank) + self.cost(rank).bytes

    def _row_bytes(self, rank: int) -> int:
        """Rows as they add up, with statistics, and those of one part, twice; half precision is copied besides."""
        rows, longest = len(self.route.queries[rank]), max(b - a for a, b in self.route.queries[rank])
        (B, H), E, item = self.prepared.query.shape[:2], self.value.shape[3], self.value.element_size()
        whole, copies = max(item, 4), item < 4
        statistics = 6  # of the rows, of a part, of both, and what they are weighted with
        return (
            B * H * (rows * ((E + statistics) * whole + E * item * copies) + longest * E * (2 * item + whole * copies))
        )

    def _two_that_come(self, rank: int) -> int:
        came = [len(self.route.needs(rank, (rank - step) % self.ranks)) for step in range(1, self.ranks)]
        return max(came[0::2], default=0) + max(came[1::2], default=0)

    def _copies_that_go(self, rank: int) -> int:
        held = len(self.route.keys[rank])
        went = [len(self.route.needs(to, rank)) for to in range(self.ranks) if to != rank]
        return max((count for count in went if count < held), default=0)

    @cached_property
    def _made(self) -> list[Tensor]:
        """Prepared tensors that are not the inputs themselves."""
        given = {t.data_ptr() for t in self.inputs}
        return [t for t in self.prepared.tensors() if t.data_ptr() not in given]

    @cached_property
    def _made_on_rows(self) -> list[bool]:
        made = {id(t) for t in self._made}
        return [r for t, r in zip(self.prepared.tensors(), self.prepared.on_rows(), strict=True) if id(t) in made]

    def _chunks(self, rank: int) -> Iterator[KVChunk]:
        """The parts of a rank, around tensors that take no memory."""
        attention = chunk_attention(self.attention)
        for owner in range(self.ranks):
            for queries, keys in self.route.chunks(rank, owner):
                prepared = self._as_long(queries, keys).detach()
                value = self.value.detach().expand(-1, -1, len(keys), -1)
                with torch.no_grad():
                    chunk = KVChunk.of(attention, prepared, value, queries, keys)
                yield chunk

    def _as_long(self, queries: Spans, keys: Spans) -> Prepared:
        lengths = [len(queries) if rows else len(keys) for rows in self.prepared.on_rows()]
        tensors = zip(self.prepared.tensors(), lengths, strict=True)
        return self.prepared.with_tensors(t.expand(*t.shape[:2], length, *t.shape[3:]) for t, length in tensors)

    def __str__(self) -> str:
        return "\n".join(words(self))


#: So many ranks have a line each; of more, the one with the most to send and the one with the most pairs do.
LINES = 16
#: Characters of the columns.
WIDTHS = (13, 10, 10, 10, 9, 9)


def words(plan: RingPlan) -> Iterator[str]:
    """The plan in words, with a line for each rank."""
    queries, keys = (sum(map(len, held)) for held in (plan.route.queries, plan.route.keys))
    yield f"{plan.attention!r}"
    yield (
        f"{number(queries, 'query', 'queries')} and {number(keys, 'key')} in {plan.layout} shares over "
        f"{number(plan.ranks, 'rank')}. The ring engine: keys and values go to the ranks that need them, "
        f"{plan.key_bytes:,} bytes each with all heads, while those that came before are computed."
    )
    names = ("pairs", "sends", "all-gather", "backward", "holds", "takes")
    yield " rank  " + " ".join(f"{name:>{width}}" for name, width in zip(names, WIDTHS, strict=True)) + "  keys go to"
    for rank in _told(plan):
        yield _line(plan, rank)
    sent, gathered = (sum(map(each, range(plan.ranks))) for each in (plan.sent, plan.gathered))
    share = f", {sent / gathered:.1%} of what an all-gather would" if gathered else ""
    yield f"All together send {size(sent)} in a forward pass{share}."
    if plan.seconds(0) is not None:
        yield "The time is that of the forward pass on these processors, with one rank alone on them and no transfers."


def _told(plan: RingPlan) -> list[int]:
    ranks = range(plan.ranks)
    if len(ranks) <= LINES:
        return list(ranks)
    return sorted({0, len(ranks) - 1, max(ranks, key=plan.sent), max(ranks, key=plan.received)})


def _line(plan: RingPlan, rank: int) -> str:
    seconds, backward = plan.seconds(rank), plan.sent(rank) + plan.returned(rank)
    told = [rough(plan.cost(rank).pairs)]
    told += [size(each) for each in (plan.sent(rank), plan.gathered(rank), backward, plan.memory(rank))]
    told += ["-" if seconds is None else duration(seconds)]
    columns = " ".join(f"{each:>{width}}" for each, width in zip(told, WIDTHS, strict=True))
    return f"{rank:>5}{'*' if rank == plan.rank else ' '} {columns}  {_names(plan.partners(rank))}"


def _names(ranks: list[int]) -> str:
    """Ranks, stretches of them by their ends."""
    stretches = Spans.union((rank, rank + 1) for rank in ranks)
    return ", ".join(f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in stretches) or "nobody"
