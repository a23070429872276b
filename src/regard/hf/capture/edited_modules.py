"""Edits of attention without the interface of transformers: calls of torch's function, and torch's modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention_output import attend_listeners
from regard.hf.capture.torch_calls import (
    ObservedCall,
    multihead,
    multihead_arguments,
    multihead_function,
    sdpa_arguments,
    sdpa_call,
)
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


@dataclass(frozen=True, eq=False)
class EditedResult:
    """What a function or a module returns after an edit, and the edited call as watches see it."""

    observed: ObservedCall
    returned: Any


def edited_function(
    module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> EditedResult | None:
    """A call of one of torch's attention functions as the open edits change it; None if none does."""
    if function not in (F.scaled_dot_product_attention, F.multi_head_attention_forward) or not _is_selected(module):
        return None
    if backend_calls.inside or attend_listeners.busy:
        return None
    if function is F.multi_head_attention_forward:
        with attend_listeners.computing():
            output = function(*args, **kwargs)
        with as_mistakes(module):
            observed = multihead_function(module, args, kwargs, output)
        return _edited(observed, output, multihead_arguments(None, args, kwargs))
    return _edited_sdpa(module, args, kwargs)


def _edited_sdpa(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EditedResult | None:
    with as_mistakes(module):
        call = sdpa_call(module, args, kwargs)
    edited = edited_call(call)
    if edited is call:
        return None
    given: dict[str, Any] = sdpa_arguments(args, kwargs) | {
        "query": edited.query,
        "key": edited.key,
        "value": edited.value,
    }

    def compute() -> tuple[Tensor, None]:
        with attend_listeners.computing():  # the edited call is reported, and this is part of it
            return F.scaled_dot_product_attention(**given).transpose(1, 2), None

    output = run_edited(edited, compute)[0]
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
    given = multihead_arguments(module, args, kwargs)
    return _edited(replace(observed, call=call), output, given, module.batch_first)


def _edited(
    observed: ObservedCall, output: Any, given: dict[str, Any], batch_first: bool = False
) -> EditedResult | None:
    """A call that torch projects, as the open edits change it."""
    call = observed.call
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
    elif not batch_first:
        returned = returned.transpose(0, 1)
    return EditedResult(replace(observed, call=edited, output=result), (returned, _weights(given, output, weights)))


def _is_selected(module: nn.Module) -> bool:
    return any(editor.selects(module) for editor in editors)


def _weights(given: dict[str, Any], output: Any, weights: Tensor) -> Tensor | None:
    """The weights that torch returns: of each head, or their mean."""
    if output[1] is None:
        return None
    weights = weights.mean(1) if given["average_attn_weights"] else weights
    return weights[0] if output[0].ndim == 2 else weights
