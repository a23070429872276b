"""Statistics of weights by the compiled kernels: one pass over the keys, without a second product."""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.engine.kernel.attention import PARTS, CallSettings, Inputs, pack_keys
from regard.engine.kernel.running import run, zeros
from regard.engine.kernel.structures import KernelCall, Pointers, fields_of


class StatisticsFields(Pointers):
    """`Statistics` of kernels/cells.h, field by field."""

    _fields_ = (
        *fields_of(c_void_p, "entropy distance received cells cell_maxima row_cells column_cells column_starts"),
        *fields_of(c_void_p, "top_weights top_keys numbers number_sums chosen chosen_mass chosen_entropy"),
        *fields_of(c_void_p, "offsets diagonals offset_sums later same key_tokens query_tokens"),
        *fields_of(c_int64, "cell_rows cell_columns k shift num_numbers num_chosen num_offsets"),
        *fields_of(c_int64, "first_sum num_sums num_parts"),
    )


@dataclass(eq=False)
class Statistics:
    """Tensors that a pass fills. The statistics that are None or empty are left out; all others hold 0 before the pass.

    `shift` is the position of the first key minus that of the first query. `top_keys` holds -1 before the pass.
    `row_cells` and `column_cells` are the cells of queries and keys; both ascend without gaps.
    """

    shift: int
    entropy: Tensor | None = None  # (B, H, I)
    distance: Tensor | None = None  # (B, H, I)
    received: Tensor | None = None  # (B, H, J)
    cells: Tensor | None = None  # (B, H, rows, columns): sums
    cell_maxima: Tensor | None = None  # the same shape
    row_cells: Tensor | None = None  # (I,)
    column_cells: Tensor | None = None  # (J,)
    top_weights: Tensor | None = None  # (B, H, I, k)
    top_keys: Tensor | None = None
    chosen: Tensor | None = None  # keys in ascending order
    chosen_mass: Tensor | None = None  # (B, H, I): over the chosen keys
    chosen_entropy: Tensor | None = None
    offset_sums: Tensor | None = None  # (B, H, number of distances): sums over queries
    later: Tensor | None = None  # (B, H, I): on keys after the query
    same: Tensor | None = None  # (B, H, I): on other keys with the token of the query
    key_tokens: Tensor | None = None  # (B, J), integers
    query_tokens: Tensor | None = None  # (B, I)
    first_offset: int = 0  # the first distance of `offset_sums`, in positions
    #: Numbers of keys (B, H or 1, J), each with their weighted sums (B, H, I).
    numbers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    #: Distances of key and query in positions, each with the weights there (B, H, I).
    offsets: list[tuple[int, Tensor]] = field(default_factory=list)

    @property
    def k(self) -> int:
        """The number of strongest links of a row."""
        return 0 if self.top_weights is None else self.top_weights.shape[-1]


