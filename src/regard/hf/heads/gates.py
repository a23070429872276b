"""`gated` multiplies each head of a model by a factor while a block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.shapes import as_tensor
from regard.hf.heads.model_heads import Heads, ModelHeads, refuse_input
from regard.hf.output_projections import open_gates


@checked
@contextmanager
def gated(
    model: nn.Module,
    gates: Mapping[Any, Tensor | Sequence[float]],
    output: str | None = None,
    num_heads: int | None = None,
) -> Iterator[None]:
    """Run a model, of Hugging Face or written by hand, with scaled heads: head_h -> g_h head_h.

    Multi-head attention is the sum over heads of head_h W_h, plus the bias of the output projection
    (Michel et al., 2019, arXiv:1905.10650). A gate g_h multiplies head_h before the output projection: 1
    changes nothing, to the bit, and 0 removes the head.

    `gates` maps module paths, as `watch` names them, or layer numbers to tensors (H,). Other modules are not changed.
    Gates that require gradients receive them, so they can be trained (Voita et al., 2019, arXiv:1905.09418). Blocks
    may be nested, and their gates multiply. After the block the model is as before. Gates do not change the weights
    that `watch` captures, since they act after the attention; the outputs of heads that it keeps are the scaled ones.
    Code that was compiled before leaves them out: a block in which no gate was applied is refused. Such code is not
    noticed if the plain model runs in the same block too.

    The input of the output projection must have the heads one after the other. If the projection has an unusual name,
    `output` is its path inside an attention module ("linears.3"); `num_heads` is for modules that do not have it.

    >>> import torch, transformers, regard as rg
    >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=4, vocab_size=9)
    >>> model = transformers.GPT2Model(config).eval()
    >>> with torch.no_grad(), rg.hf.gated(model, {"h.0.attn": [1.0, 0.0]}):
    ...     model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
    torch.Size([1, 3, 4])
    """
    heads = ModelHeads.of(model, "gated", output, num_heads)
    with apply_gates(heads, gates), _Runs().checked(model, {heads[name].output for name in gates}):
        yield


class _Runs:
    """Refuses a run that calls no gated projection: code that was compiled before does not call hooks.

    A run is a call of a module that holds a gated projection, and inside no other such module. `depth` counts those
    that are open. `is_gated`: a gate was applied in this run; `was_gated`: in any run of the block.
    """

    def __init__(self) -> None:
        self.depth, self.is_gated, self.was_gated = 0, False, False

    @contextmanager
    def checked(self, model: nn.Module, outputs: set[nn.Module]) -> Iterator[None]:
        """A block in which every run of the model must call one of the gated output projections."""
        with ExitStack() as stack:
            for module in model.modules():
                if module in outputs:
                    stack.callback(module.register_forward_pre_hook(self._gate).remove)
                elif not outputs.isdisjoint(module.modules()):
                    stack.callback(module.register_forward_pre_hook(self._start).remove)
                    stack.callback(module.register_forward_hook(self._end).remove)
            yield
        if outputs and not self.was_gated:
            raise RegardError(
                "gated: the block ended, and none of its gates was applied: it did not run the model, or what ran was "
                "compiled before, such as torch.compile(lambda x: model(x)). Call the model itself inside the block."
            )

    def _start(self, *call: Any) -> None:
        """The hook before a module: begin a run, if none is open. No gate was applied in it yet."""
        self.is_gated &= self.depth > 0
        self.depth += 1

    def _gate(self, *call: Any) -> None:
        """The hook before a gated output projection: note that a gate was applied."""
        self.is_gated = self.was_gated = True

    def _end(self, module: nn.Module, *call: Any) -> None:
        """The hook after a module: refuse a run that ended and in which no gate was applied."""
        self.depth -= 1
        if not self.depth and not self.is_gated:
            raise RegardError(
                f"gated: {type(module).__name__} ran, and none of its gates was applied: the code that ran was "
                "compiled before, or it left out these layers. Call the model before torch.compile (model._orig_mod)."
            )


@contextmanager
def apply_gates(heads: ModelHeads, gates: Mapping[Any, Any]) -> Iterator[None]:
    """Multiply the inputs of output projections by gates while a block runs."""
    chosen = [(heads[name], gate) for name, gate in gates.items()]
    checked = [(layer, _check(layer, gate)) for layer, gate in chosen]
    with ExitStack() as stack:
        for layer, gate in checked:
            inputs = _Inputs(heads.caller, layer)
            for hook in inputs.register():
                stack.callback(hook.remove)
            handle = layer.output.register_forward_pre_hook(_multiply(gate, inputs))
            open_gates[layer.module, handle] = gate
            stack.callback(open_gates.pop, (layer.module, handle))
            stack.callback(handle.remove)
        yield


class _Inputs:
    """The inputs of an attention module while it runs, to refuse an "output projection" that reads one of them."""

    def __init__(self, caller: str, heads: Heads) -> None:
        self.caller, self.heads = caller, heads
        self.tensors: list[Tensor] = []

    def register(self) -> Iterator[RemovableHandle]:
        """Observe the module, if the projection is inside of it; the hooks are returned."""
        if self.heads.output_path:
            yield self.heads.module.register_forward_pre_hook(self._enter, with_kwargs=True)
            yield self.heads.module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook before the attention module: keep its inputs."""
        self.tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]

    def _leave(self, *call: Any) -> None:
        """The hook after the attention module: drop its inputs."""
        self.tensors = []

    def check(self, joined: Tensor) -> None:
        """Refuse a projection that reads an input of the module, or a view of it."""
        if any(_base(joined) is _base(tensor) for tensor in self.tensors):
            module, path = self.heads.module, self.heads.output_path
            refuse_input(self.caller, self.heads.name, module, path, f"reads an input of {type(module).__name__}")


def _base(tensor: Tensor) -> Tensor:
    """The tensor of which this is a view, or itself."""
    return tensor if tensor._base is None else tensor._base


def _check(heads: Heads, gate: Any) -> Tensor:
    """The gates of a module as a floating-point tensor, one factor per head."""
    rule = f"gated: {heads.name} needs {heads.num_heads} finite gates, one for each head"
    try:
        gate = gate if isinstance(gate, Tensor) else as_tensor(gate, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise RegardError(f"{rule}, got {gate!r}.") from error
    if gate.shape != (heads.num_heads,):
        raise RegardError(f"{rule}, got shape {tuple(gate.shape)}.")
    if gate.is_complex() or not gate.isfinite().all():
        raise RegardError(f"{rule}, got {gate}.")
    return gate if gate.is_floating_point() else gate.float()


def _multiply(gate: Tensor, inputs: _Inputs) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """The hook before an output projection that multiplies the heads in its input (..., H E) by the gates (H,)."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        joined, *rest = args
        inputs.check(joined)
        heads = joined.unflatten(-1, (len(gate), -1)) * gate.to(joined)[:, None]
        return heads.flatten(-2), *rest

    return hook
