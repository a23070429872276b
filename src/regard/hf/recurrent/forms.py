"""The linear maps of recurrent layers: outputs = W . values, with everything but the values held fixed.

`Recurrence` is the general form of a state S (D x E) that one transition a token changes. `ShortConvolution` is a
convolution over few tokens between two gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

Form = TypeVar("Form", "Recurrence", "ShortConvolution")


@dataclass(frozen=True, eq=False)
class Recurrence:
    """S_t = A_t S_{t-1} + k_t v_t^T, with A_t = (I - k_t w_t^T) diag(exp g_t), and o_t = q_t^T S_t + d_t v_t.

    `query` q, `key` k and `address` w are (B, H, n, D); `log_decay` g is (B, H, n, 1) or (B, H, n, D); `own` d is
    (B, H, n). With `reads_before`, o_t = q_t^T S_{t-1} + d_t v_t.
    """

    query: Tensor
    key: Tensor
    log_decay: Tensor | None = None
    address: Tensor | None = None
    own: Tensor | None = None
    reads_before: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Batch entries, heads and tokens."""
        B, H, n, _ = self.key.shape
        return B, H, n

    def weights(self, rows: Tensor) -> Tensor:
        """Weights (B, H, rows, n) of selected queries: a scan over the keys, from the last to the first."""
        B, H, n = self.sizes
        queries = self.query[:, :, rows]
        x, weights = torch.zeros_like(queries), queries.new_zeros(B, H, len(rows), n)
        for j in range(n - 1, -1, -1):
            starts = (rows == j)[:, None]
            if not self.reads_before:
                x = torch.where(starts, queries, x)
            weights[..., j] = (x @ self.key[:, :, j, :, None])[..., 0]
            x = torch.where(starts, queries, self._transported(x, j)) if self.reads_before else self._transported(x, j)
        if self.own is not None:
            weights[:, :, torch.arange(len(rows)), rows] += self.own[:, :, rows]
        return weights

    def _transported(self, x: Tensor, j: int) -> Tensor:
        """x^T A_j, for rows x (B, H, rows, D)."""
        if self.address is not None:
            x = x - (x @ self.key[:, :, j, :, None]) * self.address[:, :, None, j]
        return x if self.log_decay is None else x * self.log_decay[:, :, None, j].exp()


@dataclass(frozen=True, eq=False)
class ShortConvolution:
    """o_t = out_t * sum_r taps_r * (in * v)_{t-r}: `out_gate` and `in_gate` are (B, H, n), `taps` (H, K)."""

    out_gate: Tensor
    in_gate: Tensor
    taps: Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        B, H, n = self.in_gate.shape
        return B, H, n

    def weights(self, rows: Tensor) -> Tensor:
        """Weights (B, H, rows, n) of selected queries."""
        distance = rows[:, None] - torch.arange(self.sizes[2], device=rows.device)
        near = (distance >= 0) & (distance < self.taps.shape[1])
        taps = self.taps[:, distance.clamp(0, self.taps.shape[1] - 1)] * near
        return self.out_gate[:, :, rows, None] * taps * self.in_gate[:, :, None]


def joined(forms: Sequence[Form], orders: Sequence[Tensor | None]) -> Form:
    """One form from forms of consecutive tokens; an order is the batch entry that each entry continues."""
    parts = [_reordered(form, order) for form, order in zip(forms, orders, strict=True)]
    first = parts[0]
    together = {
        field.name: torch.cat([getattr(part, field.name) for part in parts], 2)
        for field in fields(first)
        if _has_tokens(field.name, getattr(first, field.name))
    }
    return replace(first, **together)


def heads_joined(forms: Sequence[Form]) -> Form:
    """One form from forms of the heads of one layer."""
    first = forms[0]
    tensors = [field.name for field in fields(first) if isinstance(getattr(first, field.name), Tensor)]
    together = {
        name: torch.cat([getattr(form, name) for form in forms], 1 if _has_tokens(name, getattr(first, name)) else 0)
        for name in tensors
    }
    return replace(first, **together)


def _reordered(form: Form, order: Tensor | None) -> Form:
    if order is None:
        return form
    tensors = {field.name: getattr(form, field.name) for field in fields(form)}
    return replace(form, **{name: x[order] for name, x in tensors.items() if _has_tokens(name, x)})


def _has_tokens(name: str, value: object) -> bool:
    return isinstance(value, Tensor) and name != "taps"
