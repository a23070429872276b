"""The outputs of heads of modules that do not call an attention interface: the inputs of their output projections."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.hf.capture import WatchedAttention
from regard.hf.heads.layout import ModelHeads
from regard.maps import AttentionMap
from regard.shapes import at_least_float32, grouped_values

#: Rows that are compared with weights @ values.
ROWS = 4
TOLERANCE = 1e-3


class UnknownOutput(Exception):
    """The reason why the output of the heads of a module is not known."""


class ProjectedHeads:
    """Keeps the inputs of all output projections of a model while it runs."""

    def __init__(self, model: nn.Module) -> None:
        self.reason = "its heads were not found"
        try:
            layout = ModelHeads.of(model, "attribute")
            self.heads, self.unknown = layout.by_name, layout.unknown
        except RegardError as error:
            self.heads, self.unknown, self.reason = {}, {}, str(error)
        self._inputs: dict[str, list[Tensor]] = defaultdict(list)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A block in which the inputs are kept. They get a gradient, also if parameters are frozen."""
        with ExitStack() as stack:
            for name, heads in self.heads.items():
                stack.callback(heads.output.register_forward_pre_hook(self._keeper(name)).remove)
            yield

    def _keeper(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
            joined = args[0]
            if not joined.requires_grad and torch.is_grad_enabled() and joined.is_floating_point():
                joined.requires_grad_()
            self._inputs[name].append(joined)

        return keep

    def outputs(self, seen: WatchedAttention, name: str) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
        """The module, the values and the joined outputs (B, I, H E) of each call of a module."""
        if name not in self.heads:
            raise UnknownOutput(f"the output of its heads is not known: {self.unknown.get(name, self.reason)}")
        calls, joined = seen.calls(name), self._inputs[name]
        if len(joined) != len(calls):
            raise UnknownOutput(f"its output projection ran {len(joined)} times for {len(calls)} attention calls")
        for n, (weights, x) in enumerate(zip(calls, joined, strict=True)):
            try:
                value = seen.values(name, n)
            except RegardError as reason:
                raise UnknownOutput(str(reason)) from None
            shape = *weights.shape[::2], weights.shape[1], value.shape[3]
            if x.numel() != torch.Size(shape).numel() or x.shape[-1] != shape[2] * shape[3]:
                raise UnknownOutput(f"its output projection reads {tuple(x.shape)}, not heads of the shape {shape}")
            if not _is_output(weights, value, x.detach().unflatten(-1, shape[2:])):
                raise UnknownOutput("its output projection does not read weights times values alone (a gate or a norm)")
            yield self.heads[name].module, value, x


@torch.no_grad()
def _is_output(weights: AttentionMap, value: Tensor, output: Tensor) -> bool:
    """Whether some rows of weights @ values are the output (B, I, H, E)."""
    rows = torch.linspace(0, weights.shape[2] - 1, min(ROWS, weights.shape[2])).round().long()
    expected = grouped_values(weights.tile(rows=rows), at_least_float32(value).to(weights._dtype))
    actual = output[:, rows.to(output.device)].transpose(1, 2)
    return bool((expected - actual).abs().max() <= TOLERANCE * float(actual.abs().max().clamp_min(1e-6)))
