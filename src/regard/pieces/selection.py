"""Selections: another score chooses the keys of each query, before the attention itself scores them.

A selection computes its scores for some rows at a time and keeps the ids of the best keys, so it takes O(n k) memory.
The ids become a mask (`chosen_keys`), which all engines and maps read. A choice has no gradient: the query, the key and
the value get the gradients of the chosen pairs, and the tensors of the selection get none. The papers train them with a
loss of their own, for example DeepSeek-V3.2 with the divergence of the indexer's scores from the attention's weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.base.checks import Count, Size, checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes, at_least_float32, grouped_scores
from regard.base.spans import Spans
from regard.pieces.chosen import NO_ID, chosen_keys
from regard.pieces.grid import Grid
from regard.pieces.key_blocks import KeyBlocks
from regard.pieces.mask import Mask, distance_range
from regard.pieces.piece import Piece

#: Bytes that the scores of one block of rows may take.
BLOCK_BYTES = 24 << 20

#: The k best keys of each query as indices (B, I, k), from index queries, keys and weights, k, the positions, the mask,
#: and its number of query heads; None where it cannot.
Indexer = Callable[[Tensor, Tensor, Tensor, int, Positions, Mask | None, int], Tensor | None]
_indexer: Indexer | None = None


def index_by(indexer: Indexer) -> None:
    """Use a faster indexer where it can run: the compiled kernels, of a layer above, are passed in here."""
    global _indexer
    _indexer = indexer


#: What `best` computes of scores and k; None where it cannot.
Ranking = Callable[[Tensor, int], Tensor | None]
_ranking: Ranking | None = None


def rank_by(ranking: Ranking) -> None:
    """Use a faster ranking where it can run, as in `index_by`."""
    global _ranking
    _ranking = ranking


class Selection(Piece):
    """Base of all selections. A new selection defines `choose`, and `needs` if it reads tensors of the call.

    `choose` gets the queries (B, H, I, D) and keys (B, G, J, D) after the positional encoding, their positions, and the
    rest of the mask, which decides what may be chosen. It returns a mask, which `&` joins with the rest. It must give a
    query the same keys whichever queries are beside it, so that decoding equals one call.

    >>> import torch, regard as rg
    >>> class Nearest(rg.selections.Selection):  # the own key and the first
    ...     def choose(self, query, key, positions, mask):
    ...         rows = positions.query(slice(0, query.shape[2]))
    ...         return rg.masks.chosen_keys(torch.stack((rows, rows * 0), -1)[None, None], start=positions.start)
    >>> x = torch.randn(1, 2, 4, 8)
    >>> rg.Attention(selection=Nearest())(x, x, x).weights[0, 0].gt(0).int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    """

    #: The tensors of a call that `choose` needs, each with its axes: see `regard.pieces.call_tensors`.
    needs: ClassVar[Mapping[str, str]] = {}
    #: Whether `choose` reads the numbers of queries and keys. If not, a ring can run it: no rank has all keys.
    reads_vectors: ClassVar[bool] = True

    @abstractmethod
    def choose(self, query: Tensor, key: Tensor, positions: Positions, mask: Mask | None, **tensors: Tensor) -> Mask:
        """The mask of the chosen keys."""

    def check(self, sizes: Sizes) -> None:
        """Refuse sizes that do not fit the selection."""


@dataclass(frozen=True)
class CandidateKeys:
    """The positions and the mask of a call: which keys, or blocks of keys, each query may choose from."""

    grid: Grid
    positions: Positions
    mask: Mask | None

    @staticmethod
    def of(query: Tensor, positions: Positions, mask: Mask | None) -> CandidateKeys:
        """The candidates of a call with queries (B, H, I, D)."""
        B, H, I, _ = query.shape
        return CandidateKeys(Grid.whole(positions, B, H, I, query.device), positions, mask)

    def rows(self, floats: int) -> list[slice]:
        """Blocks of rows whose scores fit in memory, with so many numbers for each row and batch entry."""
        I, row_bytes = len(self.grid.query), 4 * len(self.grid.batch) * floats
        size = max(1, min(I, BLOCK_BYTES // max(1, row_bytes)))
        return [slice(start, min(start + size, I)) for start in range(0, I, size)]

    def floats_of_blocks(self, heads: int, blocks: KeyBlocks) -> int:
        """The numbers in memory for each row (`rows`): up to 4 for each block and head, and a flag for each key."""
        return 4 * heads * blocks.count + len(self.grid.key)

    def columns(self, rows: slice) -> slice:
        """Key indices, in one interval, that hold all candidates of some rows."""
        keys = Spans.of((0, len(self.positions.keys)))
        if self.mask is not None:
            keys &= self.positions.columns(self.mask.any_allowed(*self._ends(rows)))
        return slice(*keys.hull().intervals[0]) if keys else slice(0, 0)

    def allowed(self, rows: slice, columns: slice | Tensor, heads: int) -> Tensor:
        """Which keys a head of scores may choose: (B or 1, heads or 1, rows, columns).

        `heads` divides the number of query heads. A key may be chosen if one of the query heads may attend to it.
        """
        tile = self.grid.tile(rows, columns)
        if self.mask is None:
            return torch.ones(1, 1, len(tile.query), len(tile.key), dtype=torch.bool, device=tile.device)
        allowed = self.mask.allowed(tile).expand(-1, -1, len(tile.query), len(tile.key))
        return allowed if allowed.shape[1] in (1, heads) else allowed.unflatten(1, (heads, -1)).any(2)

    def visible_keys(self, rows: slice, blocks: KeyBlocks, heads: int) -> Tensor:
        """How many keys of each block a row may attend to: (B or 1, heads or 1, rows, blocks).

        The spans of the mask count the keys that all rows or none may attend to. Only the others are tested in pairs.
        """
        if (counts := self._keys_in_range(rows, blocks)) is not None:
            return counts
        keys, (first, stop) = self.positions.keys, self._ends(rows)
        surely_allowed = keys if self.mask is None else keys & self.mask.all_allowed(first, stop)
        possibly_allowed = keys if self.mask is None else keys & self.mask.any_allowed(first, stop)
        sure = self.positions.columns(surely_allowed).tensor(self.grid.device)
        counts = blocks.sums(torch.ones(1, 1, 1, len(sure), dtype=torch.int32, device=sure.device), 3, sure)
        if not (open_keys := possibly_allowed & ~surely_allowed):
            return counts.expand(-1, -1, stop - first, -1)
        columns = self.positions.columns(open_keys).tensor(self.grid.device)
        return counts + blocks.sums(self.allowed(rows, columns, heads).int(), 3, columns)

    def _keys_in_range(self, rows: slice, blocks: KeyBlocks) -> Tensor | None:
        """`visible_keys` if the mask is a range of distances and no position of a key is missing, else None.

        A block has the keys [first, stop), and a query may attend to [query + low, query + high): the count is the
        length of what both have. Such a mask has no documents and no padding, so blocks have no gaps.
        """
        intervals = self.positions.keys.intervals
        if self.mask is None or not self.mask.relative or len(intervals) != 1:
            return None
        low, high, is_whole = distance_range(self.mask)
        if not is_whole:
            return None
        query, (first_key, stop_key) = self.grid.query[rows, None], intervals[0]
        first, stop = (blocks.end - blocks.num_keys).clamp(min=first_key), blocks.end.clamp(max=stop_key)
        counts = torch.minimum(stop[:, None], query + high) - torch.maximum(first[:, None], query + low)
        return counts.clamp(min=0).int()[:, None]

    def keys_at(self, indices: Tensor) -> Tensor:
        """The positions of the keys at some indices, int32; `NO_ID` stays."""
        keys = self.grid.key
        if self.positions.keys.intervals == ((0, len(keys)),):
            return indices
        return torch.where(indices == NO_ID, NO_ID, keys[indices.clamp(max=len(keys) - 1)].int())

    def _ends(self, rows: slice) -> tuple[int, int]:
        """The position of the first of these queries, and that after the last."""
        return self.positions.start + rows.start, self.positions.start + rows.stop


def best(scores: Tensor, k: int) -> Tensor:
    """The columns of the k greatest scores of each row, ascending, int32; `NO_ID` where fewer are above -inf.

    Of equal scores the first columns are taken, whatever the engine and the number of threads.

    >>> best(torch.tensor([[1.0, 3.0, 1.0, -torch.inf]]), 2), best(torch.tensor([[0.0, -torch.inf]]), 2)[0, 1] == NO_ID
    (tensor([[0, 1]], dtype=torch.int32), tensor(True))
    """
    k = min(k, scores.shape[-1])
    if not k:
        return torch.empty(*scores.shape[:-1], 0, dtype=torch.int32, device=scores.device)
    if _ranking is not None and (ids := _ranking(scores, k)) is not None:
        return ids
    top = scores.topk(k)
    least = top.values[..., -1:]  # if more columns have this score than there is room for, topk may take any of them
    is_tied = ((scores >= least).sum(-1, keepdim=True) > k) & (least > -torch.inf)
    ids = top.indices.int().masked_fill(top.values == -torch.inf, NO_ID)
    if bool(is_tied.any()):
        ids = torch.where(is_tied, _first_of_ties(scores, least, k), ids)
    return ids.sort(-1).values


def _first_of_ties(scores: Tensor, least: Tensor, k: int) -> Tensor:
    """The columns of scores above `least`, and the first of those equal to it, k in all."""
    above, equal = scores > least, scores == least
    missing = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= missing))
    columns = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    return torch.where(chosen, columns, NO_ID).topk(k, largest=False).values


def best_keys(
    score: Callable[[slice, slice], Tensor], heads: int, k: int, candidates: CandidateKeys, floats: int
) -> Mask:
    """The mask of the k best keys of each query.

    `score` gives the scores (B, heads, rows, columns) of some rows and columns. It needs `floats` numbers for each pair
    in memory. `heads` divides the number of query heads.
    """
    keys = candidates.grid.key
    ids = _no_ids(candidates, heads, min(k, len(keys)))
    for rows in candidates.rows(floats * len(keys)):
        columns = candidates.columns(rows)
        if columns.start == columns.stop:
            continue
        scores = score(rows, columns).masked_fill(~candidates.allowed(rows, columns, heads), -torch.inf)
        found = best(scores, k)
        ids[:, :, rows, : found.shape[3]] = candidates.keys_at(
            torch.where(found == NO_ID, NO_ID, found + columns.start)
        )
    return chosen_keys.of_sorted(ids, 1, len(candidates.grid.head), candidates.positions.start)


def best_blocks(
    score: Callable[[slice, Tensor], Tensor],
    heads: int,
    k: int,
    blocks: KeyBlocks,
    candidates: CandidateKeys,
    always: Always,
    floats: int,
) -> Mask:
    """The mask of the k best blocks of each query.

    `score` gives the scores (B, heads, rows, blocks) of some rows, from the number of keys that each row may attend to
    in each block. It needs `floats` numbers for each row, and its result is changed in place, which saves an
    allocation.
    """
    ids = _no_ids(candidates, heads, min(k, blocks.count))
    for rows in candidates.rows(floats) if blocks.count else ():
        visible = candidates.visible_keys(rows, blocks, heads)
        scores = always.first(score(rows, visible), blocks, candidates.grid.query[rows])
        ids[:, :, rows] = best(scores.masked_fill_(visible == 0, -torch.inf), k)
    num_heads, start = len(candidates.grid.head), candidates.positions.start
    return chosen_keys.of_sorted(ids, blocks.size, num_heads, start, blocks.irregular)


@dataclass(frozen=True)
class Always:
    """Blocks that are always chosen: the `initial` first ones of a document, and `local` up to the query's own."""

    local: int
    initial: int = 0

    def first(self, scores: Tensor, blocks: KeyBlocks, queries: Tensor) -> Tensor:
        """The scores (B, heads, rows, blocks) of queries at these positions, now infinite for these blocks."""
        block = torch.arange(blocks.count, device=scores.device)
        behind = blocks.of_queries(queries)[:, None, :, None] - block
        is_first = (blocks.place < self.initial)[:, None, None]
        return scores.masked_fill_(((behind >= 0) & (behind < self.local)) | is_first, torch.inf)


