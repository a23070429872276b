"""What derivatives are asked for, and what is said where an engine has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.errors import RegardError

#: Why an engine with a backward pass of its own cannot run.
HIDDEN = (
    "a piece depends on a tensor that requires gradients and is none of its attributes, so gradients would not reach "
    "it. Make it an attribute of the piece, or a parameter of a piece that is an nn.Module"
)
TRANSFORMED = (
    "torch.func and forward-mode derivatives go through torch's own operations alone, as the dense engine does"
)


def is_transformed() -> bool:
    """Whether torch.func, or forward-mode differentiation, looks at every operation."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


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
