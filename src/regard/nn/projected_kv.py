"""Keys and values that are projected once and then read by many queries, one after another, as in decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.attention import Attention, Mechanism, Prepared, scores
from regard.attention_output import attend_editors
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.printing import folded_repr
from regard.base.shapes import Sizes, grouped_values, to_device, without_autocast
from regard.base.spans import Spans
from regard.engine.decoding import decode
from regard.engine.ring import Ring
from regard.engine.rows import attend_rows
from regard.maps import AttentionMap
from regard.maps.scored_map import ScoredMap
from regard.masks import Mask, causal
from regard.nn.listener import Attends, listeners
from regard.nn.module_output import ModuleOutput
from regard.normalizers import Softmax
from regard.pieces.contents import versions_of
from regard.pieces.grid import Grid
from regard.pieces.mask import sees_no_later_key
from regard.pieces.score import dot_scale

#: The normalizer for which a single query needs no engine.
PLAIN = Softmax()


@dataclass(frozen=True, eq=False)
class Rows:
    """Maps each row of queries to its source. Several rows may share a source, as the hypotheses of a beam do.

    `sources` (A,) are the numbers of the sources, and `index` (R,) the source of each row. The rows of a source become
    queries of one batch entry: the result is a grid of A x `width` queries. Row r is at `place[r]` of the flattened
    grid; `place` is None if the rows fill the grid.

    >>> import torch, regard as rg
    >>> rows = rg.nn.Rows.of(torch.tensor([0, 0, 1, 1, 1]))  # a beam of 2 and one of 3
    >>> query = torch.randn(5, 4, 1, 8)
    >>> rows.fold(query).shape, torch.equal(rows.unfold(rows.fold(query)), query)
    (torch.Size([2, 4, 3, 8]), True)
    """

    sources: Tensor
    width: int
    index: Tensor
    place: Tensor | None = None

    @staticmethod
    def of(index: Tensor) -> Rows:
        """From the source of each row, `index` (R,). Rows of one source must be neighbors."""
        index = index.cpu()
        # `entry`: for each row the place of its source in `sources`; `count`: the number of rows of each source
        sources, entry, count = index.unique_consecutive(return_inverse=True, return_counts=True)
        width = int(count.max()) if len(index) else 1
        if len(sources) * width == len(index):
            return Rows(sources, width, index)
        column = torch.arange(len(index), device="cpu") - (count.cumsum(0) - count)[entry]
        return Rows(sources, width, index, entry * width + column)

    def fold(self, query: Tensor) -> Tensor:
        """One query per row, (R, H, 1, D), to a grid, (A, H, width, D)."""
        _, H, _, D = query.shape
        if self.place is not None:
            grid = query.new_zeros(len(self.sources) * self.width, H, 1, D)
            query = grid.index_copy_(0, to_device(self.place, query.device), query)
        return query.reshape(len(self.sources), self.width, H, D).transpose(1, 2)

    def unfold(self, output: Tensor) -> Tensor:
        """The inverse of `fold`, (A, H, width, E) -> (R, H, 1, E)."""
        rows = output.transpose(1, 2).flatten(0, 1).unsqueeze(2)
        return rows if self.place is None else rows.index_select(0, to_device(self.place, rows.device))


@dataclass(frozen=True, eq=False)
class ProjectedKV:
    """Projected keys (B, G, J, D) and values (B, G, J, E) of one attention, with a mask of keys.

    The part of the score that depends on the keys alone (the projections of Bahdanau, the features of linear attention)
    is computed at the first single query and then reused. `mask` excludes keys: `padding(...)`. Several rows of queries
    may share a row of keys without a copy: `rows` maps queries to keys, and `each` is an equal value with a row of keys
    for every row of queries. `_prepared` holds the keys that `compared` has prepared: for grad mode and without it, the
    keys after their position encoding, and after the score.

    >>> import torch, regard as rg
    >>> attention = rg.nn.MultiHeadAttention(8, 2)
    >>> source, x = torch.randn(1, 5, 8), torch.randn(1, 1, 8)
    >>> keys = attention.keys(source)
    >>> keys.length, torch.allclose(attention(x, keys).output, attention(x, source).output, atol=1e-6)
    (5, True)
    """

    attention: Any  # a Mechanism
    key: Tensor
    value: Tensor
    mask: Mask | None = None
    rows: Rows | None = None
    _prepared: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    __repr__ = folded_repr

    @property
    def length(self) -> int:
        return self.key.shape[2]

    def select(self, index: Tensor) -> ProjectedKV:
        """The batch entries at `index`, of the keys, of what is prepared, and of both masks."""
        if self.rows is not None:
            return self.each.select(index)
        selected: dict[int, Tensor] = {}

        def chosen(x: Tensor) -> Tensor:
            """Index each distinct tensor once: keys, values and prepared keys are often the same tensor."""
            if id(x) not in selected:
                selected[id(x)] = x.index_select(0, to_device(index, x.device))
            return selected[id(x)]

        prepared = {has_grad: (chosen(x), chosen(y)) for has_grad, (x, y) in self._prepared.items()}
        attention, mask = self.attention, select_rows(self.mask, index)
        attention_mask = select_rows(attention.mask, index)
        attention = attention if attention_mask is attention.mask else attention.with_mask(attention_mask)
        return ProjectedKV(attention, chosen(self.key), chosen(self.value), mask, _prepared=prepared)

    def shared(self, rows: Rows) -> ProjectedKV:
        """The same as `select(rows.index)`, but each source is stored once."""
        if self.rows is not None:
            return self.each.shared(rows)
        has_all = len(rows.sources) == len(self.key) and torch.equal(rows.sources, _numbers(rows.sources))
        sources = self if has_all else self.select(rows.sources)
        return sources if rows.width == 1 else replace(sources, rows=rows)

    @property
    def each(self) -> ProjectedKV:
        """An equal value with a row of keys for every row of queries."""
        return self if self.rows is None else self._separate

    @cached_property
    def _separate(self) -> ProjectedKV:
        """`each` for keys that rows share: every row of queries gets a copy of the keys of its source."""
        assert self.rows is not None
        entry = _numbers(self.rows.sources).repeat_interleave(self.rows.width)  # of each place of the grid
        entry = entry if self.rows.place is None else entry.index_select(0, self.rows.place)
        return replace(self, rows=None).select(entry)

    def extended(self, key: Tensor, value: Tensor, mask: Mask | None = None) -> ProjectedKV:
        """A copy with the keys and values of later tokens appended. `mask`, if given, is for all its keys."""
        if Ring.default() is not None:
            raise RegardError("advance: a ring cannot decode, as each rank has only its share of earlier keys.")
        mask = self.mask if mask is None else mask
        return ProjectedKV(self.attention, torch.cat((self.key, key), 2), torch.cat((self.value, value), 2), mask)

    def causal(self) -> ProjectedKV:
        """The same keys for an attention in which no query attends to a later key."""
        if sees_no_later_key(self.attention.mask):
            return self
        return replace(self, attention=self.attention.with_mask_too(causal()))

    def compared(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The query prepared by the score, the keys prepared by the score, and the keys after their position encoding.

        Keys are prepared at the first query only: once with gradients and once without.
        """
        has_grad, score, position = torch.is_grad_enabled(), self.attention.score, self.attention.position
        if has_grad not in self._prepared:
            if position is not None:
                position.check(Spans(((0, self.length),)))
            encoded = self.key if position is None else position.encode_key(self.key, self.places)
            query, prepared = score.prepare(query, encoded)
            self._prepared[has_grad] = encoded, prepared
            return query, prepared, encoded
        encoded, prepared = self._prepared[has_grad]
        return score.prepare(query, encoded[:, :, :0])[0], prepared, encoded  # no key is prepared again

    @cached_property
    def places(self) -> Tensor:
        """The positions of the keys, which are their indices; (J,)."""
        return torch.arange(self.length, device=self.key.device)

    @cached_property
    def added(self) -> Tensor | None:
        """The mask as a tensor that is added to scores, (B, 1, 1, J): 0 for allowed keys, -inf for the other keys.

        None without a mask.
        """
        if self.mask is None:
            return None
        real = self.mask.real_keys
        assert real is not None, "is_plain says so"
        real = real[:, None, None, : self.length]
        added = torch.zeros_like(real, dtype=self.key.dtype).masked_fill(~real, -torch.inf)
        return to_device(added, self.key.device)

    @cached_property
    def is_plain(self) -> bool:
        """Whether weights are a softmax, and `mask` hides keys alone and leaves at least one in every row."""
        if self.attention.normalizer != PLAIN or self.mask is None:
            return self.attention.normalizer == PLAIN
        if (real := self.mask.real_keys) is None:
            return False
        self.mask.check(self.sizes(self.key), Positions.aligned_to_end(1, self.length))
        return bool(real[:, : self.length].any(1).all())

    def sizes(self, query: Tensor) -> Sizes:
        """The sizes of a call of `attend` with queries (B, H, I, D)."""
        (B, H, I, D), (_, G, J, _) = query.shape, self.key.shape
        return Sizes(B, H, G, I, J, D, self.value.shape[3])

    @cached_property
    def has_products(self) -> bool:
        """Whether scores are scaled dot products without a bias, which the fused kernel can compute."""
        # the width, here 1, changes the factor, but not its kind: None or a tensor where the kernel cannot run
        return isinstance(dot_scale(self.attention.score, 1), float | int) and not self.attention.bias