def _no_ids(candidates: CandidateKeys, heads: int, count: int) -> Tensor:
    """`NO_ID` in place of `count` ids for each query: (B, heads, I, count), to be filled."""
    grid = candidates.grid
    return torch.full((len(grid.batch), heads, len(grid.query), count), NO_ID, dtype=torch.int32, device=grid.device)


def block_means(key: Tensor, blocks: KeyBlocks) -> Tensor:
    """The mean key of each block, (B, G, blocks, D), in float32 at least. Padding does not count."""
    real = at_least_float32(key).masked_fill(~blocks.is_real[:, None, :, None], 0)
    return blocks.sums(real, 2) / blocks.num_keys.clamp(min=1)[:, None, :, None]


@checked
@dataclass(frozen=True)
class TokenIndexer(Selection):
    """The `k` keys of the greatest index scores (DeepSeek sparse attention, DeepSeek-V3.2, arXiv:2512.02556).

    score_ij = sum_n weight_in relu(index_query_in . index_key_j), the "lightning indexer". All query heads share the
    keys. A call gives `index_query` (B, N, I, W), `index_key` (B, 1, J, W) and `index_weights` (B, I, N) for N small
    heads of width W, with their own positional encoding. A cache keeps the index keys beside the keys. A positive
    factor of the scores, such as W^-0.5 in other libraries, changes no choice. Of equal scores the first keys are
    taken; they are common, because relu makes zeros. The choice has no gradient; the paper trains the indexer by its
    own loss.

    >>> import torch, regard as rg
    >>> attention = rg.Attention(mask=rg.causal(), selection=rg.selections.TokenIndexer(k=3))
    >>> q, k, v = torch.randn(3, 1, 4, 10, 8)
    >>> index = {"index_query": torch.randn(1, 2, 10, 4), "index_key": torch.randn(1, 1, 10, 4)}
    >>> seen = attention(q, k, v, **index, index_weights=torch.rand(1, 10, 2))
    >>> seen.weights.dense().gt(0).sum(-1)[0, 0].tolist()
    [1, 2, 3, 3, 3, 3, 3, 3, 3, 3]
    """

    k: Size
    needs: ClassVar[Mapping[str, str]] = {"index_query": "B N I W", "index_key": "B 1 J W", "index_weights": "B I N"}
    reads_vectors: ClassVar[bool] = False

    def choose(
        self,
        query: Tensor,
        key: Tensor,
        positions: Positions,
        mask: Mask | None,
        *,
        index_query: Tensor,
        index_key: Tensor,
        index_weights: Tensor,
    ) -> Mask:
        """The mask of the k best keys of each query."""
        _same_width("TokenIndexer", index_query, index_key)
        if index_weights.shape[2] != index_query.shape[1]:
            raise RegardError(
                f"TokenIndexer: index_query has {index_query.shape[1]} heads on axis 1, index_weights "
                f"{index_weights.shape[2]} on axis 2. Give one weight for each index head."
            )
        candidates, tensors = CandidateKeys.of(query, positions, mask), (index_query, index_key, index_weights)
        num_heads = query.shape[1]
        if _indexer is not None and (found := _indexer(*tensors, self.k, positions, mask, num_heads)) is not None:
            return chosen_keys.of_sorted(candidates.keys_at(found[:, None]), 1, num_heads, positions.start)
        weights = at_least_float32(index_weights).transpose(1, 2)[..., None]  # (B, N, I, 1)

        def score(rows: slice, columns: slice) -> Tensor:
            pairs = grouped_scores(*map(at_least_float32, (index_query[:, :, rows], index_key[:, :, columns])))
            return (pairs.relu_() * weights[:, :, rows]).sum(1, keepdim=True)

        num_index_heads = index_query.shape[1]  # `score` has two numbers for each of them, and a few for their sum
        return best_keys(score, 1, self.k, candidates, 2 * num_index_heads + 4)


