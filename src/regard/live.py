"""`differentiable`: maps that are made inside keep the autograd graph of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from regard.context import ContextFlag
from regard.errors import RegardError

Result = TypeVar("Result")

_kept = ContextFlag("differentiable")


@contextmanager
def differentiable() -> Iterator[None]:
    """Weights of maps that are made inside the block carry gradients, so that they can be part of a loss.

    `rg.attend`, the modules of `rg.nn` and `rg.watch` then keep live queries, keys and parameters. Of such a map
    `weights[...]`, `tile`, `dense`, every fold and `summarize` are in the autograd graph, also after the block. Outside
    the block maps are detached, and nothing is kept. `weights.carries_gradients` says which kind a map is. Watched
    layers that are recurrent, or that compute softmax themselves, have maps without gradients.

    Memory is O(n): the forward pass of a fold keeps no weights, and its backward pass computes them again, a few rows
    at a time. A second derivative (`create_graph=True`) keeps all weights.

    Errors: `RegardError` under `torch.no_grad()` or `torch.inference_mode()`, where nothing has gradients. In the block
    these two make maps without gradients, for example that of a teacher.

    >>> import torch, regard as rg
    >>> q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    >>> with rg.differentiable():
    ...     weights = rg.Attention(mask=rg.causal())(q, k, v).weights
    >>> weights.entropy().mean().backward()  # a loss: rows should be sharper
    >>> weights.carries_gradients, q.grad.shape, v.grad
    (True, torch.Size([1, 2, 5, 8]), None)
    """
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise RegardError(
            f"differentiable: torch.{mode} is active, so no weight can carry gradients. Enter rg.differentiable() "
            f"outside of torch.{mode}(), or leave it out."
        )
    with _kept.on():
        yield


def keeps_gradients() -> bool:
    """Whether a map that is made now keeps the graph of its tensors."""
    return bool(_kept) and torch.is_grad_enabled()


def keeping(is_kept: bool) -> AbstractContextManager[None]:
    """A block in which maps keep graphs, if `is_kept`: for the view of a map that does."""
    return _kept.on() if is_kept else nullcontext()


def kept(tensor: Tensor) -> Tensor:
    """The tensor itself if graphs are kept, else detached."""
    return tensor if keeps_gradients() else tensor.detach()


def with_graph(function: Callable[[], Result]) -> Callable[[], Result]:
    """The function, which runs with gradients if graphs are kept now, even if it is called under `torch.no_grad()`."""
    is_kept = keeps_gradients()

    def run() -> Result:
        with torch.set_grad_enabled(is_kept):
            return function()

    return run
