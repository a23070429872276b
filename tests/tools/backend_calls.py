"""Drawn calls of the backend of `rg.register()` in one process, so that ways kept of one kind meet calls of another.

A call is what a module of transformers gives: queries, keys, values, a mask in one of its forms, and options. The
formulas are written out here in float64, with how far rounding may move them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

import drawn
from drawn_calls import DTYPES, QUICK_EXPONENTIALS, drawn_length, drawn_tiny, within
from feature_pairs import Draw, pair
from regard.hf import backend
from regard.hf.masks.span_masks import spans_mask
from rounding import FLOAT32, unit_roundoff


@dataclass(frozen=True)
class Kind:
    """What calls of one kind share; their numbers, layouts and padding are drawn again for each."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    form: str
    rule: str
    window: int
    padded: str
    scaling: float | None
    softcap: float | None
    sinks: bool
    learns: bool
    autocast: bool
    causal: bool


def drawn_kind(rng: Draw) -> Kind:
    B, G, R = rng.randint(1, 2), rng.randint(1, 2), rng.choice([1, 1, 2, 4])
    D, E, J = rng.choice([1, 8, 16, 33, 64]), rng.choice([1, 8, 16, 40, 64]), drawn_length(rng)
    I = rng.choice([J, J, J, min(1, J), min(1, J), min(3, J), 0])
    form = rng.choice(["none", "none", "spans", "spans", "spans", "bool", "additive"]) if I and J else "none"
    dtype = rng.choice([torch.float32, *DTYPES])
    return Kind(
        ((B, G * R, I, D), (B, G, J, D), (B, G, J, E)),
        dtype,
        form,
        rng.choice(["causal", "window", "both"]),
        rng.randint(1, 12),
        rng.choice(["", "", "left", "right", "some"]),
        rng.choice([None, D**-0.5, 0.25, 1.0]),
        rng.choice([None, None, None, 2.0]),
        rng.random() < 0.15,
        dtype == torch.float32 and rng.random() < 0.2,
        dtype == torch.float32 and rng.random() < 0.1,
        rng.random() < 0.7 and J == I,
    )


