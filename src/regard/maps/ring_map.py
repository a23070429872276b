"""`RingMap`: the attention map of a sequence that is sharded over ranks. Every call is collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from math import prod
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from regard.attention import Prepared
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import at_least_float32, to_device, without_autocast
from regard.base.spans import Spans
from regard.engine.problem import Result
from regard.engine.ring import RingCall, StatePassing
from regard.engine.ring.digests import Contents, digest, words
from regard.engine.ring.kv_chunk import KVChunk
from regard.engine.ring.route import Route
from regard.maps.attention_map import BUDGET, NO_GRADIENTS, AttentionMap
from regard.maps.gradients import refusing
from regard.maps.indices import AXES, Index, Selection, indices
from regard.maps.reductions import Reduction, State, Tile, check_reductions
from regard.maps.scored_map import ScoredMap
from regard.maps.transported_map import TransportedMap
from regard.pieces.contents import versions_of
from regard.pieces.grid import Grid
from regard.pieces.normalizer import RowStatistic

#: The largest number of characters that an error shows of the indices of one axis.
LONGEST = 60


class RingMap(ScoredMap):
    """The weights (B, H, I, J) of a whole sequence. Each rank holds its shard of queries and keys.

    Every call is collective: all ranks ask for the same weights or statistics in the same order, and all get the
    answer. If their requests differ, every rank raises an error that shows each request. For a tile, the ranks that
    hold its rows and columns send them. For a statistic, keys go around the ring once more; each rank reduces the
    tiles of its own queries, and the states are merged. `row_statistic` has this rank's queries only.

    >>> import torch, torch.distributed as dist, regard as rg
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a group of one
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> weights = rg.Attention()(x, x, x, engine="ring").weights
    >>> weights.shape, weights.summarize(rg.maps.KeyTotals())[0].tolist()
    ((1, 1, 4, 4), [[[1.0, 1.0, 1.0, 1.0]]])
    >>> dist.destroy_process_group()
    """

    def __init__(self, ring_call: RingCall, result: Result) -> None:
        """The map of a call that has run, with this rank's `result`. It keeps a snapshot of this rank's part."""
        own = ring_call.own.snapshot()
        super().__init__(own.attention, own.prepared, own.positions, own.grid, result.row_statistic)
        self._ring_call = replace(ring_call, own=own)
        self._refusal = NO_GRADIENTS.format("map over ranks") if ring_call.own.scores_need_gradient else None

    def _compared(self) -> Prepared:
        raise RegardError(
            "weights.query, weights.key: this map has the vectors of no other rank. Keep those that you give to attend."
        )

    def _score_steps(self, batch: int, head: int, query: int) -> NoReturn:
        raise RegardError("weights.step_table: the keys of this map are on several ranks. Attend on one rank.")

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the tensors of this rank require grad. A backward pass refuses: each rank has only its part."""
        return self._refusal is not None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        queries, keys = (sum(map(len, held)) for held in (self._ring_call.route.queries, self._ring_call.route.keys))
        return len(self.grid.batch), len(self.grid.head), queries, keys

    def tile(
        self, batch: Index = None, head: Index = None, rows: Index = None, cols: Index = None, budget: int = BUDGET
    ) -> Tensor:
        """Exact weights (B', H', I', J') on every rank; all ranks pass the same indices. Collective."""

        def ask() -> str:
            """The request of this rank in words, for the handshake; sets `places`, or refuses."""
            places.extend(
                indices("weights[...]", name, part, size)
                for name, part, size in zip(AXES, (batch, head, rows, cols), self.shape, strict=True)
            )
            self._within_budget(prod(map(len, places)) * self._item_bytes, budget)
            return ", ".join(f"{name} {_as_ranges(place)}" for name, place in zip(AXES, places, strict=True))

        places: list[Tensor] = []
        self._agree("weights of", ask)
        b, h, i, j = (to_device(place, self.device) for place in places)
        with torch.no_grad():
            weights = self._fetched(b, h, i, j).tile(budget=budget)
        return refusing(self._refusal, [weights])[0]

    def _selection(self, index: Any) -> Selection:
        """As in every map; but other ranks wait in the handshake of `tile`, so they must learn of an error here."""
        try:
            return super()._selection(index)
        except RegardError as error:
            self._ring_call.exchange.agree("weights", error)
            raise

    def _agree(self, look: str, ask: Callable[[], str]) -> None:
        """The handshake before weights are read: if one rank refuses, all ranks raise its error. Collective.

        `look` begins the request in words; `ask` returns the rest of it, or raises the error of this rank.
        """
        request: Mapping[str, str] | RegardError
        try:
            request = {"map": f"that of attend number {self._ring_call.number}", "look": f"{look} {ask()}"}
            self._check_unchanged()
        except RegardError as error:
            request = error
        self._ring_call.exchange.agree("weights", request)

    def _fetched(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> ScoredMap:
        """The map of these batch entries, heads, queries and keys, by their indices in the whole map. Collective.

        All are vectors of integers on the device of the map.

        Every rank gets it. A rank holds all batch entries and heads of its own tokens, so it selects entries and heads
        itself. Queries and keys are sent by the ranks that hold them. The rows of the result have only some of their
        keys, which `_part` notes.
        """
        prepared, route = self._prepared.select(b, h), self._ring_call.route
        i, j = i + self._first(route.queries), j + self._first(route.keys)  # positions, by which ranks hold tokens
        on_rows = prepared.on_rows()
        tensors = [
            self._sent(t, i, route.queries) if is_row else self._sent(t, j, route.keys)
            for t, is_row in zip(prepared.tensors(), on_rows, strict=True)
        ]
        row_statistic = tuple(self._sent(t[b][:, h], i, route.queries) for t in self.row_statistic)
        grid = Grid(self.grid.batch[b], self.grid.head[h], i, j)
        return _part(self.attention, prepared.with_tensors(tensors), self.positions, grid, row_statistic)

    @staticmethod
    def _first(held: Sequence[Spans]) -> int:
        """The first position that a rank holds; `held` has those of each rank."""
        return min(share.intervals[0][0] for share in held)

    def _sent(self, own: Tensor, wanted: Tensor, held: Sequence[Spans]) -> Tensor:
        """Slices of axis 2 at the wanted positions, from the ranks that hold them. `own` has those of this rank.

        The slices arrive rank by rank, so they are put into the order of `wanted` at the end.
        """
        exchange = self._ring_call.exchange
        by_rank = [torch.isin(wanted, share.tensor(self.device)).nonzero().flatten() for share in held]
        places = torch.searchsorted(held[exchange.rank].tensor(self.device), wanted[by_rank[exchange.rank]])
        gathered = exchange.gathered(own.index_select(2, places), [len(indices) for indices in by_rank])
        return gathered.index_select(2, torch.cat(by_rank).argsort())

    def summarize(self, *reductions: Reduction) -> tuple[Any, ...]:
        """Any number of statistics in one pass around the ring; every rank gets the whole result. Collective."""
        with without_autocast(self.device):
            states = [refusing(self._refusal, state) for state in self._states(reductions)]
            return tuple(reduction.finish(state) for reduction, state in zip(reductions, states, strict=True))

    @torch.no_grad()
    def _states(self, reductions: tuple[Reduction, ...]) -> list[State]:
        """The state of each reduction after the tiles of all ranks. Collective."""
        states: dict[Reduction, Any] = {}

        def ask() -> str:
            """The reductions in words, with a digest of each, because two ranks may call different ones by one name."""
            states.update(
                (reduction, reduction.init(self.shape, self.device)) for reduction in check_reductions(reductions, self)
            )
            return ", ".join(f"{words(reduction)} ({Contents.of(reduction).digest})" for reduction in reductions)

        self._agree("statistics", ask)
        for tile in self._own_tiles():
            for reduction, state in states.items():
                reduction.add(state, tile)
        everyone = self._ring_call.exchange.collected(
            [[t.cpu() for t in states[reduction]] for reduction in reductions]
        )
        merged = [
            reduce(reduction.merge, of_ranks)
            for reduction, of_ranks in zip(reductions, zip(*everyone, strict=True), strict=True)
        ]
        return [[t.to(self.device) for t in state] for state in merged]

    @torch.no_grad()
    def tiles(self) -> Iterator[Tile]:
        """The tiles of this rank's queries, in the order in which keys arrive. Collective: every rank iterates.

        A rank that leaves the loop early still sends the keys that other ranks wait for. Inside the loop no rank may
        start another collective call, because the other ranks are at a different tile.
        """
        self._agree("tiles of", lambda: "the queries of each rank")
        yield from self._own_tiles()

    def _own_tiles(self) -> Iterator[Tile]:
        """The tiles of this rank's queries with the keys of all ranks, in the order in which keys arrive.

        At each step keys of another rank arrive, or none if no query here needs them. If the caller stops early, the
        remaining visits still pass on the keys that other ranks wait for.
        """
        ring_call = self._ring_call
        shared = [ring_call.own.value[..., :0], *self._prepared.tensors()]  # no values: weights do not need them
        visits = ring_call.visits(ring_call.keys(shared))
        try:
            for step, received in visits:
                for rows, _, chunk in ring_call.chunks(step, ring_call.with_keys(shared, received)) if received else ():
                    yield from self._of_rows(rows, chunk)
        except GeneratorExit:
            for _ in visits:
                pass
            raise

    def _of_rows(self, rows: slice, chunk: KVChunk) -> Iterator[Tile]:
        """The tiles of one range of queries with the received keys, one range of keys at a time.

        `rows` are indices of this rank's queries.
        """
        route = self._ring_call.route
        for place, keys in _key_ranges(chunk.positions.keys):
            of_keys = self._of_part(chunk.prepared.tile(slice(None), place), chunk.positions.start, rows, keys)
            row, col = chunk.positions.start - self._first(route.queries), keys.intervals[0][0]  # in the whole map
            yield from (_moved(tile, row, col - self._first(route.keys)) for tile in of_keys.tiles())

    def _of_part(self, prepared: Prepared, start: int, rows: slice | Tensor, keys: Spans) -> ScoredMap:
        """The map of one range of this rank's queries and one range of keys."""
        row_statistic: RowStatistic = tuple(t[:, :, rows] for t in self.row_statistic)
        grid = Grid(self.grid.batch, self.grid.head, self.grid.query[rows], keys.tensor(self.device))
        return _part(self.attention, prepared, Positions(start, keys), grid, row_statistic)

    def select(self, batch: Tensor, head: Tensor) -> NoReturn:
        """Refuse; use weights[batch, head] instead."""
        raise RegardError(
            "weights: select is not available for a map over ranks. Select with an index, weights[0, 3, rows], "
            "or select from the result of a statistic, weights.entropy()[:, 3]."
        )


def _part(*contents: Any) -> ScoredMap:
    """A `ScoredMap` of these arguments that has only some keys of its rows."""
    part = ScoredMap(*contents)
    part._has_whole_rows = False
    return part


def _as_ranges(places: Tensor) -> str:
    """Indices as text, with consecutive indices as one range.

    >>> _as_ranges(torch.tensor([0, 1, 2, 7, 5, 6]))
    '0-2, 7, 5-6'
    """
    parts: list[list[int]] = []
    for place in places.tolist():
        if parts and parts[-1][1] + 1 == place:
            parts[-1][1] = place
        else:
            parts.append([place, place])
    ranges = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
    if len(ranges) <= LONGEST:
        return ranges
    return f"{ranges[:LONGEST]} ... ({len(places)}, {digest(ranges)})"


def _key_ranges(keys: Spans) -> Iterator[tuple[slice, Spans]]:
    """Each range of keys, and its place among all keys of the chunk."""
    before = 0
    for start, stop in keys:
        yield slice(before, before + stop - start), Spans(((start, stop),))
        before += stop - start


def _moved(tile: Tile, rows: int, cols: int) -> Tile:
    """The tile with indices of the whole map, which are `rows` and `cols` larger."""
    return replace(
        tile,
        rows=slice(tile.rows.start + rows, tile.rows.stop + rows),
        cols=slice(tile.cols.start + cols, tile.cols.stop + cols),
        undecided=tile.undecided.shift(cols),
    )


# `RingTransportedMap`: the map of a recurrent layer whose tokens are sharded over ranks.


class RingTransportedMap(AttentionMap):
    """The weights w_ij = q_i . A_i ... A_{j+1} k_j of a whole sequence. Each rank holds its tokens.

    The first look is collective: all ranks send their prepared queries, keys and decays to all, which takes O(n) memory
    on each rank. Later looks are those of one process, and need no other rank.

    >>> import torch, torch.distributed as dist, regard as rg
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a group of one
    >>> one, attention = torch.ones(1, 1, 3, 1), rg.Attention(rg.Dot(1.0), transition=rg.transitions.Decay(-1.0))
    >>> attention(one, one, one, engine="ring").weights[0, 0, 2]
    tensor([0.1353, 0.3679, 1.0000])
    >>> dist.destroy_process_group()
    """

    is_signed: ClassVar[bool] = True
    _made_of: ClassVar[str] = "a product of transitions whose tensors lie on several ranks"

    def __init__(self, call: StatePassing) -> None:
        """The map of a call that has run; it keeps the steps of this rank's tokens."""
        own, steps = call.own, call.own.prepared.steps
        assert steps is not None
        self.attention, self._route = own.pieces_snapshot(), call.route
        self._exchange, self._number, self._steps = call.exchange, call.number, steps.detach()
        self.positions = _positions(call.route)
        (B, H), I = steps.query.shape[:2], sum(map(len, call.route.queries))
        self.grid = Grid.whole(self.positions, B, H, I, steps.query.device)
        self._versions = versions_of(self._steps.tensors())
        self._refusal = NO_GRADIENTS.format("map over ranks") if own.needs_gradient(*steps.tensors()) else None

    @property
    def _dtype(self) -> torch.dtype:
        return at_least_float32(self._steps.query).dtype

    @cached_property
    @torch.no_grad()
    def whole(self) -> TransportedMap:
        """The map of the tokens of all ranks. Collective."""
        request: Mapping[str, str] | RegardError = {"map": f"that of attend number {self._number}", "look": "the first"}
        if versions_of(self._steps.tensors()) != self._versions:
            request = RegardError(TransportedMap._stale)
        self._exchange.agree("weights", request)
        counts = [len(keys) for keys in self._route.keys]
        order = torch.cat([keys.tensor(self.device) for keys in self._route.keys]).argsort()
        gathered = (self._exchange.gathered(t, counts).index_select(2, order) for t in self._steps.tensors())
        whole = TransportedMap(self._steps.with_tensors(gathered), self.attention, self.positions, self.grid)
        whole._refusal = self._refusal
        return whole

    def select(self, batch: Index, head: Index) -> AttentionMap:
        """The map of some batch entries and heads (indices), still lazy. The first look is collective."""
        return self.whole.select(batch, head)

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        return self.whole._weights(rows, cols)

    def tiles(self) -> Iterator[Tile]:
        """Every tile that may contain a weight other than 0. The first look is collective."""
        return self.whole.tiles()


def _positions(route: Route) -> Positions:
    """The positions of the tokens of all ranks."""
    queries, keys = (
        Spans.union(pair for held in of_ranks for pair in held) for of_ranks in (route.queries, route.keys)
    )
    return Positions(queries.intervals[0][0], keys)
