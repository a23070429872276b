"""`joined_statistics`: the results of reductions for each call of a generation, as results for the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from regard.hf.capture.captured_calls import ModuleCalls
from regard.hf.capture.generation_merge import CallRows
from regard.hf.capture.module_statistics import ModuleStatistics
from regard.maps import Distance, Entropy, KeyTotals, MassOn, Reduction, RowLinks, TopLinks

#: Reductions with a result for each row, and the reduction with a sum over rows for each key.
OF_ROWS, OF_KEYS = (Distance, Entropy, MassOn, TopLinks), KeyTotals


def joined_statistics(
    module: ModuleCalls, parts: Sequence[CallRows], num_queries: int, num_keys: int
) -> ModuleStatistics:
    """The statistics of a module over a generation; only of reductions whose results are by row, or sums over all rows.

    A sum over rows cannot leave rows out, so there is none where drafts were refused, or where padding is cut off. In
    cross-attention there is no distance: the place of a query among the keys would be another one in each call.
    """
    statistics = module.statistics
    assert statistics is not None
    every_row = all(len(part.rows) == part.call.shape[2] for part in parts)
    kinds = (*OF_ROWS, OF_KEYS) if every_row else OF_ROWS
    without = Distance if module.part == "cross" else ()
    reductions = tuple(
        reduction
        for reduction in statistics.reductions
        if isinstance(reduction, kinds) and not isinstance(reduction, without)
    )
    results = tuple(
        _joined(
            reduction,
            [(part, statistics.of(reduction, module.calls.index(part.call))) for part in parts],
            num_queries,
            num_keys,
        )
        for reduction in reductions
    )
    return ModuleStatistics(statistics.name, reductions, [results])


def _joined(reduction: Reduction, parts: Sequence[tuple[CallRows, Any]], num_queries: int, num_keys: int) -> Any:
    if isinstance(reduction, TopLinks):
        weights = _rows([(part, links.weights) for part, links in parts], num_queries)
        return RowLinks(weights, _rows([(part, links.keys + part.offset) for part, links in parts], num_queries))
    if not isinstance(reduction, OF_KEYS):
        return _rows(parts, num_queries)
    first = parts[0][1]
    totals = first.new_zeros(len(parts[0][0].entries), first.shape[1], num_keys)
    for part, result in parts:
        present = (part.entries >= 0).nonzero().flatten()
        columns = range(max(0, part.offset), min(num_keys, part.offset + result.shape[2]))
        own = result[part.entries[present]][:, :, columns.start - part.offset : columns.stop - part.offset]
        totals[present, :, columns.start : columns.stop] += own
    return totals


def _rows(parts: Sequence[tuple[CallRows, Tensor]], num_queries: int) -> Tensor:
    """Results (B, H, I, ...) of each call as results (N, H, R, ...); 0 after the end of a sequence.

    Of k strongest links a call with fewer keys has fewer; the others are 0.
    """
    first, widest = parts[0][1], max((result for _, result in parts), key=lambda result: result.shape[3:])
    joined = first.new_zeros(len(parts[0][0].entries), first.shape[1], num_queries, *widest.shape[3:])
    for part, result in parts:
        present = (part.entries >= 0).nonzero().flatten()
        own = result[part.entries[present]][:, :, part.rows.start : part.rows.stop].to(joined.dtype)
        if own.ndim == 4:
            own = pad(own, (0, joined.shape[3] - own.shape[3]))
        joined[present, :, part.start : part.stop] = own
    return joined
