"""What torch's own layers project to queries, keys and values, before it is projected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.shapes import at_least_float32

#: Rows of inputs and weights that are kept, to know whether they are still those of the call.
ROWS = 4


@dataclass(frozen=True, eq=False)
class Inputs:
    """What one call projects: inputs of queries (B, I, C), keys and values (B, J, C), and the projections.

    `weights` (C, C) and `biases` (C,) are those of queries, keys and values, shared with the module.
    """

    num_heads: int
    tensors: tuple[Tensor, Tensor, Tensor]
    weights: tuple[Tensor, Tensor, Tensor]
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]

    @staticmethod
    def of(module: nn.MultiheadAttention, inputs: Sequence[Tensor]) -> Inputs | None:
        """The inputs of a call; None where its queries and keys are more than projections of them."""
        adds = module.bias_k is not None or module.bias_v is not None or module.add_zero_attn
        if adds or module.in_proj_weight is None or torch.is_autocast_enabled(inputs[0].device.type):
            return None
        query, key, value = (x.detach() for x in inputs)
        bias = module.in_proj_bias
        biases = (None, None, None) if bias is None else tuple(bias.detach().chunk(3))
        weights = tuple(module.in_proj_weight.detach().chunk(3))
        return Inputs(module.num_heads, (query, key, value), weights, biases)  # type: ignore[arg-type]

    def shaped(self) -> tuple[Tensor, Tensor, Tensor]:
        """Zeros of the shapes that queries, keys and values will have; they take no memory."""
        width = self.weights[0].shape[0] // self.num_heads
        sizes = ((len(x), self.num_heads, x.shape[1], width) for x in self.tensors)
        query, key, value = (x.new_zeros(1).expand(size) for x, size in zip(self.tensors, sizes, strict=True))
        return query, key, value

    def projected(self, number: int, x: Tensor) -> Tensor:
        """Queries (0), keys (1) or values (2) by head, (B, H, I, D)."""
        flat = F.linear(x, self.weights[number], self.biases[number])
        return flat.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def folded(self, entries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Some queries turned so that they compare with the inputs of keys: (b, H, r, C), (b, 1, J, C), values too.

        q_i . (x_j W + c) = (q_i W') . x_j + q_i . c, and the last term is the same for every key, so softmax
        does not see it. A few rows then need no key or value to be projected.
        """
        query, key, value = self.tensors
        q = self.projected(0, query[entries[:, None], rows])
        turned = at_least_float32(q) @ at_least_float32(self.weights[1]).unflatten(0, (self.num_heads, -1))
        scale = (turned.shape[-1] / q.shape[-1]) ** 0.5  # scores divide by the root of the width they see
        key, value = (x if len(x) == len(entries) else x[entries] for x in (key, value))  # all of them need no copy
        return turned * scale, key[:, None], value[:, None]

    def carried(self, mixed: Tensor) -> Tensor:
        """Head outputs (b, H, r, D) of mixed inputs sum_j w_ij x_j, (b, H, r, C), for weights that sum to 1."""
        weight, bias = self.weights[2].unflatten(0, (self.num_heads, -1)), self.biases[2]
        carried = mixed @ weight.mT.to(mixed.dtype)
        return carried if bias is None else carried + bias.view(self.num_heads, 1, -1)

    def versions(self) -> list[int]:
        """How often each tensor was changed in place; those of inference mode count nothing."""
        held = (*self.tensors[:2], *self.weights[:2], *(b for b in self.biases[:2] if b is not None))
        return [tensor._version for tensor in held if not tensor.is_inference()]

    def sample(self) -> list[Tensor]:
        """A few rows of what gives queries and keys: inputs and weights."""
        return [_rows(x) for x in (*self.tensors[:2], *(weight[None] for weight in self.weights[:2]))]


def _rows(x: Tensor) -> Tensor:
    return x[:, torch.linspace(0, x.shape[1] - 1, min(ROWS, x.shape[1]), device=x.device).round().long()]
