"""The outputs of heads of modules that do not call an attention interface.

They are the inputs of their output projections. `regard.nn.CrossAttention` has one head and no projection: its own
output is that of its head, and a decoder may call it once for each query.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from regard.base.errors import RegardError
from regard.base.shapes import at_least_float32, grouped_values, spread_indices
from regard.hf.capture import WatchedAttention
from regard.hf.heads.model_heads import ModelHeads
from regard.maps import AttentionMap
from regard.nn import CrossAttention, ModuleOutput

#: Rows that are compared with weights @ values.
ROWS = 4
TOLERANCE = 1e-3


class UnknownOutput(Exception):
    """The reason why the output of the heads of a module is not known."""


class ProjectedHeads:
    """Keeps the outputs of all heads of a model while it runs, joined: (B, I, H E) of each call.

    `heads` and `single` are the modules with and without an output projection, by path. `unknown` and `reason` say why
    others are missing.
    """

    def __init__(self, model: nn.Module) -> None:
        self.reason = "its heads were not found"
        try:
            layout = ModelHeads.of(model, "attribute")
            self.heads, self.unknown = layout.by_name, layout.unknown
        except RegardError as error:
            self.heads, self.unknown, self.reason = {}, {}, str(error)
        self.single = {name: module for name, module in model.named_modules() if isinstance(module, CrossAttention)}
        self._joined: dict[str, list[Tensor]] = defaultdict(list)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A block in which the outputs are kept. They get a gradient, also if parameters are frozen."""
        with ExitStack() as stack:
            for name, heads in self.heads.items():
                stack.callback(heads.output.register_forward_pre_hook(partial(self._keep_input, name)).remove)
            for name, module in self.single.items():
                stack.callback(module.register_forward_hook(partial(self._keep_output, name)).remove)
            yield

    def _keep_input(self, name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        """The hook before an output projection: its input is the output of the heads."""
        self._keep(name, args[0])

    def _keep_output(self, name: str, _: nn.Module, args: tuple[Tensor, ...], output: ModuleOutput) -> None:
        """The hook after a module without an output projection: its output is that of its head."""
        self._keep(name, output.output)

    def _keep(self, name: str, joined: Tensor) -> None:
        """Keep the output of one call. It begins a graph if it has none, because the parameters are frozen."""
        if not joined.requires_grad and torch.is_grad_enabled() and joined.is_floating_point():
            joined.requires_grad_()
        self._joined[name].append(joined)

    def outputs(self, seen: WatchedAttention, name: str) -> Iterator[tuple[nn.Module, Tensor, list[Tensor]]]:
        """The module, the values (B, G, J, E) and the outputs (B, I, H E) of each call of a module.

        Outputs are a list: of one tensor, or of the steps of a decoder. Raises `UnknownOutput` unless the outputs are
        weights times values.
        """
        if name in self.single:
            yield self._single(seen, name)
            return
        if name not in self.heads:
            raise UnknownOutput(f"the output of its heads is not known: {self.unknown.get(name, self.reason)}")
        calls, joined = seen.calls(name), self._joined[name]
        if len(joined) != len(calls):
            raise UnknownOutput(f"its output projection ran {len(joined)} times for {len(calls)} attention calls")
        for weights, x in zip(calls, joined, strict=True):
            try:
                value = weights.value
            except RegardError as reason:
                raise UnknownOutput(str(reason)) from None
            shape = *weights.shape[::2], weights.shape[1], value.shape[3]  # (B, I, H, E)
            if x.numel() != torch.Size(shape).numel() or x.shape[-1] != shape[2] * shape[3]:
                raise UnknownOutput(f"its output projection reads {tuple(x.shape)}, not heads of the shape {shape}")
            if not _is_output(weights, value, x.detach().unflatten(-1, shape[2:])):
                raise UnknownOutput("its output projection does not read weights times values alone (a gate or a norm)")
            yield self.heads[name].module, value, [x]

    def _single(self, seen: WatchedAttention, name: str) -> tuple[nn.Module, Tensor, list[Tensor]]:
        """The module, the values and the outputs, as in `outputs`, for a module without an output projection.

        It has one head. Its steps, each for some queries, are one call of the watch. Outputs are (B, i, E) for each.
        """
        steps, calls = self._joined[name], seen.calls(name)
        if len(calls) != 1 or sum(step.shape[1] for step in steps) != calls[0].shape[2]:
            raise UnknownOutput(f"its {len(steps)} steps are not the {len(calls)} calls that the watch kept")
        try:
            value = calls[0].value
        except RegardError as reason:
            raise UnknownOutput(str(reason)) from None
        if not _is_output(calls[0], value, torch.cat(steps, 1).detach()[:, :, None]):
            raise UnknownOutput("its output is not weights times values alone")
        return self.single[name], value, steps


@torch.no_grad()
def _is_output(weights: AttentionMap, value: Tensor, output: Tensor) -> bool:
    """Whether some rows of weights @ values are the output (B, I, H, E)."""
    rows = spread_indices(weights.shape[2], ROWS)
    expected = grouped_values(weights.tile(rows=rows), at_least_float32(value).to(weights._dtype))
    actual = output[:, rows.to(output.device)].transpose(1, 2)
    tolerance = max(TOLERANCE, 4 * torch.finfo(actual.dtype).eps)
    return bool((expected - actual).abs().max() <= tolerance * float(actual.abs().max().clamp_min(1e-6)))
