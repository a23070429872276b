"""`ScoredMap`: any weight w_ij = f(s_ij, r_i), computed on demand from queries, keys and row statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from types import MappingProxyType
from typing import ClassVar, TypeGuard

import torch
from torch import Tensor

from regard.attention import Attention, Prepared, hides_gradients, makes_new_scores, scores, snapshot_around
from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes, as_slice, at_least_float32, to_device, without_autocast
from regard.base.spans import Spans
from regard.engine.blocks import blocks
from regard.engine.kernel import KernelProblem
from regard.engine.rows import StatisticBuffer, with_remainder
from regard.engine.transforms import HIDDEN_GRADIENTS
from regard.maps import attention_map, passes
from regard.maps.attention_map import AttentionMap, RecomputedMap, TileKeys
from regard.maps.gradients import LiveRows, Rows
from regard.maps.indices import Index
from regard.maps.reductions import Reduction, State, Tile, check_reductions
from regard.maps.step_table import score_steps
from regard.pieces.contents import Originals, split_tensors, tensor_snapshot, versions_of
from regard.pieces.convolution import Taps
from regard.pieces.grid import Grid
from regard.pieces.mask import causal, window
from regard.pieces.normalizer import Normalizer, RowStatistic, Unnormalized, any_coarse
from regard.pieces.score import Dot, dot_scale, scale_of_heads

#: If a range of queries has more tiles, their scores are not kept: they are computed again after the row statistic.
STRIP = 32
#: The errors of the backward pass of weights that can be read, but have no gradients.
CHANGED = (
    "weights: parameters were changed in place since attend ran (by an optimizer step, perhaps). The map still answers "
    "with the weights before the change, but they have no gradients any more. Call backward() before the change, or "
    "attend again."
)
NOT_DIFFERENTIABLE = (
    "weights: the pieces compute scores without derivatives (.detach(), .item(), NumPy or torch.no_grad() inside a "
    "piece), so no gradient reaches queries, keys or parameters. Use operations of torch that have derivatives, or "
    "read weights.detach()."
)


class ScoredMap(RecomputedMap):
    """The weights w_ij = f(s_ij, r_i) of an attention with scores: from queries, keys and one statistic per row.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> rg.Attention(mask=rg.causal())(x, x, x).weights[0, 0, 1]
    tensor([0.5000, 0.5000, 0.0000])
    """

    #: Whether the map has all keys of its rows. The parts of a ring have some.
    _has_whole_rows = True

    _stale: ClassVar[str] = (
        "weights: queries, keys or parameters were changed in place since attend ran (by an optimizer step, perhaps), "
        "so the weights cannot be recomputed. Read them before the change, or call attend again."
    )

    #: The states of reductions that the kernel computed with the output.
    known_states: Mapping[Reduction, State] = MappingProxyType({})

    def __init__(
        self,
        attention: Attention,
        prepared: Prepared,
        positions: Positions,
        extent: Grid | Sizes,
        row_statistic: RowStatistic | None,
        originals: Originals | None = None,
    ) -> None:
        """`extent`: the coordinates of the queries and keys, or the sizes of a whole call.

        `originals`: the tensors of the pieces, if `attention` is a snapshot of them.
        """
        if attention.shared is None:
            originals = Originals.of(*split_tensors(attention))
            attention = snapshot_around(list(map(tensor_snapshot, originals.tensors)), originals.template)
        self.attention, self.positions = attention, positions
        self._prepared = prepared.detach()
        self._live = _live(self.attention, prepared, originals)
        if isinstance(extent, Grid):
            self.grid = extent
        else:
            self._sizes = extent
        self._row_statistic = row_statistic
        self._versions = versions_of(self._shared_tensors())

    def _shared_tensors(self) -> tuple[Tensor, ...]:
        return (*self._prepared.tensors(), *(self.attention.shared or ()))

    @property
    def is_signed(self) -> bool:  # type: ignore[override]
        return self.attention.normalizer.is_signed

    @property
    def has_shares(self) -> bool:  # type: ignore[override]
        return self.attention.normalizer.has_shares

    @cached_property
    def grid(self) -> Grid:
        """The coordinates of the queries and keys."""
        return Grid.whole(self.positions, self._sizes.B, self._sizes.H, self._sizes.I, self._prepared.query.device)

    @property
    def query(self) -> Tensor:
        return self._compared().query

    @property
    def key(self) -> Tensor:
        return self._compared().key

    def _compared(self) -> Prepared:
        """The tensors that the score compares, with their graphs if the map has them."""
        self._check_unchanged()
        return self._prepared if self._live is None else self._live[0]

    @property
    def score_width(self) -> int:
        """The width D of the vectors that the score compares."""
        return self._prepared.query.shape[-1]

    def _score_steps(self, batch: int, head: int, query: int) -> dict[str, Tensor]:
        one = self.select([batch], [head])
        assert isinstance(one, ScoredMap)
        place = slice(query, query + 1), slice(0, self.shape[3])
        return score_steps(one.attention, one._prepared.tile(*place), one.grid.tile(*place))

    @cached_property
    @torch.no_grad()
    def row_statistic(self) -> RowStatistic:
        """The row statistic, (B, H, I, ...) each: for softmax the log-sum-exp in nats and its rounding error."""
        self._check_unchanged()
        if self._row_statistic is not None:
            return with_remainder(self.attention, self._prepared, self.positions, self.grid, self._row_statistic)
        if 0 in self.shape:
            return self._empty_statistic(self.attention.normalizer, self.shape[2])
        terms = self._compiled_terms()
        if terms is not None and (logsumexp := passes.logsumexp(terms)) is not None:
            return with_remainder(self.attention, self._prepared, self.positions, self.grid, (logsumexp,))
        return self._statistic_of_parts() if self._has_mergeable_rows else self._statistic_of_whole_rows()

    @property
    def _has_mergeable_rows(self) -> bool:
        return self.attention.normalizer.merge_refusal is None

    def _empty_statistic(self, normalizer: Normalizer, num_rows: int) -> RowStatistic:
        """The statistic of so many rows without keys."""
        like = self._prepared.query.new_empty((*self.shape[:2], num_rows), dtype=self._dtype)
        return normalizer.empty_statistic(like)

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return at_least_float32(self._prepared.query).dtype

    def _statistic_of_parts(self) -> RowStatistic:
        """The row statistic, merged from the statistics of the tiles of each row."""
        collected = StatisticBuffer(self.shape[0], self.shape[2])
        for rows, parts in self._strips():
            tile_scores = (self._tile_scores(rows, *part) for part in parts)
            collected.write(rows, self._merged_statistic(rows, parts, tile_scores))
        return collected.tensors()

    def _merged_statistic(self, rows: slice, parts: list[TileKeys], scores: Iterable[Tensor]) -> RowStatistic:
        """The row statistic of some queries, merged from the statistics of their tiles."""
        normalizer, part_normalizer = self.attention.normalizer, self.attention.normalizer.of_part()
        of_no_key = self._empty_statistic(part_normalizer, rows.stop - rows.start)
        statistics = map(part_normalizer.row_statistic, scores, map(self._columns, parts))
        return normalizer.finish(reduce(part_normalizer.merge, statistics, of_no_key))

    def _statistic_of_whole_rows(self) -> RowStatistic:
        """A statistic that needs all scores of a row at once, such as a threshold."""
        B, H, I, J = self.shape
        size = max(1, min(attention_map.TILE[0], attention_map.WORKSPACE // (B * H * J * self._bytes_per_weight)))
        collected = StatisticBuffer(B, I)
        for block in blocks(self.attention.mask, self.positions, I, size):
            columns = block.columns.tensor(self.device)
            tile, grid = self._prepared.tile(block.rows, columns), self.grid.tile(block.rows, columns)
            s = scores(self.attention, tile, grid, masked=not block.full)
            collected.write(block.rows, self.attention.normalizer.row_statistic(s, columns))
        return collected.tensors()

    @property
    def _bytes_per_weight(self) -> int:
        return self._item_bytes * (2 * self.attention.score.floats_per_score + 4)

    @checked
    def select(self, batch: Index, head: Index) -> AttentionMap:
        """The map of some batch entries and heads (indices), still lazy."""
        self._check_unchanged()
        batch, head = self._selected_indices(batch, head)
        near = to_device(batch, self.device), to_device(head, self.device)
        grid = replace(self.grid, batch=self.grid.batch[near[0]], head=self.grid.head[near[1]])
        row_statistic = tuple(t[near[0]][:, near[1]] for t in self.row_statistic)
        prepared, originals = self._live or (self._prepared, None)
        return ScoredMap(
            self.attention.of_heads(near[1]),
            prepared.select(batch, head),
            self.positions,
            grid,
            row_statistic,
            None if originals is None else _of_heads(originals, near[1]),
        )

    @cached_property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether weights, tiles and reductions of this map are in the autograd graph."""
        if self._live is None:
            return False
        prepared, originals = self._live
        return any(t.requires_grad for t in (*prepared.tensors(), *originals.tensors)) or self._hides_gradients

    @cached_property
    def _hides_gradients(self) -> bool:
        """Whether a piece depends on a tensor that requires gradients but is not stored in the piece."""
        if self._live is None or 0 in self.shape:
            return False
        originals = self._live[1]
        with torch.enable_grad():
            return hides_gradients(originals.template, originals.tensors, self._prepared, self.grid)

    def live_rows(self) -> LiveRows:
        """Rows by the scores of the queries, keys and pieces with their graphs; kernels may know their gradients."""
        self._check_unchanged()
        if self._refusal is not None:
            return super().live_rows()
        prepared, originals = self._live or (self._prepared, Originals.of(*split_tensors(self.attention)))
        if originals.are_changed:
            return LiveRows.refused(CHANGED)
        if self._hides_gradients:
            return LiveRows.refused(f"weights: {HIDDEN_GRADIENTS}.")
        count = len(prepared.tensors())

        def around(tensors: Sequence[Tensor]) -> Rows:
            """The rows of weights from other tensors: first those of `prepared`, then those of the pieces."""
            attention, inputs = originals.template.around(tensors[count:]), prepared.with_tensors(tensors[:count])

            def rows(queries: slice | Tensor, keys: Spans) -> tuple[Tensor, Tensor | None]:
                """Weights (B, H, I', J') and their logarithms: see `Rows`."""
                columns = keys.tensor(self.device)
                i, j = _on_device(queries, self.device), as_slice(keys.tensor("cpu"))
                s = scores(attention, inputs.tile(i, columns if j is None else j), self.grid.tile(i, keys))
                # without keys, as before the first whole group of keys, there is nothing to normalize
                weights = attention.normalizer.rows_with_logs(s, columns) if s.shape[-1] else (s, None)
                if torch.is_grad_enabled() and not weights[0].requires_grad and originals.template.is_foreign:
                    raise RegardError(NOT_DIFFERENTIABLE)
                return weights

            return rows

        def compiled(tensors: Sequence[Tensor], states: dict[Reduction, State]) -> dict[Reduction, State]:
            """Those of the states whose gradients the kernels compute, in the graph of these tensors."""
            attention, inputs = originals.template.around(tensors[count:]), prepared.with_tensors(tensors[:count])
            terms = passes.terms_of_map(attention, inputs, self.positions, self.grid)
            return {} if terms is None else passes.differentiable(terms, self.row_statistic[0], states)

        is_compiled = type(self) is ScoredMap
        return LiveRows([*prepared.tensors(), *originals.tensors], around, None, compiled if is_compiled else None)

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        """Weights of a tile (B, H, I', J'): slices, or indices on the host; the indices of keys ascend."""
        self._check_unchanged()
        i, j = _on_device(rows, self.device), _on_device(cols, self.device)
        columns = torch.arange(self.shape[3], device=self.device)[j]
        # the keys as spans too, which tell the grid their positions on the host
        single_keys = cols.tolist() if isinstance(cols, Tensor) and isinstance(j, Tensor) else []
        keys = Spans.of((j.start, j.stop)) if isinstance(j, slice) else Spans.union((n, n + 1) for n in single_keys)
        row_statistic = tuple(t[:, :, i] for t in self.row_statistic)
        if self._are_coarse(row_statistic):
            return torch.cat([self._weights_of_whole_rows(part)[..., j] for part in self._parts_of(rows)], 2)
        s = scores(self.attention, self._prepared.tile(i, j), self.grid.tile(i, keys))
        return self.attention.normalizer.weights(s, row_statistic, columns)

    @cached_property
    def _has_coarse_rows(self) -> bool:
        """Whether a row is coarse; False for tensors on a device, for whose answer the host would wait."""
        is_relative = self._has_whole_rows and self.attention.normalizer.is_relative
        return is_relative and self.device.type == "cpu" and any_coarse(self.row_statistic[0])

    def _are_coarse(self, row_statistic: RowStatistic) -> bool:
        """Whether one of these rows is coarse: a tile of another shape rounds its scores to quite other numbers."""
        return self._has_coarse_rows and any_coarse(row_statistic[0])

    def _parts_of(self, rows: Tensor | slice) -> Sequence[Tensor]:
        """These rows, as indices on the host, in parts whose scores fit in the workspace."""
        indices = torch.arange(self.shape[2])[rows] if isinstance(rows, slice) else rows
        return indices.split(max(1, attention_map.WORKSPACE // self._row_bytes))

    def _weights_of_whole_rows(self, rows: Tensor) -> Tensor:
        """The weights of these rows on all keys, by the statistic of the scores that are computed here."""
        i, keys = _on_device(rows, self.device), slice(0, self.shape[3])
        columns, normalizer = torch.arange(keys.stop, device=self.device), self.attention.normalizer
        s = scores(self.attention, self._prepared.tile(i, keys), self.grid.tile(i, Spans.of((0, keys.stop))))
        row_statistic = normalizer.restated(s, tuple(t[:, :, i] for t in self.row_statistic), columns)
        return normalizer.weights(s, row_statistic, columns)

    @torch.no_grad()
    def reduction_states(self, reductions: Iterable[Reduction]) -> dict[Reduction, State]:
        """The state of each reduction; the compiled kernels compute the reductions that they know, tiles compute the
        others.
        """
        reductions = check_reductions(reductions, self)
        known = {reduction: self._known(reduction) for reduction in reductions if reduction in self.known_states}
        states = {r: r.init(self.shape, self.device) for r in reductions if r not in known}
        done: set[Reduction] = set()
        with without_autocast(self.device):
            if any(map(passes.knows, states)) and (terms := self._compiled_terms()) is not None:
                done = passes.fill(terms, self.row_statistic[0], states)
            self._add_tiles({reduction: state for reduction, state in states.items() if reduction not in done})
        return {reduction: (known if reduction in known else states)[reduction] for reduction in reductions}

    def remember(self, states: Mapping[Reduction, State]) -> None:
        """Keep the states of reductions of this map, so that no pass computes them again."""
        self.known_states = states

    def _known(self, reduction: Reduction) -> State:
        """A copy of a state in `known_states`, which the caller may change."""
        self._check_unchanged()
        return [tensor.clone() for tensor in self.known_states[reduction]]

    def _add_tiles(self, states: dict[Reduction, State]) -> None:
        """Add every tile to every state. If no reduction reads weights, none is computed: all are 0."""
        if any(reduction.reads_weights for reduction in states) or type(self) is not ScoredMap:
            return super()._add_tiles(states)
        for tile in self._tiles_with(self._zeros_of_strip) if states else ():
            for reduction, state in states.items():
                reduction.add(state, tile)

    def _zeros_of_strip(self, rows: slice, parts: list[TileKeys]) -> Iterator[tuple[Tensor, None]]:
        """Zeros in place of the weights of each tile, as views of one number."""
        zero = torch.zeros((), dtype=torch.float32, device=self.device)
        for cols, _ in parts:
            yield zero.expand(*self.shape[:2], rows.stop - rows.start, cols.stop - cols.start), None

    def _compiled_terms(self) -> KernelProblem | None:
        """This map as the compiled kernels compute it; None if they cannot. Other kinds of maps have other weights."""
        if type(self) is not ScoredMap or 0 in self.shape:
            return None
        self._check_unchanged()
        return passes.terms_of_map(self.attention, self._prepared, self.positions, self.grid)

    @torch.no_grad()
    def tiles(self) -> Iterator[Tile]:
        """Every tile that may contain a weight above 0, row by row.

        If the row statistic is not known yet, it is computed from the same scores, which saves a pass.
        """
        collected = StatisticBuffer(self.shape[0], self.shape[2])
        yield from self._tiles_with(partial(self._weights_of_strip, collected=collected))
        if collected.is_complete:
            self.row_statistic = collected.tensors()

    def _weights_of_strip(  # type: ignore[override]
        self, rows: slice, parts: list[TileKeys], collected: StatisticBuffer
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Weights of each tile of these queries, and their logarithms (None if those are not cheap).

        `parts` has the keys of each tile, and those whose mask is undecided.

        If the row statistic of the map is not known and the scores of the strip fit in memory, its own scores give the
        statistic of these rows, and `collected` takes it.
        """
        fits = len(parts) <= (STRIP if self._has_mergeable_rows else 1)
        if self._row_statistic is not None or "row_statistic" in self.__dict__ or not fits:
            yield from self._weights_by_statistic(rows, parts)
        elif len(parts) == 1:
            s = self._tile_scores(rows, *parts[0])
            weights, logs, row_statistic = self.attention.normalizer.normalize_with_logs(s, self._columns(parts[0]))
            collected.write(rows, row_statistic)
            yield weights, logs
        else:
            tile_scores = [self._tile_scores(rows, *part) for part in parts]
            collected.write(rows, row_statistic := self._merged_statistic(rows, parts, tile_scores))
            for part, s in zip(parts, tile_scores, strict=True):
                yield self.attention.normalizer.tile_weights(s, row_statistic, self._columns(part))

    def _weights_by_statistic(self, rows: slice, parts: list[TileKeys]) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Weights of each tile, from the row statistic of the map (a pass over all tiles computes it, if need be).

        Coarse rows (`_are_coarse`) take another statistic, that of the scores as these tiles round them.
        """
        row_statistic = tuple(t[:, :, rows] for t in self.row_statistic)
        if self._are_coarse(row_statistic):
            if not self._has_mergeable_rows:
                yield from super()._weights_of_strip(rows, parts)
                return
            row_statistic = self._merged_statistic(rows, parts, (self._tile_scores(rows, *part) for part in parts))
        for part in parts:
            scores_of_part = self._tile_scores(rows, *part)
            yield self.attention.normalizer.tile_weights(scores_of_part, row_statistic, self._columns(part))

    def _columns(self, part: TileKeys) -> Tensor:
        """The key indices of a tile, (j,)."""
        return torch.arange(part[0].start, part[0].stop, device=self.device)

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


def _live(attention: Attention, prepared: Prepared, originals: Originals | None) -> tuple[Prepared, Originals] | None:
    """The tensors of a map with their graphs; None outside of grad mode, and if no gradient can reach one of them."""
    if not torch.is_grad_enabled():
        return None
    tensors, is_foreign = prepared.tensors(), False
    if originals is not None:
        tensors, is_foreign = tensors + originals.tensors, originals.template.is_foreign
    if not is_foreign and not any([t.requires_grad for t in tensors]):
        return None
    return prepared, originals or Originals.of(*split_tensors(attention))


def _of_heads(originals: Originals, head: Tensor) -> Originals:
    """The tensors of the pieces for some query heads."""
    pieces = originals.template.around(originals.tensors)
    if (selected := pieces.of_heads(head)) is pieces:
        return originals
    tensors, template = split_tensors(selected)
    return Originals(tensors, template, [-1] if originals.are_changed else versions_of(tensors))


def _on_device(index: Tensor | slice, device: torch.device) -> Tensor | slice:
    """An index of a tensor on a device; consecutive indices become a slice."""
    if isinstance(index, slice):
        return index
    return to_device(index, device) if (consecutive := as_slice(index)) is None else consecutive


# `convolution_map`: a convolution over a few tokens between two gates, as weights.


@dataclass(frozen=True, eq=False)
class Convolution:
    """o_i = out_i sum_r taps_r in_{i-r} v_{i-r}: `out_gate` (B, H, I) of the last I tokens, `in_gate` (B, H, J).

    `taps` (H, K) are the numbers of the convolution; taps_0 is that of the token itself. Each channel is a head.
    """

    out_gate: Tensor
    in_gate: Tensor
    taps: Tensor


def convolution_map(convolution: Convolution) -> ScoredMap:
    """w_ij = out_i taps_{i-j} in_j, for I queries that are the last of J tokens. Gated short convolutions (LFM2).

    >>> import torch
    >>> from regard.maps.scored_map import Convolution, convolution_map
    >>> ones = torch.ones(1, 1, 3)
    >>> convolution_map(Convolution(2 * ones, ones, torch.tensor([[1.0, 0.5]])))[0, 0]
    tensor([[2., 0., 0.],
            [1., 2., 0.],
            [0., 1., 2.]])
    """
    taps, gates = convolution.taps, (convolution.out_gate[..., None], convolution.in_gate[..., None])
    mask, normalizer = causal() & window(taps.shape[1]), Unnormalized()
    attention = Attention(Dot(1.0), bias=Taps(taps.detach()), mask=mask, normalizer=normalizer).eval()
    (B, H, I), J = convolution.out_gate.shape, convolution.in_gate.shape[2]
    positions = Positions.aligned_to_end(I, J)
    grid = Grid.whole(positions, B, H, I, taps.device)
    return ScoredMap(
        attention, Prepared(*gates, (None,), (None,)), positions, grid, normalizer.row_statistic(gates[0], grid.key)
    )


# Queries, keys and row statistics of maps with w_ij = exp(c q_i . k_j - r_i): the page computes weights from these.


def is_dot(weights: AttentionMap) -> TypeGuard[ScoredMap]:
    """Whether w_ij = exp(c q_i . k_j - r_i) for allowed pairs, with one mask for all heads and precise r_i.

    >>> import torch, regard as rg
    >>> x = torch.randn(1, 2, 3, 4)
    >>> is_dot(rg.Attention()(x, x, x).weights)
    True
    """
    if type(weights) is not ScoredMap:
        return False
    attention = weights.attention
    scale = dot_scale(attention.score, weights.score_width)
    is_plain = attention.normalizer.as_softmax is not None and not attention.bias
    has_one_mask = attention.mask is None or attention.mask.allowed(weights.grid.first_pair()).shape[1] == 1
    return scale is not None and is_plain and has_one_mask and not any_coarse(weights.row_statistic[0])


def dot_tensors(weights: ScoredMap) -> tuple[Tensor, Tensor, Tensor]:
    """c q (H, I, D), k (G, J, D) and r (H, I) of the first text of a map that `is_dot`; r is 0 where a row is empty."""
    prepared, attention = weights._prepared, weights.attention
    query = at_least_float32(prepared.query)
    scale = scale_of_heads(attention.score, query, weights.grid)
    softmax = attention.normalizer.as_softmax
    assert scale is not None and softmax is not None
    empty = weights.row_statistic[0].isneginf()
    return (
        (query[0] * (scale / softmax.temperature)).float(),
        prepared.key[0].float(),
        weights.row_statistic[0].masked_fill(empty, 0.0)[0].float(),
    )
