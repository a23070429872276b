"""Statistics of weights by the compiled kernels: one pass over the keys, without a second product.

A statistic is a field of `Statistics` of kernels/cells.h, which says its shape. A number for each query, (B, H, I), is
added to the tensor that is given; other statistics are prepared here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.engine.kernel.attention import PARTS, CallSettings, Inputs, RowFolds, backward, pack_keys
from regard.engine.kernel.running import run, zeros
from regard.engine.kernel.structures import KernelCall, Pointers, fields_of

#: What a pass computes: tensors that it adds to, and what they need, by the fields of `Statistics` of kernels/cells.h.
#: All statistics hold 0 before the pass. These differ from the fields:
#: - `received` is (B, H, J), `cells` and `cell_maxima` (B, H, rows, columns), and `offset_sums` (B, H, distances);
#: - `numbers` is a list of numbers of keys (B, H or 1, J), each with their weighted sums (B, H, I);
#: - `offsets` is a list of distances of key and query in positions, each with the weights there (B, H, I);
#: - `first_offset` is the first distance of `offset_sums`, in positions;
#: - `key_tokens` (B, J) and `query_tokens` (B, I) are any integers;
#: - `shift` is the position of the first key minus that of the first query.
Parts = dict[str, Any]


class DifferentiableStatistics(torch.autograd.Function):
    """Entropies and distances of rows that are known already, (B, H, I) by the name of their field, with gradients.

    The last arguments are the fields of `Inputs`, which receive the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        setting: CallSettings,
        logsumexp: Tensor,
        known: dict[str, Tensor],
        shift: int,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.setting, ctx.names, ctx.shift = setting, list(known), shift
        ctx.save_for_backward(logsumexp, *known.values(), *tensors)
        ctx.set_materialize_grads(False)  # None for a statistic that nothing depends on
        return tuple(values.clone() for values in known.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logsumexp, *saved = ctx.saved_tensors
        known, inputs, wanted = saved[: len(grads)], Inputs(*saved[len(grads) :]), Inputs(*ctx.needs_input_grad[4:])
        given = {name: g.float() for name, g in zip(ctx.names, grads, strict=True) if g is not None}
        values = dict(zip(ctx.names, known, strict=True))
        with torch.no_grad():
            grads_of_inputs = statistic_gradients(ctx.setting, inputs, wanted, logsumexp, values, given, ctx.shift)
        return None, None, None, None, *grads_of_inputs


def statistic_gradients(
    setting: CallSettings,
    inputs: Inputs,
    wanted: Inputs,
    logsumexp: Tensor,
    values: dict[str, Tensor],
    grads: dict[str, Tensor],
    shift: int,
) -> list[Tensor | None]:
    """Gradients of the inputs in their dtypes, from statistics of rows and their gradients; `wanted` as in `gradients`.

    `logsumexp` (B, H, I) is the row statistic. `shift` leads from queries to keys at the same position (`first_shift`).
    `values` and `grads` have the statistics and their gradients, (B, H, I), by the name of their field: "entropy" and
    "distance". With the weights w_j of the keys of a row and that of the sink, w_s: the gradient of the entropy H by a
    score is w_j (-log w_j - H - w_s), and by the sink w_s (1 - w_s - H). That of the distance d is w_j (|j - i| - d),
    and by the sink -w_s d. Statistics do not depend on the values, so `backward` gets values of width 0.
    """
    sink_weight = 0.0 if inputs.sink is None else torch.exp(inputs.sink.float()[:, None] - logsumexp)
    of_statistics = torch.zeros_like(logsumexp)
    for name, grad in grads.items():
        of_statistics += grad * values[name]
    of_entropy = grads.get("entropy", torch.zeros_like(logsumexp))
    folds = RowFolds({f"grad_{name}": grad.contiguous() for name, grad in grads.items()}, {}, shift)
    inputs, no_grad = inputs._replace(value=inputs.key[..., :0]), inputs.query[..., :0]
    delta = of_statistics + of_entropy * sink_weight
    found = backward(setting, inputs, wanted, no_grad, delta, logsumexp, folds)
    if wanted.sink and inputs.sink is not None:
        found = found._replace(sink=(sink_weight * (of_entropy * (1 - sink_weight) - of_statistics)).sum((0, 2)))
    found = found._replace(value=None)  # type: ignore[arg-type]
    return [None if g is None or t is None else g.to(t.dtype) for g, t in zip(found, inputs, strict=True)]


class StatisticsFields(Pointers):
    """`Statistics` of kernels/cells.h."""

    _fields_ = fields_of("Statistics")


def add_statistics(setting: CallSettings, inputs: Inputs, logsumexp: Tensor, wanted: Parts) -> None:
    """Add the statistics of all weights to the tensors of `wanted`. `logsumexp` (B, H, I) is that of the rows."""
    call, wanted = statistics_call(setting, inputs, logsumexp), dict(wanted)
    fields = StatisticsFields(num_parts=-(-PARTS // (call.B * call.H)), shift=wanted.pop("shift"))
    adds = [prepare(setting, call, fields, wanted) for name, prepare in PREPARED.items() if name in wanted]
    assert wanted.keys() <= {field[0] for field in StatisticsFields._fields_}, f"no such statistics: {[*wanted]}"
    fields.point(**wanted)
    run(setting.library, "statistics", call, setting.layout.num_pairs * call.H * call.D, fields)
    for add in adds:
        add()


def statistics_call(setting: CallSettings, inputs: Inputs, logsumexp: Tensor) -> KernelCall:
    """A call that computes weights from the log-sum-exp (B, H, I) of their rows."""
    call = inputs.call(setting)
    pack_keys(call, setting)
    call.point(logsumexp=logsumexp.float().contiguous())
    return call


# Each of these functions prepares one statistic: it removes the statistic from `wanted`, sets the fields of C, and
# returns a function to call after the pass, which adds the result to the tensor of the caller.


def _strongest(setting: CallSettings, call: KernelCall, fields: StatisticsFields, wanted: Parts) -> Callable[[], None]:
    """Set the number k of strongest links of a row; the pass writes them to the tensors of the caller."""
    fields.k = wanted["top_weights"].shape[-1]
    return _nothing


def _chosen(setting: CallSettings, call: KernelCall, fields: StatisticsFields, wanted: Parts) -> Callable[[], None]:
    """Set the number of chosen keys, which ascend."""
    fields.num_chosen = len(wanted["chosen"])
    return _nothing


def _add_each(totals: Sequence[Tensor], sums: Tensor) -> None:
    """Add sums (B, H, count, I) to as many tensors (B, H, I)."""
    for total, part in zip(totals, sums.unbind(2), strict=True):
        total += part


def _nothing() -> None:
    """Nothing is left to do: the pass itself added to the tensors of the caller."""


def _tokens(setting: CallSettings, call: KernelCall, fields: StatisticsFields, wanted: Parts) -> Callable[[], None]:
    """Number the different tokens from 0 on, because the fields of C are 32-bit integers.

    The keys that fill the last panel get the token 0: their weights are 0.
    """
    given = wanted.pop("key_tokens"), wanted.pop("query_tokens")
    tokens = torch.cat(given, -1).unique(return_inverse=True)[1].int()
    keys, queries = tokens.split([call.J, call.I], -1)
    keys = F.pad(keys, (0, setting.padded(call.J) - call.J)).contiguous()
    fields.point(key_tokens=keys, query_tokens=queries.contiguous())
    return _nothing


def _received(setting: CallSettings, call: KernelCall, fields: StatisticsFields, wanted: Parts) -> Callable[[], None]:
    """Allocate one sum of each key for each part of the work; they are added up after the pass."""
    total, sums = wanted.pop("received"), zeros(call.B, call.H, fields.num_parts, setting.padded(call.J))
    fields.point(received=sums)
    return lambda: total.add_(sums.sum(2)[..., : call.J])


def _cells(setting: CallSettings, call: KernelCall, fields: StatisticsFields, wanted: Parts) -> Callable[[], None]:
    """Allocate sums and maxima of cells (rows, columns) for each part of the work.

    `row_cells` (I,) has the row of each query, `column_cells` (J,) the column of each key; both ascend without gaps.
    """
    total, total_maxima = wanted.pop("cells"), wanted.pop("cell_maxima", None)
    rows, columns = wanted.pop("row_cells"), wanted.pop("column_cells")
    shape = call.B, call.H, fields.num_parts, *total.shape[2:]
    sums, maxima = zeros(*shape), None if total_maxima is None else zeros(*shape)
    starts = torch.searchsorted(columns, torch.arange(shape[-1] + 1, device="cpu"))  # the first key of each column
    fields.point(cells=sums, cell_maxima=maxima, column_starts=starts)
    fields.point(row_cells=rows.contiguous(), column_cells=columns.contiguous())
    fields.cell_rows, fields.cell_columns = shape[3:]

    def add() -> None:
        total.add_(sums.sum(2))
        if total_maxima is not None and maxima is not None:
            total_maxima.add_(maxima.amax(2))  # to zeros

    return add


def _numbers(setting: CallSettings, call: KernelCall, fields: StatisticsFields, wanted: Parts) -> Callable[[], None]:
    """Allocate the sums of weights times numbers of keys, (B, H, count, I)."""
    given, totals = zip(*wanted.pop("numbers"), strict=True)
    sums = zeros(call.B, call.H, len(given), call.I)
    of_heads = torch.stack([numbers.float().expand(call.B, call.H, call.J) for numbers in given], 2)
    fields.point(numbers=F.pad(of_heads, (0, setting.padded(call.J) - call.J)).contiguous(), number_sums=sums)
    fields.num_numbers = len(given)
    return lambda: _add_each(totals, sums)


def _offsets(setting: CallSettings, call: KernelCall, fields: StatisticsFields, wanted: Parts) -> Callable[[], None]:
    """Allocate the weights at single distances, (B, H, count, I)."""
    given, totals = zip(*wanted.pop("offsets"), strict=True)
    weights = zeros(call.B, call.H, len(given), call.I)
    steps = torch.tensor([offset - fields.shift for offset in given], dtype=torch.int64, device="cpu")
    fields.point(offsets=steps, diagonals=weights)
    fields.num_offsets = len(given)
    return lambda: _add_each(totals, weights)


def _offset_sums(
    setting: CallSettings, call: KernelCall, fields: StatisticsFields, wanted: Parts
) -> Callable[[], None]:
    """Allocate the sums of weights at consecutive distances, for each part of the work; they are added up after it.

    Callers count distances in positions from `first_offset` on, and the kernel counts in indices: less by the shift.
    """
    total = wanted.pop("offset_sums")
    fields.first_sum, fields.num_sums = wanted.pop("first_offset") - fields.shift, total.shape[-1]
    sums = zeros(call.B, call.H, fields.num_parts, fields.num_sums)
    fields.point(offset_sums=sums)
    return lambda: total.add_(sums.sum(2))


#: Statistics that need preparation. For all others the pass adds to the tensors of the caller.
PREPARED = {
    "top_weights": _strongest,
    "chosen": _chosen,
    "same": _tokens,
    "received": _received,
    "cells": _cells,
    "numbers": _numbers,
    "offsets": _offsets,
    "offset_sums": _offset_sums,
}
