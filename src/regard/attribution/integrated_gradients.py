"""Integrated gradients (Sundararajan et al. 2017, arXiv:1703.01365) over the weights of a layer (Hao et al. 2021,
arXiv:2004.11207).

An edit moves the weights of one layer from a baseline w' to what they are: w' + a (w - w'), a from 0 to 1. The share
of each weight in the change of L is (w_ij - w'_ij) times the mean over a of dL/dw_ij = g_i(a) . v_j. Queries, keys and
values of the layer do not depend on its own weights, so only g depends on a: the result is again a map of O(n) memory.
Completeness: all links of a layer sum to L(w) - L(w').
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.attention import Attention
from regard.attribution.call_changes import CallChange, changing, need_backend
from regard.attribution.request import AttributionRequest, MethodResult, received
from regard.attribution.traced_run import TracedCall, gradients_on, traced_run
from regard.base.errors import RegardError, nearest
from regard.hf.calls import AttentionCall
from regard.maps import AttentionMap, GradientMap, SumMap

FORMULA = "(w_ij - w'_ij) v_j . mean_a g_i(a), g(a) the gradient with the weights w' + a (w - w')"
BASELINES = ("zero", "uniform")
STEPS = 16


def integrated_gradients(request: AttributionRequest) -> MethodResult:
    """The links of each layer, edited alone: `baseline` "zero" (no attention) or "uniform" (all allowed keys alike).

    The mean is a Gauss-Legendre quadrature with `steps` points: one run of the model for each point and layer.
    """
    baseline, steps = _options(request)
    run = traced_run(request.model, request.inputs, request.target.number, request.layers)
    need_backend("integrated-gradients", run.calls.values())
    maps: dict[str, AttentionMap] = {}
    worst = 0.0
    for name, call in run.calls.items():
        source, base = _baseline(call, baseline)
        gradient, start = _mean_gradient(request, call, base, steps)
        maps[name] = GradientMap(source, gradient, call.value)
        # all links of the layer: sum_ij (w - w')_ij v_j . g_i = sum_i g_i . (output - base)_i
        total = (gradient.double() * (call.output - base).double()).sum()
        worst = max(worst, abs(float(total - (run.number.double().sum() - start.double().sum()))))
    note = f"Completeness: links of a layer sum to L(weights) - L({baseline}), with an error of at most {worst:.1g}."
    return MethodResult(maps, received(request, run.calls, maps), run.number, run.parts, run.missing, (note,))


def _options(request: AttributionRequest) -> tuple[str, int]:
    """The checked options `baseline` and `steps`, or their defaults."""
    baseline, steps = request.options.get("baseline", "zero"), request.options.get("steps", STEPS)
    if baseline not in BASELINES:
        raise RegardError(f"attribute(baseline={baseline!r}): {nearest(str(baseline), BASELINES)}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise RegardError(f"attribute(steps={steps!r}): the number of points is an integer of at least 1.")
    return baseline, steps


def _baseline(call: TracedCall, baseline: str) -> tuple[AttentionMap, Tensor]:
    """The map w - w', and the output of the weights w', (B, H, I, E).

    With the baseline "zero" w' is 0; otherwise its rows are uniform.
    """
    if baseline == "zero":
        return call.weights, torch.zeros_like(call.output)
    (B, H, I, J), G = call.weights.shape, call.value.shape[1]
    # equal scores: the weights are uniform over the keys that the mask allows
    query, key = call.value.new_zeros(B, H, I, 1), call.value.new_zeros(B, G, J, 1)
    mask, positions = call.weights.attention.mask, call.weights.positions
    with torch.no_grad():
        seen = Attention(mask=mask)(query, key, call.value, positions=positions)
    return SumMap([call.weights, seen.weights], [1.0, -1.0]), seen.output


class _Path(CallChange):
    """Gives the module the output with the weights w' + share (w - w'), at one call of it.

    `base` is the output with w', (B, I, H, E). `moved` are the outputs of all calls; the one at `index` is handed on,
    as the start of a graph of its own.
    """

    share = 1.0

    def __init__(self, call: TracedCall, base: Tensor) -> None:
        super().__init__(call.module)
        self.base, self.index = base.transpose(1, 2), call.index
        self.moved: list[Tensor] = []

    def output(self, call: AttentionCall, output: Tensor) -> Tensor:
        """Move the output on the way from the baseline; `base` and `output` are (B, I, H, E)."""
        moved = (self.base + self.share * (output.detach() - self.base)).to(output.dtype).requires_grad_()
        self.moved.append(moved)
        return moved if len(self.moved) == self.index + 1 else output


def _mean_gradient(request: AttributionRequest, call: TracedCall, base: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The mean over a of g(a), (B, H, I, E), and L with the baseline w', (B,). `base` is the output with w'.

    The mean is a Gauss-Legendre quadrature with `steps` points, each of which runs the model.
    """
    # the rule is for -1 to 1, with weights of sum 2; it is moved to 0 to 1
    points, shares = np.polynomial.legendre.leggauss(steps)
    total: Any = torch.zeros_like(call.output)
    for point, share in zip((points + 1) / 2, shares / 2, strict=True):
        number, moved = _at(request, call, base, float(point))
        (gradient,) = torch.autograd.grad(number, moved, torch.ones_like(number), allow_unused=True)
        total = total if gradient is None else total + share * gradient.transpose(1, 2)
    return total, _at(request, call, base, 0.0)[0].detach()


def _at(request: AttributionRequest, call: TracedCall, base: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """L (B,), and the output that was handed on (B, I, H, E), with the weights w' + share (w - w').

    `base` is the output of the call with w'.
    """
    path = _Path(call, base)
    path.share = share
    with gradients_on(), changing(path):
        number = request.target.number(request.inputs.run(request.model))
    return number, path.moved[path.index]
