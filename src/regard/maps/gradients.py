"""Gradients of weights and reductions in O(n) memory: the forward pass keeps no weights, the backward computes them
again.

A family of weights says how whole rows of weights follow from its tensors (`LiveRows`). What is read from a map, a tile
or the states of reductions, is one autograd function. Its forward pass is that of any map: kernels, or tiles without a
graph. Its backward pass goes through the rows, a range at a time: weights, what is read of them, and the gradients of
the tensors, which are added up. So no more weights are in memory than those of one range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.base.shapes import as_slice, to_device, without_autocast
from regard.base.spans import Spans
from regard.engine.gradients import zeros_like
from regard.engine.transforms import is_transformed
from regard.maps.reductions import Distance, Entropy, Reduction, Shape, State, Tile, check_reductions
from regard.pieces.grid import Grid

#: Weights of whole rows, and their logarithms if these are more precise than log(weights): from queries (a slice, or
#: indices on the host) and keys, among which are all those with a weight other than 0.
Rows = Callable[[slice | Tensor, Spans], tuple[Tensor, Tensor | None]]
#: Kinds of reductions whose gradient may need no rows: see `LiveRows`.
COMPILED = (Entropy, Distance)
#: Numbers that the graph of a weight holds, for each number that its computation without a graph holds.
GRAPH = 4


@dataclass(frozen=True, eq=False)
class LiveRows:
    """Whole rows of weights as a function of `tensors`: `around` makes it for tensors of the same shapes.

    With a `refusal` only values can be read: it is the error of the backward pass. `compiled` puts known states of
    reductions into the graph of other tensors, if it knows a gradient for them that needs no rows.
    """

    tensors: Sequence[Tensor]
    around: Callable[[Sequence[Tensor]], Rows]
    refusal: str | None = None
    compiled: Callable[[Sequence[Tensor], dict[Reduction, State]], dict[Reduction, State]] | None = None

    @staticmethod
    def refused(reason: str) -> LiveRows:
        """Rows whose gradients cannot be computed."""
        return LiveRows([torch.zeros((), requires_grad=True)], _no_rows, reason)


class Readable(Protocol):
    """What this file needs of a map.

    `live_rows` are its rows as a function of tensors in the graph. `reduction_states` and `_indexed` read it without a
    graph: states of reductions, and the weights of queries and keys by index. `_row_blocks` cuts the queries into
    ranges, with the keys that some and that all of them may attend to. With `whole` these are ranges of whole rows, of
    which that many copies fit in the workspace. `_spans` asks the mask for such keys: `question` is "any_allowed" or
    "all_allowed". `_row_bytes` is the memory of one row of every batch entry and head.
    """

    is_signed: ClassVar[bool]
    has_shares: ClassVar[bool]
    grid: Grid

    @property
    def shape(self) -> Shape: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def _row_bytes(self) -> int: ...
    def live_rows(self) -> LiveRows: ...
    def reduction_states(self, reductions: Iterable[Reduction]) -> dict[Reduction, State]: ...
    def _indexed(self, rows: Tensor, cols: Tensor) -> Tensor: ...
    def _row_blocks(self, whole: int = 0) -> Iterator[tuple[slice, Spans, Spans]]: ...
    def _spans(self, question: str, rows: slice) -> Spans: ...


def _no_rows(_: Sequence[Tensor]) -> Rows:
    raise AssertionError("the backward pass refuses before it asks for rows")


def refusing(reason: str | None, results: Sequence[Tensor]) -> list[Tensor]:
    """The results; with a reason they are in a graph whose backward pass is this error."""
    if reason is None or not torch.is_grad_enabled():
        return list(results)
    return list(_Refused.apply(reason, torch.zeros((), requires_grad=True), *results))  # type: ignore[arg-type]


class _Refused(torch.autograd.Function):
    """Results that can be read, and have no gradients."""

    @staticmethod
    def forward(ctx: Any, reason: str, _: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
        ctx.reason = reason
        ctx.mark_non_differentiable(*(t for t in results if not t.is_floating_point()))
        return tuple(t.clone() for t in results)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RegardError(ctx.reason)


def live_tile(weights: Readable, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
    """The weights (B, H, I', J') of these queries and keys (indices on the host), in the autograd graph."""
    return _read(_TileReading(weights, rows, cols, workspace))[0]


def in_graph(empty: Tensor, tensors: Iterable[Tensor]) -> Tensor:
    """A tensor without numbers in the graph of these tensors, whose gradients of it are 0."""
    return empty + sum(tensor.sum() for tensor in tensors if tensor.requires_grad)


def live_states(weights: Readable, reductions: Iterable[Reduction]) -> dict[Reduction, State]:
    """The state of each reduction after the whole map, in the autograd graph."""
    reading = _ReductionReading(weights, list(dict.fromkeys(check_reductions(reductions, weights))))
    numbers = iter(_read(reading))
    return {reduction: [next(numbers) for _ in range(count)] for reduction, count in reading.counts.items()}


def joined_rows(parts: Sequence[LiveRows], combine: Callable[[list[Any]], Rows]) -> LiveRows:
    """Rows that `combine` computes from the rows of several maps.

    `combine` gets one entry for each part, in their order: its `Rows`, or the tensors of an `extra_tensors`.
    """
    counts = [len(part.tensors) for part in parts]

    def around(tensors: Sequence[Tensor]) -> Rows:
        source = iter(tensors)
        own = [[next(source) for _ in range(count)] for count in counts]
        return combine([part.around(some) for part, some in zip(parts, own, strict=True)])

    refusal = next((part.refusal for part in parts if part.refusal is not None), None)
    return LiveRows([tensor for part in parts for tensor in part.tensors], around, refusal)


def mapped_rows(source: LiveRows, change: Callable[[Tensor, slice | Tensor, Spans], Tensor]) -> LiveRows:
    """The rows of one map, changed: `change` gets the weights, the queries and the keys."""

    def combine(parts: list[Rows]) -> Rows:
        (rows,) = parts
        return lambda queries, keys: (change(rows(queries, keys)[0], queries, keys), None)

    return joined_rows([source], combine)


def extra_tensors(tensors: Sequence[Tensor]) -> LiveRows:
    """Tensors of a map beside those of its parts: `joined_rows` passes them to its `combine` in place of rows."""
    return LiveRows(tensors, lambda some: some)  # type: ignore[arg-type, return-value]


#: Results of a part of a reading, each with its gradient.
Part = list[tuple[Tensor, Tensor]]


class _Reading(Protocol):
    """What is read of a map: its results without a graph, and in the graph, part by part."""

    weights: Readable

    def results(self) -> list[Tensor]:
        """What is read, without a graph."""
        ...

    def parts(self, rows: Rows, grads: Sequence[Tensor | None]) -> Iterator[Part]:
        """The parts of the results that depend on weights, each with its gradient; together they are the results."""
        ...

    def compiled(
        self, live: LiveRows, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], /
    ) -> tuple[Part, Sequence[Tensor | None]]:
        """Results that need no rows, in the graph of the tensors, and the gradients of all others."""
        ...

    def whole(self, rows: Rows, grads: Sequence[Tensor | None]) -> Part:
        """All results in one graph, for a second derivative."""
        ...


@dataclass(eq=False)
class _TileReading:
    """The weights of some queries and keys."""

    weights: Readable
    rows: Tensor
    cols: Tensor
    workspace: int

    def results(self) -> list[Tensor]:
        tile = self.weights._indexed(self.rows, self.cols)
        return [tile.clone() if tile._is_view() else tile]  # a view from a function cannot be changed in place

    def parts(self, rows: Rows, grads: Sequence[Tensor | None]) -> Iterator[Part]:
        """Some of the queries at a time, as many as fit in the workspace with their graph."""
        (grad,) = grads
        if grad is None:
            return
        height = max(1, self.workspace // (GRAPH * self.weights._row_bytes))
        for places in torch.arange(len(self.rows)).split(height):
            queries = self.rows[places]
            keys = self.weights._spans("any_allowed", slice(int(queries.min()), int(queries.max()) + 1))
            if keys:
                consecutive = as_slice(queries)
                tile, _ = rows(queries if consecutive is None else consecutive, keys)
                yield [(self._columns(tile, keys), grad[:, :, places.to(grad.device)])]

    def compiled(
        self, _live: LiveRows, _tensors: Sequence[Tensor], grads: Sequence[Tensor | None], /
    ) -> tuple[Part, Sequence[Tensor | None]]:
        return [], grads

    def _columns(self, tile: Tensor, keys: Spans) -> Tensor:
        """The columns `cols` of a tile whose columns are `keys`; 0 for a column that is none of these keys."""
        tile_keys = keys.tensor("cpu")
        place = torch.searchsorted(tile_keys, self.cols).clamp_max(len(tile_keys) - 1)
        is_known = to_device(tile_keys[place] == self.cols, tile.device)
        return tile[..., to_device(place, tile.device)].where(is_known, 0.0)

    def whole(self, rows: Rows, grads: Sequence[Tensor | None]) -> Part:
        return [pair for part in self.parts(rows, grads) for pair in part]


class _ReductionReading:
    """The states of reductions after the whole map."""

    def __init__(self, weights: Readable, reductions: list[Reduction]) -> None:
        self.weights, self.reductions = weights, reductions
        #: The number of tensors in the state of each reduction, in the order of the results; `results` sets it.
        self.counts: dict[Reduction, int] = {}
        #: The states, which the caller may change in the results; for gradients that need them.
        self._states: dict[Reduction, State] = {}

    def results(self) -> list[Tensor]:
        states = self.weights.reduction_states(self.reductions)
        self.counts = {reduction: len(states[reduction]) for reduction in self.reductions}
        self._states = {f: [t.clone() for t in states[f]] for f in self.reductions if type(f) in COMPILED}
        return [tensor for state in states.values() for tensor in state]

    @property
    def constants(self) -> list[bool]:
        """For each result, whether it depends on no weight."""
        return [not reduction.reads_weights for reduction, count in self.counts.items() for _ in range(count)]

    def compiled(
        self, live: LiveRows, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> tuple[Part, Sequence[Tensor | None]]:
        of_reduction = self._grads_of(grads)
        known = {reduction: state for reduction, state in self._states.items() if reduction in of_reduction}
        states = live.compiled(tensors, known) if known and live.compiled is not None else {}
        pairs = [pair for reduction, state in states.items() for pair in _in_graph(state, of_reduction[reduction])]
        of_results = [reduction for reduction, count in self.counts.items() for _ in range(count)]
        return pairs, [None if f in states else grad for f, grad in zip(of_results, grads, strict=True)]

    def _grads_of(self, grads: Sequence[Tensor | None]) -> dict[Reduction, list[Tensor | None]]:
        """The gradients of all results as those of each state, by reduction; without states that have none."""
        source = iter(grads)
        split = {reduction: [next(source) for _ in range(count)] for reduction, count in self.counts.items()}
        return {reduction: part for reduction, part in split.items() if any(grad is not None for grad in part)}

    def _new(self, reduction: Reduction) -> State:
        return reduction.init(self.weights.shape, self.weights.device)

    def _blocks(self) -> list[tuple[slice, Spans, Spans]]:
        """The ranges of queries with keys, as `AttentionMap._row_blocks` gives them, which fit with their graph."""
        blocks = self.weights._row_blocks(whole=GRAPH) if 0 not in self.weights.shape else ()
        return [block for block in blocks if block[1]]

    def _tiles(self, rows: Rows, block: tuple[slice, Spans, Spans]) -> list[Tile]:
        """The tiles of a range of queries, one for each interval of their keys."""
        queries, keys, all_allowed = block
        weights, logs = rows(queries, keys)
        tiles, first = [], 0  # `first`: the column of `weights` at which the interval begins
        for start, stop in keys:
            cols, part = slice(start, stop), slice(first, first + stop - start)
            undecided = Spans.of((start, stop)) & ~all_allowed
            own_logs = None if logs is None else logs[..., part]
            tiles.append(
                Tile(weights[..., part], own_logs, queries, cols, self.weights.grid.tile(queries, cols), undecided)
            )
            first = part.stop
        return tiles

    def parts(self, rows: Rows, grads: Sequence[Tensor | None]) -> Iterator[Part]:
        """Range by range, from the last to the first.

        States of disjoint queries add up for most reductions, so that every range has the gradient of the result. For
        other reductions, such as a maximum, the state before a range takes part in it, and the gradient goes through
        it.
        """
        of_reduction = self._grads_of(grads)
        blocks = self._blocks() if of_reduction else []
        before = self._states_before(rows, [reduction for reduction in of_reduction if not _adds_up(reduction)], blocks)
        reached: set[Reduction] = set()
        depends = False  # weights on groups do not, if no group is whole yet
        for number, block in reversed(list(enumerate(blocks))):
            tiles, part = self._tiles(rows, block), []
            depends |= any(tile.weights.requires_grad for tile in tiles)
            for reduction, reduction_grads in of_reduction.items():
                earlier = [_leaf(t) for t in before[reduction][number]] if reduction in before else []
                state = [t.clone() for t in earlier] if reduction in before else self._new(reduction)
                _add(reduction, state, tiles)
                pairs = _in_graph(state, reduction_grads)
                part += pairs
                if reduction not in reached and self._reaches(reduction, state, tiles, reduction in before):
                    reached.add(reduction)
                if reduction in before:
                    of_reduction[reduction] = _gradients_before(pairs, earlier, reduction_grads)
            yield part
        if depends:
            _refuse_unreached([reduction for reduction in of_reduction if reduction not in reached])

    def _reaches(self, reduction: Reduction, state: State, tiles: list[Tile], has_earlier: bool) -> bool:
        """Whether the state of a reduction depends on the weights of these tiles, and not on an earlier state alone."""
        if has_earlier:
            state = self._new(reduction)
            _add(reduction, state, tiles)
        return any(tensor.requires_grad for tensor in state)

    @torch.no_grad()
    def _states_before(
        self, rows: Rows, reductions: list[Reduction], blocks: list[Any]
    ) -> dict[Reduction, list[State]]:
        """For each of these reductions its state before each range."""
        before: dict[Reduction, list[State]] = {reduction: [] for reduction in reductions}
        states = {reduction: self._new(reduction) for reduction in reductions}
        for block in blocks if reductions else ():
            tiles = self._tiles(rows, block)
            for reduction, state in states.items():
                before[reduction].append([tensor.clone() for tensor in state])
                _add(reduction, state, tiles)
        return before

    def whole(self, rows: Rows, grads: Sequence[Tensor | None]) -> Part:
        of_reduction, blocks = self._grads_of(grads), self._blocks()
        states = {reduction: self._new(reduction) for reduction in of_reduction}
        for block in blocks:
            tiles = self._tiles(rows, block)
            for reduction, state in states.items():
                _add(reduction, state, tiles)
        return [pair for reduction, state in states.items() for pair in _in_graph(state, of_reduction[reduction])]


def _add(reduction: Reduction, state: State, tiles: Sequence[Tile]) -> None:
    """Add the tiles to a state, which `add` may overwrite although its graph needs the earlier numbers."""
    is_sum = _adds_up(reduction) or not torch.is_grad_enabled()
    with nullcontext() if is_sum else torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        for tile in tiles:
            reduction.add(state, tile)


def _adds_up(reduction: Reduction) -> bool:
    """Whether states of disjoint queries add up: see `Reduction.adds_rows`."""
    return type(reduction).merge is Reduction.merge if reduction.adds_rows is None else reduction.adds_rows


def _leaf(tensor: Tensor) -> Tensor:
    """The tensor, as an input of a graph if it can have a gradient."""
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


def _in_graph(state: State, grads: Sequence[Tensor | None]) -> Part:
    """The tensors of a state that depend on weights and have a gradient, with it."""
    pairs = zip(state, grads, strict=True)
    return [(tensor, grad) for tensor, grad in pairs if grad is not None and tensor.requires_grad]


def _gradients_before(pairs: Part, earlier: State, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of a state before a range, from those after it."""
    inputs = [tensor for tensor in earlier if tensor.requires_grad]
    if not pairs or not inputs:
        return list(grads)
    outputs, output_grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, inputs, output_grads, retain_graph=True, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in earlier]