@checked
@dataclass(frozen=True)
class BlockIndexer(Selection):
    """The `k` blocks of `size` keys with the greatest index scores (MiniMax-M3).

    The score of a block is the greatest index_query_in . index_key_j of its keys. A call gives `index_query` (B, G, I,
    W), one index head for each key head, and `index_key` (B, 1, J, W). The block of the query and those before it,
    `local` in all, are always among the k. Blocks begin anew with each packed document, and padding is in none. The
    choice has no gradient.

    >>> import torch, regard as rg
    >>> attention = rg.Attention(mask=rg.causal(), selection=rg.selections.BlockIndexer(size=2, k=2))
    >>> q, k, v = torch.randn(3, 1, 4, 10, 8)
    >>> index = {"index_query": torch.randn(1, 4, 10, 4), "index_key": torch.randn(1, 1, 10, 4)}
    >>> attention(q, k, v, **index).weights.dense().gt(0).sum(-1)[0, 0].tolist()
    [1, 2, 3, 4, 3, 4, 3, 4, 3, 4]
    """

    size: Size
    k: Size
    local: Count = 1
    needs: ClassVar[Mapping[str, str]] = {"index_query": "B G I W", "index_key": "B 1 J W"}
    reads_vectors: ClassVar[bool] = False

    def choose(
        self,
        query: Tensor,
        key: Tensor,
        positions: Positions,
        mask: Mask | None,
        *,
        index_query: Tensor,
        index_key: Tensor,
    ) -> Mask:
        """The mask of the k best blocks of each query."""
        _same_width("BlockIndexer", index_query, index_key)
        heads, candidates = index_query.shape[1], CandidateKeys.of(query, positions, mask)
        blocks = KeyBlocks.of(self.size, mask, candidates.grid)

        def score(rows: slice, visible: Tensor) -> Tensor:
            """The greatest score of an allowed key of each block; -inf without one."""
            pairs = grouped_scores(at_least_float32(index_query[:, :, rows]), at_least_float32(index_key))
            allowed = candidates.allowed(rows, slice(None), heads)
            pairs.masked_fill_(~allowed, -torch.inf)
            lowest = pairs.new_full((*pairs.shape[:3], blocks.count), -torch.inf)
            return lowest.scatter_reduce_(3, blocks.of_keys[:, None, None].expand_as(pairs), pairs, "amax")

        return best_blocks(score, heads, self.k, blocks, candidates, Always(self.local), heads * key.shape[2])


