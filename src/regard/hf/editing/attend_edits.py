"""Edits of calls of `regard.attend`, which the modules of `regard.nn` make too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.attention_output import AttentionOutput, attend, attend_listeners
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.caches import Cache
from regard.composites.composite import Composite
from regard.edits.layer_edits import EditedMap, LayerEdits
from regard.edits.recurrent_edits import LINKS, edited_recurrence, without_softmax
from regard.engine.recurrent import recur
from regard.engine.ring import Ring
from regard.hf.calls import AttentionCall, Translation
from regard.hf.edited_calls import computed, edited_call, editors, patched_output, rows_of, with_rows
from regard.maps.transported_map import TransportedMap
from regard.pieces.call_tensors import needs_of
from regard.pieces.transition import with_heads

NAME = "regard.attend"


def edited_attend(
    module: nn.Module,
    attention: Attention | Composite,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    positions: Positions | None,
    cache: Cache | None,
    engine: str | Ring,
    **options: Any,
) -> AttentionOutput | None:
    """The result of a call of `attend` by a module as the open edits change it; None if none does.

    The arguments after `module` are those of the call.

    Edits of scores are pieces of the attention that runs. Then edits of weights change rows of its result, and at last
    patches replace outputs of heads. `after_edit` of the map has the values of the edited call, and its output
    (B, H, I, E) if it was patched, so that a watch does not read those of the call without edits.
    """
    if not any(editor.selects(module) for editor in editors):
        return None
    if isinstance(attention, Composite):
        raise _refusal(module, "a composite of several attentions")
    if cache is not None or Ring.of(engine) is not None or Ring.default() is not None:
        raise _refusal(module, "a ring" if cache is None else "a cache; give it all keys, and positions")
    positions = positions or Positions.aligned_to_end(query.shape[2], key.shape[2])
    place = positions.start, positions.keys.hull().intervals[0][0] if positions.keys else 0
    translation = Translation(attention, positions, query)
    call = AttentionCall(module, NAME, attend, query, key, value, None, {}, to_run=True, place=place, known=translation)
    edited = edited_call(call)
    if edited is call:
        return None
    edits = LayerEdits(()) if edited.edits is None else edited.edits.edits
    if isinstance(attention, Attention) and attention.transition is not None:
        edits = without_softmax(edits)
    changed, tensors = edits.attention(attention), (edited.query, edited.key, edited.value)
    with attend_listeners.computing():
        seen = changed(*tensors, positions=positions, engine=engine, **options)
    if edits.changes_weights:
        seen = _with_weights(seen, edited, Translation(changed, positions, edited.query, edits))
    edited, (patched, _) = patched_output(edited, (seen.output.transpose(1, 2), None))
    seen.weights.after_edit = edited.value, None if edited.patched is None else patched.transpose(1, 2)
    return replace(seen, output=patched.transpose(1, 2))


def _refusal(module: nn.Module, what: str) -> RegardError:
    """The error for a call of `attend` with something that edits do not reach."""
    kind = type(module).__name__
    return RegardError(f"edit: the attention of {kind} cannot be edited: it calls regard.attend with {what}.")


def _with_weights(seen: AttentionOutput, call: AttentionCall, translation: Translation) -> AttentionOutput:
    """The result `seen` of the call with the rows whose weights are edited after the softmax.

    `translation` has the edits, and the attention with the edits of its scores.
    """
    attention, edits = translation.attention, translation.edits
    assert edits is not None
    if isinstance(seen.weights, TransportedMap) and all(isinstance(one.edit, LINKS) for one in edits.edits):
        return _with_links(seen, seen.weights, call.value, edits)
    if not attention.is_scored or any(map(needs_of, attention.pieces())):
        raise RegardError(
            f"edit: the weights of {type(call.module).__name__} cannot be edited after they are computed: its "
            "attention is recurrent, chooses keys or needs tensors of the call. KnockOut (renormalized) and "
            "AddToScores act before; of recurrent attention KnockOut and ScaleWeights change the weights."
        )
    rows, output = rows_of(call), seen.output
    if rows.any:
        with attend_listeners.computing():
            edited, _ = computed(call, translation, rows)
        output = with_rows(output.transpose(1, 2), rows, edited.transpose(1, 2), None).transpose(1, 2)
    return replace(seen, output=output, weights=EditedMap(seen.weights, edits))


def _with_links(seen: AttentionOutput, weights: TransportedMap, value: Tensor, edits: LayerEdits) -> AttentionOutput:
    """The result of a recurrent attention with edits of its weights (links between tokens).

    Rows that no edit selects keep their bits.
    """
    _, H, I, _ = weights.shape
    steps = weights.live_steps
    output, rows = edited_recurrence(edits, with_heads(value, H), I, lambda values: recur(steps, values)[0])
    output = torch.where(rows, output.to(seen.output.dtype), seen.output)
    return replace(seen, output=output, weights=EditedMap(weights, edits))