def add_statistics(setting: CallSettings, inputs: Inputs, logsumexp: Tensor, wanted: Statistics) -> None:
    """Add the statistics of all weights to the tensors of `wanted`."""
    call = statistics_call(setting, inputs, logsumexp)
    fields = StatisticsFields(num_parts=-(-PARTS // (call.B * call.H)), shift=wanted.shift)
    fields.point(entropy=wanted.entropy, distance=wanted.distance)
    fields.point(top_weights=wanted.top_weights, top_keys=wanted.top_keys)
    fields.k = wanted.k
    fields.point(chosen=wanted.chosen, chosen_mass=wanted.chosen_mass, chosen_entropy=wanted.chosen_entropy)
    fields.num_chosen = 0 if wanted.chosen is None else len(wanted.chosen)
    _tokens(setting, call, fields, wanted)
    received = _received(setting, call, fields, wanted)
    cells, maxima = _cells(call, fields, wanted)
    number_sums, diagonals = _numbers(setting, call, fields, wanted), _diagonals(call, fields, wanted)
    offset_sums = _offset_sums(call, fields, wanted)
    run(setting.library, "statistics", call, setting.layout.num_pairs * call.H * call.D, fields)
    _add(wanted.received, None if received is None else received.sum(2)[..., : call.J])
    _add(wanted.cells, None if cells is None else cells.sum(2))
    _add(wanted.cell_maxima, None if maxima is None else maxima.amax(2))
    _add(wanted.offset_sums, None if offset_sums is None else offset_sums.sum(2))
    for listed, sums in ((wanted.numbers, number_sums), (wanted.offsets, diagonals)):
        for n, (_, total) in enumerate(listed):
            total += sums[:, :, n]


def statistics_call(setting: CallSettings, inputs: Inputs, logsumexp: Tensor) -> KernelCall:
    """A call that computes weights from their log-sum-exp."""
    call = inputs.call(setting)
    pack_keys(call, setting)
    call.point(logsumexp=logsumexp.float().contiguous())
    return call


def _add(total: Tensor | None, sums: Tensor | None) -> None:
    if total is not None and sums is not None:
        total += sums


def _tokens(setting: CallSettings, call: KernelCall, fields: StatisticsFields, wanted: Statistics) -> None:
    """Sums over keys that depend on the query; tokens become small numbers."""
    fields.point(later=wanted.later)
    if wanted.same is not None and wanted.key_tokens is not None and wanted.query_tokens is not None:
        tokens = torch.cat([wanted.key_tokens, wanted.query_tokens], -1).unique(return_inverse=True)[1].int()
        keys, queries = tokens.split([call.J, call.I], -1)
        keys = F.pad(keys, (0, setting.padded(call.J) - call.J)).contiguous()
        fields.point(same=wanted.same, key_tokens=keys, query_tokens=queries.contiguous())


def _received(setting: CallSettings, call: KernelCall, fields: StatisticsFields, wanted: Statistics) -> Tensor | None:
    """Room for the sums of each part."""
    if wanted.received is None:
        return None
    received = zeros(call.B, call.H, fields.num_parts, setting.padded(call.J))
    fields.point(received=received)
    return received


def _cells(call: KernelCall, fields: StatisticsFields, wanted: Statistics) -> tuple[Tensor | None, Tensor | None]:
    """Room for the cells of each part: sums and maxima."""
    if wanted.cells is None or wanted.row_cells is None or wanted.column_cells is None:
        return None, None
    shape = call.B, call.H, fields.num_parts, *wanted.cells.shape[2:]
    cells, maxima = zeros(*shape), None if wanted.cell_maxima is None else zeros(*shape)
    starts = torch.searchsorted(wanted.column_cells, torch.arange(shape[-1] + 1, device="cpu"))
    fields.point(cells=cells, cell_maxima=maxima, column_starts=starts)
    fields.point(row_cells=wanted.row_cells.contiguous(), column_cells=wanted.column_cells.contiguous())
    fields.cell_rows, fields.cell_columns = shape[3:]
    return cells, maxima


def _numbers(setting: CallSettings, call: KernelCall, fields: StatisticsFields, wanted: Statistics) -> Tensor:
    """Room for the sums of weights times numbers of keys, (B, H, count, I)."""
    sums = zeros(call.B, call.H, len(wanted.numbers), call.I)
    if wanted.numbers:
        of_heads = [numbers.float().expand(call.B, call.H, call.J) for numbers, _ in wanted.numbers]
        padded = F.pad(torch.stack(of_heads, 2), (0, setting.padded(call.J) - call.J))
        fields.point(numbers=padded.contiguous(), number_sums=sums)
        fields.num_numbers = len(of_heads)
    return sums


def _diagonals(call: KernelCall, fields: StatisticsFields, wanted: Statistics) -> Tensor:
    """Room for the weights at single distances, (B, H, count, I)."""
    weights = zeros(call.B, call.H, len(wanted.offsets), call.I)
    if wanted.offsets:
        steps = [offset - wanted.shift for offset, _ in wanted.offsets]
        fields.point(offsets=torch.tensor(steps, dtype=torch.int64, device="cpu"), diagonals=weights)
        fields.num_offsets = len(steps)
    return weights


def _offset_sums(call: KernelCall, fields: StatisticsFields, wanted: Statistics) -> Tensor | None:
    """Room for the sums of each part at distances that follow each other."""
    if wanted.offset_sums is None:
        return None
    fields.first_sum, fields.num_sums = wanted.first_offset - wanted.shift, wanted.offset_sums.shape[-1]
    sums = zeros(call.B, call.H, fields.num_parts, fields.num_sums)
    fields.point(offset_sums=sums)
    return sums
