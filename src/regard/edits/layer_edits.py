"""The edits of one layer: the pairs that they select, as masks, biases and functions of a tile, and the edited map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.attention import Attention
from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import to_device, widest_float
from regard.base.spans import EVERYTHING, Spans
from regard.edits.values import AddToScores, KnockOut, ReplaceWeights, ScaleWeights, check_sums
from regard.edits.where import EVERY, Indices, Where
from regard.maps.attention_map import AttentionMap
from regard.maps.changed_map import ChangedMap
from regard.maps.gradients import LiveRows, mapped_rows
from regard.maps.indices import Index
from regard.pieces.bias import AdditiveBias
from regard.pieces.grid import Grid
from regard.pieces.mask import Mask
from regard.stats.numbering import layer_number

# The pairs that an edit selects in one layer, as a mask that forbids them and as a bias that adds to their scores.


@dataclass(frozen=True)
class Pairs:
    """Heads, queries, keys and batch entries: every query of the set with every key of the set.

    Queries and keys are numbered in the whole sequence. An attention may number them otherwise (a window of a cache):
    the number of a query is its position + `query_shift`, that of a key its position + `key_shift`.
    """

    heads: Indices = EVERY
    queries: Indices = EVERY
    keys: Indices = EVERY
    query_shift: int = 0
    key_shift: int = 0
    batch: Indices = EVERY

    @classmethod
    def of(cls, where: Where, heads: Indices, num_batch: int) -> list[Pairs]:
        """What an edit selects in these heads, once for each set of batch entries with the same queries and keys."""
        return [cls(heads, queries, keys, batch=batch) for batch, queries, keys in where.token_sets(num_batch)]

    def rows(self, grid: Grid) -> Tensor:
        """For each row of a tile, whether its entry, its head and its query are selected: (B or 1, H or 1, I, 1)."""
        rows = self.queries.contain(grid.i + self.query_shift)
        for chosen, numbers in ((self.heads, grid.h), (self.batch, grid.b)):
            rows = rows if chosen.is_everything else chosen.contain(numbers) & rows
        return rows

    def columns(self, grid: Grid) -> Tensor:
        """For each key of a tile, whether it is selected: (1, 1, 1, J)."""
        return self.keys.contain(grid.j + self.key_shift)

    def cells(self, grid: Grid) -> Tensor:
        """For each pair of a tile, whether it is selected: (B or 1, H or 1, I, J)."""
        return self.rows(grid) & self.columns(grid)


@dataclass(frozen=True)
class KnockedOut(Mask):
    """All pairs but the selected ones.

    >>> import regard as rg
    >>> pairs = Pairs(queries=Indices.of(2), keys=Indices.of(0, 1))
    >>> KnockedOut(pairs).dense(3).int().tolist()
    [[1, 1, 1], [1, 1, 1], [0, 0, 1]]
    """

    pairs: Pairs

    @property
    def batched(self) -> bool:  # type: ignore[override]
        return not self.pairs.batch.is_everything

    def allowed(self, grid: Grid) -> Tensor:
        return ~self.pairs.cells(grid)

    def any_allowed(self, start: int, stop: int) -> Spans:
        # too large is right: a key is left out only if it is selected for all heads, entries and queries
        pairs, queries = self.pairs, Spans.of((start, stop)).shift(self.pairs.query_shift)
        if pairs.heads.is_everything and not self.batched and pairs.queries.core().covers(queries):
            return ~pairs.keys.core().shift(-pairs.key_shift)
        return EVERYTHING

    def all_allowed(self, start: int, stop: int) -> Spans:
        # too small is right: a key is in only if it is selected for no head, entry and query
        pairs, queries = self.pairs, Spans.of((start, stop)).shift(self.pairs.query_shift)
        if not pairs.queries.hull() & queries:
            return EVERYTHING
        return ~pairs.keys.hull().shift(-pairs.key_shift)

    def __repr__(self) -> str:
        return "knocked-out pairs"


@dataclass(frozen=True)
class AddedToScores(AdditiveBias):
    """A number that is added to the scores of the selected pairs."""

    pairs: Pairs
    amount: float

    def term(self, grid: Grid, rows: Tensor | None, cols: Tensor | None) -> Tensor:
        return self.pairs.cells(grid).to(widest_float(grid.device)) * self.amount


# What the edits of one layer do to the scores and the weights of a tile; nothing here knows a model.


#: The largest weight on a forbidden key that is rounding.
ROUNDING = 1e-6

PairEdit = KnockOut | ScaleWeights | AddToScores | ReplaceWeights


@dataclass(frozen=True)
class EditedTile:
    """A tile whose weights are edited: its coordinates, those of the whole map, and the mask of the attention.

    `row_sum` is the sum of each row of weights (1 for softmax without a sink); None if rows have different sums.
    """

    grid: Grid
    whole: Grid
    mask: Mask | None
    row_sum: float | None

    @property
    def whole_rows(self) -> Grid:
        """The rows of the tile with all their keys."""
        return replace(self.grid, key=self.whole.key, positions=None)

    def allowed(self, grid: Grid) -> Tensor:
        """For each pair, whether the mask allows it; broadcasts against the tile."""
        if self.mask is None:
            return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=grid.device)
        return self.mask.allowed(grid)


@dataclass(frozen=True, eq=False)
class LayerEdit:
    """One edit, the pairs that it selects in one layer, and the weights that `ReplaceWeights` gives to this layer.

    The `given` weights are a tensor of rows, the map of another run or "uniform"; None for other edits. `given_for` are
    the batch entries of a given tensor or map, in their order, if it has only those that the edit selects.
    """

    edit: PairEdit
    pairs: Pairs
    given: Tensor | str | AttentionMap | None = None
    given_for: Indices | None = None

    @property
    def is_of_scores(self) -> bool:
        """Whether it acts before the softmax."""
        return isinstance(self.edit, AddToScores) or (isinstance(self.edit, KnockOut) and self.edit.renormalize)

    @property
    def gives_negative(self) -> bool:
        """Whether weights that are not negative may become so."""
        if isinstance(self.edit, ScaleWeights):
            return self.edit.factor < 0
        return isinstance(self.given, AttentionMap) and self.given.is_signed

    @property
    def keeps_shares(self) -> bool:
        """Whether rows that are shares remain shares.

        A knock-out after the softmax loses weight. Given rows are checked to sum to 1.
        """
        if isinstance(self.edit, ScaleWeights):
            return self.edit.factor == 1
        return (
            self.given.has_shares
            if isinstance(self.given, AttentionMap)
            else (self.is_of_scores or isinstance(self.edit, ReplaceWeights))
        )

    def weights(self, weights: Tensor, tile: EditedTile) -> Tensor:
        """The weights (B, H, I, J) of a tile after an edit of weights.

        With "uniform" weights the allowed and selected keys of a row share it equally. A row without such a key stays.
        """
        edit, pairs = self.edit, self.pairs
        if isinstance(edit, KnockOut):
            return weights.masked_fill(pairs.cells(tile.grid), 0.0)
        if isinstance(edit, ScaleWeights):
            return torch.where(pairs.cells(tile.grid), weights * edit.factor, weights)
        rows = pairs.rows(tile.grid)
        if not bool(rows.any()):
            return weights
        if not isinstance(self.given, str):
            return torch.where(rows, self._given_weights(tile).to(weights.dtype), weights)
        whole = tile.whole_rows
        shared = (tile.allowed(whole) & pairs.columns(whole)).expand(-1, -1, -1, len(whole.key))
        num_shared = shared.sum(-1, keepdim=True)
        here = (tile.allowed(tile.grid) & pairs.columns(tile.grid)).to(weights.dtype)
        return torch.where(rows & (num_shared > 0), here / num_shared.clamp_min(1), weights)

    def _given_weights(self, tile: EditedTile) -> Tensor:
        """The given weights of a tile, (B or 1, H, I, J), with zeros in rows that are not replaced."""
        pairs, entries = self.pairs, self.pairs.batch.contain(tile.grid.batch)
        tile = replace(tile, grid=replace(tile.grid, batch=tile.grid.batch[entries]))  # of the selected entries
        grid = tile.grid
        chosen, heads = pairs.queries.contain(grid.query + pairs.query_shift), pairs.heads.contain(grid.head)
        rows = self._given_rows(tile, grid.head[heads], grid.query[chosen] + pairs.query_shift)
        self._check_rows(tile, rows, heads, chosen)
        columns, J = grid.key + pairs.key_shift, rows.shape[-1]
        rows = rows[..., columns.clamp_max(J - 1)] * (columns < J)  # no query may attend to the keys from J on
        table = rows.new_zeros(len(rows), len(heads), len(chosen), len(columns))
        table[:, heads.nonzero(), chosen.nonzero()[:, 0]] = rows
        if len(table) == 1 or len(grid.batch) == len(entries):
            return table
        return table.new_zeros(len(entries), *table.shape[1:]).index_put((entries,), table)

    def _given_rows(self, tile: EditedTile, heads: Tensor, queries: Tensor) -> Tensor:
        """The given weights of these heads and queries, with all keys: (B or 1, heads or 1, queries, J).

        Queries are numbered in the whole sequence. A map of another run has rows of all heads and queries. A tensor
        has those of the selected ones, in their order; a tensor of one axis is the row of all of them.
        """
        given, pairs, batch = self.given, self.pairs, tile.grid.batch
        if isinstance(given, AttentionMap):
            head_index, row_index = heads, queries
        else:
            assert isinstance(given, Tensor)
            head_index, row_index = pairs.heads.rank(heads), pairs.queries.rank(queries) * (given.ndim > 1)
            given = given.reshape((1,) * (4 - given.ndim) + tuple(given.shape))
        B, H, R, _ = given.shape
        _check_count("heads", H, int(head_index.max()))
        batch = batch if self.given_for is None else self.given_for.rank(batch)
        _check_count("batch entries", B, int(batch.max()))
        if (last_row := int(row_index.max())) >= R:
            raise RegardError(self._too_few_rows(R, last_row))
        one = torch.zeros_like(batch[:1])  # weights of one entry or head are those of all
        index = one if B == 1 else batch, one if H == 1 else head_index, row_index
        if isinstance(given, AttentionMap):
            batches, heads, rows = (part.cpu() for part in index)
            return given.tile(batches, heads, rows).to(batch.device)
        return given[tuple(part.to(given.device) for part in torch.meshgrid(*index, indexing="ij"))].to(batch.device)

    def _too_few_rows(self, num_rows: int, needed: int) -> str:
        """The error of a run that needs row number `needed`: one row does not serve all queries, as one head does."""
        assert isinstance(self.given, Tensor | AttentionMap)
        shape, of_tensor = tuple(self.given.shape), isinstance(self.given, Tensor)
        one_row = f"a row for each, a tensor of shape ({shape[-1]},) as the row of all"
        return (
            f"ReplaceWeights: the given weights have the shape {shape} with {num_rows} row{'s' * (num_rows != 1)}, and "
            f"this run needs number {needed} (from 0 on), because each selected query has its own row. Give "
            f"{one_row if of_tensor else 'the map of a run of the same length'}, or select fewer: Where(queries=...)."
        )

    def _check_rows(self, tile: EditedTile, rows: Tensor, heads: Tensor, chosen: Tensor) -> None:
        """Refuse rows of another length, with another sum, or with weight on keys that the mask forbids.

        `rows` are the result of `_given_rows`, with the keys 0 to J - 1 of the whole sequence. `heads` (H,) and
        `chosen` (I,) say which heads and queries of the tile have them. Sums are checked of a tensor only: a given map
        knows whether its rows are shares.
        """
        keys, J = tile.whole.key + self.pairs.key_shift, rows.shape[-1]
        allowed = tile.allowed(replace(tile.whole_rows, query=tile.grid.query[chosen]))
        allowed = (allowed if allowed.shape[1] == 1 else allowed[:, heads]).expand(-1, -1, -1, len(keys))
        if bool(allowed[..., keys >= J].any()):
            raise RegardError(
                f"ReplaceWeights: rows of {J} keys were given, and a query of this run may attend to key "
                f"{int(keys.max())}. Give weights of a run of the same length."
            )
        if isinstance(self.given, Tensor) and tile.row_sum == 1:
            check_sums(rows)
        inside = keys[keys < J]
        # the weight of a row outside of the keys that its query may attend to
        lost = rows.sum(-1) - (rows[..., inside] * allowed[..., keys < J]).sum(-1)
        if float(lost.detach().max()) > ROUNDING:
            raise RegardError(
                "ReplaceWeights: the given rows have weight on keys that the mask forbids (later tokens, padding, keys "
                "outside of a window or knocked out). Set them to 0 and divide each row by its sum."
            )


def _check_count(what: str, count: int, last: int) -> None:
    """Refuse a run that needs the weights of a head or an entry (`what`) beyond the given ones; one serves all."""
    if count > 1 and last >= count:
        raise RegardError(
            f"ReplaceWeights: weights of {count} {what} were given, and this run needs number {last}. Give weights of "
            "a run of the same size, or select fewer: Where(queries=..., heads=...)."
        )


@dataclass(frozen=True, eq=False)
class LayerEdits:
    """All edits of one layer, in order."""

    edits: tuple[LayerEdit, ...]

    @property
    def changes_weights(self) -> bool:
        """Whether weights change after the softmax."""
        return any(not edit.is_of_scores for edit in self.edits)

    def attention(self, attention: Attention) -> Attention:
        """The attention with the edits of scores: masks and biases."""
        mask, biases = attention.mask, [*attention.bias]
        for edit in self.edits:
            if isinstance(edit.edit, AddToScores):
                biases.append(AddedToScores(edit.pairs, edit.edit.amount))
            elif edit.is_of_scores:
                knocked_out = KnockedOut(edit.pairs)
                mask = knocked_out if mask is None else mask & knocked_out
        edited = attention.with_mask(mask)
        edited.bias = biases
        return edited

    def weights(self, weights: Tensor, tile: EditedTile) -> Tensor:
        """The weights of a tile after the edits of weights."""
        for edit in self.edits:
            if not edit.is_of_scores:
                weights = edit.weights(weights, tile)
        return weights

    def shifted(self, query_shift: int, key_shift: int) -> LayerEdits:
        """The same edits for an attention whose positions are lower by these shifts."""
        return LayerEdits(
            tuple(
                replace(edit, pairs=replace(edit.pairs, query_shift=query_shift, key_shift=key_shift))
                for edit in self.edits
            )
        )


def layer_edits(edit: PairEdit, pairs: list[Pairs], path: str, num_batch: int) -> list[LayerEdit]:
    """An edit in the layer with this module path, once for each part of the batch that `Pairs.of` made.

    `ReplaceWeights` gives weights to the layer: a tensor, a map or "uniform".
    """
    given = of_layer("ReplaceWeights", edit.weights, path) if isinstance(edit, ReplaceWeights) else None
    shape, entries = getattr(given, "shape", ()), edit.where.entries(num_batch)
    if len(shape) == 4 and shape[0] not in (1, num_batch, len(entries)):
        raise RegardError(
            f"ReplaceWeights: weights of {shape[0]} batch entries were given, and the run has {num_batch}. Give "
            "one, as many, or one for each entry that Where(batch=...) selects."
        )
    given_for = Indices.of(*entries) if len(shape) == 4 and shape[0] not in (1, num_batch) else None
    return [LayerEdit(edit, part, given, given_for) for part in pairs]


def of_layer(edit: str, given: Any, path: str) -> Any:
    """What belongs to one layer: a mapping has it by the number of the layer or by the module path.

    Anything else that was given belongs to all layers. `edit` is the class of the edit, for the error.
    """
    if not isinstance(given, Mapping):
        return given
    layer = layer_number(path)
    for name in (path, layer, str(layer)):
        if name in given:
            return given[name]
    raise RegardError(f"{edit}: what was given has no layer {path!r}. It has {', '.join(map(str, given)) or 'none'}.")


@dataclass(frozen=True, eq=False)
class CallEdits:
    """The edits of one call. Its first query has the number `start` in the whole sequence, its first key `first`."""

    edits: LayerEdits
    start: int
    first: int

    def placed(self, positions: Positions) -> LayerEdits:
        """The edits for an attention with these positions."""
        return self.edits.shifted(self.start - positions.start, self.first - positions.keys.intervals[0][0])

    def and_then(self, edits: LayerEdits) -> CallEdits:
        """These edits, then others."""
        return replace(self, edits=LayerEdits((*self.edits.edits, *edits.edits)))


# `EditedMap`: the weights of an attention after edits of its weights.


class EditedMap(ChangedMap):
    """The weights of another map, scaled, replaced or removed where edits say so; computed on demand.

    >>> import torch, regard as rg
    >>> from regard.edits.layer_edits import LayerEdit
    >>> from regard.edits.layer_edits import Pairs
    >>> x, half = torch.zeros(1, 1, 2, 4), rg.edits.ScaleWeights(rg.Where(keys=0), 0.5)
    >>> pairs = Pairs(keys=half.where.indices("keys"))
    >>> EditedMap(rg.Attention()(x, x, x).weights, LayerEdits((LayerEdit(half, pairs),)))[0, 0, 1]
    tensor([0.2500, 0.5000])
    """

    def __init__(self, source: AttentionMap, edits: LayerEdits) -> None:
        super().__init__(source)
        self.edits = edits

    @property
    def is_signed(self) -> bool:  # type: ignore[override]
        return self.source.is_signed or any(edit.gives_negative for edit in self.edits.edits)

    @property
    def has_shares(self) -> bool:  # type: ignore[override]
        return self.source.has_shares and all(edit.keeps_shares for edit in self.edits.edits)

    @property
    def _bytes_per_weight(self) -> int:
        return 3 * self.source._bytes_per_weight  # weights of the source, what replaces them, and the result

    @checked
    def select(self, batch: Index, head: Index) -> EditedMap:
        """The map of some batch entries and heads (indices), still lazy."""
        return EditedMap(self.source.select(batch, head), self.edits)

    def live_rows(self) -> LiveRows:
        return mapped_rows(
            self.source.live_rows(), lambda weights, i, keys: self._edited(weights, i, keys.tensor("cpu"))
        )

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        return self._edited(self.source._weights(rows, cols), rows, cols)

    def _edited(self, weights: Tensor, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        """The weights of a tile of the source (indices of its rows and columns) after the edits."""
        i = rows if isinstance(rows, slice) else to_device(rows, self.device)
        j = cols if isinstance(cols, slice) else to_device(cols, self.device)
        grid = replace(self.grid, query=self.grid.query[i], key=self.grid.key[j], positions=None)
        tile = EditedTile(grid, self.grid, self.attention.mask, self.attention.normalizer.row_sum)
        return self.edits.weights(weights, tile)
