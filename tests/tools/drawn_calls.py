"""Drawn calls of every quick path, in the dtypes of users, beside formulas in float64 that are written out here.

The paths: chosen keys, statistics with the output, plans that are kept for repeated calls, tokens after a cache, and
windows of long texts.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor

import drawn
import regard as rg
from feature_pairs import Draw, drawn_mask, pair
from regard.engine.kept_plans import kept_plans
from rounding import FLOAT32, unit_roundoff

DTYPES = torch.float32, torch.bfloat16, torch.float16
#: How far the log-sum-exp of torch's fused kernel may be off in half precision, where its exponentials are quick ones.
#: Up to 5.5e-5 was measured.
QUICK_EXPONENTIALS = 2.0**-13
FOLDED = rg.maps.Entropy(), rg.maps.Distance(), rg.maps.TopLinks(1)


class Formula:
    """softmax(scale q . k) v over the allowed pairs in float64, and how far rounding may move what comes of it.

    Products of D channels in float32 move a score by (D + 4) u sum |q k|, and the scale and the temperature by a few u
    of it, so a weight by twice the largest of these, relatively. Sums over J keys add J u. Kernels that round weights
    to the dtype of the values, and outputs, add a few of its u.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, *, may_be_torch: bool = False
    ) -> None:
        """`may_be_torch`: whether torch's fused kernel may run."""
        dtype, num_heads = v.dtype, q.shape[1]
        q, k, v = q.double(), *(t.double().repeat_interleave(num_heads // t.shape[1], 1) for t in (k, v))
        self.allowed = allowed.expand(*q.shape[:3], k.shape[2])
        scores = (q @ k.mT * scale).masked_fill(~self.allowed, -torch.inf)
        self.weights = scores.softmax(-1).nan_to_num(0.0)
        self.output = self.weights @ v
        moved = (q.abs() @ k.abs().mT * abs(scale)).masked_fill(~self.allowed, 0).flatten(3)
        largest = moved.amax(-1, keepdim=True) if moved.shape[-1] else moved.sum(-1, keepdim=True)
        self.share = torch.expm1(2 * (q.shape[-1] + 8) * FLOAT32 * largest) + (k.shape[2] + 60) * FLOAT32
        if may_be_torch and dtype != torch.float32:
            self.share = self.share + QUICK_EXPONENTIALS
        self.output_bound = (self.share + 4 * unit_roundoff(dtype)) * (self.weights @ v.abs()) + drawn_tiny(dtype)

    def check(self, seen: rg.AttentionOutput) -> None:
        within("output", seen.output, self.output, self.output_bound)
        within("weights", seen.weights.dense(), self.weights, self.share * self.weights + 1e-30)

    def check_statistics(self, seen: rg.AttentionOutput, distance: Tensor) -> None:
        entropy, spread, links = seen.statistics
        logs = -torch.special.xlogy(self.weights, self.weights)
        bound = (self.share * (logs + self.weights)).sum(-1) + self.share[..., 0] + 1e-30
        within("entropy", entropy, logs.sum(-1), bound)
        lengths = (self.weights * distance.abs()).sum(-1)
        within("distance", spread, lengths, self.share[..., 0] * lengths + 1e-30)
        if not self.weights.shape[-1]:
            return
        greatest, share = self.weights.amax(-1), self.share[..., 0]
        within("strongest link", links.weights[..., 0], greatest, share * greatest + 1e-30)
        of_key = self.weights.gather(-1, links.keys.clamp(min=0))[..., 0]
        within("its key", of_key, greatest, 2 * share * greatest + 1e-30)


def drawn_tiny(dtype: torch.dtype) -> float:
    """The spacing of the least numbers of a dtype."""
    return torch.finfo(dtype).smallest_normal * unit_roundoff(dtype) * 4 + 1e-30


def within(name: str, mine: Tensor, theirs: Tensor, bound: Tensor) -> None:
    off = (mine.double() - theirs).abs()
    assert bool((off <= bound).all()), f"{name}: off by {float((off / bound).nan_to_num(torch.inf).max()):.3g} bounds"


def drawn_inputs(rng: Draw, num_queries: int, num_keys: int, batch: int | None = None) -> list[Tensor]:
    """Queries, keys and values in any layout."""
    B, G, R = batch or rng.randint(1, 2), rng.randint(1, 2), rng.choice([1, 1, 2, 4])
    D, E, size = rng.choice([1, 8, 16, 33, 64]), rng.choice([1, 8, 16, 40, 64]), rng.choice([0.3, 1, 1, 3])
    dtype, layouts = rng.choice(DTYPES), [*drawn.LAYOUTS] if num_queries and num_keys else ["contiguous"]
    shapes = (B, G * R, num_queries, D), (B, G, num_keys, D), (B, G, num_keys, E)
    return [drawn.LAYOUTS[rng.choice(layouts)]((size * torch.randn(shape)).to(dtype)) for shape in shapes]


def drawn_length(rng: Draw) -> int:
    return rng.choice([0, 1, 2, rng.randint(3, 40), rng.randint(3, 40), rng.choice([95, 96, 97, 128, 129, 200])])


@pair
def chosen_keys(rng: Draw) -> None:
    """Keys, or blocks of keys, that were chosen for each query; some twice, some after the last key, some rows none."""
    I, J = max(1, drawn_length(rng)), max(1, drawn_length(rng))
    q, k, v = drawn_inputs(rng, I, J)
    H, size, start = q.shape[1], rng.choice([1, 1, 7, 24, 32, 64]), rng.randint(0, 5)
    heads = rng.choice([n for n in range(1, H + 1) if H % n == 0])
    ids = torch.randint(-1, (start + J) // size + 2, (1, heads, I, rng.choice([0, 1, 3, 16, 60])))
    named = torch.zeros(1, heads, I, (start + J) // size + 2, dtype=torch.bool)
    for place in range(ids.shape[-1]):
        one = ids[..., place : place + 1]
        named |= torch.zeros_like(named).scatter(-1, one.clamp(min=0), True) & (one >= 0)
    positions, allowed = torch.arange(J), named.repeat_interleave(H // heads, 1)[..., torch.arange(J) // size]
    mask, first = rg.masks.chosen_keys(ids, size=size, num_heads=H, start=start), rg.types.Positions.of(start, I, J)
    if rng.random() < 0.5:
        mask, allowed = mask & rg.causal(), allowed & (positions <= torch.arange(start, start + I)[:, None])
    scale = rng.choice([0.2, q.shape[-1] ** -0.5])
    call = functools.partial(rg.Attention(rg.Dot(scale=scale), mask=mask), positions=first, engine="chosen")
    Formula(q, k, v, allowed, scale).check(call(q, k, v))


@pair
def statistics_with_the_output(rng: Draw) -> None:
    """Entropy, distance and strongest link of each row, computed in the loop of the output."""
    n = drawn_length(rng)
    mask, allowed = drawn_mask(rng, n) if n > 1 else (rg.causal(), torch.ones(n, n, dtype=torch.bool))
    q, k, v = drawn_inputs(rng, n, n, batch=1)
    attention, scale = rg.Attention(mask=mask), q.shape[-1] ** -0.5
    with contextlib.nullcontext() if rng.random() < 0.3 else torch.no_grad():
        seen = attention(q, k, v, engine="kernel", statistics=FOLDED)
    formula = Formula(q, k, v, allowed, scale)
    formula.check(seen)
    formula.check_statistics(seen, torch.arange(n) - torch.arange(n)[:, None])


#: Attentions of repeated calls: the same objects in all draws, so that later draws find the plans of earlier ones.
REPEATED = {"plain": rg.Attention(), "causal": rg.Attention(mask=rg.causal()), "near": rg.Attention(mask=rg.window(3))}


@pair
def kept_plan(rng: Draw) -> None:
    """Calls with options, one after another, whose plans, masks and attentions earlier calls have made."""
    n, name = rng.choice([1, 6, 6, 7, 200]), rng.choice([*REPEATED])
    i, j = torch.arange(n)[:, None], torch.arange(n)
    own = {"plain": i >= -1, "causal": j <= i, "near": abs(i - j) < 3}[name].expand(n, n)
    if rng.random() < 0.02:
        kept_plans.clear()
    given = torch.rand(n, n, generator=torch.Generator().manual_seed(rng.randint(0, 3))) < 0.7
    given[:, 0] = True
    for _ in range(6 if n < 200 else 3):
        q, k, v = drawn_inputs(rng, n, n)
        options, allowed, scale = {}, own, q.shape[-1] ** -0.5
        if rng.random() < 0.4:
            options, allowed = {"mask": given.clone()[None, None]}, allowed & given
        if rng.random() < 0.4:
            options, allowed = options | {"is_causal": True}, allowed & (j <= i)
        if rng.random() < 0.4:
            scale = rng.choice([0.25, 0.5, 1])
            options = options | {"scale": scale}
        leaves = [t.requires_grad_() if rng.random() < 0.2 else t for t in (q, k, v)]
        engine = rng.choice(["auto", "kernel", "kernel"])
        formula = Formula(*(t.detach() for t in leaves), allowed, scale, may_be_torch=engine == "auto")
        formula.check(rg.attend(*leaves, attention=REPEATED[name], engine=engine, **options))


@pair
def tokens_after_a_cache(rng: Draw) -> None:
    """A prompt, then calls of one query: each is a call with all keys so far."""
    prompt, news = rng.randint(1, 30), [rng.choice([1, 1, 1, 3]) for _ in range(rng.randint(1, 5))]
    n, window = prompt + sum(news), rng.choice([None, rng.randint(1, 12)])
    q, k, v = drawn_inputs(rng, n, n)
    mask = rg.causal() if window is None else rg.causal() & rg.window(window)
    attention, scale = rg.Attention(rg.Dot(scale=0.3), mask=mask), 0.3
    with contextlib.nullcontext() if rng.random() < 0.2 else torch.no_grad():
        cache, stop = attention(*(t[:, :, :prompt] for t in (q, k, v)), cache=rg.GrowingCache()).cache, prompt
        for new in news:
            start, stop = stop, stop + new
            seen = attention(q[:, :, stop - 1 : stop], k[:, :, start:stop], v[:, :, start:stop], cache=cache)
            cache, far = seen.cache, stop - 1 - torch.arange(stop)
            allowed = (far < (stop + 1 if window is None else window))[None]
            so_far = q[:, :, stop - 1 : stop], k[:, :, :stop], v[:, :, :stop]
            Formula(*so_far, allowed, scale, may_be_torch=True).check(seen)


@pair
def long_windows(rng: Draw) -> None:
    """A window of a text that is so long that runs of tiles pack their own keys; documents may end anywhere."""
    near, causal = rng.choice([1, 2, rng.randint(3, 120), rng.randint(3, 120), 256, 300]), rng.random() < 0.6
    J = 2 * ((1 if causal else 2) * near + 16 * 96) + rng.randint(-3, 400)
    I = J - rng.choice([0, 0, rng.randint(1, 1000)])
    q, k, v = drawn_inputs(rng, I, J, batch=1)
    ends = sorted({rng.randint(1, J - 1) for _ in range(rng.choice([0, 0, 1, 5]))} | {J})
    lengths = [stop - start for start, stop in zip([0, *ends], ends, strict=False)]
    mask = rg.window(near) & rg.documents(lengths) if len(ends) > 1 else rg.window(near)
    attention, scale = rg.Attention(mask=mask & rg.causal() if causal else mask), q.shape[-1] ** -0.5
    seen, text = attention(q, k, v, engine="kernel"), torch.bucketize(torch.arange(J), torch.tensor(ends), right=True)
    for start in range(0, I, 500):
        rows = torch.arange(start, min(I, start + 500)) + J - I
        keys = torch.arange(max(0, int(rows[0]) - near), min(J, int(rows[-1]) + near))
        step = rows[:, None] - keys
        allowed = (step.abs() < near) & (text[rows][:, None] == text[keys]) & ((step >= 0) | (not causal))
        own, found = slice(start, start + len(rows)), slice(int(keys[0]), int(keys[-1]) + 1)
        formula = Formula(q[:, :, own], k[:, :, found], v[:, :, found], allowed, scale)
        within("output", seen.output[:, :, own], formula.output, formula.output_bound)
