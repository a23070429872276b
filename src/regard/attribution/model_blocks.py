"""The blocks of a model: the layers that hold its attention modules, with their inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class BlockCall:
    """One call of a block: its arguments, its output (B, n, C), and the outputs of the modules inside it by path."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    children: dict[str, Tensor]

    @property
    def hidden(self) -> Tensor:
        """The input (B, n, C) of the block."""
        return self.args[0] if self.args else self.kwargs["hidden_states"]

    def run(self) -> Tensor:
        """Run the block again on the same arguments."""
        return first_tensor(self.block(*self.args, **self.kwargs))


def block_name(attention: str) -> str:
    """The block of an attention module: its path up to the first number.

    >>> block_name("model.layers.3.self_attn"), block_name("encoder.block.0.layer.0.SelfAttention")
    ('model.layers.3', 'encoder.block.0')
    """
    parts = attention.split(".")
    number = next((n for n, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: number + 1])


def first_tensor(output: Any) -> Tensor:
    """The hidden states that a module returns."""
    return output[0] if isinstance(output, tuple | list) else output


class BlockCalls:
    """Keeps the calls of the blocks that hold `attentions` (module paths) while a model runs, by the path of the block.

    The inputs of blocks get a gradient, also if parameters are frozen.
    """

    def __init__(self, model: nn.Module, attentions: Iterable[str]) -> None:
        self.blocks = {name: model.get_submodule(name) for name in dict.fromkeys(map(block_name, attentions))}
        self.calls: dict[str, BlockCall] = {}
        self._children: dict[str, Tensor] = {}  # of the block that runs now

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A block of code in which calls are kept; of several calls of one block of the model, the last."""
        with ExitStack() as stack:
            for name, block in self.blocks.items():
                stack.callback(block.register_forward_pre_hook(_require_gradient, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self._keeper(name), with_kwargs=True).remove)
                for path, child in block.named_modules():
                    if path:
                        stack.callback(child.register_forward_hook(self._keep_child(path)).remove)
            yield

    def _keeper(self, name: str) -> Callable[..., None]:
        """The hook that keeps a call of this block, with the outputs of its children, which have run before it ends."""

        def keep(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.calls[name] = BlockCall(block, args, kwargs, first_tensor(output), self._children)
            self._children = {}

        return keep

    def _keep_child(self, path: str) -> Callable[..., None]:
        """The hook that keeps the tensor that a child at this path returns, until its block ends."""

        def keep(child: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            output = first_tensor(output) if not isinstance(output, dict) else None
            if isinstance(output, Tensor):
                self._children[path] = output

        return keep


def _require_gradient(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before a block: start the graph at its input if it has none, because the parameters are frozen."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    if isinstance(hidden, Tensor) and not hidden.requires_grad and torch.is_grad_enabled():
        hidden.requires_grad_()


def is_additive(call: BlockCall, attention: str) -> bool:
    """Whether a block only adds to its input: the output of its attention, and that of one other part.

    The numbers of the call decide: output - input must be the sum of the outputs of two children. `attention` is the
    path of the attention inside the block. A norm after the sum (as in BERT) is not additive.
    """
    with torch.no_grad():
        rest = call.output - call.hidden
        # the attention, and the modules around it inside the block
        outer = [attention.rsplit(".", n)[0] for n in range(attention.count(".") + 1)]
        attended = [call.children[path] for path in outer if path in call.children]
        others = [x for path, x in call.children.items() if path not in outer and x.shape == rest.shape]
        tolerance = max(1e-4, 4 * torch.finfo(call.output.dtype).eps) * float(call.output.abs().max())
        for added in attended:
            if added.shape == rest.shape and any(bool((rest - added - x).abs().max() <= tolerance) for x in others):
                return True
    return False
