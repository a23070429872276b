"""Edits of attention without the interface of transformers: calls of torch's function, and torch's modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention_output import attend_listeners
from regard.hf.capture.torch_calls import ObservedCall, multihead, multihead_arguments, sdpa_call
from regard.hf.capture.transformers_interface import backend_calls
from regard.hf.edited_calls import (
    EAGER,
    all_rows,
    as_mistakes,
    computed,
    edited_call,
    editors,
    patched_output,
    run_edited,
    translated,
)

#: The arguments of `F.scaled_dot_product_attention` that may be given by position.
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True, eq=False)
class EditedResult:
    """What a function or a module returns after an edit, and the edited call as watches see it."""

    observed: ObservedCall
    returned: Any


def edited_sdpa(
    module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> EditedResult | None:
    """A call of `F.scaled_dot_product_attention` as the open edits change it; None if none does."""
    if function is not F.scaled_dot_product_attention or not _is_selected(module):
        return None
    if backend_calls.inside or attend_listeners.busy:
        return None
    with as_mistakes(module):
        call = sdpa_call(module, args, kwargs)
    edited = edited_call(call)
    if edited is call:
        return None
    given = {**dict(zip(NAMES, args, strict=False)), **kwargs}
    given |= {"query": edited.query, "key": edited.key, "value": edited.value}
    output = run_edited(edited, lambda: (function(**given).transpose(1, 2), None))[0]
    edited, (patched, _) = patched_output(edited, (output, None))
    return EditedResult(ObservedCall(edited, output), patched.transpose(1, 2))


def edited_multihead(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> EditedResult | None:
    """The result of a call of `nn.MultiheadAttention` as the open edits change it; None if none does."""
    if not isinstance(module, nn.MultiheadAttention) or not _is_selected(module) or output is None:
        return None
    with as_mistakes(module):
        observed = multihead(module, args, kwargs, output)
    call = observed.call
    call = replace(call, options=call.options | {"dropout": module.dropout if module.training else 0.0})
    edited = edited_call(call)
    if edited is call:
        return None
    heads, weights = computed(replace(edited, backend=EAGER), translated(edited), all_rows(edited))
    finish = observed.finish
    assert finish is not None and weights is not None
    result = finish(heads, heads, heads)
    edited, (patched, _) = patched_output(edited, (heads.transpose(1, 2), None))
    patched = patched.transpose(1, 2)
    returned = finish(patched, patched, patched)
    if output[0].ndim == 2:
        returned = returned[0]
    elif not module.batch_first:
        returned = returned.transpose(0, 1)
    given = _weights(module, args, kwargs, output, weights)
    return EditedResult(replace(observed, call=edited, output=result), (returned, given))


def _is_selected(module: nn.Module) -> bool:
    return any(editor.selects(module) for editor in editors)


def _weights(module: Any, args: Any, kwargs: Any, output: Any, weights: Tensor) -> Tensor | None:
    """The weights that the module returns: of each head, or their mean."""
    if output[1] is None:
        return None
    weights = weights.mean(1) if multihead_arguments(module, args, kwargs)["average_attn_weights"] else weights
    return weights[0] if output[0].ndim == 2 else weights
