"""Checks a map: recomputed weights @ values must equal the kernel's own output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.attention import Prepared, scores
from regard.hf.calls import DIRECT, Call, Translation
from regard.hf.capture.torch_calls import Heard
from regard.hf.masks.span_masks import OURS
from regard.pieces.grid import Grid
from regard.shapes import at_least_float32, grouped_values

#: Queries of known kernels that are recomputed, spread over the sequence, for the first and the last batch entry.
ROWS = 4
#: Bytes of scores that are recomputed at once where every row is.
BYTES = 8 << 20
#: Packages whose backends are known kernels.
KNOWN = ("torch", "transformers", "regard")
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
def check(name: str, heard: Heard, translation: Translation, every_row: bool = False) -> Check:
    """Recompute rows of all heads and compare with the output: (B, I, H, E), or what `finish` makes of that.

    Of a known kernel a few rows are enough. A backend of the user's own may treat any pair differently, so all of its
    rows are recomputed, block by block.
    """
    call, output, finish = heard.call, heard.output, heard.finish
    if call.drops:
        return Check(name, note=f"dropout {call.dropout} drops weights in training mode; use model.eval()")
    (B, H, I, _), E = call.query.shape, call.value.shape[-1]
    if finish is None and output.shape != (B, I, H, E):
        return Check(name, note=f"the backend returned shape {tuple(output.shape)} instead of {(B, I, H, E)}")
    compared = _Compared()
    with torch.autocast(output.device.type, enabled=False):
        for entries, rows in _blocks(call, every_row or not _is_known(call)):
            compared.add(heard, translation, entries, rows)
    return compared.check(name, call, output.dtype)


def _is_known(call: Call) -> bool:
    """Whether the backend is an unchanged function of torch, of transformers or of this package."""
    function = call.function
    module = getattr(function, "__module__", None) or ""
    held = getattr(sys.modules.get(module), getattr(function, "__name__", ""), None)
    return call.backend in (DIRECT, OURS) or (module.split(".")[0] in KNOWN and held is function)


def _blocks(call: Call, every_row: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Batch entries and rows, in blocks that are recomputed at once."""
    (B, H, I, _), J, device = call.query.shape, call.key.shape[2], call.query.device
    if every_row:
        at_once = max(BYTES // (4 * B * H * J), 1)
        for rows in torch.arange(I, device=device).split(at_once):
            yield torch.arange(B, device=device), rows
        return
    rows = torch.linspace(0, I - 1, min(ROWS, I), device=device).round().long()
    yield torch.tensor(sorted({0, B - 1}), device=device), rows


@dataclass
class _Compared:
    """The greatest difference so far, the greatest output, and what rounding of scores may change."""

    any_row: bool = False
    error: float = 0.0
    reach: float = 0.0
    rounding: float = 0.0

    def add(self, heard: Heard, translation: Translation, entries: Tensor, rows: Tensor) -> None:
        """Recompute some rows of some entries."""
        expected, empty, rounding = _recompute(heard, translation, entries, rows)
        actual = at_least_float32(heard.output[entries[:, None], rows])
        if heard.finish is None:
            actual = actual.transpose(1, 2)
        else:
            expected, empty = heard.finish(expected, entries, rows), empty.any(1)
        compared = expected.isfinite() & ~empty
        if not compared.any():
            return
        actual, expected = actual[compared], expected[compared]
        difference = float((expected - actual).abs().max())
        self.error = max(self.error, difference) if difference == difference else difference
        self.reach = max(self.reach, float(actual.abs().max()))
        self.rounding, self.any_row = max(self.rounding, rounding), True

    def check(self, name: str, call: Call, dtype: torch.dtype) -> Check:
        if not self.any_row:
            return Check(name, note="the values or all rows looked at are empty or not finite")
        share = TOLERANCE.get(dtype, TOLERANCE[torch.float32]) + (self.rounding if call.backend == "eager" else 0.0)
        tolerance = share * max(self.reach, 1e-6)
        return Check(name, self.error, tolerance, self.error <= tolerance)


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