@checked
@dataclass(frozen=True)
class BlockMeans(Selection):
    """The `k` blocks of `size` keys whose mean key fits the query best (MoBA, arXiv:2502.13189).

    The score of a block is q_i . mean(k_j of the block), for each query head. The query's own block is always one of
    the k. MoBA is causal: with `mask=regard.causal()` only blocks before the query's own are compared. Blocks begin
    anew with each packed document, and padding is in none of them, as in the authors' code. If another mask hides a
    part of a block, such as a window, the mean is that of the keys that the query may attend to. The choice has no
    gradient; queries and keys learn through the chosen pairs.

    >>> import torch, regard as rg
    >>> attention = rg.Attention(mask=rg.causal(), selection=rg.selections.BlockMeans(size=4, k=2))
    >>> q, k, v = torch.randn(3, 1, 2, 16, 8)
    >>> attention(q, k, v).weights.dense().gt(0).sum(-1)[0, 0].tolist()
    [1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8]
    """

    size: Size
    k: Size

    def choose(self, query: Tensor, key: Tensor, positions: Positions, mask: Mask | None) -> Mask:
        """The mask of the k best blocks of each query."""
        candidates, heads = CandidateKeys.of(query, positions, mask), query.shape[1]
        blocks = KeyBlocks.of(self.size, mask, candidates.grid)
        query, key = at_least_float32(query), at_least_float32(key)
        means, block_numbers = block_means(key, blocks), torch.arange(blocks.count, device=key.device)

        def score(rows: slice, visible: Tensor) -> Tensor:
            """Products with the means of blocks; if a block is hidden in part, with the mean of its visible keys."""
            scores = grouped_scores(query[:, :, rows], means)
            own = blocks.of_queries(candidates.grid.query[rows])[:, None, :, None]  # chosen whatever its score
            is_cut = (visible > 0) & (visible != blocks.num_keys[:, None, None]) & (block_numbers != own)
            if not bool(is_cut.any()):
                return scores
            columns = candidates.columns(rows)
            pairs = grouped_scores(query[:, :, rows], key[:, :, columns])
            pairs = pairs.masked_fill(~candidates.allowed(rows, columns, heads), 0)
            return torch.where(is_cut, blocks.sums(pairs, 3, columns) / visible.clamp(min=1), scores)

        floats = candidates.floats_of_blocks(heads, blocks)
        if mask is not None and not mask.is_lower_triangular:  # it may cut blocks
            floats = max(floats, heads * key.shape[2])
        return best_blocks(score, heads, self.k, blocks, candidates, Always(local=1), floats)