def read(module: Attends, query: Tensor, keys: ProjectedKV, start: int | None = None) -> ModuleOutput:
    """The attention output (B, H, I, E) of queries (B, H, I, D), and its map; the first query has position `start`.

    Several queries are one call of `attend`, and so is every call whose weights are not those of one score, and every
    call in a block of `rg.edit` (`attend_editors`), which changes calls of `attend`. A single query, as in decoding, is
    scored against the prepared keys without planning, because planning takes longer than the arithmetic. `start` is by
    default such that the last query has the position of the last key.
    """
    attention = keys.attention
    if Ring.default() is not None:
        return _read_share(module, query, keys.each, start)
    start = keys.length - query.shape[2] if start is None else start
    is_empty = 0 in (*query.shape[:3], keys.length)
    if query.shape[2] > 1 or is_empty or attend_editors or _needs_a_call(attention):
        keys = keys.each
        positions = Positions.of(start, query.shape[2], keys.length)
        seen = _masked(attention, keys)(query, keys.key, keys.value, positions=positions)
        listeners.tell(module, lambda: seen.weights, lambda: keys.value)
        return ModuleOutput(seen.output, lambda: seen.weights)
    return _read_one(module, query, keys, start)


def _needs_a_call(attention: Mechanism) -> bool:
    """Whether a single query, too, is a call of `attend`: its weights are not those of one score, or dropout draws."""
    return not attention.is_scored or bool(attention.training and attention.dropout)


