"""`AttentionMap`: the weights of an attention, computed on demand. Each family of weights is a subclass.

output = W . values, with everything else held fixed: W is the map. `ScoredMap` computes w_ij = f(s_ij, r_i) from scores
and one statistic per row. Other families compute their weights differently, but a tile, a row and a reduction are asked
for in the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self, TypeVar, overload

import torch
from torch import Tensor

from regard.attention import Attention
from regard.base.checks import Count, checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import as_slice, as_tensor, to_device, without_autocast
from regard.base.spans import Spans
from regard.base.upper_layers import upper_layer
from regard.maps.gradients import LiveRows, in_graph, live_states, live_tile
from regard.maps.indices import AXES, Index, Selection, indices
from regard.maps.paged_keys import PagedKeys
from regard.maps.reductions import (
    Distance,
    Entropy,
    KeyTotals,
    MassOn,
    Pool,
    Reduction,
    RowLinks,
    Similarity,
    State,
    Tile,
    TopLinks,
    check_reductions,
)
from regard.maps.step_table import StepTable, names_of, values_of_head
from regard.maps.tensor_interface import TensorInterface
from regard.pieces.contents import versions_of
from regard.pieces.grid import Grid

#: The keys of a tile, and those of them that not every query may attend to: there the mask decides for each pair.
TileKeys = tuple[slice, Spans]
#: Computes the weights of each tile of a range of queries, and their logarithms (None if those are not cheap).
WeightsOfStrip = Callable[[slice, list[TileKeys]], Iterator[tuple[Tensor, Tensor | None]]]

#: The default budget: the largest dense result, in bytes.
BUDGET = 1 << 30
#: The largest tile of a reduction: queries, keys.
TILE = (512, 4096)
#: Bytes of memory for computing one tile.
WORKSPACE = 128 << 20
#: Ranges of keys become one tile if the gap between them is at most this number of keys.
GAP = 64

#: The error of a backward pass through a family of maps without gradients.
NO_GRADIENTS = (
    "weights: a {} has no gradients. A map that joins several calls, or that lies on several ranks, can be read only. "
    "Use the map of one call on one rank; or read weights.detach(), a constant in the loss."
)

#: The results of reductions, in the types of `summarize`.
First = TypeVar("First")
Second = TypeVar("Second")
Third = TypeVar("Third")


class AttentionMap(TensorInterface, ABC):
    """The weights (B, H, I, J) of one attention, computed on demand in O(n) memory.

    Nothing is computed before you ask. Every answer is exact. Weights are before dropout, in float32 or float64. They
    are in the autograd graph if the map was made in grad mode of tensors that require grad (`requires_grad`). Weights
    of a softmax are shares: not negative, with the sum 1 in each row (`has_shares`). If `is_signed`, they may be
    negative and of any sum. Gates, edits and sums of maps may also give rows of any sum. `shares()` gives
    |w_ij| / sum_j |w_ij|.

    >>> import torch, regard as rg
    >>> seen = rg.Attention()(*(torch.randn(1, 2, 5, 4) for _ in range(3)))
    >>> seen.weights
    AttentionMap(1 x 2 heads x 5 queries x 5 keys)
    >>> seen.weights[0, 1, 2:4].shape, seen.weights.entropy().shape
    (torch.Size([2, 5]), torch.Size([1, 2, 5]))
    """

    #: Whether weights may be negative, and rows may have any sum.
    is_signed: ClassVar[bool] = False
    #: Whether the rows are shares: no weight is negative, and a row sums to 1, or to less where the rest is on no key
    #: (a sink, an empty row of a part). Each family answers. Statistics that need shares refuse other maps.
    has_shares: ClassVar[bool] = False
    #: Chooses the family of weights; `call_map` sets it, since the families are subclasses of this class.
    _of_tensors: ClassVar[Callable[..., AttentionMap]]
    #: The class of the map of shares; `changed_map` sets it, because it imports this file.
    _shares_of: ClassVar[Callable[[AttentionMap], AttentionMap]]

    #: What the weights are computed from, in families without queries and keys.
    _made_of: ClassVar[str] = "weights that something else computed"
    #: Reads the values of the call, if a watch kept them.
    _values: Callable[[], Tensor] | None = None

    #: The tensors of the map with their graphs, in families that keep a snapshot beside them; None without gradients.
    _live: Any = None
    #: Why gradients of this map cannot be computed, although it was made of tensors that require them.
    _refusal: str | None = None
    #: Of an edited call the values (B, G, J, E), and the output (B, H, I, E) if a patch changed it; else None.
    after_edit: tuple[Tensor, Tensor | None] | None = None
    #: The pieces. Their mask says which keys a query may attend to.
    attention: Attention
    #: The positions of queries and keys.
    positions: Positions
    #: The coordinates of batch entries, heads, queries and keys.
    grid: Grid

    @staticmethod
    def of(
        attention: Attention,
        query: Tensor,
        key: Tensor | PagedKeys,
        statistic: Tensor | None = None,
        positions: Positions | None = None,
        **tensors: Tensor,
    ) -> AttentionMap:
        """The map of queries and keys that another program computed: a serving engine, a kernel, a saved file.

        `query` (B, H, I, D) and `key` (B, G, J, D) are what the kernel read: if it rotates them before, `attention` has
        no position. `statistic` is the log-sum-exp of every row in nats, (B, H, I), as FlashAttention, FlexAttention
        and cuDNN return it; a few rows are compared with the scores, and without it it is computed. Keys may be in
        pages (`PagedKeys`). `tensors` are those that pieces need for each call, by name. Nothing is attended: there
        are no values and there is no output.

        >>> import torch, regard as rg
        >>> query, key = torch.randn(2, 1, 2, 5, 4)
        >>> logsumexp = (query @ key.mT / 2).logsumexp(-1)
        >>> rg.AttentionMap.of(rg.Attention(), query, key, logsumexp)
        AttentionMap(1 x 2 heads x 5 queries x 5 keys)
        """
        return AttentionMap._of_tensors(attention, query, key, statistic, positions, tensors)

    @abstractmethod
    def select(self, batch: Index, head: Index) -> AttentionMap:
        """The map of some batch entries and heads (indices), still lazy."""

    def _selected_indices(self, batch: Index, head: Index) -> tuple[Tensor, Tensor]:
        """The arguments of `select` as indices on the host."""
        (B, H), owner = self.shape[:2], "weights.select"
        return indices(owner, "batch", batch, B), indices(owner, "head", head, H)

    @abstractmethod
    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        """Weights of a tile (B, H, I', J'): slices, or indices on the host; the indices of keys ascend."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch entries, heads, queries and keys."""
        return len(self.grid.batch), len(self.grid.head), len(self.grid.query), len(self.grid.key)

    @property
    def device(self) -> torch.device:
        """Where the weights are computed."""
        return self.grid.device

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return torch.float32

    @property
    def _item_bytes(self) -> int:
        return self._dtype.itemsize

    @property
    def _row_bytes(self) -> int:
        """Bytes of memory for computing one row of every batch entry and head."""
        B, H, _, J = self.shape
        return max(1, B * H * J * self._bytes_per_weight)

    @property
    def _bytes_per_weight(self) -> int:
        """Bytes of memory for computing one weight."""
        return 2 * self._item_bytes

    # The tensors of the call

    @property
    def query(self) -> Tensor:
        """The queries (B, H, I, D) that the scores were computed from.

        They are as the score compares them: after rotary encodings, and after what a score does before it compares
        (a norm, a projection, a feature map). They are detached if the map is, so with `rg.watch(model, grad=True)`
        they are in the autograd graph. Maps that are not computed from scores have none, and the error says what they
        are computed from.

        >>> import torch, regard as rg
        >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
        >>> weights = rg.Attention()(q, k, v).weights
        >>> torch.allclose((weights.query @ weights.key.mT / 2).softmax(-1), weights.dense(), atol=1e-6)
        True
        """
        raise RegardError(f"weights.query: {self._without_scores()}")

    @property
    def key(self) -> Tensor:
        """The keys (B, G, J, D) that the scores were computed from, as the score compares them; see `query`.

        Query head h reads key head h // (H / G). With a cache, they are the keys of all tokens so far.
        """
        raise RegardError(f"weights.key: {self._without_scores()}")

    def _without_scores(self) -> str:
        """The end of the error for a map without queries and keys."""
        return f"this map has no queries and keys. It is {self._made_of}."

    @property
    def value(self) -> Tensor:
        """The values (B, G, J, E) of the call, for a map of `rg.watch(model, keep="qkv")`; the output is W @ value.

        Query head h reads value head h // (H / G). With a cache, the values are those of all tokens so far. Values of
        a recurrent layer are those of its recurrence, before the norm, gate and projection that follow it. Other maps
        keep no values, since weights do not depend on them.

        >>> import torch, regard as rg
        >>> encoder = rg.nn.TransformerConfig(8, num_heads=2).encoder(layers=2).eval()
        >>> with rg.watch(encoder, keep="qkv") as seen:
        ...     states = encoder(torch.randn(1, 5, 8))
        >>> seen[1].value.shape, (seen[1] @ seen[1].value).shape
        (torch.Size([1, 2, 5, 4]), torch.Size([1, 2, 5, 4]))
        """
        if self._values is None:
            raise RegardError(
                "weights.value: this map has no values. A watch keeps them with rg.watch(model, keep='qkv'): read them "
                "from seen[3] itself, not from a copy or a selection of it. The value of "
                "rg.attend(query, key, value) is your own tensor."
            )
        value = self._values()
        return value if self.requires_grad else value.detach()

    # Exact pieces

    def __getitem__(self, index: Any) -> Tensor:
        """Exact weights by batch entry, head, query and key: `weights.dense()[index]`, read by itself.

        Indices are those of a tensor: integers, slices, `...`, None, lists, tensors of integers or booleans. Several
        lists name pairs, as in torch: weights[0, 0, [4, 7], [1, 2]] has two weights. `tile` reads every row of one list
        with every key of another.
        """
        selection = self._selection(index)
        block = selection.block(self, WORKSPACE // self._bytes_per_weight)
        return block[tuple(to_device(p, block.device) if isinstance(p, Tensor) else p for p in selection.of_block)]

    def _selection(self, index: Any) -> Selection:
        """What an index expression reads, if it fits in the budget."""
        selection = Selection.of(index, self.shape)
        self._within_budget(selection.size * self._item_bytes, BUDGET)
        return selection

    @checked
    def tile(
        self, batch: Index = None, head: Index = None, rows: Index = None, cols: Index = None, budget: Count = BUDGET
    ) -> Tensor:
        """Exact weights of selected batch entries, heads, queries and keys; always four axes (B', H', I', J')."""
        b, h, i, j = (
            indices("weights[...]", name, part, size)
            for name, part, size in zip(AXES, (batch, head, rows, cols), self.shape, strict=True)
        )
        if 0 in (len(b), len(h), len(i), len(j)):
            empty = torch.zeros(len(b), len(h), len(i), len(j), dtype=self._dtype, device=self.device)
            return in_graph(empty, self.live_rows().tensors) if self._is_read_live else empty
        self._within_budget(len(b) * len(h) * len(i) * len(j) * self._item_bytes, budget)
        view = self if batch is None and head is None else self.select(b, h)
        return live_tile(view, i, j, WORKSPACE) if view._is_read_live else view._indexed(i, j)

    @torch.no_grad()
    def _indexed(self, rows: Tensor, cols: Tensor) -> Tensor:
        """The weights of these queries and keys (indices on the host), without gradients."""
        (B, H), (keys, place) = self.shape[:2], cols.unique(return_inverse=True)
        step = max(1, WORKSPACE // max(1, B * H * len(keys) * self._bytes_per_weight))
        consecutive, columns = as_slice(rows), as_slice(keys)
        if consecutive is None:
            parts = rows.split(step)
        else:
            first, last = consecutive.start, consecutive.stop
            parts = [slice(start, min(start + step, last)) for start in range(first, last, step)]
        with without_autocast(self.device):  # it would round sums
            weights = torch.cat([self._weights(part, keys if columns is None else columns) for part in parts], 2)
        return weights if torch.equal(keys, cols) else weights[..., to_device(place, self.device)]

    @checked
    def dense(self, budget: Count = BUDGET) -> Tensor:
        """All weights (B, H, I, J), if they fit in `budget` bytes."""
        return self.tile(budget=budget)

    @checked
    @torch.no_grad()
    def step_table(
        self,
        query: int,
        head: int = 0,
        batch: int = 0,
        *,
        value: Tensor | None = None,
        tokens: Sequence[str] | None = None,
        queries: Sequence[str] | None = None,
    ) -> StepTable:
        """One query with all its numbers: the scores of each key, scaled, biased and masked, its weight, and its value.

        `query`, `head` and `batch` are indices. `value` are the values of the call, with the axes that `attend` takes;
        a map of `rg.watch(model, keep="qkv")` has its own. `tokens` are the tokens of the keys, and `queries` those of
        the queries, if they differ. Only maps that are computed from scores have these steps; for others the error says
        what they are computed from. The result prints as a table, and it is one in notebooks.

        >>> import torch, regard as rg
        >>> x = torch.eye(3)
        >>> table = rg.attend(x, x, x, is_causal=True).weights.step_table(1, value=x)
        >>> list(table.steps), table.steps["masked"], table.output
        (['product', 'scaled', 'masked', 'weight'], tensor([0.0000, 0.5774,   -inf]), tensor([0.3595, 0.6405, 0.0000]))
        """
        places = zip(AXES, (batch, head, query), self.shape, strict=False)
        b, h, i = (int(indices("weights.step_table", name, place, size)) for name, place, size in places)
        steps = {name: step[0, 0, 0] for name, step in self._score_steps(b, h, i).items()}
        steps["weight"] = self.tile([b], [h], [i])[0, 0, 0]
        if value is None and self._values is not None:
            value = self.value
        if queries is None and self.shape[2] == self.shape[3]:
            queries = tokens
        names = names_of(tokens, self.shape[3], "keys")
        name = names_of(queries, self.shape[2], "queries")[i]
        title = (
            f"Query {i if queries is None else f'{i} ({name})'}, batch entry {b}, head {h}. "
            f"{self.attention.normalizer!r} makes weights of the scores."
        )
        of_head = None if value is None else values_of_head(value, self.shape, b, h)
        return StepTable(title, name, names, steps, of_head)

    def _score_steps(self, batch: int, head: int, query: int) -> dict[str, Tensor]:
        """The scores (1, 1, 1, J) of one query after each step."""
        raise RegardError(f"weights.step_table: {self._without_scores()}")

    @checked
    def at_keys(self, keys: Tensor | Sequence[int]) -> Tensor:
        """The weight of each query on one key of its own, (B, H, I): `keys` (I,) or (B, I) are indices, -1 is none.

        Rows are read in blocks, so a whole map is never computed. A query without a key gives 0.

        >>> import torch, regard as rg
        >>> weights = rg.Attention(mask=rg.causal())(*torch.zeros(3, 1, 1, 4, 2)).weights
        >>> weights.at_keys([0, 0, -1, 2])[0, 0]
        tensor([1.0000, 0.5000, 0.0000, 0.2500])
        """
        (B, H, I, J), keys = self.shape, as_tensor(keys, device="cpu")
        is_index = not keys.is_floating_point() and keys.dtype != torch.bool
        is_index &= not keys.numel() or -1 <= int(keys.min()) <= int(keys.max()) < J
        if keys.shape not in ((I,), (1, I), (B, I)) or not is_index:
            raise RegardError(
                f"weights.at_keys: keys are indices from 0 to {J - 1}, or -1 for none, of shape ({I},) or ({B}, {I}), "
                f"one for each query; got {keys.dtype} of shape {tuple(keys.shape)}."
            )
        if not J:
            return self.tile().sum(3)  # zeros, in the graph of the map
        keys = (keys[None] if keys.ndim == 1 else keys).long()
        parts = []
        for rows in torch.arange(I).split(TILE[0]):
            columns, place = keys[:, rows].clamp_min(0).unique(return_inverse=True)
            index, has_key = (to_device(x, self.device)[:, None, :, None] for x in (place, keys[:, rows] >= 0))
            tile = self.tile(rows=rows, cols=columns)
            parts.append(tile.gather(3, index.expand(B, H, -1, 1)).where(has_key, 0.0)[..., 0])
        return torch.cat(parts, 2)

    @checked
    def at_offset(self, offset: int) -> Tensor:
        """The weight of each query on the key `offset` positions after it, (B, H, I): -1 is the token before.

        It is a diagonal of the map. 0 where there is no such key.

        >>> import torch, regard as rg
        >>> weights = rg.Attention(mask=rg.causal())(*torch.zeros(3, 1, 1, 4, 2)).weights
        >>> weights.at_offset(-1)[0, 0]
        tensor([0.0000, 0.5000, 0.3333, 0.2500])
        """
        wanted, keys = self.grid.query.cpu() + offset, self.grid.key.cpu()
        place = torch.searchsorted(keys, wanted).clamp_max(max(len(keys) - 1, 0))
        return self.at_keys(place.where(keys[place] == wanted, -1) if len(keys) else torch.full_like(wanted, -1))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """All weights as a NumPy array, if they fit in the budget of `dense`."""
        if copy is False:
            raise RegardError("weights: each call computes a new array, so copy=False is impossible. Leave it out.")
        self._refuse_export("NumPy")
        weights = self.dense().detach().cpu().numpy()
        return weights if dtype is None else weights.astype(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """All weights for `torch.as_tensor` and every other library that reads DLPack, within the budget of `dense`."""
        self._refuse_export("DLPack, which torch.as_tensor reads,")
        return self.dense().detach().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty((), device=self.device).__dlpack_device__()

    def __len__(self) -> int:
        """The number of batch entries, the first axis."""
        return self.shape[0]

    def __bool__(self) -> bool:
        return True  # an empty batch is a map too

    def _within_budget(self, size: int, budget: int = BUDGET) -> None:
        """Refuse a result of more bytes than the budget."""
        if size > budget:
            raise RegardError(
                f"weights: this tensor takes {size / 2**20:,.0f} MiB, "
                f"the budget is {budget / 2**20:,.0f} MiB. "
                "Ask for fewer rows (weights[b, h, i0:i1]), for statistics (entropy(), top(), pool()), or raise "
                f"the budget: tile(..., budget={size})."
            )

    def _parts(self, axis: int) -> Iterable[Tensor]:
        """The indices of the queries (axis 2) or keys (axis 3), in parts whose weights fit in the workspace."""
        size = max(1, self.numel() // max(1, self.shape[axis])) * self._bytes_per_weight
        return torch.arange(self.shape[axis], device="cpu").split(max(1, WORKSPACE // size))

    def shares(self) -> AttentionMap:
        """|w_ij| / sum_j |w_ij|: the share of each key, for statistics that need shares.

        >>> import torch, regard as rg
        >>> x = torch.zeros(1, 1, 3, 4)
        >>> rg.Attention()(x, x, x).weights.shares()[0, 0, 2]
        tensor([0.3333, 0.3333, 0.3333])
        """
        return AttentionMap._shares_of(self)

    # Gradients

    @property
    def requires_grad(self) -> bool:
        """Whether weights, tiles and reductions of this map are in the autograd graph.

        They are if the map was made in grad mode of a tensor that requires grad: queries, keys, or a parameter of a
        piece. Maps of `rg.watch(model)` are detached; `rg.watch(model, grad=True)` keeps their graphs.

        >>> import torch, regard as rg
        >>> q, k, v = (torch.randn(1, 1, 3, 4, requires_grad=True) for _ in range(3))
        >>> weights = rg.Attention()(q, k, v).weights
        >>> weights.entropy().mean().backward()  # a loss: rows should be sharper
        >>> weights.requires_grad, q.grad.shape, v.grad
        (True, torch.Size([1, 1, 3, 4]), None)
        """
        return self._refusal is not None

    def detach(self) -> Self:
        """The same map without its graph: its weights and statistics are constants, and it keeps no activations.

        >>> import torch, regard as rg
        >>> x = torch.randn(1, 1, 3, 4, requires_grad=True)
        >>> rg.Attention()(x, x, x).weights.detach().entropy().requires_grad
        False
        """
        if not self.requires_grad:
            return self
        detached = object.__new__(type(self))
        state = {name: x for name, x in vars(self).items() if name not in ("_live", "_refusal", "requires_grad")}
        vars(detached).update({name: _detached(x) for name, x in state.items()})
        return detached

    def __getstate__(self) -> dict[str, Any]:
        """The fields of the detached map: a copy or a file has no graph, and no values."""
        return {name: x for name, x in vars(self.detach()).items() if name != "_values"}

    def with_gradients(self) -> Self:
        """This map, if it requires grad; else a `RegardError` that says why it does not.

        Use it where a loss needs gradients: `weights.with_gradients().entropy()`. A constant map
        would contribute no gradient, and no error would say so.

        >>> import torch, regard as rg
        >>> x = torch.randn(1, 1, 3, 4, requires_grad=True)
        >>> with torch.no_grad():
        ...     weights = rg.Attention()(x, x, x).weights
        >>> weights.with_gradients()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        regard.RegardError: weights: this map does not require grad. ...
        """
        if not self.requires_grad:
            raise RegardError(
                "weights: this map does not require grad. It was made under torch.no_grad(), or of tensors that do not "
                "require grad, or it was detached, as the maps of rg.watch(model) are: rg.watch(model, grad=True)."
            )
        if (refusal := self.live_rows().refusal) is not None:
            raise RegardError(refusal)
        return self

    @property
    def _is_read_live(self) -> bool:
        """Whether what is read now must be in the autograd graph."""
        return torch.is_grad_enabled() and self.requires_grad

    def _refuse_export(self, library: str) -> None:
        """Refuse to give all weights to another library, which would drop the graph without a word."""
        if self._is_read_live:
            raise RegardError(
                f"weights: this map requires grad, and {library} cannot keep its graph. Call weights.detach() first; "
                "weights.dense() is a tensor with the graph."
            )

    def live_rows(self) -> LiveRows:
        """Whole rows of weights as a function of the tensors of this map, for gradients."""
        return LiveRows.refused(self._refusal or NO_GRADIENTS.format(type(self).__name__))

    # Streaming statistics

    @overload
    def summarize(self, reduction: Reduction[First], /) -> tuple[First]: ...

    @overload
    def summarize(self, reduction: Reduction[First], second: Reduction[Second], /) -> tuple[First, Second]: ...
    @overload
    def summarize(
        self, reduction: Reduction[First], second: Reduction[Second], third: Reduction[Third], /
    ) -> tuple[First, Second, Third]: ...
    @overload
    def summarize(self, *reductions: Reduction) -> tuple[Any, ...]: ...

    @checked
    def summarize(self, *reductions: Reduction) -> tuple[Any, ...]:
        """Any number of statistics in one pass over the tiles that the mask allows, in O(n) memory.

        Equal reductions are computed once. Statistics of a map that requires grad are in the autograd graph.

        >>> import torch, regard as rg
        >>> seen = rg.Attention()(*(torch.randn(1, 2, 5, 4) for _ in range(3)))
        >>> entropy, received = seen.weights.summarize(rg.maps.Entropy(), rg.maps.KeyTotals())
        """
        is_live = self._is_read_live
        with torch.set_grad_enabled(is_live), without_autocast(self.device):
            states = live_states(self, reductions) if is_live else self.reduction_states(reductions)
            return tuple(reduction.finish(states[reduction]) for reduction in reductions)

    @torch.no_grad()
    def reduction_states(self, reductions: Iterable[Reduction]) -> dict[Reduction, State]:
        """The state of each reduction after the whole map, for callers that merge states; in one pass over the tiles.

        States have no gradients.
        """
        reductions = check_reductions(reductions, self)
        states = {reduction: reduction.init(self.shape, self.device) for reduction in reductions}
        with without_autocast(self.device):
            self._add_tiles(states)
        return states

    def _add_tiles(self, states: dict[Reduction, State]) -> None:
        """Add every tile to every state."""
        for tile in self.tiles() if states else ():
            for reduction, state in states.items():
                reduction.add(state, tile)

    @torch.no_grad()
    def tiles(self) -> Iterator[Tile]:
        """Every tile that may contain a weight other than 0, row by row; without gradients."""
        yield from self._tiles_with(self._weights_of_strip)

    def _tiles_with(self, weights_of_strip: WeightsOfStrip) -> Iterator[Tile]:
        """Every tile that the mask allows, with weights from this function."""
        for rows, parts in self._strips() if 0 not in self.shape else ():
            for (cols, undecided), (weights, logs) in zip(parts, weights_of_strip(rows, parts), strict=True):
                yield Tile(weights, logs, rows, cols, self.grid.tile(rows, cols), undecided)

    def _weights_of_strip(self, rows: slice, parts: list[TileKeys]) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Weights of each tile of these queries, and their logarithms (None if those are not cheap)."""
        for cols, _ in parts:
            yield self._weights(rows, cols), None

    def _strips(self) -> Iterator[tuple[slice, list[TileKeys]]]:
        """Ranges of queries, with the keys of each of their tiles."""
        for rows, any_allowed, all_allowed in self._row_blocks():
            columns = _cut(any_allowed, TILE[1])
            yield rows, [(cols, Spans.of((cols.start, cols.stop)) & ~all_allowed) for cols in columns]

    def _row_blocks(self, whole: int = 0) -> Iterator[tuple[slice, Spans, Spans]]:
        """Ranges of queries, the keys that some of them may attend to (and short gaps), and those that all may.

        A range has at most TILE[0] queries, and fewer if one of its tiles would not fit in the workspace. If `whole` is
        given, all tiles of a range must fit at once, with that number of times the memory. A mask may allow each range
        another number of keys, so the height is halved until a range fits, and doubled again for the next one.
        """
        B, H, I, J = self.shape
        most_pairs = WORKSPACE // (B * H * self._bytes_per_weight * max(1, whole))
        top, height, widest = 0, TILE[0], J if whole else TILE[1]
        while top < I:
            rows, any_allowed = self._range_of_rows(top, height)
            while height > 1 and height * min(len(any_allowed), widest) > most_pairs:
                height //= 2
                rows, any_allowed = self._range_of_rows(top, height)
            yield rows, any_allowed, self._spans("all_allowed", rows)
            top, height = rows.stop, min(2 * height, TILE[0])

    def _range_of_rows(self, top: int, height: int) -> tuple[slice, Spans]:
        """At most `height` queries from `top` on, and the keys that some of them may attend to (and short gaps)."""
        rows = slice(top, min(top + height, self.shape[2]))
        return rows, self._spans("any_allowed", rows).gaps_up_to(GAP)

    def _spans(self, question: str, rows: slice) -> Spans:
        """The answer of the mask to "any_allowed" or "all_allowed" for a range of queries, as indices of keys."""
        mask, positions = self.attention.mask, self.positions
        if mask is None:
            return Spans.of((0, self.shape[3]))
        return positions.columns(getattr(mask, question)(rows.start + positions.start, rows.stop + positions.start))

    def entropy(self) -> Tensor:
        """-sum_j w log w of every row, in nats; (B, H, I)."""
        return self.summarize(Entropy())[0]

    def top(self, k: int = 1) -> RowLinks:
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

    @torch.no_grad()
    def show(self, tokens: Sequence[str] | None = None, queries: Sequence[str] | None = None, batch: int = 0) -> Any:
        """Show the map in a notebook; needs `pip install 'regard[view]'`.

        `tokens` are the tokens of the keys; `queries` the tokens of the queries, if they differ.
        """
        return upper_layer("widget").show_maps([self], tokens, queries, batch)

    def _repr_svg_(self) -> str | None:
        return upper_layer("drawing").maps_svg({"": self}, repr(self))

    def __repr__(self) -> str:
        B, H, I, J = self.shape
        return f"AttentionMap({B} x {H} heads x {I} queries x {J} keys{', signed' if self.is_signed else ''})"


def _detached(value: Any) -> Any:
    """A tensor or a map without its graph, and lists of them; anything else as it is."""
    if isinstance(value, Tensor | AttentionMap):
        return value.detach()
    return type(value)(map(_detached, value)) if type(value) in (list, tuple) else value


class RecomputedMap(AttentionMap):
    """A map whose weights are computed again from tensors that others may change in place: then it refuses.

    A subclass sets `_versions` to `versions_of(self._shared_tensors())`.
    """

    #: The error for a look after such a change.
    _stale: ClassVar[str]
    _versions: list[int]

    @abstractmethod
    def _shared_tensors(self) -> Iterable[Tensor]:
        """The tensors that share memory with tensors outside the map."""

    def _check_unchanged(self) -> None:
        """Refuse after a change in place: the weights would belong neither to the old nor to the new tensors."""
        if versions_of(self._shared_tensors()) != self._versions:
            raise RegardError(self._stale)

    def __getstate__(self) -> dict[str, Any]:
        """All fields but the versions, since a copy has its own tensors; they are detached."""
        self._check_unchanged()
        return {name: value for name, value in super().__getstate__().items() if name != "_versions"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._versions = versions_of(self._shared_tensors())


def _cut(spans: Spans, width: int) -> Iterator[slice]:
    """The ranges, cut into slices of about equal size and at most `width`."""
    for first, last in spans:
        num_slices = -(-(last - first) // width)
        for n in range(num_slices):
            yield slice(first + (last - first) * n // num_slices, first + (last - first) * (n + 1) // num_slices)
