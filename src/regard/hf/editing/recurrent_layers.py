"""Edits of recurrent layers of transformers: those that call a function, and those that compute inside their module.

A weight is changed for the reads of its query alone: the state keeps what every token wrote, so later tokens read it.
Earlier calls of a layer with a cache are kept, because a query also reads what their tokens wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention import Attention
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.edits.layer_edits import LayerEdits
from regard.edits.recurrent_edits import edited_recurrence, without_softmax
from regard.engine.recurrent import recur
from regard.engine.transforms import is_transformed
from regard.hf.calls import RECURRENCE, AttentionCall, Translation
from regard.hf.capture.recurrent_calls import RecurrentCall, dtype_of, read_core
from regard.hf.edited_calls import as_mistakes, edited_call
from regard.hf.recurrent.core_calls import LAYOUTS, CoreCall, rwkv
from regard.hf.recurrent.core_functions import core_names
from regard.hf.recurrent.forms import with_last_queries
from regard.hf.recurrent.inline_layers import GatedConvolution, Lightning, MatrixMemory, RealGated, inline_reader
from regard.maps.scored_map import Convolution
from regard.pieces.mask import causal
from regard.pieces.transition import Steps

#: The last call of each layer, with the calls that it continues.
LastCalls = dict[nn.Module, RecurrentCall]
#: Reads the call of a recurrence.
ReadCore = Callable[[], CoreCall]
#: Readers of layers that compute inside their module -> the layout of their outputs (B, H, n, E).
INLINE_LAYOUTS: dict[type, Callable[[Tensor], Tensor]] = {
    Lightning: lambda x: x.transpose(1, 2).flatten(2),
    MatrixMemory: lambda x: x,
    RealGated: LAYOUTS[rwkv],
    GatedConvolution: LAYOUTS[rwkv],
}


def is_editable(module: nn.Module) -> bool:
    """Whether a module computes one recurrence. Zamba computes one for each of its groups of heads."""
    is_core = bool(core_names(module)) and getattr(module, "n_mamba_heads", 1) == 1
    return is_core or inline_reader(module) is not None


def changed_output(
    last: LastCalls, module: nn.Module, reader: Any, read: ReadCore, result: Any, read_graph: ReadCore | None = None
) -> tuple[Any, LayerEdits | None]:
    """The result of a recurrence, of which the first tensor is the output, with the open edits, and these edits.

    `read` reads the call without its graph, and `read_graph` with it, if gradients are possible. `last` has the last
    call of each layer, which this one may continue; it is replaced by this call. Rows that no edit selects keep their
    bits.
    """
    first, *others = result if isinstance(result, tuple) else (result,)
    with as_mistakes(module):
        core = read_core(module, read)
        kept = replace(core, output=core.output[..., :0].clone(), scale=None)
        call = RecurrentCall.of("", kept, dtype_of(module), False, last.pop(module, None), keeps_values=True)
    if core.after or read_graph is None:  # the next call may continue this one
        last[module] = call
    B, H, I, J = call.shape
    edits = _edits_of(module, reader, core.output.new_empty(B, H, I, 0), core.output.new_empty(B, H, J, 0))
    if edits is None:
        return result, None
    if call.earlier is None and read_graph is not None:
        core = read_core(module, read_graph)
        output, rows = _edited(edits, core, core.value, core.form())
    elif first.requires_grad or is_transformed():  # a forward derivative does not say that it is one
        raise RegardError(
            f"edit: {type(module).__name__} continues a state, or computes its recurrence inside its module, so an "
            "edited run has no gradients. Use torch.no_grad; if a state is continued, give the whole text in one call."
        )
    else:
        output, rows = _edited(edits, core, call.read_values(), call.form())
    layout = LAYOUTS.get(reader) or INLINE_LAYOUTS[type(reader)]
    edited = torch.where(layout(rows.expand_as(output)), layout(output).to(first.dtype), first)
    edited = torch.empty_like(first).copy_(edited)  # its strides, which models rely on
    return (edited if not isinstance(result, tuple) else (edited, *others)), edits


def _edits_of(module: nn.Module, reader: Any, query: Tensor, key: Tensor) -> LayerEdits | None:
    """The open edits of a call; None if none changes it.

    `query` (B, H, I, 0) and `key` (B, H, J, 0) have the sizes of the call, with the tokens of earlier calls as keys.
    A recurrence reads the tokens up to its query, so its pairs are those of a causal attention.
    """
    place = key.shape[2] - query.shape[2], 0
    known = Translation(Attention(mask=causal()), Positions.aligned_to_end(query.shape[2], key.shape[2]), query)
    call = AttentionCall(module, RECURRENCE, reader, query, key, key, None, {}, to_run=True, place=place, known=known)
    edited = edited_call(call)
    return None if edited.edits is None else without_softmax(edited.edits.edits)


def _edited(edits: LayerEdits, core: CoreCall, value: Tensor, form: Steps | Convolution) -> tuple[Tensor, Tensor]:
    """The output (B, H, I, E) of the tokens of a call with edited weights, and which rows are edited."""
    num_queries = core.output.shape[2]
    with torch.autocast(value.device.type, enabled=False):
        form = with_last_queries(form, num_queries)  # type: ignore[type-var]
        output, rows = edited_recurrence(edits, value, num_queries, partial(_read, form))
        output = output if core.scale is None else output * core.scale
        return output if core.offset is None else output + core.offset, rows


def _read(form: Steps | Convolution, value: Tensor) -> Tensor:
    """W . values for the last queries of a form, (B, H, I, E), from the values (B, H, J, E) of all tokens."""
    if isinstance(form, Steps):
        return recur(form, value)[0]
    num_heads, width = form.taps.shape
    padded = F.pad(form.in_gate * value[..., 0], (width - 1, 0))
    mixed = F.conv1d(padded, form.taps.flip(1)[:, None], groups=num_heads)
    return (form.out_gate * mixed[..., mixed.shape[2] - form.out_gate.shape[2] :])[..., None]
