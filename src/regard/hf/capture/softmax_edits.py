"""Edits of modules that compute a softmax themselves: the softmax that a watch follows is the one that is changed.

The module runs once. Its softmax is told by its shape, with the axes (batch, heads, queries, keys), and after the run
the product with the values must show that these were the weights of the module (`Trace.weighted_sum`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.attention_output import attend_listeners
from regard.base.positions import Positions
from regard.base.shapes import at_least_float32
from regard.hf.calls import OWN_SOFTMAX, AttentionCall, Translation, Untranslatable
from regard.hf.capture.module_rerun import four_axes
from regard.hf.capture.softmax_trace import SOFTMAX, softmax_axis
from regard.hf.capture.transformers_interface import backend_calls
from regard.hf.edited_calls import edited_call, editors, rows_of
from regard.pieces.data_masks import mask_tensor
from regard.pieces.grid import Grid

#: A score that is lower by this much than the largest of its row is masked: models add -10,000 or less to it.
MASKED = 1000.0


@dataclass(frozen=True, eq=False)
class SoftmaxEdit:
    """The edits of one softmax. A watch keeps it, because it runs the module again to read its weights."""

    call: AttentionCall

    def weights(self, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """What the softmax returns with the edits. Other rows and heads keep their bits."""
        call, plain, scores = self.call, function(*args, **kwargs), _scores(args, kwargs)
        assert call.edits is not None
        (B, H, I, _), J = call.query.shape, call.key.shape[2]
        scores = at_least_float32(scores).reshape(B, H, I, J)
        known = _translation(scores, call.query)
        edits, grid = call.edits.placed(known.positions), Grid.whole(known.positions, B, H, I, plain.device)
        attention = edits.attention(known.attention)
        assert attention.mask is not None
        for bias in attention.bias:
            scores = scores + bias.term(grid, None, None)
        scores = scores.masked_fill(~attention.mask.allowed(grid), -torch.inf)
        edited, _ = attention.normalizer.normalize_rows(scores, torch.arange(J, device=plain.device))
        edited = Translation(attention, known.positions, call.query, edits).edited(edited, grid, grid)
        rows, chosen = rows_of(call), torch.zeros(1, H, I, 1, dtype=torch.bool, device=plain.device)
        chosen[:, torch.tensor(rows.heads, device=plain.device)[:, None], torch.tensor(rows.queries)] = True
        return torch.where(chosen, edited.to(plain.dtype), plain.reshape(B, H, I, J)).reshape(plain.shape)


def softmax_edit(
    module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> SoftmaxEdit | None:
    """The open edits of a softmax that a module computes; None if it is none, or if no edit changes it."""
    if function not in SOFTMAX or backend_calls.inside or attend_listeners.busy:
        return None
    given = next((given for editor in editors if (given := editor.softmax_inputs(module)) is not None), None)
    scores = _scores(args, kwargs)
    if given is None or scores.ndim < 3 or softmax_axis(scores, *args[1:], **kwargs) != -1:
        return None
    try:
        B, H, I, J = four_axes(module, given, scores, None).shape
    except Untranslatable:
        return None
    query, key = scores.new_empty(B, H, I, 0), scores.new_empty(B, H, J, 0)
    known = _translation(at_least_float32(scores).reshape(B, H, I, J), query)
    call = AttentionCall(module, OWN_SOFTMAX, function, query, key, key, None, {}, to_run=True, known=known)
    edited = edited_call(call)
    return None if edited.edits is None else SoftmaxEdit(edited)


def _scores(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["input"]


@torch.no_grad()
def _translation(scores: Tensor, query: Tensor) -> Translation:
    """An attention with the mask that scores (B, H, I, J) show."""
    allowed = ~(scores < scores.amax(-1, keepdim=True) - MASKED)
    return Translation(Attention(mask=mask_tensor(allowed)), Positions.aligned_to_end(*scores.shape[2:]), query)
