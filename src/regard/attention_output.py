"""One call for any attention: `attend` runs it, `plan` says how it would run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention import Attention, Mechanism, Prepared, checked_mechanism
from regard.base.checks import explained
from regard.base.context import ContextItems
from regard.base.errors import RegardError, errors_named, warn_caller
from regard.base.positions import Positions, check_positions
from regard.base.shapes import Sizes, check_finite, in_autocast_dtype, without_autocast
from regard.base.spans import Spans
from regard.base.upper_layers import importers
from regard.caches import Cache, Extended, GrowingCache, RecurrentCache
from regard.call_options import CallOptions
from regard.engine.decoding import DecodingStep, RecurrentStep
from regard.engine.hidden import may_be_spoiled, without_hidden
from regard.engine.kept_plans import Repeat, Request, kept_plans
from regard.engine.plan import CompositePlan, ExecutionPlan
from regard.engine.plan import plan as engine_plan
from regard.engine.problem import Problem, Result
from regard.engine.ring import RankShare, Ring, RingPlan
from regard.engine.transforms import numbers_needed, refuse_tracing, uncompiled
from regard.maps.attention_map import AttentionMap
from regard.maps.call_map import RING_MAPS, map_of, problem_of
from regard.maps.compiled_reductions import folds_of
from regard.maps.listener import Listeners
from regard.maps.reductions import Reduction
from regard.maps.scored_map import ScoredMap
from regard.maps.transported_map import TransportedMap
from regard.pieces.call_tensors import ARGUMENTS, CallTensors, check_call_tensors, needs_of
from regard.pieces.mask import Mask

#: Listeners of every call of `attend`. The module is None: a function does not know its caller.
attend_listeners = Listeners()
#: The open edits of this thread. Each runs a call of `attend` with its changes, or returns None if it changes nothing.
attend_editors: ContextItems[Callable[..., AttentionOutput | None]] = ContextItems("attend editors")

#: The attention of a call that names none.
PLAIN = Attention()
#: The error of `attend(attention, query, key, value)`.
TENSORS_FIRST = (
    "attend: the tensors come first: attention(query, key, value), or attend(query, key, value, attention=attention)."
)


@dataclass(frozen=True, eq=False)
class AttentionOutput:
    """The result of `attend`: the output (B, H, I, E), the weights on demand, and the next cache if it got one.

    `statistics` are the results of `attend(..., statistics=)`, in their order. The result unpacks to two, the output
    and the weights.

    >>> import torch, regard as rg
    >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
    >>> output, weights = rg.attend(q, k, v)
    >>> torch.allclose(output, weights.dense() @ v, atol=1e-6)
    True
    """

    output: Tensor
    weights: AttentionMap
    cache: Cache | None = None
    statistics: tuple[Any, ...] = ()

    def __iter__(self) -> Iterator[Any]:  # a type checker unpacks it to two values of any type
        return iter((self.output, self.weights))

    def __repr__(self) -> str:
        cache = "" if self.cache is None else f", cache of {self.cache.length} tokens"
        return f"AttentionOutput(output {tuple(self.output.shape)}, weights {self.weights!r}{cache})"

    def _repr_svg_(self) -> str | None:
        return self.weights._repr_svg_()


@uncompiled
@explained
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention: Mechanism | None = None,
    mask: Mask | Tensor | None = None,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    dropout_p: float = 0.0,
    layout: Literal["bhld", "blhd"] = "bhld",
    positions: Positions | None = None,
    cache: Cache | None = None,
    engine: str | Ring = "auto",
    check: bool = False,
    statistics: Iterable[Reduction] = (),
    **tensors: Tensor,
) -> AttentionOutput:
    """output_i = sum_j w_ij v_j, with the weights of any mechanism, and every weight on demand.

    `query` is (B, H, I, D), `key` (B, G, J, D), `value` (B, G, J, E); G divides H, and H / G query heads share each
    key/value head. With `layout="blhd"`, that of flash-attn, they and the output have the length before the heads.
    Without an axis of heads, (B, I, D) or (I, D), there is one head, and the output has the same axes; the map of the
    weights always has four. Arrays of NumPy are taken too. The result unpacks to two:
    `output, weights = attend(query, key, value)`; `cache` is its third attribute.

    `attention` is the mechanism: `attend(..., attention=attention)` is `attention(...)`. Without it the weights are the
    softmax of q_i . k_j / sqrt(D). These arguments change it for one call:

    - `mask` is joined to the mask of the attention, `&`. It is a piece, such as `regard.padding(lengths)`, or a tensor:
      booleans with True = may attend, or numbers that are added to the scores. Numbers that are all 0 or very negative
      are a mask; others are a bias, with gradients. A tensor has four axes (B, H, I, J), each of which may be 1, or two
      axes: (I, J), or (B, J) for keys. With a cache, J counts the earlier keys too. Integers, and numbers that are all
      1 and 0, are refused: torch adds them to the scores.
    - `is_causal` adds `regard.causal()`. Without a cache or `positions`, other numbers of queries than of keys are
      refused: torch aligns the first query with the first key, flash-attn the last query with the last key.
    - `scale` is the factor of the dot product, `dropout_p` the share of dropped weights, in eval mode too.

    `positions` are the positions of queries and keys; by default, with a cache too, the last query has
    the position of the last key. `cache` holds earlier keys and values; `cache` of the result is for the next call.
    `engine` is "auto", "reference", "dense", "fused", "kernel", "chosen", "blocked", "linear", "recurrent" or "flex";
    an engine that cannot run the pieces raises an error with the reason. With "ring", or a `Ring`, the processes of a
    group run one sequence together, and each passes its part. `check=True` raises an error if an input has NaN or
    infinite values. `statistics` are reductions, such as `regard.maps.Entropy()`; the result has what
    `weights.summarize` returns for them. The compiled kernel computes the entropy, the distance and the strongest link
    of every row with the output, without a pass of their own. `tensors` are those that a piece needs for each call, by
    name; its docstring gives their shapes.

    >>> import torch, regard as rg
    >>> attention = rg.Attention(mask=rg.window(256), position=rg.RoPE(64))
    >>> q, k, v = torch.randn(1, 8, 1000, 64), torch.randn(1, 2, 1000, 64), torch.randn(1, 2, 1000, 64)
    >>> output, weights = rg.attend(q, k, v, attention=attention, is_causal=True)
    >>> output.shape
    torch.Size([1, 8, 1000, 64])
    >>> weights[0, 3, 700, 440:450].gt(0).tolist()
    [False, False, False, False, False, True, True, True, True, True]
    """
    if not isinstance(check, bool):
        raise RegardError(f"attend: check is True or False, got {type(check).__name__}.")
    refuse_tracing("attend")
    wanted = _reductions(statistics)
    options = CallOptions(mask, is_causal, scale, dropout_p)
    request, order = _request(attention, (query, key, value), layout, positions, cache, options, engine, tensors)
    if wanted or attend_listeners:
        request = request._replace(statistics=(*wanted, *attend_listeners.reductions))
    if attend_editors and not attend_listeners.busy:  # the innermost `rg.edit` runs the call, if it selects it
        edited = [*attend_editors][-1](
            *request[:4], positions=positions, cache=cache, engine=engine, check=check, **request.tensors
        )
        if edited is not None:
            attend_listeners.tell(None, lambda: edited.weights, lambda: request.value)
            return _completed(edited, order, wanted)
    seen = request.attention.attend_request(request, cache, check)
    return seen if order is PLAIN_ORDER and not wanted else _completed(seen, order, wanted)


def _reductions(statistics: Iterable[Reduction]) -> tuple[Reduction, ...]:
    """The argument `statistics` of a call, after checks."""
    if type(statistics) is tuple and not statistics:
        return ()
    if isinstance(statistics, Reduction):
        raise RegardError(f"attend(statistics={statistics!r}): give a list, statistics=[{statistics!r}].")
    reductions = tuple(statistics) if isinstance(statistics, Iterable) else (statistics,)
    for reduction in reductions:
        if not isinstance(reduction, Reduction):
            raise RegardError(
                f"attend(statistics=...): expected reductions, such as regard.maps.Entropy(), got {reduction!r}."
            )
    return reductions


def _completed(seen: AttentionOutput, order: Order, statistics: tuple[Reduction, ...]) -> AttentionOutput:
    """The result with its statistics, and with the output in the order of the inputs."""
    seen = order.of_result(seen)
    return replace(seen, statistics=seen.weights.summarize(*statistics)) if statistics else seen


class Order(NamedTuple):
    """Which axes the tensors of a call have, if not (batch, heads, length, width).

    `length_first`: the length is before the heads. `num_missing`: 1 without heads, 2 without a batch too.
    """

    length_first: bool = False
    num_missing: int = 0

    @staticmethod
    def of(layout: str, tensors: Iterable[Tensor]) -> Order:
        """The order of the tensors of a call. Without an axis of heads, both layouts are the same."""
        if not isinstance(layout, str) or layout not in ("bhld", "blhd"):
            raise RegardError(
                f'attend(layout={layout!r}): the axes are "bhld" (batch, heads, length, width), as in torch, or "blhd" '
                "(batch, length, heads, width), as in flash-attn."
            )
        axes = {x.ndim for x in tensors if isinstance(x, Tensor)}
        if axes in ({2}, {3}):
            return Order(num_missing=4 - axes.pop())
        return PLAIN_ORDER if layout == "bhld" else Order(length_first=True)

    def four_axes(self, tensor: Any) -> Any:
        """A tensor as (batch, heads, length, width)."""
        if self.num_missing and isinstance(tensor, Tensor):
            return tensor.unsqueeze(-3) if self.num_missing == 1 else tensor[None, None]
        is_swapped = self.length_first and isinstance(tensor, Tensor) and tensor.ndim == 4
        return tensor.transpose(1, 2) if is_swapped else tensor

    def mask_of(self, mask: Any) -> Any:
        """A mask (batch, queries, keys) of a call without heads, with them."""
        return mask[:, None] if self.num_missing and isinstance(mask, Tensor) and mask.ndim == 3 else mask

    def of_result(self, seen: AttentionOutput) -> AttentionOutput:
        """The result with the output in the order of the inputs."""
        if self.num_missing:
            return replace(seen, output=seen.output[:, 0] if self.num_missing == 1 else seen.output[0, 0])
        return replace(seen, output=seen.output.transpose(1, 2)) if self.length_first else seen


#: The axes that engines take: (batch, heads, length, width).
PLAIN_ORDER = Order()


def _has_four_axes(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 4


def _as_tensor(value: Any) -> Any:
    """An array of NumPy as a tensor; anything else as it is."""
    if not isinstance(value, np.ndarray):
        return value
    try:
        return torch.tensor(np.ascontiguousarray(value))  # a copy: an array may be read-only, or have negative strides
    except (TypeError, ValueError):  # texts or objects
        return value


def _request(
    attention: Mechanism | None,
    inputs: tuple[Any, Any, Any],
    layout: str,
    positions: Positions | None,
    cache: Cache | None,
    options: CallOptions,
    engine: str | Ring,
    tensors: CallTensors,
) -> tuple[Request, Order]:
    """The `Request` of a call: heads first, and the options of the call applied to the attention. And its `Order`.

    `inputs` are query, key and value, `tensors` those that pieces need, by name; all are as the user gave them.
    """
    (query, key, value), order = inputs, PLAIN_ORDER
    is_plain = _has_four_axes(query) and _has_four_axes(key) and _has_four_axes(value)
    if not (is_plain and isinstance(layout, str) and layout == "bhld"):  # a decoding step must not wait for this
        tensors_given = [*map(_as_tensor, inputs)]
        order = Order.of(layout, tensors_given)
        query, key, value = map(order.four_axes, tensors_given)
    attention = PLAIN if attention is None else checked_mechanism("attend: attention", attention)
    if isinstance(query, nn.Module):
        raise RegardError(TENSORS_FIRST)
    if options:
        options = options._replace(mask=order.mask_of(_as_tensor(options.mask)))
        earlier = cache.length if isinstance(cache, Cache) else None
        attention = options.applied(attention, Sizes.of(query, key, value), positions, earlier)
    if isinstance(query, Tensor) and isinstance(key, Tensor) and (query.is_inference() or key.is_inference()):
        query, key = _copied_inference(query), _copied_inference(key)
    if tensors:
        tensors = {name: _copied_inference(tensor) for name, tensor in tensors.items()}
    return Request(attention, query, key, value, positions, None, None, engine, tensors), order  # type: ignore[arg-type]


def _copied_inference(tensor: Tensor) -> Tensor:
    """A copy of an inference tensor: it counts no changes in place, so a map could not refuse after one."""
    return tensor.clone() if isinstance(tensor, Tensor) and tensor.is_inference() else tensor


@overload
def plan(query: Tensor, key: Tensor, value: Tensor, *, engine: Ring | Literal["ring"], **options: Any) -> RingPlan: ...


@overload
def plan(
    query: Tensor, key: Tensor, value: Tensor, *, attention: Attention | None = None, **options: Any
) -> ExecutionPlan: ...


@overload
def plan(query: Tensor, key: Tensor, value: Tensor, *, attention: Mechanism, **options: Any) -> CompositePlan: ...


@explained
def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention: Mechanism | None = None,
    mask: Mask | Tensor | None = None,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    dropout_p: float = 0.0,
    layout: Literal["bhld", "blhd"] = "bhld",
    positions: Positions | None = None,
    cache: Cache | None = None,
    engine: str | Ring = "auto",
    **tensors: Tensor,
) -> ExecutionPlan | RingPlan | CompositePlan:
    """How `attend` would run this call: the engine, the engines that cannot run it and why, pairs, operations, bytes.

    With `engine=Ring(ranks=N)` and no process group, the tensors are the whole sequence, and the plan has the bytes,
    pairs and memory of each of N ranks. In a process group the tensors are this rank's part, and all ranks must call
    `plan`.

    >>> import torch, regard as rg
    >>> x = torch.randn(1, 8, 16384, 64)
    >>> print(rg.plan(x, x, x, mask=rg.causal() & rg.window(256)))  # doctest: +ELLIPSIS
    Attention(score=Dot(), mask=(causal() & window(size=256)), normalizer=Softmax(temperature=1.0, sink=None))
    16,384 queries, 16,384 keys, 8 heads of width 64, batch 1.
    The ... engine is chosen: ...
    """
    with errors_named("attend", "plan"):
        options = CallOptions(mask, is_causal, scale, dropout_p)
        request, _ = _request(attention, (query, key, value), layout, positions, cache, options, engine, tensors)
        return request.attention.plan_request(request, cache)


def attend_pieces(request: Request, cache: Cache | None, check: bool) -> AttentionOutput:
    """`attend` with one `Attention`: as an earlier call or a decoding step without a plan, else by a plan.

    With `check` inputs that are not finite are an error.
    """
    attention: Attention = request.attention
    if (ring := Ring.of(request.engine)) is not None:
        return _attend_ring(ring, request, cache, check)
    seed, found = _seed(attention), None
    if seed is None and not check and not request.statistics:
        found = kept_plans.find(request) if _is_whole(request, cache) else None
        if found is not None:
            unplanned = None if found[0] is None else _repeated(found[0].repeat, request)
        else:
            unplanned = NEXT_TOKEN[type(cache)](request, cache) if type(cache) in NEXT_TOKEN else None
        if unplanned is not None:
            return unplanned
    with numbers_needed(request.query):
        request, next_cache = extended(request, cache, seed)
        kept, plan_key, piece_tensors = found or kept_plans.find(request)
        planned = None if kept is None else kept.plan(request, piece_tensors)
        problem = _problem(request) if planned is None else planned.problem
        # statistics that the kernel may compute together with the output
        folds = folds_of(request.statistics, problem) if request.statistics else None
        if folds is not None:
            vars(problem).update(folds=folds)
        if check:
            check_finite(query=request.query, key=request.key, value=request.value)
        result = _run(problem, planned, request, plan_key)
        if may_be_spoiled(problem, result.output) and (shown := without_hidden(request, problem)) is not None:
            request = shown.request  # zeros in place of keys and values that are not finite, and run again
            problem, folds = _problem(request), None
            result = shown.marked(problem, _run(problem, None, request, None))
        if next_cache is not None:
            next_cache = next_cache.with_state(result.state, attention.memory_pieces())
    weights = map_of(problem, result.row_statistic)
    if folds is not None and isinstance(weights, ScoredMap):
        weights.remember(folds.computed())
    attend_listeners.tell(None, lambda: weights, lambda: request.value)
    return AttentionOutput(result.output, weights, next_cache)


def _is_whole(request: Request, cache: Cache | None) -> bool:
    """Whether `extended` would return this call unchanged, if it has no dropout."""
    return cache is None and not request.tensors and not torch._C._is_any_autocast_enabled()


def _repeated(repeat: Repeat | None, request: Request) -> AttentionOutput | None:
    """The result of a call like an earlier one; None if it needs a plan."""
    result = None if repeat is None else repeat.run(request.query, request.key, request.value)
    if repeat is None or result is None:
        return None
    prepared = Prepared(request.query, request.key, repeat.empty_states, repeat.empty_states)
    facts = repeat.positions, repeat.sizes, result.row_statistic, repeat.originals
    weights = ScoredMap(repeat.attention, prepared, *facts)
    if attend_listeners:
        attend_listeners.tell(None, lambda: weights, lambda: request.value)
    return AttentionOutput(result.output, weights)


def _decoded(request: Request, cache: GrowingCache) -> AttentionOutput | None:
    """The result of a single query after the keys of a cache; None if it needs a plan."""
    step = kept_plans.next_token(DecodingStep, request, None)
    if step is None or cache.tensors or not cache.length:
        return None
    num_keys = cache.length + request.key.shape[2]
    longer = cache.extend(request.key, request.value)
    output, logsumexp = step.run(request.query, longer.key, longer.value)
    prepared, positions = Prepared(request.query, longer.key, (), ()), longer.positions
    if positions.start != num_keys - 1:  # several new keys: the query has the position of the last
        positions = Positions(num_keys - 1, positions.keys)
    sizes = step.sizes_of(num_keys)
    weights = ScoredMap(step.attention, prepared, positions, sizes, (logsumexp,), step.originals)
    if attend_listeners:
        attend_listeners.tell(None, lambda: weights, lambda: longer.value)
    return AttentionOutput(output, weights, longer.cache)


def _recurred(request: Request, cache: RecurrentCache) -> AttentionOutput | None:
    """The result of a single token after the state of a cache; None if it needs a plan."""
    _, query, key, value, _, _, _, _, tensors, *_ = request
    step = kept_plans.next_token(RecurrentStep, request, cache.state)
    if step is None:
        return None
    assert cache.state is not None, "a step has a state"
    output, state, steps = step.run(query, key, value, tensors, cache.state)
    positions = Positions(cache.length, Spans(((cache.length, cache.length + 1),)))
    weights = TransportedMap(steps, step.attention, positions)
    if attend_listeners:
        attend_listeners.tell(None, lambda: weights, lambda: value)
    return AttentionOutput(output, weights, RecurrentCache.after(state, cache.length + 1))


#: How a single query after a cache runs without a plan, by the class of the cache.
NEXT_TOKEN: dict[type, Callable[[Request, Any], AttentionOutput | None]] = {
    GrowingCache: _decoded,
    RecurrentCache: _recurred,
}


def plan_pieces(request: Request, cache: Cache | None) -> ExecutionPlan | RingPlan:
    """`plan` with one `Attention`: the plan of a call that continues this cache."""
    if (ring := Ring.of(request.engine)) is not None:
        return ring.plan(_share(request), partial(_check_no_cache, cache))
    seed = 0 if _has_dropout(request.attention) else None  # any seed costs the same; none is drawn from torch
    problem = _problem(extended(request, cache, seed)[0])
    planned = engine_plan(problem, request.engine)
    problem.plan_cache.clear()  # as in `_run`: its entries refer to the problem
    return planned


def _share(request: Request) -> RankShare:
    """The pieces and the tokens with which this rank takes part in a call of the ring engine."""
    query, key, value = (in_autocast_dtype(t) for t in (request.query, request.key, request.value))
    return RankShare(request.attention, query, key, value, request.positions, request.tensors)


def _attend_ring(ring: Ring, request: Request, cache: Cache | None, check: bool) -> AttentionOutput:
    """`attend` with the ring engine, on all ranks of a group."""
    share = _share(request)

    def check_own() -> None:
        """Refuse arguments of this rank. The ring calls it in its handshake, so that all ranks raise the error."""
        _check_no_cache(cache)
        if check:
            check_finite(query=share.query, key=share.key, value=share.value)

    ring_call = ring.start_call(share, _seed(share.attention), check_own)
    with attend_listeners.computing(), without_autocast(share.query.device):
        result = ring_call.run()
    weights = RING_MAPS[share.attention.family](ring_call, result)
    attend_listeners.tell(None, lambda: weights)
    return AttentionOutput(result.output, weights)


def _check_no_cache(cache: Cache | None) -> None:
    if cache is not None:
        raise RegardError(
            "attend: the ring engine takes no cache: a decoding step has only one query. Use the blocked engine."
        )


def extended(request: Request, cache: Cache | None, seed: int | None = None) -> tuple[Request, Cache | None]:
    """The call with the keys of the cache before its own, and the next cache; both inputs as they are without a cache.

    The tensors have the dtype of autocast if it is on, and those that pieces need are checked. `seed` is of dropout.
    """
    if seed is not None or torch._C._is_any_autocast_enabled():
        query, key, value = (in_autocast_dtype(t) for t in (request.query, request.key, request.value))
        request = request._replace(query=query, key=key, value=value, seed=seed)
    if cache is None and not request.tensors:
        return request, None
    sizes = Sizes.of(request.query, request.key, request.value)
    request = with_tensors(request, sizes)
    return (request, None) if cache is None else _with_cache(request, cache, sizes)


def with_tensors(request: Request, sizes: Sizes) -> Request:
    """The call with the tensors that its pieces need, after checks."""
    pieces = request.attention.pieces()
    if not request.tensors and not any(map(needs_of, pieces)):
        return request
    return request._replace(tensors=check_call_tensors("attend", pieces, sizes, request.tensors, ARGUMENTS))


def _with_cache(request: Request, cache: Cache, sizes: Sizes) -> tuple[Request, Cache]:
    """The call with all keys of the cache, and the next cache."""
    attention, query, key, value = request.attention, request.query, request.key, request.value
    check_positions(request.positions)
    if not isinstance(cache, Cache):
        kind = f"the class {cache.__name__}" if isinstance(cache, type) else type(cache).__name__
        remedy = "Begin with GrowingCache(), and continue with seen.cache of the result."
        raise RegardError(f"attend: the cache must be a regard.caches.Cache, got {kind}. {remedy}")
    if request.positions is not None:
        raise RegardError("attend: a cache has its own positions; give a cache or positions, not both.")
    longer = cache.extend(key, value)
    tensors, next_cache = request.tensors, longer.cache
    if axes := attention.key_axes():
        of_keys = cache.extend_tensors({name: tensors[name] for name in axes}, axes)
        tensors, next_cache = {**tensors, **of_keys}, next_cache.with_tensors(of_keys)
    # what a transition made of all earlier keys; with more queries than new keys, some queries stand before its end
    memory = cache.memory_of(attention.memory_pieces()) if sizes.I <= sizes.J else None
    if cache.mask is not None:
        attention = attention.with_mask_too(cache.mask)
    positions = _positions_of(sizes, longer, cache)
    request = request._replace(
        attention=attention,
        key=longer.key,
        value=longer.value,
        positions=positions,
        state=cache.sums(query),
        tensors=tensors,
        memory=memory,
    )
    return request, next_cache


def _problem(request: Request) -> Problem:
    """The problem of a call, after checks of all sizes."""
    if not request.tensors:  # the others are checked before the cache joins them with earlier ones
        with_tensors(request, Sizes.of(request.query, request.key, request.value))
    attention, query, key, value, positions, state, seed, _, tensors, memory, _ = request
    return problem_of(attention, query, key, value, positions, state, seed, tensors, memory)


def _run(problem: Problem, kept: ExecutionPlan | None, request: Request, plan_key: Hashable) -> Result:
    """Plan, unless a kept plan is given, run, and keep a new plan by its key.

    Autocast is off here: it has already rounded the inputs, and it must not round sums.
    """
    with attend_listeners.computing(), without_autocast(problem.query.device):
        chosen = engine_plan(problem, request.engine) if kept is None else kept
        for reason in chosen.quadratic if kept is None else ():
            warn_caller(f"attend: {reason}. regard.plan(...) shows the whole plan.")
        result = chosen.run()
        if kept is None:
            kept_plans.keep(plan_key, chosen, request.attention)
    problem.plan_cache.clear()  # its entries refer to the problem, and a cycle would keep the tensors alive
    return result


def _has_dropout(attention: Attention) -> bool:
    return attention.training and attention.dropout > 0


def _seed(attention: Attention) -> int | None:
    """A new seed of dropout, drawn by torch's generator; None without dropout."""
    return int(torch.randint(2**31, ())) if _has_dropout(attention) else None


def _positions_of(sizes: Sizes, longer: Extended, cache: Cache) -> Positions:
    """The positions of a call with a cache, for `sizes.I` queries and `sizes.J` new keys, aligned to the end.

    With more queries than new keys the first queries have positions of earlier keys. A cache that has forgotten keys
    which these queries may attend to is refused.
    """
    keys, length = longer.positions.keys, longer.positions.start + sizes.J
    start = length - sizes.I
    if (
        sizes.I > sizes.J
        and cache.mask is not None
        and not keys.covers(cache.mask.any_allowed(start, length) & Spans(((0, length),)))
    ):
        raise RegardError(
            f"attend: with {sizes.I} queries and {sizes.J} new keys the first query has position {start}, and "
            f"{type(cache).__name__} has forgotten keys that this query may attend to. Give at most as many queries as "
            "new keys, or use GrowingCache, which keeps all keys."
        )
    return Positions(start, keys)


_THIS = sys.modules[__name__]
importers["attention"] = lambda: _THIS  # torch's compiler cannot follow an import, but it can follow a module