@checked
@dataclass(frozen=True)
class CompressedBlocks(Selection):
    """The `k` blocks of `size` keys with the greatest compressed weights (NSA's selected branch, arXiv:2502.11089).

    The compressed weights of a query are softmax(q_i . mean(k_j of a block) / sqrt(D)) over the blocks of `size` keys
    (so not a shorter last one) that ended before it or with it, and of which the mask hides no key. Blocks begin anew
    with each packed document, and padding is in none of them, as in flash-linear-attention. The query heads of a key
    head choose together, by the sum of their weights. The `initial` first blocks and `local` blocks up to the query's
    own are always among the k. It is for causal attention. The choice has no gradient: in NSA the compressed branch
    itself gives one to the same keys.

    >>> import torch, regard as rg
    >>> attention = rg.Attention(mask=rg.causal(), selection=rg.selections.CompressedBlocks(size=4, k=3, local=1))
    >>> q, k, v = torch.randn(1, 4, 16, 8), torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8)
    >>> attention(q, k, v).weights.dense().gt(0).sum(-1)[0, 0].tolist()
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 9, 10, 11, 12]
    """

    size: Size
    k: Size
    initial: Count = 1
    local: Count = 2

    def choose(self, query: Tensor, key: Tensor, positions: Positions, mask: Mask | None) -> Mask:
        """The mask of the k best blocks of each query."""
        candidates, heads = CandidateKeys.of(query, positions, mask), key.shape[1]
        blocks = KeyBlocks.of(self.size, mask, candidates.grid)
        means, scale = block_means(key, blocks), query.shape[-1] ** -0.5

        def score(rows: slice, visible: Tensor) -> Tensor:
            """The compressed weights, summed over the query heads of each key head; 0 for a block that is not whole."""
            queries = candidates.grid.query[rows, None]
            ended = (blocks.end <= queries[-1] + 1).any(0).nonzero()
            num_blocks = int(ended[-1]) + 1 if len(ended) else 0  # no query compares itself with the blocks after these
            scores = grouped_scores(at_least_float32(query[:, :, rows]) * scale, means[:, :, :num_blocks])
            has_ended = blocks.end[:, None, None, :num_blocks] <= queries + 1
            is_whole = (has_ended & (visible[..., :num_blocks] == self.size))[:, :, None]
            scores = scores.unflatten(1, (heads, -1)).masked_fill_(~is_whole, -torch.inf)  # (B, G, H / G, rows, blocks)
            # a row without a whole block is NaN after the softmax; the sum is over the query heads of a key head
            return F.pad(scores.softmax(-1).nan_to_num_(0.0).sum(2), (0, blocks.count - num_blocks))

        floats = candidates.floats_of_blocks(query.shape[1], blocks)
        return best_blocks(score, heads, self.k, blocks, candidates, Always(self.local, self.initial), floats)


