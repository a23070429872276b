"""`DifferentialCapture`: one call of differential attention, W = W_1 - lambda W_2.

DiffLlama (arXiv 2410.05258) calls the backend twice, with the same queries and keys and two halves of the values. The
first half of the heads gives W_1, and the second half W_2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.hf.calls import Untranslatable
from regard.hf.capture.captured_calls import Capture, SharedKeys
from regard.hf.capture.torch_calls import ObservedCall
from regard.maps import AttentionMap
from regard.maps.combined_map import SumMap

PARAMETERS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "lambda_init", "groupnorm", "o_proj")
#: Largest error of the module's output, relative to the largest output.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 1e-2}


def is_differential(module: nn.Module | None) -> bool:
    """Whether a module subtracts two softmaxes, as DiffLlama does."""
    return module is not None and all(hasattr(module, name) for name in PARAMETERS)


@dataclass(eq=False)
class DifferentialCapture(Capture):
    """The two softmaxes of a call, one for each half of the heads, and lambda."""

    factor: float = 0.0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        B, H, I, J = super().shape
        return B, H // 2, I, J

    @cached_property
    def map(self) -> AttentionMap:
        """W_1 - lambda W_2; its `parts` are the two softmaxes, and its `factors` 1 and -lambda."""
        both = self._scored()
        half = both.shape[1] // 2
        parts = [both.select(slice(None), slice(start, start + half)) for start in (0, half)]
        return SumMap(parts, [1.0, -self.factor])


@torch.no_grad()
def differential(module: Any, first: Capture, halves: list[ObservedCall], output: Tensor) -> DifferentialCapture:
    """The difference of two softmaxes, from the captured first call, and both calls, with outputs (B, I, H, D).

    `Untranslatable` if the difference, normalized and projected, is not the output of the module.
    """
    of_first, of_second = (half.output for half in halves)
    factor = float(_exp_dot(module.lambda_q1, module.lambda_k1) - _exp_dot(module.lambda_q2, module.lambda_k2))
    factor += module.lambda_init
    plus, minus = torch.cat([of_first, of_second], -1).chunk(2, dim=2)
    normed = (1 - module.lambda_init) * module.groupnorm(plus - factor * minus)
    expected = module.o_proj(normed.flatten(2))
    tolerance = TOLERANCE.get(output.dtype, 1e-4) * max(float(output.abs().max()), 1e-6)
    error = float((expected - output).abs().max())
    if not error <= tolerance:
        raise Untranslatable(f"{type(module).__name__} does not subtract its two maps as DiffLlama does")
    check = replace(first.check, error=max(error, first.check.error or 0.0)) if first.check.ok else first.check
    values = None if first.values is None else SharedKeys(_values(halves))
    return DifferentialCapture(
        first.attention, first.positions, first.query, first.keys, check, first.logsumexp, values, factor=factor
    )


def _values(halves: list[ObservedCall]) -> Tensor:
    """The values (B, G, J, 2 D) of each pair of heads: of either call, whose two halves of the heads have the same."""
    return torch.cat([half.call.value.detach().chunk(2, dim=1)[0] for half in halves], -1)


def _exp_dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(-1, dtype=torch.float32).exp()