def _read_share(module: Attends, query: Tensor, keys: ProjectedKV, start: int | None) -> ModuleOutput:
    """The output for this rank's share of the queries and keys. Their positions are those of the whole sequence.

    `query` (B, H, I, D) has the queries of this rank. `start` is the position of the first query as the user gave it,
    or None.
    """
    attention = _masked(keys.attention, keys)
    has_positions = attention.position or attention.bias or not (attention.mask is None or attention.mask.keys_only)
    is_default = start is None or (start == 0 and query.shape[2] == keys.length)
    if has_positions and not is_default:
        raise RegardError(
            f"{type(module).__name__}(start={start}): inside Ring.as_default the ring knows the positions: the last "
            "query of the whole sequence has the position of its last key. Omit start."
        )
    seen = attention(query, keys.key, keys.value)
    listeners.tell(module, lambda: seen.weights)
    return ModuleOutput(seen.output, lambda: seen.weights)


def _read_one(module: Attends, query: Tensor, keys: ProjectedKV, start: int) -> ModuleOutput:
    """The output for a single query per row, at the position `start`.

    Rows that share their keys become queries of one batch entry.
    """
    attention, mask = keys.attention, keys.attention.mask
    # a causal mask hides no key from a query at the last position or later
    plain = keys.is_plain and (mask is None or (mask.is_lower_triangular and start >= keys.length - 1))
    if attention.bias or not plain:
        keys = keys.each  # queries of one batch entry would have different positions, which biases and masks read
    if attention.position is not None:
        attention.position.check(Spans(((start, start + 1),)))
        query = attention.position.encode_query(query, torch.arange(start, start + 1, device=query.device))
    positions, rows = Positions(start, Spans(((0, keys.length),))), keys.rows
    heads = _output_at(query if rows is None else rows.fold(query), keys, positions, plain)
    output = ModuleOutput(heads if rows is None else rows.unfold(heads), _map_when_asked(query, keys, positions))
    listeners.tell(module, lambda: output.weights, lambda: keys.each.value)
    return output