@checked
@dataclass(frozen=True)
class HashBuckets(Selection):
    """The keys that fall into a bucket of the query in one of `rounds` hashes (Reformer, arXiv:2001.04451).

    Round r multiplies a vector by a random matrix R_r of D x `num_buckets` / 2 numbers. Its bucket is argmax([x R_r; -x
    R_r]), so near directions share buckets. A query attends to itself only if it has no other key, as in the paper,
    where queries and keys are one vector. The matrices depend on `seed` and D only. Implementations sort tokens by
    bucket, cut them into chunks, and lose pairs of one bucket in distant chunks; here all are kept. The ids of a row
    take as much memory as the largest row has keys.

    >>> import torch, regard as rg
    >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [2.0, 0.0]]).view(1, 1, 3, 2)  # 0 and 2 have one direction
    >>> attention = rg.Attention(selection=rg.selections.HashBuckets(num_buckets=2))
    >>> attention(x, x, x).weights.dense()[0, 0].gt(0).int().tolist()
    [[0, 0, 1], [0, 1, 0], [1, 0, 0]]
    """

    num_buckets: Size
    rounds: Size = 1
    seed: Count = 0

    def __post_init__(self) -> None:
        if self.num_buckets % 2:
            raise RegardError(
                f"HashBuckets(num_buckets={self.num_buckets}): buckets come in pairs, x and -x: give 2 n."
            )

    def buckets(self, x: Tensor) -> Tensor:
        """The bucket of each vector in each round: (B, heads, n, D) -> (B, heads, n, rounds)."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = x.shape[-1], self.rounds, self.num_buckets // 2
        matrices = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        turned = torch.einsum("bhnd,drk->bhnrk", at_least_float32(x), matrices.to(at_least_float32(x)))
        return torch.cat((turned, -turned), -1).argmax(-1)

    def choose(self, query: Tensor, key: Tensor, positions: Positions, mask: Mask | None) -> Mask:
        """The mask of all keys in the buckets of each query."""
        candidates, of_keys = CandidateKeys.of(query, positions, mask), self.buckets(key)
        of_queries, grid = self.buckets(query), candidates.grid
        of_keys = of_keys.repeat_interleave(query.shape[1] // key.shape[1], 1)
        all_rows, parts = candidates.rows(query.shape[1] * 4 * len(grid.key)), []
        for rows in all_rows:
            pairs = (of_queries[:, :, rows, None] == of_keys[:, :, None]).any(-1)
            allowed, own = candidates.allowed(rows, slice(None), query.shape[1]), grid.key == grid.query[rows, None]
            others = pairs & allowed & ~own
            pairs = others | (allowed & own & ~others.any(-1, keepdim=True))
            found = torch.where(pairs, grid.key.int(), NO_ID)
            count = int(pairs.sum(-1).max()) if pairs.numel() else 0
            parts.append(found.topk(count, largest=False).values.sort(-1).values)
        width = max((part.shape[3] for part in parts), default=0)
        ids = _no_ids(candidates, query.shape[1], width)
        for rows, part in zip(all_rows, parts, strict=True):
            ids[:, :, rows, : part.shape[3]] = part
        return chosen_keys.of_sorted(ids, 1, query.shape[1], positions.start)


def _same_width(piece: str, query: Tensor, key: Tensor) -> None:
    """Refuse index queries and index keys of different widths."""
    if query.shape[-1] != key.shape[-1]:
        raise RegardError(
            f"{piece}: index_query has width {query.shape[-1]}, index_key {key.shape[-1]}; they must be equal: "
            f"{tuple(query.shape)} against {tuple(key.shape)}."
        )
