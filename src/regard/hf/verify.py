"""The proof that a map is right: recomputed weights @ values against what the kernel itself returned."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.attention import Prepared, scores
from regard.hf.torch_calls import Heard
from regard.hf.translate import Call, Translation
from regard.pieces.grid import Grid
from regard.shapes import at_least_float32, grouped_values

#: Queries that are recomputed, spread over the sequence, for the first and the last batch entry.
ROWS = 4
#: Error allowed, as a share of the greatest output.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}


@dataclass(frozen=True)
class Check:
    """How far recomputed weights @ values lie from the kernel's output, for one module.

    `error` is the greatest difference and `tolerance` what rounding explains; both None, and `ok`
    too, where nothing could be compared: `note` says why.
    """

    name: str
    error: float | None = None
    tolerance: float | None = None
    ok: bool | None = None
    note: str = ""

    def __str__(self) -> str:
        if self.ok is None:
            return f"{self.name}: not verified, {self.note}"
        return f"{self.name}: {'ok' if self.ok else 'WRONG'}, error {self.error:.2g}, tolerance {self.tolerance:.2g}"


@torch.no_grad()
def check(name: str, heard: Heard, translation: Translation) -> Check:
    """Recompute a few rows of all heads and compare with the output: (B, I, H, E), or what `finish` makes of that."""
    call, output, finish = heard.call, heard.output, heard.finish
    if call.drops:
        return Check(name, note=f"dropout {call.dropout} drops weights in training mode; use model.eval()")
    (B, H, I, _), E = call.query.shape, call.value.shape[-1]
    if finish is None and output.shape != (B, I, H, E):
        return Check(name, note=f"the backend returned shape {tuple(output.shape)} instead of {(B, I, H, E)}")
    entries = torch.tensor(sorted({0, B - 1}), device=output.device)
    rows = torch.linspace(0, I - 1, min(ROWS, I), device=output.device).round().long()
    with torch.autocast(output.device.type, enabled=False):
        expected, empty, rounding = _recompute(heard, translation, entries, rows)
        actual = at_least_float32(output[entries[:, None], rows])
        if finish is None:
            actual = actual.transpose(1, 2)
        else:
            expected, empty = finish(expected, entries, rows), empty.any(1)
    compared = expected.isfinite() & ~empty
    if not compared.any():
        return Check(name, note="the values or all rows looked at are empty or not finite")
    return _compared(name, call, output.dtype, actual[compared], expected[compared], rounding)


def _compared(name: str, call: Call, dtype: torch.dtype, actual: Tensor, expected: Tensor, rounding: float) -> Check:
    error = float((expected - actual).abs().max())
    share = TOLERANCE.get(dtype, TOLERANCE[torch.float32]) + (rounding if call.backend == "eager" else 0.0)
    tolerance = share * max(float(actual.abs().max()), 1e-6)
    return Check(name, error, tolerance, error <= tolerance)


def _recompute(heard: Heard, translation: Translation, entries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, float]:
    """Outputs (b, H, r, E), which rows are empty, and what rounding scores to the model's dtype may change."""
    attention, positions, call = translation.attention, translation.positions, heard.call
    B, H, I, _ = call.query.shape
    prepared = Prepared.of(attention, translation.query, call.key, positions)
    heads = torch.arange(H, device=rows.device)
    grid = Grid.whole(positions, B, H, I, rows.device)
    grid = Grid(grid.batch[entries], heads, grid.query[rows], grid.key)
    columns = torch.arange(call.key.shape[2], device=rows.device)
    tile = prepared.select(entries, heads).tile(rows, slice(None))
    if heard.inputs is None:
        value = call.value[entries]
    else:
        query, key, value = heard.inputs.folded(entries, rows)
        tile = replace(tile, query=query, key=key)
    s = scores(attention, tile, grid)
    weights = attention.normalizer.weights(s, attention.normalizer.statistic(s, columns), columns)
    output = grouped_values(weights, at_least_float32(value))
    if heard.inputs is not None:
        output = heard.inputs.carried(output)
    low = call.query.dtype in (torch.bfloat16, torch.float16)
    reach = float((weights * s.masked_fill(weights == 0, 0.0).abs()).sum(-1).max()) if low else 0.0
    return output, s.isneginf().all(-1, keepdim=True), reach * torch.finfo(call.query.dtype).eps
