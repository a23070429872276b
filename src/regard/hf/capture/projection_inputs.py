"""`ProjectionInputs`: inputs and weights, from which a call of torch's own layers projects queries, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.base.shapes import at_least_float32, spread_indices

#: Rows of inputs and weights that are copied, to detect whether they changed after the call.
ROWS = 4


@dataclass(frozen=True, eq=False)
class ProjectionInputs:
    """The inputs of one call, for queries (B, I, C), keys and values (B, J, C), and the three projections.

    `weights` (C, C) and `biases` (C,) are the module's own tensors, for queries, keys and values.
    """

    num_heads: int
    tensors: tuple[Tensor, Tensor, Tensor]
    weights: tuple[Tensor, Tensor, Tensor]
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]

    @staticmethod
    def of(module: nn.MultiheadAttention, inputs: Sequence[Tensor]) -> ProjectionInputs | None:
        """The inputs of a call; None if its keys or values are not just projections of them."""
        adds = module.bias_k is not None or module.bias_v is not None or module.add_zero_attn
        if adds or module.in_proj_weight is None or torch.is_autocast_enabled(inputs[0].device.type):
            return None
        query, key, value = (x.detach() for x in inputs)
        bias = module.in_proj_bias
        biases = (None, None, None) if bias is None else tuple(bias.detach().chunk(3))
        weights = tuple(module.in_proj_weight.detach().chunk(3))
        return ProjectionInputs(module.num_heads, (query, key, value), weights, biases)  # type: ignore[arg-type]

    def shaped(self) -> tuple[Tensor, Tensor, Tensor]:
        """Zeros in the shapes of the queries, keys and values; they take no memory."""
        width = self.weights[0].shape[0] // self.num_heads
        sizes = ((len(x), self.num_heads, x.shape[1], width) for x in self.tensors)
        query, key, value = (x.new_zeros(1).expand(size) for x, size in zip(self.tensors, sizes, strict=True))
        return query, key, value

    def projected(self, number: int, x: Tensor) -> Tensor:
        """The projection of x to queries (0), keys (1) or values (2), (B, H, I, D)."""
        flat = F.linear(x, self.weights[number], self.biases[number])
        return flat.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def folded(self, entries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A few queries times the key projection, (b, H, r, C), and unprojected keys and values, (b, 1, J, C).

        q_i . (x_j W + c) = (q_i W') . x_j + q_i . c. The last term is the same for every key, so it does not change
        the softmax. For a few rows this avoids projecting all keys and values.
        """
        query, key, value = self.tensors
        q = self.projected(0, query[entries[:, None], rows])
        folded = at_least_float32(q) @ at_least_float32(self.weights[1]).unflatten(0, (self.num_heads, -1))
        scale = (folded.shape[-1] / q.shape[-1]) ** 0.5  # scores are divided by the square root of the width
        key, value = (x if len(x) == len(entries) else x[entries] for x in (key, value))  # no copy of the whole batch
        return folded * scale, key[:, None], value[:, None]

    def project_output(self, mixed: Tensor) -> Tensor:
        """Head outputs (b, H, r, D) from weighted sums of unprojected values, sum_j w_ij x_j (b, H, r, C).

        The weights of a row sum to 1, so the bias is added once.
        """
        weight, bias = self.weights[2].unflatten(0, (self.num_heads, -1)), self.biases[2]
        projected = mixed @ weight.mT.to(mixed.dtype)
        return projected if bias is None else projected + bias.view(self.num_heads, 1, -1)

    def versions(self, with_values: bool = False) -> list[int]:
        """How often each tensor was changed in place. Tensors of inference mode have no counter."""
        last = 3 if with_values else 2
        tensors = (*self.tensors[:last], *self.weights[:last], *(b for b in self.biases[:last] if b is not None))
        return [tensor._version for tensor in tensors if not tensor.is_inference()]

    def sample(self, with_values: bool = False) -> list[Tensor]:
        """A few rows of the inputs and weights of queries and keys, and of values if they are read later."""
        last = 3 if with_values else 2
        return [_rows(x) for x in (*self.tensors[:last], *(weight[None] for weight in self.weights[:last]))]


def _rows(x: Tensor) -> Tensor:
    return x[:, spread_indices(x.shape[1], ROWS, x.device)]
