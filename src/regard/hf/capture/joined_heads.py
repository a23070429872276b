"""`JoinedHeads` keeps the input of each output projection: the heads of a call, one after the other.

A gate or a norm between the weighted values and the projection is part of this input, so its slices times the slices
of the matrix are what the heads write into the residual stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.hf.capture.kept_values import LostProjection, NoValues
from regard.hf.output_projections import LinearLayer, output_projection
from regard.nn import Attends

#: (B, H, I, J) of a call.
Shape = tuple[int, int, int, int]


class JoinedHeads:
    """The inputs of the output projections of attention modules, in the order of their calls."""

    def __init__(self, model: nn.Module, attending: Mapping[str, nn.Module]) -> None:
        self.layers: dict[str, LinearLayer] = {}
        self.without: dict[str, str] = {}
        self._names: dict[nn.Module, str] = {}
        self._inputs: dict[str, list[Tensor]] = {}
        #: Modules that only read the weight of their output projection.
        self._uncalled = {name for name, module in attending.items() if isinstance(module, nn.MultiheadAttention)}
        for name, module in attending.items():
            output = output_projection(model, name, module)
            layer = LinearLayer.of(output)
            if output is None or layer is None:
                self.without[name] = _reason(module, output)
            else:
                self.layers[name], self._names[output] = layer, name

    def module_ended(self, module: nn.Module, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str | None:
        """Keep the input of an output projection; returns the name of its attention module."""
        name = self._names.get(module)
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if name is not None and given is not None:
            self._read_layer(name, module)
            self._inputs.setdefault(name, []).append(given.detach())
        return name

    def _read_layer(self, name: str, module: nn.Module) -> None:
        """Read the matrix at a call. Before its first call a model may change it itself: RWKV scales its own."""
        if name not in self._inputs:
            self.layers[name] = LinearLayer.of(module) or self.layers[name]
        elif not self.layers[name].is_unchanged:
            self.without[name] = "its output projection was changed in place between its calls"

    def layer(self, name: str) -> LinearLayer:
        """The output projection of an attention module."""
        if name in self.without:
            raise (LostProjection if name in self.layers else NoValues)(self.without[name])
        if name not in self.layers:
            raise NoValues("its output projection was not found when the watch began")
        if not self.layers[name].is_unchanged:
            raise LostProjection(
                "its output projection was changed in place after it was watched (by an optimizer step)"
            )
        return self.layers[name]

    def are_values(self, name: str) -> bool:
        """Whether the projection reads the weighted values, and is not called: in nn.MultiheadAttention."""
        return name in self._uncalled and name not in self._inputs

    def of_call(self, name: str, shapes: Sequence[Shape], call: int) -> Tensor:
        """The heads (B, I, H, E) of one of the calls of a module. A call that joins steps has one input for each."""
        if name not in self._inputs:
            raise NoValues(
                "its output projection was not called as a module inside the with-block (compiled code is not)"
            )
        inputs, of_calls = list(self._inputs[name]), []
        for B, H, I, _ in shapes:
            parts: list[Tensor] = []
            while inputs and sum(part.shape[1] for part in parts) < I:
                parts.append(_batch_first(inputs.pop(0), B))
            of_calls.append((parts, B, H, I))
        if inputs or any(sum(part.shape[1] for part in parts) != I for parts, _, _, I in of_calls):
            raise NoValues("its output projection did not run once for each call of its attention")
        parts, _, H, _ = of_calls[call]
        joined = torch.cat(parts, 1)
        if joined.shape[-1] % H:
            raise NoValues(f"its output projection reads {joined.shape[-1]} channels, which are not those of {H} heads")
        return joined.unflatten(-1, (H, -1))


def _batch_first(x: Tensor, B: int) -> Tensor:
    """The input of a projection as (B, I, channels)."""
    if x.ndim == 3 and len(x) == B:
        return x
    if x.ndim != 2 or len(x) % B:
        raise NoValues(f"its output projection reads a tensor of shape {tuple(x.shape)}, and the batch size is {B}")
    return x.unflatten(0, (B, -1))


def _reason(module: nn.Module, output: nn.Module | None) -> str:
    """Why the output projection of a module is not known."""
    kind = type(module).__name__
    if output is None or isinstance(module, Attends):
        return f"{kind} has no output projection of a known name, so its heads are not parts of a residual stream"
    return (
        f"the output projection of {kind} is a {type(output).__name__}, which is not a linear layer with plain weights"
    )
