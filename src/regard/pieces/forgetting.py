"""The bias of forgetting attention: what the tokens between a key and a query let through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import at_least_float32, widest_float
from regard.pieces.bias import AdditiveBias, State, prepared_part
from regard.pieces.grid import Grid

#: A gate below this is closed: no key before it keeps a weight. Sums of lower numbers would lose the other gates.
LEAST = -1e5


@dataclass(frozen=True)
class ForgettingBias(AdditiveBias):
    """sum of log f_l over j < l <= i, for gates f_l in (0, 1] of each token (Lin et al. 2025, FoX, arXiv:2503.02130).

    A token with a gate near 0 lets later queries forget all keys before it. If all gates of a head are equal, this is
    ALiBi. Each call needs `log_forget` (B, H, J), the logarithms of the gates, at most 0: `logsigmoid` of a projection,
    for instance. It is for causal attention. x-transformers calls it data-dependent ALiBi.

    >>> import math, torch, regard as rg
    >>> x = torch.zeros(1, 1, 4, 8)  # all scores are equal
    >>> attention = rg.Attention(bias=rg.biases.ForgettingBias(), mask=rg.causal())
    >>> gates = torch.tensor([1.0, 1.0, 0.5, 1.0])  # token 2 halves the weights of the tokens before it
    >>> attention(x, x, x, log_forget=gates.log()[None, None]).weights[0, 0, 3]
    tensor([0.1667, 0.1667, 0.3333, 0.3333])
    """

    needs: ClassVar[Mapping[str, str]] = {"log_forget": "B H J"}

    def prepare(self, query: Tensor, key: Tensor, positions: Positions, log_forget: Tensor | None = None) -> State:
        """The sums of the log gates from the first key up to each query and key, as pairs of numbers: (B, H, n, 2).

        A query may have a position before the first key, where the sum is 0, or after the last one.
        """
        if log_forget is None:
            raise RegardError(
                "ForgettingBias.prepare: needs log_forget (batch, heads, keys), the logarithms of the forget gates. "
                "Give it to the call: attention(q, k, v, log_forget=...)."
            )
        if len(positions.keys.intervals) > 1:
            raise RegardError(
                "ForgettingBias: the keys have gaps in their positions, so the gates of the tokens between them are "
                "missing. Use a cache that keeps all keys, or a ring cache without sinks."
            )
        dtype = at_least_float32(query).dtype
        sums = log_forget.to(widest_float(log_forget.device)).clamp_min(LEAST).cumsum(-1)
        first, count = next((start for start, _ in positions.keys), 0), log_forget.shape[-1]
        key_indices = positions.query(slice(0, query.shape[2]), query.device) - first
        at_queries = torch.nn.functional.pad(sums, (1, 0))[..., (key_indices + 1).clamp(0, count)]
        return _pairs(at_queries, dtype), _pairs(sums, dtype)

    def term(self, grid: Grid, rows: Tensor | None, cols: Tensor | None) -> Tensor:
        rows, cols = prepared_part("ForgettingBias", rows), prepared_part("ForgettingBias", cols)
        rounded, errors = (rows[..., n, None] - cols[..., None, :, n] for n in (0, 1))
        return rounded + errors


def _pairs(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Each sum as a number of `dtype` and its rounding error. Differences of large sums then keep their digits."""
    rounded = sums.to(dtype)
    return torch.stack((rounded, (sums - rounded).to(dtype)), -1)
