"""`TransportedMap`: the weights of a recurrent layer, w_ij = q_i . A_i ... A_{j+1} k_j, computed on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.attention import Attention
from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import to_device, without_autocast
from regard.base.spans import Spans
from regard.engine.recurrent import Transport, recur, rows_of_steps
from regard.maps.attention_map import TILE, WORKSPACE, RecomputedMap
from regard.maps.gradients import LiveRows, Rows
from regard.maps.indices import Index
from regard.maps.reductions import Tile
from regard.pieces.contents import autograd_records, versions_of
from regard.pieces.grid import Grid
from regard.pieces.mask import causal
from regard.pieces.transition import Steps


class TransportedMap(RecomputedMap):
    """The weights w_ij = q_i . A_i ... A_{j+1} k_j of a recurrent layer: each key, transported to each query.

    Weights may be negative, and rows have any sum. `steps` hold one head for each query head. Factors of O(n) memory
    are computed at the first look; then a row of n weights takes O(n) time, and a tile a scan from its rows to its
    columns.

    >>> import torch, regard as rg
    >>> q, k, v = torch.randn(3, 1, 2, 6, 4)
    >>> seen = rg.Attention(transition=rg.transitions.Delta())(q, k, v, beta=torch.ones(1, 2, 6))
    >>> torch.allclose(seen.weights.dense() @ v, seen.output, atol=1e-5), seen.weights.is_signed
    (True, True)
    """

    is_signed: ClassVar[bool] = True
    _made_of: ClassVar[str] = "a product of one transition for each token: weights.steps has its tensors"
    _stale: ClassVar[str] = (
        "weights: queries, keys or decays were changed in place since attend ran, so the weights cannot be "
        "recomputed. Read them before the change, or call attend again."
    )

    def __init__(self, steps: Steps, attention: Attention, positions: Positions, grid: Grid | None = None) -> None:
        """The weights are those of `steps`; of `attention` the map needs the mask, which says where weights are 0.

        `grid` has the coordinates of a selection of batch entries and heads; by default they are all.
        """
        self.attention, self.positions = attention, positions
        tensors = steps.tensors()
        self.steps = steps.detach() if any([t.requires_grad for t in tensors]) else steps
        self._live = steps if autograd_records(tensors) else None
        if grid is not None:
            self.grid = grid
        self._transport: Transport | None = None  # the factors, once a weight was read
        self._of_heads: dict[tuple[int, int], TransportedMap] = {}  # (batch entry, head) -> its map
        self._versions = versions_of(tensors)

    @classmethod
    def of_steps(cls, steps: Steps) -> TransportedMap:
        """The map of tensors of a model: I queries are the last of J tokens."""
        _, H, I, _ = steps.query.shape
        J = steps.key.shape[2]
        if I > J:
            raise RegardError(f"TransportedMap: {I} queries and {J} keys; every query needs a key of its own.")
        return cls(steps.of_heads(H), Attention(mask=causal()), Positions.aligned_to_end(I, J))

    @cached_property
    def grid(self) -> Grid:  # type: ignore[override]
        """The coordinates of all weights; made when they are first needed, because a step of one token is short."""
        B, H, I, _ = self.steps.query.shape
        return Grid.whole(self.positions, B, H, I, self.steps.query.device)

    def _shared_tensors(self) -> Sequence[Tensor]:
        return self.steps.tensors()

    def __getstate__(self) -> dict[str, Any]:
        """All fields but the versions and the factors, which a copy computes again."""
        return super().__getstate__() | {"_transport": None, "_of_heads": {}}

    @property
    def _dtype(self) -> torch.dtype:
        return self.transport.dtype

    @property
    def transport(self) -> Transport:
        """The factors of all chunks; computed once."""
        self._check_unchanged()
        if self._transport is None:
            self._transport = Transport(self.steps)
        return self._transport

    @checked
    def select(self, batch: Index, head: Index) -> TransportedMap:
        """The map of some batch entries and heads (indices), still lazy."""
        self._check_unchanged()
        b, h = self._selected_indices(batch, head)
        if (len(b), len(h)) != (1, 1) or self._is_read_live:
            return self._selected(b, h)
        if (place := (int(b), int(h))) not in self._of_heads:
            self._of_heads[place] = self._selected(b, h)  # with its factors, for the next look
        return self._of_heads[place]

    def _selected(self, batch: Tensor, head: Tensor) -> TransportedMap:
        """The map of some batch entries and heads, by indices on the host."""
        b, h = to_device(batch, self.device), to_device(head, self.device)
        grid = replace(self.grid, batch=self.grid.batch[b], head=self.grid.head[h])
        steps = self.live_steps.select(batch, head)
        selected = TransportedMap(steps, self.attention, self.positions, grid)
        selected._refusal = self._refusal
        return selected

    @property
    def live_steps(self) -> Steps:
        """The steps, in the graph of the call if the map is."""
        return self._live or self.steps

    @property
    def requires_grad(self) -> bool:
        return self._live is not None or self._refusal is not None

    def live_rows(self) -> LiveRows:
        """Rows by a scan over the steps with their graphs."""
        self._check_unchanged()
        if self._refusal is not None:
            return super().live_rows()
        live = self.live_steps

        def around(tensors: Sequence[Tensor]) -> Rows:
            steps = live.with_tensors(tensors)
            return lambda queries, keys: (rows_of_steps(steps, queries, keys), None)

        return LiveRows(live.tensors(), around)

    @torch.no_grad()
    def output(self, value: Tensor) -> Tensor:
        """W . values in O(n) time: (B, H, J, E) -> (B, H, I, E)."""
        self._check_unchanged()
        with without_autocast(self.device):
            return recur(self.steps, value)[0]

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        """A few rows by the compiled kernels, where they can; else by a scan."""
        i, j = (_indices(part, size) for part, size in zip((rows, cols), self.shape[2:], strict=True))
        unique_rows, place = i.unique(return_inverse=True)  # a scan needs ascending rows
        few = self.transport.few_rows(unique_rows, int(j[0]))
        weights = self._swept(unique_rows, j) if few is None else few[..., j]
        return weights if torch.equal(unique_rows, i) else weights[:, :, to_device(place, self.device)]

    def _swept(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Weights (B, H, rows, cols) of ascending rows and columns (indices), by a scan from late to early chunks."""
        num_maps = self.shape[0] * self.shape[1]
        weights = torch.zeros(num_maps, len(rows), len(cols), dtype=self._dtype, device=self.device)
        for start, part in self.transport.sweep(rows, int(cols[0])):
            left, right = (int(n) for n in torch.searchsorted(cols, torch.tensor([start, start + part.shape[2]])))
            weights[:, :, left:right] = part[:, :, to_device(cols[left:right] - start, self.device)]
        return weights.view(*self.shape[:2], len(rows), len(cols))

    @torch.no_grad()
    def tiles(self) -> Iterator[Tile]:
        """Every tile that may contain a weight other than 0: one scan for each range of queries."""
        for rows in self._ranges() if 0 not in self.shape else ():
            parts: list[Tensor] = []
            for start, part in self.transport.sweep(torch.arange(rows.start, rows.stop), 0):
                parts.insert(0, part)  # chunks come from the last to the first
                if start == 0 or sum(part.shape[2] for part in parts) >= TILE[1]:
                    yield self._tile(rows, start, torch.cat(parts, 2))
                    parts.clear()

    def _ranges(self) -> Iterator[slice]:
        """Ranges of queries, so that a tile fits in the workspace."""
        B, H, I, J = self.shape
        height = max(1, min(TILE[0], WORKSPACE // (B * H * min(J, TILE[1]) * self._bytes_per_weight)))
        for top in range(0, I, height):
            yield slice(top, min(top + height, I))

    def _tile(self, rows: slice, start: int, weights: Tensor) -> Tile:
        """The tile of these rows and the keys from `start` on, from weights (B * H, rows, keys) of whole chunks.

        Keys after the last of these rows are cut off. Those after the first of them are undecided.
        """
        first = self.shape[3] - self.shape[2]  # the token of the first query
        cols = slice(start, min(start + weights.shape[2], rows.stop + first))
        weights = weights[..., : cols.stop - start].view(*self.shape[:2], -1, cols.stop - start)
        undecided = Spans.of((cols.start, cols.stop)) & Spans.of((rows.start + first + 1, self.shape[3]))
        return Tile(weights, None, rows, cols, self.grid.tile(rows, cols), undecided)


def _indices(part: Tensor | slice, size: int) -> Tensor:
    """Rows or columns as indices on the host; `size` is that of the axis."""
    return torch.arange(*part.indices(size)) if isinstance(part, slice) else part
