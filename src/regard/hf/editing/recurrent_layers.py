"""Edits of recurrent layers of transformers whose recurrence is one function (`hf/recurrent/core_calls.py`).

A weight is changed for the reads of its query alone: the state keeps what every token wrote, so later tokens read it.
Earlier calls of a layer with a cache are kept, because a query also reads what their tokens wrote.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.edits.layer_edits import LayerEdits
from regard.edits.recurrent_edits import edited_recurrence, without_softmax
from regard.engine.recurrent import recur
from regard.hf.calls import RECURRENCE, AttentionCall, Translation
from regard.hf.capture.recurrent_calls import RecurrentCall, detached, dtype_of, read_core
from regard.hf.edited_calls import as_mistakes, edited_call
from regard.hf.recurrent.core_calls import LAYOUTS, READERS, CoreCall
from regard.hf.recurrent.core_functions import core_names
from regard.hf.recurrent.forms import with_last_queries
from regard.pieces.mask import causal
from regard.pieces.transition import Steps

#: The last call of each layer, with the calls that it continues.
LastCalls = dict[nn.Module, RecurrentCall]


def is_editable(module: nn.Module) -> bool:
    """Whether a module computes one recurrence by a function. Zamba computes one for each of its groups of heads."""
    return bool(core_names(module)) and getattr(module, "n_mamba_heads", 1) == 1


def changed_core(
    last: LastCalls, module: nn.Module, name: str, given: dict[str, Any], result: Any
) -> tuple[Any, LayerEdits | None]:
    """The result of a function that computes a recurrent layer, with the open edits, and these edits.

    `name` is that of the function, `given` its arguments by name with the state "before", and `result` what it
    returned. `last` has the last call of each layer, which this one may continue; it is replaced by this call. Rows
    that no edit selects keep their bits.
    """
    first, *others = result if isinstance(result, tuple) else (result,)
    with as_mistakes(module):
        core = read_core(module, lambda: READERS[name](detached(given), detached(result)))
        kept = replace(core, output=core.output[..., :0].clone(), scale=None)
        call = RecurrentCall.of("", kept, dtype_of(module), False, last.pop(module, None), keeps_values=True)
    if core.after:  # the next call may continue this one
        last[module] = call
    B, H, I, J = call.shape
    edits = _edits_of(module, name, core.output.new_empty(B, H, I, 0), core.output.new_empty(B, H, J, 0))
    if edits is None:
        return result, None
    if call.earlier is None:  # with gradients, if the function has them
        core = read_core(module, lambda: READERS[name](given, result))
        output, rows = _edited(edits, core, core.value, core.form())  # type: ignore[arg-type]
    elif first.requires_grad:
        raise RegardError(
            f"edit: {type(module).__name__} continues a state, so an edited run has no gradients. Use torch.no_grad, "
            "or give the whole text in one call."
        )
    else:
        output, rows = _edited(edits, core, call.read_values(), call.form())  # type: ignore[arg-type]
    layout = LAYOUTS[READERS[name]]
    edited = torch.where(layout(rows.expand_as(output)), layout(output).to(first.dtype), first)
    edited = torch.empty_like(first).copy_(edited)  # its strides, which models rely on
    return (edited if not isinstance(result, tuple) else (edited, *others)), edits


def _edits_of(module: nn.Module, name: str, query: Tensor, key: Tensor) -> LayerEdits | None:
    """The open edits of a call of the core function `name`; None if none changes it.

    `query` (B, H, I, 0) and `key` (B, H, J, 0) have the sizes of the call, with the tokens of earlier calls as keys.
    A recurrence reads the tokens up to its query, so its pairs are those of a causal attention.
    """
    place = key.shape[2] - query.shape[2], 0
    known = Translation(Attention(mask=causal()), Positions.aligned_to_end(query.shape[2], key.shape[2]), query)
    call = AttentionCall(
        module, RECURRENCE, READERS[name], query, key, key, None, {}, to_run=True, place=place, known=known
    )
    edited = edited_call(call)
    return None if edited.edits is None else without_softmax(edited.edits.edits)


def _edited(edits: LayerEdits, core: CoreCall, value: Tensor, steps: Steps) -> tuple[Tensor, Tensor]:
    """The output (B, H, I, E) of the tokens of a call with edited weights, and which rows are edited."""
    num_queries = core.output.shape[2]
    with torch.autocast(value.device.type, enabled=False):
        steps = with_last_queries(steps, num_queries)
        output, rows = edited_recurrence(edits, value, num_queries, lambda values: recur(steps, values)[0])
        return output if core.scale is None else output * core.scale, rows
