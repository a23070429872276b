"""`ReturnedCall`: a backend call that cannot be recomputed, with the weights that the backend returned.

Eager backends return their weights. They are kept only if weights times values are the backend's output: some models
return other weights than they compute with. They take O(n^2) memory, so this is the last resort.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.shapes import at_least_float32, grouped_values
from regard.hf.calls import DIRECT, MULTIHEAD, NO_NUMBERS, Untranslatable
from regard.hf.capture.module_rerun import mask_of
from regard.hf.capture.torch_calls import ObservedCall
from regard.hf.capture.verification import TOLERANCE, Check
from regard.maps import attention_map
from regard.maps.attention_map import AttentionMap
from regard.maps.dense_map import DenseMap


@dataclass(eq=False)
class ReturnedCall:
    """One call of a backend, and the weights (B, H, I, J) that it returned."""

    name: str
    weights: Tensor
    check: Check
    #: Kept with watch(keep="qkv").
    values: Tensor | None = None

    def read_values(self) -> Tensor:
        assert self.values is not None
        return self.values

    @property
    def shape(self) -> tuple[int, int, int, int]:
        B, H, I, J = self.weights.shape
        return B, H, I, J

    @property
    def map(self) -> AttentionMap:
        return DenseMap(self.weights, False, rule=mask_of)


@torch.no_grad()
def returned_call(
    name: str, observed: ObservedCall, reason: Untranslatable, keeps_values: bool = False
) -> ReturnedCall:
    """The returned weights of a call that cannot be recomputed; else `Untranslatable` with reason and remedy."""
    call, weights = observed.call, observed.weights
    if weights is None or weights.ndim != 4:
        remedy = (
            ""
            if call.backend in ("eager", DIRECT, MULTIHEAD)
            else "; model.set_attn_implementation('eager') may return its weights"
        )
        raise Untranslatable(f"{reason}{remedy}")
    if weights.is_meta:
        raise Untranslatable(NO_NUMBERS)
    fits = weights.shape == (*call.query.shape[:3], call.value.shape[2]) and not call.drops
    if not fits or weights.numel() * weights.element_size() > attention_map.BUDGET:
        raise Untranslatable(f"{reason}; the weights that it returned cannot be used")
    sums = grouped_values(at_least_float32(weights), at_least_float32(call.value)).transpose(1, 2)
    tolerance = TOLERANCE.get(observed.output.dtype, 1e-4) * max(float(observed.output.abs().max()), 1e-6)
    error = float((sums - observed.output).abs().max())
    if not error <= tolerance:
        raise Untranslatable(f"{reason}; the weights that it returned are not those that it computes with")
    values = call.value.detach() if keeps_values else None
    verified = Check(name, error, tolerance, True, "these weights were returned")
    return ReturnedCall(name, weights.detach(), verified, values)
