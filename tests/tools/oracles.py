"""The register of oracles: who else says what a mechanism must answer, and how the answers are compared.

An oracle is another library or a few lines written from the paper; never our own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.catalog import mechanism

EXACT = 1e-10
#: For libraries that compute a softmax, an angle or a logarithm in float32.
FLOAT32 = 1e-5

ORACLES: dict[str, list[Callable[..., Any]]] = {}


def oracle(name: str, tolerance: float = EXACT, arguments: dict[str, Any] | None = None, **sizes: int):
    """Register `judge(attention, q, k, v) -> output or (output, weights)` and make a test of it.

    `arguments` replace the mechanism's tiny ones, `sizes` those of its example.
    """

    def register(judge: Callable[..., Any]) -> Callable[[], None]:
        @torch.no_grad()
        def test() -> None:
            attention, q, k, v = mechanism(name).example(**sizes)
            if arguments is not None:
                attention = mechanism(name).build(**arguments).to(q.dtype)
            scatter(attention)
            agree(attention, q, k, v, judge(attention, q, k, v), tolerance)

        test.__name__, test.__doc__ = judge.__name__, judge.__doc__
        ORACLES.setdefault(name, []).append(judge)
        return test

    return register


def scatter(attention: nn.Module) -> None:
    """Parameters of size 1, so that none is hidden by starting near 0."""
    for parameter in attention.parameters():
        parameter.data.normal_()


def agree(attention, q: Tensor, k: Tensor, v: Tensor, expected: Any, tolerance: float = EXACT) -> None:
    output, weights = expected if isinstance(expected, tuple) else (expected, None)
    seen = attention(q, k, v)
    close(seen.output, output, tolerance)
    if weights is not None:
        close(seen.weights[...], weights, tolerance)


def close(mine: Tensor, theirs: Any, tolerance: float = EXACT) -> None:
    theirs = np.asarray(theirs.detach() if isinstance(theirs, Tensor) else theirs)
    assert tuple(mine.shape) == theirs.shape
    np.testing.assert_allclose(mine.detach().numpy(), theirs, rtol=tolerance, atol=tolerance)


def by_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """Output and weights of torch's dense path; the weights are its output for one-hot values."""
    one_hot = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    with sdpa_kernel(SDPBackend.MATH):
        output, weights = (F.scaled_dot_product_attention(q, k, x, attn_mask=mask, **options) for x in (v, one_hot))
    return output, weights


def by_jax(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Output of jax's attention, whose layout is (batch, length, heads, width); in float32."""
    q, k, v = (x.transpose(1, 2).float().numpy() for x in (q, k, v))
    return np.swapaxes(jax.nn.dot_product_attention(q, k, v, **options), 1, 2)


def pairs(I: int, J: int, allowed: Callable[[int, int], bool]) -> Tensor:
    """A mask of every pair (i, j), asked one by one."""
    return torch.tensor([[bool(allowed(i, j)) for j in range(J)] for i in range(I)])


class Says(nn.Module):
    """In place of a projection: it gives the vectors it was made with, so another layer attends with ours."""

    def __init__(self, x: Tensor, length_first: bool = False) -> None:
        super().__init__()
        self.x = flat(x).transpose(0, 1) if length_first else flat(x)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.x.clone()


def flat(x: Tensor) -> Tensor:
    """(B, H, n, D) -> (B, n, H D), the layout of other libraries."""
    return x.transpose(1, 2).flatten(2)


def heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, n, H D) -> (B, H, n, D)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
