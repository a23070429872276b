"""What torch does with operations beside running them (derivatives, maps, graphs), and what is said where it cannot."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.errors import RegardError
from regard.shapes import has_numbers

#: Why an engine with a backward pass of its own cannot run.
HIDDEN = (
    "a piece depends on a tensor that requires gradients and is none of its attributes, so gradients would not reach "
    "it. Make it an attribute of the piece, or a parameter of a piece that is an nn.Module"
)
TRANSFORMED = (
    "torch.func and forward-mode derivatives go through torch's own operations alone, as the dense engine does"
)
GRAPH = (
    "regard.attend plans by sizes and masks in Python, which no graph can hold. Leave fullgraph=True out, and what is "
    "around the call is compiled; or record one plan with torch.export.export(model, inputs)"
)
Function = TypeVar("Function", bound=Callable[..., Any])


def is_transformed() -> bool:
    """Whether torch.func, or forward-mode differentiation, looks at every operation."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def uncompiled(function: Function) -> Function:
    """Run as it is inside torch.compile, which breaks its graph here; without a break it says why.

    torch's compiler is asked only if something has loaded it, which takes seconds.
    """
    runs: list[Any] = []

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not runs:
            if torch.compiler.is_dynamo_compiling():
                torch._dynamo.graph_break(msg=GRAPH)
            runs.append(torch.compiler.disable(function, reason=GRAPH))
        return runs[0](*args, **kwargs)

    return run  # type: ignore[return-value]


@contextmanager
def decided(query: Tensor) -> Iterator[None]:
    """Where the numbers of tensors cannot be read, say so of a piece or an engine that has to decide by them."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RegardError) or (has_numbers(query) and not is_transformed()):
            raise
        raise RegardError(
            "attend: inside torch.vmap, torch.export or on the meta device no number can be read, and these pieces or "
            f"this engine decide by numbers: {str(error).strip().splitlines()[0][:200]} A mapped axis can be folded "
            "into the batch, which attend goes through itself; engine='dense' decides least by numbers."
        ) from error


def once(engine: str, *tensors: Tensor) -> list[Tensor]:
    """The same tensors; a second derivative through the engine that takes them is refused in words.

    A gradient that is computed outside autograd has no gradient of its own, and torch would take it as constant.
    """
    if not torch.is_grad_enabled():
        return list(tensors)
    learning = [t for t in tensors if t.requires_grad]
    again = iter(_Once.apply(engine, *learning) if learning else ())
    return [next(again) if t.requires_grad else t for t in tensors]


class _Once(torch.autograd.Function):
    """Leaves tensors as they are, and links their gradients to them where those are to be differentiated again."""

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
    """Gradients that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, engine: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.engine = engine
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RegardError(
            f"attend: the {ctx.engine} engine computes gradients itself, and a gradient of these gradients was "
            "asked for (create_graph=True, a gradient penalty, a Hessian). The dense engine has derivatives of any "
            "order: attend(..., engine='dense')."
        )