def _refuse_unreached(reductions: list[Reduction]) -> None:
    """Refuse gradients of reductions that no weight reaches by differentiable operations."""
    for reduction in reductions:
        raise RegardError(
            f"weights.summarize: {type(reduction).__name__} has no gradient. Its state depends on weights only through "
            "operations without a derivative, such as comparisons, counts or indices. Leave it out of the loss."
        )


def _read(reading: _Reading) -> tuple[Tensor, ...]:
    """The results of a reading, in the autograd graph."""
    if is_transformed():
        raise RegardError(
            "weights: torch.func and forward-mode derivatives do not reach weights. Use torch.autograd.grad or "
            "backward(), or read the output of attend(..., engine='dense'). weights.detach() gives the values alone."
        )
    live = reading.weights.live_rows()
    return _Read.apply(reading, live, *live.tensors)  # type: ignore[return-value]


class _Read(torch.autograd.Function):
    """Reads a map; backward computes the weights again, range by range.

    `tensors` are those of `live`, as arguments, so that autograd passes their gradients on.
    """

    @staticmethod
    def forward(ctx: Any, reading: _Reading, live: LiveRows, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.reading, ctx.live = reading, live
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)  # None in place of zeros for a result that a loss does not read
        results = reading.results()
        constants = getattr(reading, "constants", [False] * len(results))
        pairs = zip(results, constants, strict=True)
        ctx.mark_non_differentiable(*(t for t, is_constant in pairs if is_constant or not t.is_floating_point()))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of `tensors`, from those of the results: sums over the parts of the reading.

        Each part has a graph of its own, which begins at leaves, so it is freed before the next one is built.
        """
        live: LiveRows = ctx.live
        if live.refusal is not None:
            raise RegardError(live.refusal)
        tensors, wanted = _saved(ctx), ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # create_graph=True
            with without_autocast(ctx.reading.weights.device):
                part = ctx.reading.whole(live.around(tensors), grads)
                return None, None, *_gradients(part, tensors, wanted, create_graph=True)
        sums = [zeros_like(t) if want else None for t, want in zip(tensors, wanted, strict=True)]
        leaves = [t.detach().requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)]
        with torch.enable_grad(), without_autocast(ctx.reading.weights.device):
            compiled, grads = ctx.reading.compiled(live, leaves, grads)
            for part in chain([compiled], ctx.reading.parts(live.around(leaves), grads)):
                for total, gradient in zip(sums, _gradients(part, leaves, wanted), strict=True):
                    if total is not None and gradient is not None:
                        total += gradient
        return None, None, *(s if s is None else s.to(t.dtype) for s, t in zip(sums, tensors, strict=True))


def _saved(ctx: Any) -> Sequence[Tensor]:
    """The tensors of the forward pass; an error with the remedy if they were freed or changed."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "inplace" in str(error):
            raise RegardError(
                "weights: queries, keys or parameters were changed in place after the weights were read, so their "
                "gradients cannot be computed. Call backward() before the change (an optimizer step, perhaps)."
            ) from error
        if "second time" in str(error):
            raise RegardError(
                "weights: backward() has already freed the graph of these weights. Add up the losses and call "
                "backward() once, read the weights again, or pass retain_graph=True to the first backward()."
            ) from error
        raise


def _gradients(
    part: Part, inputs: Sequence[Tensor], wanted: Sequence[bool], create_graph: bool = False
) -> list[Tensor | None]:
    """Gradients of a part of the results with respect to the wanted inputs; None where there is none.

    With `create_graph` they have a graph themselves, for a second derivative.
    """
    part = [(result, grad) for result, grad in part if result.requires_grad]
    if not part:
        return [None] * len(inputs)
    results, grads = zip(*((result, grad.to(result.dtype)) for result, grad in part), strict=True)
    leaves = [tensor for tensor, want in zip(inputs, wanted, strict=True) if want]
    # keep the graph: a family may compute something once for all rows
    leaf_gradients = iter(
        torch.autograd.grad(results, leaves, grads, retain_graph=True, create_graph=create_graph, allow_unused=True)
    )
    return [next(leaf_gradients) if want else None for want in wanted]