class Call:
    """One call of a kind, with its pairs and its added numbers written out."""

    def __init__(self, rng: Draw, kind: Kind) -> None:
        size, layouts = rng.choice([0.3, 1, 1, 3]), [*drawn.LAYOUTS] if all(map(all, kind.shapes)) else ["contiguous"]
        made = [(size * torch.randn(shape)).to(kind.dtype) for shape in kind.shapes]
        self.kind, self.tensors = kind, [drawn.LAYOUTS[rng.choice(layouts)](t) for t in made]
        if kind.learns:
            self.tensors = [t.detach().requires_grad_(rng.random() < 0.8) for t in self.tensors]
        (B, H, I, _), (_, _, J, _) = kind.shapes[:2]
        self.real, self.bias = drawn_padding(rng, kind.padded, B, J), torch.zeros(1, 1, I, J)
        self.sinks = nn.Parameter(torch.randn(H), requires_grad=False) if kind.sinks else None
        self.mask = self.made_mask(rng)
        self.options: dict[str, Any] = {"scaling": kind.scaling, "dropout": 0.0, "position_ids": None}
        self.options |= {"softcap": kind.softcap} if kind.softcap else {}
        self.options |= {"s_aux": self.sinks} if kind.sinks else {}
        self.options |= {"sliding_window": kind.window} if kind.form == "spans" and kind.rule == "window" else {}

    def allowed(self) -> Tensor:
        """The pairs that take part (B, 1, I, J)."""
        (B, _, I, _), (_, _, J, _) = self.kind.shapes[:2]
        i, j = torch.arange(J - I, J)[:, None], torch.arange(J)
        if self.kind.form == "none":
            return (j <= i if self.kind.causal else j >= 0).expand(B, 1, I, J)
        near = {"causal": j <= i, "window": (j <= i) & (i - j < self.kind.window), "both": j >= 0}[self.kind.rule]
        return near & self.real[:, None, None]

    def made_mask(self, rng: Draw) -> Tensor | None:
        """The mask as transformers gives it to a backend."""
        kind, ((B, H, I, _), (_, _, J, _)) = self.kind, self.kind.shapes[:2]
        if kind.form == "none":
            return None
        if kind.form == "spans":
            window = sliding_window_causal_mask_function(kind.window)
            function = {"causal": causal_mask_function, "window": window, "both": bidirectional_mask_function}[
                kind.rule
            ]
            return spans_mask(B, I, J, J - I, 0, mask_function=function, attention_mask=self.real.long())
        if kind.form == "bool":
            return self.allowed().contiguous()
        self.bias = torch.randn(B, rng.choice([1, H]), I, J) if rng.random() < 0.5 else self.bias
        return self.bias.to(kind.dtype).masked_fill(~self.allowed(), torch.finfo(kind.dtype).min)

    def run(self) -> Tensor:
        module = nn.Module().eval()
        module.is_causal = self.kind.causal
        autocast = torch.autocast("cpu", torch.bfloat16) if self.kind.autocast else contextlib.nullcontext()
        with autocast:
            return backend.run(module, *self.tensors, self.mask, **self.options)[0]

    def check(self) -> None:
        """The output, and the gradients where one is wanted, against float64."""
        kind, output = self.kind, self.run()
        dtype = torch.bfloat16 if kind.autocast else kind.dtype
        q, k, v = (t.detach().to(dtype).double().requires_grad_() for t in self.tensors)
        groups = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scale = kind.shapes[0][-1] ** -0.5 if kind.scaling is None else kind.scaling
        bias = self.bias.to(dtype).double()
        scores, moved = q @ keys.mT * scale, q.abs() @ keys.abs().mT * abs(scale) + bias.abs()
        capped = kind.softcap * (scores / kind.softcap).tanh() if kind.softcap else scores
        allowed = self.allowed().expand(scores.shape)
        sinks = torch.full((q.shape[1],), -torch.inf) if self.sinks is None else self.sinks
        sink = sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
        logits = torch.cat((torch.where(allowed, capped + bias, -torch.inf), sink), -1)
        logits = logits.masked_fill((logits == -torch.inf).all(-1, keepdim=True), 0)  # zeros, without a key
        weights = logits.softmax(-1)[..., :-1] * allowed
        expected = (weights @ values).transpose(1, 2)
        largest = (
            moved.masked_fill(~allowed, 0).amax(-1, keepdim=True) if moved.shape[-1] else moved.sum(-1, keepdim=True)
        )
        share = (torch.expm1(2 * (q.shape[-1] + 12) * FLOAT32 * largest) + (k.shape[2] + 60) * FLOAT32).detach()
        if dtype != torch.float32:
            share = share + QUICK_EXPONENTIALS
        # Weights are rounded to the dtype of the values: those below its normal numbers lose all that is finer.
        least = drawn_tiny(dtype) * (1 + allowed.double() @ values.abs())
        spread = (share + 4 * unit_roundoff(dtype)) * (weights @ values.abs()) + least
        within("output", output.detach(), expected.detach(), spread.detach().transpose(1, 2))
        assert output.is_contiguous()
        if output.requires_grad:
            most = float(share.max()) if share.numel() else 0.0
            self.check_gradients(output, expected, (q, k, v), most + 4 * unit_roundoff(dtype))

    def check_gradients(self, output: Tensor, expected: Tensor, leaves: tuple[Tensor, ...], share: float) -> None:
        """Each gradient is off by at most a few shares of its largest number, or of what is summed up for it."""
        slope = torch.randn(output.shape)
        wanted = [(mine, theirs) for mine, theirs in zip(self.tensors, leaves, strict=True) if mine.requires_grad]
        found = torch.autograd.grad(output, [mine for mine, _ in wanted], slope)
        true = torch.autograd.grad(expected, [theirs for _, theirs in wanted], slope.double())
        q, k, v = (t.detach().abs().max() if t.numel() else torch.zeros(()) for t in leaves)
        size = (
            8
            * (float(slope.abs().max()) if slope.numel() else 0)
            * max(1, *output.shape)
            * torch.stack((q * v, k * v, torch.ones_like(v))).amax()
        )
        for mine, theirs in zip(found, true, strict=True):
            within("gradient", mine, theirs, share * size + 0 * theirs)


def drawn_padding(rng: Draw, side: str, num_batch: int, num_keys: int) -> Tensor:
    """Which keys (B, J) are real: all, or without some at the left, at the right or anywhere; entry 0 has one."""
    real = torch.ones(num_batch, num_keys, dtype=torch.bool)
    for entry in range(num_batch if num_keys > 1 else 0):
        cut = rng.randint(0, num_keys - 1)
        if side == "some":
            real[entry] = torch.rand(num_keys) < 0.7
        elif side:
            real[entry, slice(0, cut) if side == "left" else slice(num_keys - cut, None)] = False
    return real


@pair
def kept_ways(rng: Draw) -> None:
    """Calls of a few kinds in drawn order: each equals its formula, whichever way was kept before."""
    if rng.random() < 0.02:
        backend._ways.clear()
    kinds = [drawn_kind(rng) for _ in range(3)]
    for _ in range(6):
        kind = rng.choice(kinds)
        call = Call(rng, kind)
        with contextlib.nullcontext() if kind.learns and rng.random() < 0.8 else torch.no_grad():
            for _ in range(rng.choice([1, 1, 2])):  # the layers of a model share a mask
                call.check()