def _output_at(query: Tensor, keys: ProjectedKV, positions: Positions, plain: bool) -> Tensor:
    """The output of queries whose positions are encoded, (B, H, I, E).

    If the call is `plain`, a softmax over all keys that `keys.mask` leaves, the fused kernel runs if it supports the
    score; else it is computed from all scores.
    """
    attention = keys.attention if plain else _masked(keys.attention, keys)
    if not plain or not keys._prepared:  # later queries have the widths of the first
        attention.check(keys.sizes(query), positions, keys.key.shape[3])
    if plain and keys.has_products:
        compared, key, _ = keys.compared(query)
        return _fused(attention, compared, key, keys)
    prepared, grid = _prepared(query, keys, positions)
    if plain:
        return _softmax(attention, prepared, grid, keys)
    return attend_rows(attention, prepared, keys.value, grid, keys.places)[0]


def _map_when_asked(query: Tensor, keys: ProjectedKV, positions: Positions) -> Callable[[], AttentionMap]:
    """A function that makes the map of a single query per row, in the grad mode of this call and from its tensors.

    It raises an error if one of them has changed since then.
    """
    has_grad, tensors = torch.is_grad_enabled(), (query, keys.key, *keys.attention.parameters())
    versions = versions_of(tensors)

    def make() -> AttentionMap:
        if versions_of(tensors) != versions:
            raise RegardError(ScoredMap._stale)
        with torch.set_grad_enabled(has_grad):
            prepared, grid = _prepared(query, keys.each, positions)
            # None: the row statistic is computed when it is first needed
            return ScoredMap(_masked(keys.attention, keys.each), prepared, positions, grid, None)

    return make


def _prepared(query: Tensor, keys: ProjectedKV, positions: Positions) -> tuple[Prepared, Grid]:
    """What the score and the biases prepared for queries whose positions are encoded, and the grid of the call."""
    compared, key, encoded = keys.compared(query)
    states = [bias.prepare(query, encoded, positions) for bias in keys.attention.bias]
    B, H, I, _ = query.shape
    prepared = Prepared(compared, key, tuple(r for r, _ in states), tuple(c for _, c in states))
    return prepared, Grid.whole(positions, B, H, I, query.device)


def _fused(attention: Attention, query: Tensor, key: Tensor, keys: ProjectedKV) -> Tensor:
    """The output of the fused kernel, for a query and keys that the score has prepared; (B, H, I, E).

    `decode` takes the mask of keys as flags, or computes the tensor that is added to scores if its kernel needs that.
    """
    scale = dot_scale(attention.score, query.shape[3])
    assert isinstance(scale, float | int), "has_products says so"
    real = None if keys.mask is None else keys.mask.real_keys
    return decode(query, key, keys.value, scale, real, lambda: keys.added)[0].to(keys.value.dtype)


def _softmax(attention: Attention, prepared: Prepared, grid: Grid, keys: ProjectedKV) -> Tensor:
    """The output as the dense engine computes it, without the row statistic: the map is made anew if it is read."""
    tile = scores(attention, prepared, grid, masked=False)
    weights = torch.softmax(tile if keys.added is None else tile + keys.added, -1)
    with without_autocast(weights.device):
        return grouped_values(weights, keys.value.to(weights.dtype)).to(keys.value.dtype)


def _numbers(x: Tensor) -> Tensor:
    """The numbers of the rows of a tensor: 0, 1, ..."""
    return torch.arange(len(x), device=x.device)


def _masked(attention: Any, keys: ProjectedKV) -> Any:
    """The attention, whose mask also hides the keys that the mask of `keys` hides."""
    return attention if keys.mask is None else attention.with_mask_too(keys.mask)


def select_rows(value: Any, index: Tensor) -> Any:
    """The rows at `index` of a tensor, of `ProjectedKV`, of a mask, or of nested tuples of them. Numbers stay the same.

    >>> import torch, regard as rg
    >>> rg.nn.select_rows((torch.tensor([[1], [2]]), 7), torch.tensor([1, 1, 0]))
    (tensor([[2], [2], [1]]), 7)
    """
    if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype not in (torch.int32, torch.int64):
        kind = f"{index.dtype} of shape {tuple(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
        raise RegardError(f"select_rows: the index must be a vector of integers, got {kind}.")
    if isinstance(value, Tensor):
        try:
            return value.index_select(0, to_device(index, value.device))
        except (IndexError, RuntimeError):
            shape = tuple(value.shape)
            raise RegardError(f"select_rows: rows {index.tolist()} are not in a tensor of shape {shape}.") from None
    if isinstance(value, ProjectedKV):
        return value.select(index)
    if isinstance(value, Mask):
        return value.select(index)
    if isinstance(value, tuple):
        return tuple(select_rows(part, index) for part in value)
    return value
