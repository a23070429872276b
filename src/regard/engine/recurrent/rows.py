"""Rows of weights of a recurrence, with gradients.

The output is o = W v. So for the gradient G of R rows, sum_ij G_ij w_ij is the sum of o_ii for the values G^T, and the
backward pass of the recurrence gives its gradient. No graph of a scan is built.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.base.shapes import as_slice, to_device, without_autocast
from regard.base.spans import Spans
from regard.engine.recurrent.engine import recur
from regard.engine.recurrent.transport import Transport
from regard.engine.transforms import gradients_once
from regard.pieces.transition import Steps


def rows_of_steps(steps: Steps, queries: slice | Tensor, keys: Spans) -> Tensor:
    """The weights (B, H, I', J') of some queries (a slice, or indices on the host) and keys, in the autograd graph."""
    if isinstance(queries, Tensor) and (consecutive := as_slice(queries)) is None:
        return torch.cat([rows_of_steps(steps, slice(i, i + 1), keys) for i in queries.tolist()], 2)
    rows = consecutive if isinstance(queries, Tensor) else queries  # type: ignore[possibly-undefined]
    cut = _until(steps, rows)
    weights = _Rows.apply(cut, *cut.tensors())
    num_later = steps.key.shape[2] - weights.shape[3]  # type: ignore[union-attr]  # keys with weights of 0
    columns = keys.tensor("cpu")
    column_slice = as_slice(columns)
    index = to_device(columns, weights.device) if column_slice is None else column_slice  # type: ignore[union-attr]
    return F.pad(weights, (0, num_later))[..., index]  # type: ignore[arg-type]


def _until(steps: Steps, rows: slice) -> Steps:
    """The steps of these queries, and of the keys up to the last of them."""
    stop = steps.key.shape[2] - steps.query.shape[2] + rows.stop
    tensors = zip(steps.tensors(), steps.on_rows(), strict=True)
    return steps.with_tensors(t[:, :, rows] if on_row else t[:, :, :stop] for t, on_row in tensors)


class _Rows(torch.autograd.Function):
    """All rows of weights of some steps, (B, H, I, J). The head of this file derives the backward pass."""

    @staticmethod
    def forward(ctx: Any, steps: Steps, *tensors: Tensor) -> Tensor:
        ctx.steps = steps.detach()
        ctx.save_for_backward(*tensors)
        B, H, I, _ = steps.query.shape
        parts = [part for _, part in Transport(steps).sweep(torch.arange(I, device="cpu"), 0)]  # the last chunk first
        return torch.cat(parts[::-1], 2)[..., : steps.key.shape[2]].unflatten(0, (B, H))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        leaves = [t.detach().requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)]
        with torch.enable_grad(), without_autocast(grad.device):
            output, _ = recur(ctx.steps.with_tensors(leaves), grad.detach().mT.contiguous())
            total = output.diagonal(dim1=-2, dim2=-1).sum()
            inputs = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
            leaf_gradients = iter(torch.autograd.grad(total, inputs, allow_unused=True) if total.requires_grad else ())
        gradients = [next(leaf_gradients, None) if want else None for want in wanted]
        return None, *gradients_once("recurrent", gradients, grad, *tensors)
