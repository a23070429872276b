"""Edits of modules that compute their weights themselves.

A softmax that a watch follows is changed where it is computed, and the module runs once. The softmax is told by its
shape, with the axes (batch, heads, queries, keys), and after the run the product with the values must show that these
were the weights of the module (`Trace.weighted_sum`).

Weights that a watch measures (Longformer, block-sparse BigBird) are changed after the run, if the module returns their
products with the values. Their logarithms are scores that have them as their softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.attention_output import attend_listeners
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import at_least_float32
from regard.hf.calls import OWN_SOFTMAX, AttentionCall, Translation, Untranslatable, measuring
from regard.hf.capture.module_rerun import LastWeights, four_axes
from regard.hf.capture.softmax_trace import SOFTMAX, softmax_axis
from regard.hf.capture.transformers_interface import backend_calls
from regard.hf.capture.value_probe import ProbedCall
from regard.hf.edited_calls import edited_call, editors, rows_of
from regard.hf.names import output_names
from regard.pieces.data_masks import mask_tensor
from regard.pieces.grid import Grid

#: A score that is lower by this much than the largest of its row is masked: models add -10,000 or less to it.
MASKED = 1000.0
#: Largest error of the sum of measured weights of a row.
SUM = 1e-3


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
        return torch.where(self.rows, edited.to(plain.dtype), plain.reshape(B, H, I, J)).reshape(plain.shape)

    @property
    def rows(self) -> Tensor:
        """Whether an edit selects a head and query, (1, H, I, 1)."""
        (_, H, I, _), rows, device = self.call.query.shape, rows_of(self.call), self.call.query.device
        chosen = torch.zeros(1, H, I, 1, dtype=torch.bool, device=device)
        heads, queries = (torch.tensor(part, device=device, dtype=torch.long) for part in (rows.heads, rows.queries))
        chosen[:, heads[:, None], queries] = True
        return chosen


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
        shape = four_axes(module, given, scores, None).shape
    except Untranslatable:
        return None
    return _edit_of(module, function, scores.reshape(shape))


def _edit_of(module: nn.Module, function: Callable[..., Any], scores: Tensor) -> SoftmaxEdit | None:
    """The open edits of a softmax of scores (B, H, I, J); None if none changes it.

    Its queries and keys are not known: those of the call have the sizes, and no channels.
    """
    B, H, I, J = scores.shape
    query, key = scores.new_empty(B, H, I, 0), scores.new_empty(B, H, J, 0)
    known = _translation(at_least_float32(scores), query)
    call = AttentionCall(module, OWN_SOFTMAX, function, query, key, key, None, {}, to_run=True, known=known)
    edited = edited_call(call)
    return None if edited.edits is None else SoftmaxEdit(edited)


def _scores(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The scores that a softmax was given, by position or by name."""
    return args[0] if args else kwargs["input"]


@torch.no_grad()
def _translation(scores: Tensor, query: Tensor) -> Translation:
    """An attention with the mask that scores (B, H, I, J) show."""
    allowed = ~(scores < scores.amax(-1, keepdim=True) - MASKED)
    return Translation(Attention(mask=mask_tensor(allowed)), Positions.aligned_to_end(*scores.shape[2:]), query)


@dataclass(eq=False)
class EditedProbe(ProbedCall):
    """One call of a module whose weights are measured and then edited."""

    edit: SoftmaxEdit

    def compute(self) -> Tensor:
        """The edited weights (B, H, I, J)."""
        return self.edit.weights(_softmax, (_logs(super().compute()),), {})


@torch.no_grad()
def measured_edit(module: nn.Module, output: Any) -> tuple[EditedProbe, Any] | None:
    """A call of a module whose weights are measured, with the open edits, and what the module then returns.

    None if no edit changes it, if its output is not its weights times its values (a projection follows, or there are
    several outputs), or if its weights are no softmax.
    """
    given = next((given for editor in editors if (given := editor.module_given(module)) is not None), None)
    first, *others = output if isinstance(output, tuple | list) else (output,)
    if given is None or output_names(dict(module.named_children())):
        return None
    with measuring.on():
        try:
            probe = ProbedCall.of(type(module).__name__, given, output, LastWeights())
        except Untranslatable:
            return None
        run, weights = given.run(), probe.weights()
    sums, row_sums = probe.layout.sums(run), weights.sum(-1)
    # The logarithms of a row are scores only if it sums to 1, or to 0 because all its keys are masked.
    is_sum = torch.minimum(row_sums.abs(), (row_sums - 1).abs()) < SUM
    is_softmax = not probe.is_signed(weights) and bool(is_sum.all())
    if probe.layout.is_shared or len(run.sums) != 1 or not is_softmax:
        return None
    edit = _edit_of(module, _softmax, _logs(weights))
    if edit is None:
        return None
    _refuse_unreachable(probe, first)
    edited = torch.where(edit.rows, edit.weights(_softmax, (_logs(weights),), {}) @ probe.layout.values(run), sums)
    returned = probe.layout.joined(edited).reshape(first.shape)
    kept = EditedProbe(**vars(probe), edit=edit)
    return kept, returned if isinstance(output, Tensor) else type(output)((returned, *others))


def _refuse_unreachable(probe: ProbedCall, output: Tensor) -> None:
    """Refuse a run whose gradients or returned weights an edit after the run would not reach."""
    if output.requires_grad:
        raise RegardError(
            f"edit: the weights of {probe.name} are measured, so an edited run has no gradients. Use torch.no_grad."
        )
    if probe.given.kwargs.get("output_attentions"):
        raise RegardError(
            f"edit: the weights of {probe.name} are measured, and those that it returns are not edited. Leave "
            "output_attentions out, and read the edited weights of rg.watch."
        )


def _softmax(scores: Tensor) -> Tensor:
    """The softmax over keys; 0 in a row that is masked as a whole."""
    return scores.softmax(-1).nan_to_num(0.0)


def _logs(weights: Tensor) -> Tensor:
    """Scores whose softmax are these weights, if a row sums to 1. A weight that rounding made negative counts as 0."""
    return weights.clamp_min(0.0).log()
