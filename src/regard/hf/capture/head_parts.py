"""What the heads of a captured call compute and write: outputs, parts of the residual stream, effects on a logit."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.base.shapes import at_least_float32, spread_indices, to_device
from regard.hf.capture.captured_calls import ModuleCalls
from regard.hf.capture.joined_heads import JoinedHeads
from regard.hf.capture.kept_values import LostProjection, NoValues
from regard.hf.capture.residual_stream import FinalNorm, ResidualStream
from regard.hf.output_projections import open_gates
from regard.maps.attention_map import AttentionMap
from regard.maps.changed_map import ValueWeightedMap
from regard.stats.composition import value_weighted

#: Rows of weights times values that are compared with the input of the output projection.
ROWS = 4
#: Largest difference that is rounding, relative to the largest number.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 1e-2}
BETWEEN = (
    "a gate or a norm stands between its weighted values and its output projection, so no number for each key exists"
)


class KeptParts:
    """What a watch with keep="qkv" keeps beside values: inputs of output projections, and the end of the stream."""

    def __init__(self, model: nn.Module, attending: Mapping[str, nn.Module]) -> None:
        self.joined, self.stream = JoinedHeads(model, attending), ResidualStream(model, attending)
        self._threads: set[int] = set()
        self.gates: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
        self.trusted = {
            name for name, module in attending.items() if type(module).__module__.startswith("transformers")
        }

    def module_ended(self, module: nn.Module, args: Iterable[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        self._threads.add(threading.get_ident())
        name = self.joined.module_ended(module, args, kwargs)
        self.stream.module_ended(module, args, kwargs, output, name)

    def keep_gates(self, module: nn.Module | None, call: Any) -> None:
        """Keep the gates (H, I) that are open at a call, or at a step that was appended to it."""
        _, H, I, _ = call.shape
        factor = torch.ones(H)
        for (gated, _), gate in list(open_gates.items()):
            factor = factor * gate.detach().to(factor.device) if gated is module else factor
        known = self.gates.get(call, factor.new_ones(H, 0))
        self.gates[call] = torch.cat([known, factor[:, None].expand(H, I - known.shape[1])], 1)

    def check_threads(self) -> None:
        """Refuse runs in several threads: the order of their calls does not show which part belongs to which call."""
        if len(self._threads) > 1:
            raise LostProjection("the model ran in several threads under one watch. Begin a watch in each thread")


@dataclass(eq=False)
class CallParts:
    """One call of an attention module, and what was kept of it."""

    name: str
    calls: ModuleCalls
    call: int
    kept: KeptParts

    @property
    def weights(self) -> AttentionMap:
        return self.calls.calls[self.call].map

    @cached_property
    def values(self) -> Tensor:
        return self.calls.calls[self.call].read_values()

    @property
    def patched(self) -> Tensor | None:
        """The output (B, H, I, E) of the call, if an edit changed it."""
        return getattr(self.calls.calls[self.call], "patched", None)

    @property
    def gates(self) -> Tensor:
        """The gates (H, I) by which the model multiplied the output of the call; 1 without `gated`."""
        return self.kept.gates.get(self.calls.calls[self.call], torch.ones(self.weights.shape[1:3]))

    def values_of(self, heads: Tensor) -> Tensor:
        """The values (B, H', J, E) that these query heads read."""
        return self.values[:, to_device(heads // (self.weights.shape[1] // self.values.shape[1]), self.values.device)]

    @torch.no_grad()
    def output(self, heads: Tensor) -> Tensor:
        """W . values of these heads, or what an edit put in their place, (B, H', I, E)."""
        if self.patched is not None:
            output = at_least_float32(self.patched[:, to_device(heads, self.patched.device)])
        else:
            output = self.weights.select(None, heads) @ self.values_of(heads)
        return output * self.gates[heads.cpu(), :, None].to(output)

    @cached_property
    def joined(self) -> Tensor:
        """The input of the output projection, (B, I, H, E): weighted values, after a gate or a norm if there is one."""
        self.kept.check_threads()
        self.kept.joined.layer(self.name)
        if self.kept.joined.are_values(self.name):
            return self.output(torch.arange(self.weights.shape[1])).transpose(1, 2)
        joined = self.kept.joined.of_call(self.name, [call.shape for call in self.calls.calls], self.call)
        if self.name not in self.kept.trusted and not self._is_weighted_values(joined):
            raise NoValues(
                "the input of its output projection is not its weighted values, the heads one after the other, so it "
                "is not known which part of it is which head"
            )
        return joined

    @cached_property
    def is_direct(self) -> bool:
        """Whether the output projection reads the weighted values, without a gate or a norm between."""
        self.kept.joined.layer(self.name)
        is_read = self.kept.joined.are_values(self.name) or self._is_weighted_values(self.joined)
        return is_read and bool((self.gates == 1).all())

    @torch.no_grad()
    def _is_weighted_values(self, joined: Tensor) -> bool:
        _, H, I, _ = self.weights.shape
        rows = spread_indices(I, ROWS)
        tile, values = self.weights.tile(rows=rows), at_least_float32(self.values_of(torch.arange(H)))
        expected = (tile.to(values.dtype) @ values).transpose(1, 2)
        if self.patched is not None:
            expected = at_least_float32(self.patched)[:, :, to_device(rows, self.patched.device)].transpose(1, 2)
        expected = expected * self.gates[:, rows.cpu()].mT[..., None].to(expected)
        actual = joined[:, to_device(rows, joined.device)]
        if actual.shape != expected.shape:
            return False
        used = (tile.sum(-1) != 0).transpose(1, 2)  # rows of padding may have any output
        error = (expected - actual).abs().amax(-1)[used]
        limit = TOLERANCE.get(joined.dtype, 1e-4) * max(float(expected.abs().max()), 1e-6)
        return not error.numel() or float(error.max()) <= limit

    @torch.no_grad()
    def part(self, heads: Tensor) -> Tensor:
        """What these heads add to the residual stream, (B, H', I, C)."""
        heads = to_device(heads, self.joined.device)
        matrix = at_least_float32(self._matrix())[heads]
        return torch.einsum("bihe,hec->bhic", at_least_float32(self.joined)[:, :, heads].to(matrix.dtype), matrix)

    def _matrix(self) -> Tensor:
        """The matrix of the output projection by head, (H, E, C)."""
        return self.kept.joined.layer(self.name).matrix.unflatten(0, (self.weights.shape[1], -1))

    def bias(self) -> Tensor:
        """The bias of the output projection, (C,)."""
        layer = self.kept.joined.layer(self.name)
        return layer.matrix.new_zeros(layer.matrix.shape[1]) if layer.bias is None else layer.bias.clone()

    @torch.no_grad()
    def value_weighted(self, projected: bool | None) -> ValueWeightedMap:
        """The map of |w_ij| ||v_j||, or of |w_ij| ||v_j W_h|| with the part W_h of the output projection."""
        if not (projected or (projected is None and self._has_projection())):
            return value_weighted(self.weights, self.values)
        if not self.is_direct:
            raise NoValues(f"{BETWEEN}; projected=False has the norms of the values alone")
        return value_weighted(self.weights, self.values, self._matrix())

    def _has_projection(self) -> bool:
        try:
            return self.is_direct
        except LostProjection:
            raise
        except NoValues:
            return False

    @torch.no_grad()
    def logit_effect(self, token: int, heads: Tensor) -> Tensor:
        """What these heads add to the logit of a token, (B, H', I), with the scale of the final norm held."""
        stream = self.kept.stream
        if stream.head is None:
            raise NoValues("the model has no language-model head that is a linear layer, such as lm_head")
        if not 0 <= token < stream.head.matrix.shape[1]:
            raise NoValues(f"token {token} is not in the vocabulary: the head has {stream.head.matrix.shape[1]} logits")
        if not stream.head.is_unchanged:
            raise NoValues("the language-model head was changed in place after it was watched (by an optimizer step)")
        read = self._final_read()
        direction = read.direction(stream.head.matrix[:, token])
        heads = to_device(heads, direction.device)
        by_head = at_least_float32(self._matrix())[heads] @ direction
        joined = at_least_float32(self.joined)[:, :, heads].to(by_head.dtype)
        return torch.einsum("bihe,he->bhi", joined, by_head) * read.scale[:, None]

    def _final_read(self) -> FinalNorm:
        """The final norm of this call."""
        reads, num_calls = self.kept.stream.reads, len(self.calls.calls)
        if not reads:
            raise NoValues("the language-model head was not called inside the with-block. Run the whole model")
        if len(reads) != num_calls:
            raise NoValues(f"the language-model head ran {len(reads)} times, and this layer {num_calls} times")
        read = reads[self.call]
        if isinstance(read.norm, str):
            raise NoValues(read.norm)
        if self.name in read.without:
            raise NoValues(read.without[self.name])
        if self.name not in read.reached:
            raise NoValues("it is in no block of the stack that ends at the language-model head")
        return read.norm
