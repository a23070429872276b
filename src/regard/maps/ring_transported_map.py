"""`RingTransportedMap`: the map of a recurrent layer whose tokens are sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import at_least_float32
from regard.base.spans import Spans
from regard.engine.ring import StatePassing
from regard.engine.ring.route import Route
from regard.maps.attention_map import NO_GRADIENTS, AttentionMap
from regard.maps.indices import Index
from regard.maps.reductions import Tile
from regard.maps.transported_map import TransportedMap
from regard.pieces.contents import versions_of
from regard.pieces.grid import Grid


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
        own, steps = call.own, call.own.prepared.steps
        assert steps is not None
        self.attention, self._route = own.pieces_snapshot(), call.route
        self._exchange, self._number, self._steps = call.exchange, call.number, steps.detach()
        self.positions = _positions(call.route)
        (B, H), I = steps.query.shape[:2], sum(map(len, call.route.queries))
        self.grid = Grid.whole(self.positions, B, H, I, steps.query.device)
        self._versions = self._current_versions()
        self._refusal = NO_GRADIENTS.format("map over ranks") if own.needs_gradient(*steps.tensors()) else None

    @property
    def _dtype(self) -> torch.dtype:
        return at_least_float32(self._steps.query).dtype

    def _current_versions(self) -> list[int]:
        return versions_of(self._steps.tensors())

    @cached_property
    @torch.no_grad()
    def whole(self) -> TransportedMap:
        """The map of the tokens of all ranks. Collective."""
        request: Mapping[str, str] | RegardError = {"map": f"that of attend number {self._number}", "look": "the first"}
        if self._current_versions() != self._versions:
            request = RegardError(
                "weights: queries, keys or decays were changed in place since attend ran, so the weights cannot be "
                "recomputed. Read them before the change, or call attend again."
            )
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
