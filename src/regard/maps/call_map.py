"""From a call to its map: the problem after all checks, and the family of weights that its pieces have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.attention import EMPTY, Attention, Family, Scored, Transported, checked_attention
from regard.base.errors import RegardError, errors_named
from regard.base.positions import Positions, check_positions
from regard.base.shapes import Sizes, in_autocast_dtype, spread_indices
from regard.caches import Memory
from regard.engine.problem import Problem, Result
from regard.engine.rows import recomputed_statistic
from regard.maps.attention_map import AttentionMap
from regard.maps.paged_keys import PagedKeys
from regard.maps.ring_map import RingMap, RingTransportedMap
from regard.maps.scored_map import ScoredMap
from regard.maps.transported_map import TransportedMap
from regard.pieces.call_tensors import CallTensors, check_call_tensors
from regard.pieces.data_masks import padding
from regard.pieces.normalizer import RowStatistic

#: A given log-sum-exp may differ from that of the scores by this much: kernels in half precision round both.
STATISTIC_TOLERANCE = 0.05
#: Rows of a given statistic that are compared with the scores.
COMPARED_ROWS = 4


def problem_of(
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Positions | None,
    state: Tensor | None = None,
    seed: int | None = None,
    tensors: CallTensors = EMPTY,
    memory: Memory | None = None,
) -> Problem:
    """The problem of a call (`Problem` says what each argument is), after checks of all sizes."""
    sizes = Sizes.of(query, key, value)
    check_positions(positions)
    positions = positions or Positions.aligned_to_end(sizes.I, sizes.J)
    positions.check(sizes.J)
    attention.check(sizes, positions, key.shape[-1])
    return Problem(attention, query, key, value, positions, sizes, seed, state, tensors, memory)


def map_of(problem: Problem, row_statistic: RowStatistic | None) -> AttentionMap:
    """The weights of a call."""
    return MAPS[problem.attention.family](problem, row_statistic)


def _scored(problem: Problem, row_statistic: RowStatistic | None) -> AttentionMap:
    pieces, positions, sizes = problem.pieces_snapshot(), problem.positions, problem.sizes
    return ScoredMap(pieces, problem.prepared, positions, sizes, row_statistic, problem.originals())


def _transported(problem: Problem, row_statistic: RowStatistic | None) -> AttentionMap:
    assert problem.prepared.steps is not None
    return TransportedMap(problem.prepared.steps, problem.pieces_snapshot(), problem.positions)


#: Family of weights -> what makes the map of a call, and of a call of a ring.
MAPS = {Scored: _scored, Transported: _transported}
RING_MAPS: dict[type[Family], Callable[[Any, Result], AttentionMap]] = {
    Scored: RingMap,
    Transported: lambda call, result: RingTransportedMap(call),
}


def map_of_tensors(
    attention: Attention,
    query: Tensor,
    key: Tensor | PagedKeys,
    statistic: Tensor | None,
    positions: Positions | None,
    tensors: dict[str, Any],
) -> AttentionMap:
    """`AttentionMap.of`, which says what the arguments are. Errors of `attend` name it in place of `attend`."""
    with errors_named("attend", "AttentionMap.of"):
        checked_attention("attend: the first argument", attention)
        if isinstance(key, PagedKeys):
            attention, key = _gathered(attention, key, positions)
        query, key = in_autocast_dtype(query), in_autocast_dtype(key)
        given = check_call_tensors("attend", attention.pieces(), Sizes.of(query, key, key), tensors)
        problem = problem_of(attention, query, key, key[..., :1], positions, tensors=given)  # weights need no values
    return map_of(problem, None if statistic is None else _checked_statistic(problem, statistic))


def _gathered(attention: Attention, keys: PagedKeys, positions: Positions | None) -> tuple[Attention, Tensor]:
    """The keys of all pages in order, aligned to the end, and a mask that hides what is before shorter texts."""
    if positions is not None:
        raise RegardError("attend: keys in pages have their own positions, aligned to the end; leave positions out.")
    key, real = keys.gathered()
    if real is None:
        return attention, key
    return attention.with_mask_too(padding(real)), key


@torch.no_grad()
def _checked_statistic(problem: Problem, statistic: Tensor) -> RowStatistic:
    """The log-sum-exp of somebody else's kernel, after a comparison of a few rows with the scores."""
    sizes, normalizer, is_scored = problem.sizes, problem.attention.normalizer, problem.attention.is_scored
    if not is_scored or normalizer.as_softmax is None:
        kind = type(normalizer).__name__ if is_scored else "a transition"
        raise RegardError(f"AttentionMap.of: with {kind} no row has a log-sum-exp. Leave `statistic` out.")
    if not isinstance(statistic, Tensor) or statistic.shape != (sizes.B, sizes.H, sizes.I):
        got = tuple(statistic.shape) if isinstance(statistic, Tensor) else type(statistic).__name__
        raise RegardError(
            f"AttentionMap.of: the statistic is the log-sum-exp of every row, a tensor of shape (batch, heads, queries)"
            f" = ({sizes.B}, {sizes.H}, {sizes.I}), got {got}."
        )
    given = statistic.detach().to(problem.query.device, torch.promote_types(statistic.dtype, torch.float32))
    given = given.masked_fill(given == torch.inf, -torch.inf)  # FlashAttention 2 writes inf for a row without keys
    if not problem.sizes.is_empty:
        _compare(problem, given)
    return (given,)


def _exact_statistic(problem: Problem, rows: Tensor) -> RowStatistic:
    """The statistic of the rows at these ascending indices (on the host), also if none of them has a key."""
    attention, positions, sizes = problem.attention, problem.positions, problem.sizes
    first, last = (int(rows[n]) + positions.start for n in (0, -1))
    if attention.mask is not None and not positions.columns(attention.mask.any_allowed(first, last + 1)):
        like = problem.query.new_empty((sizes.B, sizes.H, len(rows)), dtype=torch.float32)
        return attention.normalizer.empty_statistic(like)
    return recomputed_statistic(attention, problem.prepared, positions, problem.grid, rows)


def _compare(problem: Problem, given: Tensor) -> None:
    """Refuse a statistic, `given` (B, H, I), that is not the log-sum-exp of these scores, in nats."""
    rows = spread_indices(problem.sizes.I, COMPARED_ROWS)
    exact = _exact_statistic(problem, rows)[0]
    some = given[:, :, rows.to(given.device)].to(exact.dtype)
    wrong = ~torch.isclose(some, exact, rtol=1e-2, atol=STATISTIC_TOLERANCE) & ~(some.isneginf() & exact.isneginf())
    if not wrong.any():
        return
    b, h, row = wrong.nonzero()[0].tolist()
    is_base_2 = torch.isclose(some * math.log(2), exact, rtol=1e-2, atol=STATISTIC_TOLERANCE)[wrong].all()
    remedy = (
        "The numbers are logarithms of base 2, as FlashInfer returns them: give statistic * math.log(2)."
        if bool(is_base_2)
        else "Give the natural logarithm of the sum of exp(score), with the factor of the scores inside, and give the "
        "same mask, factor and rotated queries and keys as the kernel read. Or leave `statistic` out: it is computed."
    )
    raise RegardError(
        f"AttentionMap.of: the statistic of batch entry {b}, head {h}, query {int(rows[row])} is "
        f"{float(some[b, h, row]):.4g}, but the log-sum-exp of its scores is {float(exact[b, h, row]):.4g}. {remedy}"
    )


AttentionMap._of_tensors = map_of_tensors
