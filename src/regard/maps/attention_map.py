"""`AttentionMap`: any weight w_ij = f(s_ij, r_i), computed on demand from queries, keys and row statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from regard.attention import Attention, Prepared, makes_new_scores, scores, snapshot
from regard.checks import Count, checked
from regard.display import viewer_part
from regard.engine.blocks import blocks
from regard.engine.kernel import Terms
from regard.engine.rows import StatisticBuffer, with_remainder
from regard.errors import RegardError
from regard.maps import passes
from regard.maps.folds import Distance, Entropy, Fold, KeyTotals, Links, MassOn, Pool, Similarity, State, Tile, TopLinks
from regard.maps.indices import Index, OutOfRange, axis_index, indices
from regard.pieces.grid import Grid
from regard.pieces.normalizer import RowStatistic, add_log_sums, has_logsumexp
from regard.positions import Positions
from regard.shapes import Sizes, as_slice, at_least_float32, to_device
from regard.spans import Spans

#: The keys of a tile, and those of them that not every query may attend to: there the mask decides for each pair.
TileKeys = tuple[slice, Spans]

#: The default budget: the largest dense result, in bytes.
BUDGET = 1 << 30
#: The largest tile of a fold: queries, keys.
TILE = (512, 4096)
#: If a range of queries has more tiles, their scores are not kept: they are computed again after the row statistic.
STRIP = 32
#: Bytes of memory for computing one tile.
WORKSPACE = 128 << 20
#: Ranges of keys become one tile if the gap between them is at most this number of keys.
GAP = 64

#: The results of folds, in the types of `summarize`.
First = TypeVar("First")
Second = TypeVar("Second")
Third = TypeVar("Third")

#: Names of the axes of a map.
AXES = ("batch", "head", "query", "key")


class AttentionMap:
    """The weights (B, H, I, J) of one attention, computed on demand in O(n) memory.

    Nothing is computed before you ask. Every answer is exact: it is computed from queries, keys and one statistic per
    row. Weights are before dropout, in float32 or float64, and detached.

    >>> import torch, regard as rg
    >>> seen = rg.attend(rg.Attention(), *(torch.randn(1, 2, 5, 4) for _ in range(3)))
    >>> seen.weights
    AttentionMap(1 x 2 heads x 5 queries x 5 keys)
    >>> seen.weights[0, 1, 2:4].shape, seen.weights.entropy().shape
    (torch.Size([2, 5]), torch.Size([1, 2, 5]))
    """

    def __init__(
        self,
        attention: Attention,
        prepared: Prepared,
        positions: Positions,
        extent: Grid | Sizes,
        row_statistic: RowStatistic | None,
    ) -> None:
        """`extent`: the coordinates of the queries and keys, or the sizes of a whole call."""
        self.attention, self.positions, self._prepared = snapshot(attention), positions, prepared.detach()
        if isinstance(extent, Grid):
            self.grid = extent
        else:
            self._sizes = extent
        self._row_statistic = row_statistic
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        """The versions of tensors that share memory with tensors outside the map."""
        tensors = (*self._prepared.tensors(), *(self.attention.shared or ()))
        return [t._version for t in tensors if not t.is_inference()]

    def _check_unchanged(self) -> None:
        """Refuse after a change in place: the weights would belong neither to the old nor to the new tensors."""
        if self._current_versions() != self._versions:
            raise RegardError(
                "weights: queries, keys or parameters were changed in place since attend ran (by an optimizer step, "
                "perhaps), so the weights cannot be recomputed. Read them before the change, or call attend again."
            )

    def __getstate__(self) -> dict[str, Any]:
        """All fields but the versions, since a copy has its own tensors."""
        self._check_unchanged()
        return {name: value for name, value in vars(self).items() if name != "_versions"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._versions = self._current_versions()

    @cached_property
    def grid(self) -> Grid:
        """The coordinates of the queries and keys."""
        return Grid.whole(self.positions, self._sizes.B, self._sizes.H, self._sizes.I, self._prepared.query.device)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch entries, heads, queries and keys."""
        return len(self.grid.batch), len(self.grid.head), len(self.grid.query), len(self.grid.key)

    @property
    def device(self) -> torch.device:
        """Where the weights are computed."""
        return self.grid.device

    @property
    def score_width(self) -> int:
        """The width D of the vectors that the score compares."""
        return self._prepared.query.shape[-1]

    @cached_property
    @torch.no_grad()
    def row_statistic(self) -> RowStatistic:
        """The row statistic, (B, H, I, ...) each: for softmax the log-sum-exp in nats and its rounding error."""
        self._check_unchanged()
        if self._row_statistic is not None:
            return with_remainder(self.attention, self._prepared, self.positions, self.grid, self._row_statistic)
        if 0 in self.shape:
            return self._of_empty_rows()
        terms = self._compiled_terms()
        if terms is not None and (logsumexp := passes.logsumexp(terms)) is not None:
            return with_remainder(self.attention, self._prepared, self.positions, self.grid, (logsumexp,))
        return self._of_parts() if has_logsumexp(self.attention.normalizer) else self._of_whole_rows()

    def _of_empty_rows(self) -> RowStatistic:
        """The statistic of empty rows, computed from one masked key."""
        normalizer = self.attention.normalizer
        masked = self._prepared.query.new_full((*self.shape[:3], 1), normalizer.masked_score, dtype=self._dtype)
        return normalizer.row_statistic(masked, torch.zeros(1, dtype=torch.int64, device=self.device))

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return at_least_float32(self._prepared.query).dtype

    def _of_parts(self) -> RowStatistic:
        """A statistic that is the log of a sum, accumulated from tile to tile."""
        collected = StatisticBuffer(self.shape[0], self.shape[2])
        for rows, parts in self._strips():
            collected.write(rows, self._total(rows, (self._tile_scores(rows, *part) for part in parts)))
        return collected.tensors()

    def _total(self, rows: slice, scores: Iterable[Tensor]) -> RowStatistic:
        """A statistic that is the log of a sum, for the queries of these tiles."""
        normalizer, query = self.attention.normalizer, self._prepared.query[:, :, rows, 0]
        assert has_logsumexp(normalizer)
        none = torch.full_like(query, -torch.inf, dtype=at_least_float32(query).dtype)
        return normalizer.with_sink(
            reduce(add_log_sums, map(normalizer.logsumexp, scores), (none, torch.zeros_like(none)))
        )

    def _of_whole_rows(self) -> RowStatistic:
        """A statistic that needs all scores of a row at once, such as a threshold."""
        B, H, I, J = self.shape
        size = max(1, min(TILE[0], WORKSPACE // (B * H * J * self._bytes_per_weight)))
        collected = StatisticBuffer(B, I)
        for block in blocks(self.attention.mask, self.positions, I, size):
            columns = block.columns.tensor(self.device)
            tile, grid = self._prepared.tile(block.rows, columns), self.grid.tile(block.rows, columns)
            s = scores(self.attention, tile, grid, masked=not block.full)
            collected.write(block.rows, self.attention.normalizer.row_statistic(s, columns))
        return collected.tensors()

    @property
    def _item_bytes(self) -> int:
        return max(self._prepared.query.element_size(), 4)

    @property
    def _bytes_per_weight(self) -> int:
        return self._item_bytes * (2 * self.attention.score.floats_per_score + 4)

    # Exact pieces

    def __getitem__(self, index: Any) -> Tensor:
        """Exact weights by batch entry, head, query and key. An integer drops its axis; slices and lists keep it.

        Each list selects on its own axis: weights[0, [0, 1], [2, 3]] is (2, 2, J).
        """
        b, h, i, j = self._axes(index)
        tile = self.tile(b, h, i, j)
        return tile[tuple(0 if isinstance(part, int) else slice(None) for part in (b, h, i, j))]

    def _axes(self, index: Any) -> list[Any]:
        """The index of each of the four axes."""
        index = index if isinstance(index, tuple) else (index,)
        at = next((n for n, part in enumerate(index) if part is ...), len(index))
        given = (*index[:at], *index[at + 1 :])
        if len(given) > 4 or any(part is ... for part in given):
            raise OutOfRange(f"weights[...]: the map has 4 axes {self.shape}, got {len(index)} indices.")
        if any(part is None for part in given):
            raise RegardError("weights[...]: None cannot add an axis here. Add it afterwards: weights[...][None].")
        parts = (*index[:at], *[slice(None)] * (4 - len(given)), *index[at + 1 :])
        return [axis_index(axis, part) for axis, part in zip(AXES, parts, strict=True)]

    @checked
    @torch.no_grad()
    def tile(
        self, batch: Index = None, head: Index = None, rows: Index = None, cols: Index = None, budget: Count = BUDGET
    ) -> Tensor:
        """Exact weights of selected batch entries, heads, queries and keys; always four axes (B', H', I', J')."""
        b, h, i, j = (
            indices("weights[...]", name, part, size)
            for name, part, size in zip(AXES, (batch, head, rows, cols), self.shape, strict=True)
        )
        if 0 in (len(b), len(h), len(i), len(j)):
            return self._prepared.query.new_zeros(len(b), len(h), len(i), len(j), dtype=self._dtype)
        self._within_budget(len(b) * len(h) * len(i) * len(j) * self._item_bytes, budget)
        view = self if batch is None and head is None else self.select(b, h)
        keys, place = j.unique(return_inverse=True)
        step = max(1, WORKSPACE // max(1, len(b) * len(h) * len(keys) * self._bytes_per_weight))
        weights = torch.cat([view._weights(part, keys) for part in i.split(step)], 2)
        return weights if torch.equal(keys, j) else weights[..., to_device(place, self.device)]

    @checked
    def dense(self, budget: Count = BUDGET) -> Tensor:
        """All weights (B, H, I, J), if they fit in `budget` bytes."""
        return self.tile(budget=budget)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """All weights as a NumPy array, if they fit in the budget of `dense`."""
        if copy is False:
            raise RegardError("weights: each call computes a new array, so copy=False is impossible. Leave it out.")
        weights = self.dense().cpu().numpy()
        return weights if dtype is None else weights.astype(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """All weights for `torch.as_tensor` and every other library that reads DLPack, within the budget of `dense`."""
        return self.dense().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device=self.device).__dlpack_device__()

    def __len__(self) -> int:
        """The number of batch entries, the first axis."""
        return self.shape[0]

    def __bool__(self) -> bool:
        return True  # an empty batch is a map too

    @checked
    def select(self, batch: Index, head: Index) -> AttentionMap:
        """The map of some batch entries and heads (indices), still lazy."""
        self._check_unchanged()
        batch = indices("weights.select", "batch", batch, self.shape[0])
        head = indices("weights.select", "head", head, self.shape[1])
        near = to_device(batch, self.device), to_device(head, self.device)
        grid = replace(self.grid, batch=self.grid.batch[near[0]], head=self.grid.head[near[1]])
        row_statistic = tuple(t[near[0]][:, near[1]] for t in self.row_statistic)
        return AttentionMap(self.attention, self._prepared.select(batch, head), self.positions, grid, row_statistic)

    def _within_budget(self, size: int, budget: int) -> None:
        if size > budget:
            raise RegardError(
                f"weights: this tensor takes {size / 2**20:,.0f} MiB, "
                f"the budget is {budget / 2**20:,.0f} MiB. "
                "Ask for fewer rows (weights[b, h, i0:i1]), for statistics (entropy(), top(), pool()), or raise "
                f"the budget: tile(..., budget={size})."
            )

    def _weights(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Weights of a tile, by indices on the host; the indices of keys ascend."""
        self._check_unchanged()
        columns, keys = to_device(cols, self.device), Spans.union((j, j + 1) for j in cols.tolist())
        i, j = (at if (at := as_slice(x)) is not None else to_device(x, self.device) for x in (rows, cols))
        s = scores(self.attention, self._prepared.tile(i, j), self.grid.tile(i, keys))
        return self.attention.normalizer.weights(s, tuple(t[:, :, i] for t in self.row_statistic), columns)

    # Streaming statistics

    @overload
    def summarize(self, fold: Fold[First], /) -> tuple[First]: ...
    @overload
    def summarize(self, fold: Fold[First], second: Fold[Second], /) -> tuple[First, Second]: ...
    @overload
    def summarize(
        self, fold: Fold[First], second: Fold[Second], third: Fold[Third], /
    ) -> tuple[First, Second, Third]: ...
    @overload
    def summarize(self, *folds: Fold) -> tuple[Any, ...]: ...

    @checked
    @torch.no_grad()
    def summarize(self, *folds: Fold) -> tuple[Any, ...]:
        """Any number of statistics in one pass over the tiles that the mask allows, in O(n) memory.

        Equal folds are computed once.

        >>> import torch, regard as rg
        >>> seen = rg.attend(rg.Attention(), *(torch.randn(1, 2, 5, 4) for _ in range(3)))
        >>> entropy, received = seen.weights.summarize(rg.Entropy(), rg.KeyTotals())
        """
        states = self.fold_states(folds)
        return tuple(fold.finish(states[fold]) for fold in folds)

    def fold_states(self, folds: Iterable[Fold]) -> dict[Fold, State]:
        """The state of each fold after the whole map, for callers that merge states; in one pass where possible.

        The compiled kernels compute the folds that they know. A pass over the tiles computes the others.
        """
        states = {fold: fold.init(self.shape, self.device) for fold in folds}
        done: set[Fold] = set()
        if any(map(passes.knows, states)) and (terms := self._compiled_terms()) is not None:
            done = passes.fill(terms, self.row_statistic[0], states)
        left = {fold: state for fold, state in states.items() if fold not in done}
        if not left:
            return states
        no_weights = type(self) is AttentionMap and not any(fold.reads_weights for fold in left)
        for tile in self._shapes_of_tiles() if no_weights else self.tiles():
            for fold, state in left.items():
                fold.add(state, tile)
        return states

    def _shapes_of_tiles(self) -> Iterator[Tile]:
        """The tiles for folds that do not read weights: every weight is 0, and none is computed."""
        zero = torch.zeros((), dtype=torch.float32, device=self.device)
        for rows, parts in self._strips() if 0 not in self.shape else ():
            for cols, undecided in parts:
                shape = (*self.shape[:2], rows.stop - rows.start, cols.stop - cols.start)
                yield Tile(zero.expand(shape), None, rows, cols, self.grid.tile(rows, cols), undecided)

    def _compiled_terms(self) -> Terms | None:
        """This map as the compiled kernels compute it; None if they cannot. Other kinds of maps have other weights."""
        if type(self) is not AttentionMap or 0 in self.shape:
            return None
        self._check_unchanged()
        return passes.terms_of_map(self.attention, self._prepared, self.positions, self.grid)

    @torch.no_grad()
    def tiles(self) -> Iterator[Tile]:
        """Every tile that may contain a weight above 0, row by row.

        If the row statistic is not known yet, it is computed from the same scores, which saves a pass.
        """
        if 0 in self.shape:
            return
        collected = StatisticBuffer(self.shape[0], self.shape[2])
        for rows, parts in self._strips():
            for (cols, undecided), (weights, logs) in zip(
                parts, self._weights_of_tiles(rows, parts, collected), strict=True
            ):
                yield Tile(weights, logs, rows, cols, self.grid.tile(rows, cols), undecided)
        if collected.is_complete:
            self.row_statistic = collected.tensors()

    def _strips(self) -> Iterator[tuple[slice, list[TileKeys]]]:
        """Ranges of queries, with the keys of each of their tiles."""
        for rows, any_allowed, all_allowed in self._row_blocks():
            columns = _cut(any_allowed, TILE[1])
            yield rows, [(cols, Spans.of((cols.start, cols.stop)) & ~all_allowed) for cols in columns]

    def _weights_of_tiles(
        self, rows: slice, parts: list[TileKeys], collected: StatisticBuffer
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Weights of each tile of these queries, and their logarithms (None if those are not cheap).

        An unknown row statistic comes from the scores of these tiles, and `collected` takes it. If there are too many
        tiles, a pass over the whole map computes it.
        """
        normalizer = self.attention.normalizer
        fits = len(parts) <= STRIP if has_logsumexp(normalizer) else len(parts) == 1
        if self._is_solved or not fits:
            row_statistic = tuple(t[:, :, rows] for t in self.row_statistic)
            for part in parts:
                yield normalizer.tile_weights(self._tile_scores(rows, *part), row_statistic, self._columns(part))
            return
        kept = [self._tile_scores(rows, *part) for part in parts]
        if len(parts) == 1:
            weights, logs, row_statistic = normalizer.normalize_with_logs(kept[0], self._columns(parts[0]))
            collected.write(rows, row_statistic)
            yield weights, logs
            return
        collected.write(rows, row_statistic := self._total(rows, kept))
        for part, s in zip(parts, kept, strict=True):
            yield normalizer.tile_weights(s, row_statistic, self._columns(part))

    def _columns(self, part: TileKeys) -> Tensor:
        return torch.arange(part[0].start, part[0].stop, device=self.device)

    @property
    def _is_solved(self) -> bool:
        """Whether the row statistic is known without another pass."""
        return self._row_statistic is not None or "row_statistic" in self.__dict__

    def _row_blocks(self) -> Iterator[tuple[slice, Spans, Spans]]:
        """Ranges of queries, the keys that some of them may attend to (and short gaps), and those that all may.

        A range has at most TILE[0] queries, and fewer if one of its tiles would not fit in the workspace.
        """
        B, H, I, _J = self.shape
        size = WORKSPACE // (B * H * self._bytes_per_weight)
        top, height = 0, TILE[0]
        while top < I:
            rows, any_allowed = self._range_of_rows(top, height)
            while height > 1 and height * min(len(any_allowed), TILE[1]) > size:
                height //= 2
                rows, any_allowed = self._range_of_rows(top, height)
            yield rows, any_allowed, self._spans("all_allowed", rows)
            top, height = rows.stop, min(2 * height, TILE[0])

    def _range_of_rows(self, top: int, height: int) -> tuple[slice, Spans]:
        rows = slice(top, min(top + height, self.shape[2]))
        return rows, self._spans("any_allowed", rows).gaps_up_to(GAP)

    def _spans(self, question: str, rows: slice) -> Spans:
        """The mask's answer for a range of queries, as indices of keys."""
        mask, positions = self.attention.mask, self.positions
        if mask is None:
            return Spans.of((0, self.shape[3]))
        return positions.columns(getattr(mask, question)(rows.start + positions.start, rows.stop + positions.start))

    def _tile_scores(self, rows: slice, cols: slice, undecided: Spans) -> Tensor:
        """Scores of a tile. The mask is evaluated only for `undecided` keys; all queries may attend to the others."""
        self._check_unchanged()
        grid, mask = self.grid.tile(rows, cols), self.attention.mask
        s = scores(self.attention, self._prepared.tile(rows, cols), grid, masked=False)
        if not makes_new_scores(self.attention):
            s = s.clone()  # the weights overwrite the scores
        if mask is None:
            return s
        for first, last in undecided:
            part = slice(first - cols.start, last - cols.start)
            forbidden = ~mask.allowed(grid.tile(slice(None), part))
            s[..., part] = s[..., part].masked_fill(forbidden, self.attention.normalizer.masked_score)
        return s

    def entropy(self) -> Tensor:
        """-sum_j w log w of every row, in nats; (B, H, I)."""
        return self.summarize(Entropy())[0]

    def top(self, k: int = 1) -> Links:
        """The k largest weights of every row and their keys; (B, H, I, k) each."""
        return self.summarize(TopLinks(k))[0]

    def received(self) -> Tensor:
        """The weight that each key receives, summed over queries; (B, H, J)."""
        return self.summarize(KeyTotals())[0]

    def distance(self) -> Tensor:
        """The mean distance |i - j| of every query to its keys, weighted, in positions; (B, H, I)."""
        return self.summarize(Distance())[0]

    def mass(self, keys: Tensor | list[int]) -> Tensor:
        """The weight of every query on selected keys (indices or booleans); (B, H, I)."""
        return self.summarize(MassOn(keys))[0]

    def pool(self, rows: int = 64, cols: int = 64) -> Tensor:
        """The whole map as rows x cols cells; (B, H, rows, cols)."""
        return self.summarize(Pool(rows, cols))[0]

    def similarity(self) -> Tensor:
        """Cosine between the maps of every two heads; (B, H, H)."""
        return self.summarize(Similarity())[0]

    def show(self, tokens: Sequence[str] | None = None, queries: Sequence[str] | None = None, batch: int = 0) -> Any:
        """Show the map in a notebook; needs `pip install 'regard[view]'`.

        `tokens` are the tokens of the keys; `queries` the tokens of the queries, if they differ.
        """
        return viewer_part("widget").show_map(self, tokens, queries, batch)

    def __repr__(self) -> str:
        B, H, I, J = self.shape
        return f"AttentionMap({B} x {H} heads x {I} queries x {J} keys)"


def _cut(spans: Spans, width: int) -> Iterator[slice]:
    """The ranges, cut into slices of about equal size and at most `width`."""
    for first, last in spans:
        num_slices = -(-(last - first) // width)
        for n in range(num_slices):
            yield slice(first + (last - first) * n // num_slices, first + (last - first) * (n + 1) // num_slices)
