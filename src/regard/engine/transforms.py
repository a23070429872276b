"""torch's transformations of functions (derivatives, vmap, graphs), and errors where an engine supports none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from regard.base.errors import RegardError
from regard.base.shapes import has_numbers, without_autocast

#: Why engines with a backward pass of their own cannot run.
HIDDEN_GRADIENTS = (
    "a piece depends on a tensor that requires gradients and is none of its attributes, so no gradient would reach "
    "it. Make it an attribute of the piece, or a parameter of a piece that is an nn.Module"
)
TRANSFORMED = "torch.func and forward-mode derivatives need torch's own operations, which only the dense engine uses"
GRAPH = (
    "regard.attend plans by sizes and masks in Python, which no graph can hold. Leave fullgraph=True out to compile "
    "the code around the call; or record one plan with torch.export.export(model, inputs)"
)
#: Engines with derivatives of any order, or what to do without one.
DENSE = "The dense engine has derivatives of any order: attend(..., engine='dense')."
REMEDIES = {
    "recurrent": "No engine has second derivatives of a transition: compute the steps with torch's own operations."
}
Function = TypeVar("Function", bound=Callable[..., Any])
_PROXY = torch._C._TorchDispatchModeKey.PROXY


def own_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass with no derivative of its own, computed without autocast, which would round its sums.

    torch runs a backward pass under the autocast of its caller, as `with torch.autocast(...): loss.backward()` does.
    """

    @wraps(backward)
    def in_full_precision(ctx: Any, *grads: Tensor) -> Any:
        with without_autocast(grads[0].device):
            return backward(ctx, *grads)

    return once_differentiable(in_full_precision)  # type: ignore[return-value]


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_recorded() -> bool:
    """Whether make_fx or torch.jit.trace records torch's operations to repeat them. Neither sees compiled kernels."""
    return torch._C._get_tracing_state() is not None or torch._C._get_dispatch_mode(_PROXY) is not None


def refuse_tracing(operation: str) -> None:
    """Refuse torch.jit.trace, which keeps sizes, positions and what compiled kernels compute as constants.

    `operation` is the name of the public function, for the error.
    """
    if torch._C._get_tracing_state() is not None:
        raise RegardError(
            f"{operation}: torch.jit.trace would record the sizes and the numbers of this call as constants. Use "
            "torch.export.export(model, inputs) or torch.compile(model)."
        )


def uncompiled(function: Function, reason: str = GRAPH) -> Function:
    """Break the graph of torch.compile at this function; with fullgraph=True raise an error with the reason.

    torch's compiler takes seconds to load, so it is used only if the caller has loaded it.
    """
    disabled: list[Any] = []  # the function that torch does not compile, after the first call that needs it

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            if torch.compiler.is_dynamo_compiling():
                torch._dynamo.graph_break(msg=reason)
            uncompiled_function = torch.compiler.disable(function, reason=reason)  # torch 2.8 warns inside of append
            disabled.append(uncompiled_function)
        return disabled[0](*args, **kwargs)

    return run  # type: ignore[return-value]


@contextmanager
def numbers_needed(query: Tensor) -> Iterator[None]:
    """Explain the error of a piece or an engine that reads numbers where tensors have none (vmap, export, meta)."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RegardError) or (has_numbers(query) and not is_transformed()):
            raise
        raise RegardError(
            "attend: inside torch.vmap, torch.export or on the meta device no number can be read, and these pieces or "
            f"this engine decide by numbers: {str(error).strip().splitlines()[0][:200]} Make a mapped axis part of the "
            "batch axis, or use engine='dense', which reads the fewest numbers."
        ) from error


def differentiable_once(engine: str, *tensors: Tensor) -> list[Tensor]:
    """The tensors again, through which a second derivative raises a `RegardError` that names the engine.

    Gradients that an engine computes outside autograd have no gradient themselves; torch would treat them as constants.
    """
    if not torch.is_grad_enabled():
        return list(tensors)
    learning = [t for t in tensors if t.requires_grad]
    again = iter(_DifferentiableOnce.apply(engine, *learning) if learning else ())
    return [next(again) if t.requires_grad else t for t in tensors]


def gradients_once(engine: str, gradients: Iterable[Tensor | None], *tensors: Tensor | None) -> list[Tensor | None]:
    """For a backward pass: its gradients, which depend on `tensors`; their own derivative raises a `RegardError`.

    The error names `engine`. Grad mode is on in a backward pass only with create_graph=True; otherwise nobody can
    differentiate the gradients.
    """
    gradients = list(gradients)
    if not torch.is_grad_enabled():
        return gradients
    present = [grad for grad in gradients if grad is not None]
    again = iter(_Refused.apply(engine, len(present), *present, *(t for t in tensors if t is not None)))  # type: ignore[arg-type]
    return [None if grad is None else next(again) for grad in gradients]


class _DifferentiableOnce(torch.autograd.Function):
    """The identity. With create_graph=True its gradients depend on the tensors through `_Refused`."""

    @staticmethod
    def forward(ctx: Any, engine: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.engine = engine
        ctx.save_for_backward(*tensors)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return None, *grads
        return None, *_Refused.apply(ctx.engine, len(grads), *grads, *ctx.saved_tensors)


class _Refused(torch.autograd.Function):
    """The identity on gradients; its own backward pass raises an error."""

    @staticmethod
    def forward(ctx: Any, engine: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.engine = engine
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RegardError(
            f"attend: the {ctx.engine} engine computes gradients itself, so these gradients have no gradient "
            f"(create_graph=True, a gradient penalty, a Hessian). {REMEDIES.get(ctx.engine, DENSE)}"
        )
