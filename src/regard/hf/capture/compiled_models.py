"""Refuses models that are compiled: their compiled code cannot be watched."""

from __future__ import annotations

from torch import nn

from regard.errors import RegardError


def _is_compiled(module: nn.Module) -> bool:
    forward = module.forward
    own = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
    return own or hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def refuse_compiled(model: nn.Module, operation: str = "watch") -> None:
    """Raise an error if a part of the model is compiled."""
    for name, module in model.named_modules():
        if _is_compiled(module):
            where = f"its part {name!r}" if name else "the model"
            raise RegardError(
                f"{operation}: {where} is compiled, and compiled code does not look up its backend again. Use the "
                "original model: model._orig_mod after torch.compile(model); after model.compile(), or if its forward "
                "was compiled, load the model again."
            )
