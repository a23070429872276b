"""Models that torch compiled: their attention is watched where it is the operator `regard::attention`, else refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.errors import RegardError
from regard.base.versions import check_model
from regard.engine.kernel.attention import Inputs
from regard.engine.kernel.library import load_fast
from regard.engine.kernel.operator import OperatorTerms
from regard.hf.calls import AttentionCall
from regard.hf.capture.torch_calls import ObservedCall
from regard.hf.capture.transformers_interface import backend_calls
from regard.hf.masks.graph_masks import GraphMask
from regard.hf.masks.span_masks import OURS
from regard.hf.operator_calls import owner_of


def _is_compiled(module: nn.Module) -> bool:
    forward = module.forward
    own = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
    return own or hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _compiled_part(model: nn.Module) -> str:
    """The compiled part of a model, in words; "" if no part is compiled."""
    name = next((name for name, module in model.named_modules() if _is_compiled(module)), None)
    return "" if name is None else f"its part {name!r}" if name else "the model"


def refuse_compiled(model: nn.Module, operation: str, remedy: str = "") -> None:
    """Raise an error if a part of the model is compiled, or if it is of a version that cannot be observed."""
    check_model(model, operation)
    if where := _compiled_part(model):
        raise RegardError(
            f"{operation}: {where} is compiled, and compiled code does not look up its backend again. {remedy}Use the "
            "original model: model._orig_mod after torch.compile(model); after model.compile(), or if its forward was "
            "compiled, load the model again."
        )


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of a model is compiled. Raises an error if its attention cannot be watched then."""
    check_model(model, "watch")
    is_ours = getattr(getattr(model, "config", None), "_attn_implementation", None) == OURS
    if is_ours and load_fast() is not None:
        return bool(_compiled_part(model))
    remedy = (
        "Load it with attn_implementation='regard' (after regard.register()), whose attention is an operator of the "
        "graph, and compile it then. "
    )
    refuse_compiled(model, "watch", remedy)
    return False


class CompiledCalls:
    """Observes the operator, and keeps each call under the module whose parameter it received.

    Inside compiled code no hook runs, and its buffers are used again: the tensors are copied.
    """

    def __init__(self, modules: Mapping[str, nn.Module], keep: Callable[[str, Callable[[], Any]], None]) -> None:
        owners = ((name, module, owner_of(module)) for name, module in modules.items())
        self._owners = {owner.data_ptr(): (name, module) for name, module, owner in owners if owner is not None}
        self._keep = keep

    def operator_called(self, inputs: Inputs, terms: OperatorTerms, output: Tensor, logsumexp: Tensor) -> None:
        if backend_calls.inside or terms.owner is None or terms.owner.data_ptr() not in self._owners:
            return
        name, module = self._owners[terms.owner.data_ptr()]
        self._keep(name, lambda: _observed(module, inputs, terms, output))


def _observed(module: nn.Module, inputs: Inputs, terms: OperatorTerms, output: Tensor) -> ObservedCall:
    """The call of the backend that became this call of the operator."""
    query, key, value = (t.detach().clone() for t in (inputs.query, inputs.key, inputs.value))
    start = terms.start + (0 if terms.offset is None else int(terms.offset))
    real = None if terms.real is None else terms.real.clone()
    groups = None if terms.groups is None else terms.groups.clone()
    mask = GraphMask(start, terms.first, terms.is_causal, terms.window, real, groups)
    sink = None if inputs.sink is None else inputs.sink.detach().clone()
    options = {"scaling": terms.scale, "softcap": terms.cap or None, "s_aux": sink, "dropout": terms.dropout}
    call = AttentionCall(module, OURS, torch.ops.regard.attention, query, key, value, mask, options)
    return ObservedCall(call, output.detach().transpose(1, 2))
