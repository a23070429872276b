"""The Triton kernels and the flex engine: right beside formulas in float64, and timed beside FlexAttention and SDPA."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import regard as rg
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.rows import Job, Row

HEADS, WIDTH = 8, 64
REDUCTIONS = (rg.maps.Entropy(), rg.maps.TopLinks(4), rg.maps.KeyTotals(), rg.maps.Distance(), rg.maps.Pool(16, 16))
#: Fields of each kind of row.
FIELDS = {
    "statistics are right": {"entropy", "top", "received", "distance", "cells", "logsumexp", "used", "holds"},
    "statistics, ms": {"logsumexp_ms", "statistics_ms", "statistics_gib", "sdpa_ms", "flex_ms"},
    "flex engine": {"difference", "limit", "holds", "ms", "flex_ms", "sdpa_ms", "backward_ms", "flex_backward_ms"},
}


@dataclass(frozen=True)
class Form:
    """A mechanism, and the same by hand: which pairs it allows, and what it does to their scores."""

    attention: Callable[[int], rg.Attention]
    allows: Callable[[Tensor, Tensor, int], Tensor]
    change: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """All scores in float64, -inf for forbidden pairs."""
        n = query.shape[2]
        scores = query.double() @ key.double().mT * WIDTH**-0.5
        h, i, j = _numbers(query)
        scores = scores if self.change is None else self.change(scores, h, i, j)
        return scores.masked_fill(~self.allows(i, j, n), -torch.inf)

    def dense_mask(self, query: Tensor) -> Tensor:
        """What SDPA adds to the scores, for forms without a soft cap."""
        h, i, j = _numbers(query)
        added = torch.zeros((), device=query.device) if self.change is None else self.change(0.0 * h, h, i, j)
        return added.masked_fill(~self.allows(i, j, query.shape[2]), -torch.inf).to(query.dtype)


def _numbers(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers of heads, queries and keys, (H, 1, 1), (n, 1), (n,)."""
    n = torch.arange(query.shape[2], device=query.device)
    return torch.arange(query.shape[1], device=query.device)[:, None, None], n[:, None], n


def _is_causal(i: Tensor, j: Tensor, n: int) -> Tensor:
    return j <= i


def _slopes(score: Any, h: Tensor, i: Tensor, j: Tensor) -> Any:
    return score - 2.0 ** (-8 / HEADS * (h + 1)) * (i - j)


FORMS = {
    "plain": Form(lambda n: rg.Attention(), lambda i, j, n: (i >= 0) & (j >= 0)),
    "causal": Form(lambda n: rg.Attention(mask=rg.causal()), _is_causal),
    "window": Form(
        lambda n: rg.Attention(mask=rg.causal() & rg.window(max(2, n // 8))),
        lambda i, j, n: (j <= i) & (i - j < max(2, n // 8)),
    ),
    "documents": Form(
        lambda n: rg.Attention(mask=rg.causal() & rg.documents([n // 4] * 3 + [n - 3 * (n // 4)])),
        lambda i, j, n: (j <= i) & ((i // (n // 4)).clamp(max=3) == (j // (n // 4)).clamp(max=3)),
    ),
    "ALiBi": Form(lambda n: rg.Attention(mask=rg.causal(), bias=rg.ALiBi(HEADS)), _is_causal, _slopes),
    "soft cap": Form(
        lambda n: rg.Attention(mask=rg.causal(), bias=rg.biases.Softcap(5.0)),
        _is_causal,
        lambda score, h, i, j: 5.0 * torch.tanh(score / 5.0),
    ),
}


def jobs(machine: Machine) -> Iterator[Job]:
    """Right first, then times, then FlexAttention, whose compiler takes longest."""
    for name in FORMS:
        for dtype in machine.size(("bfloat16", "float16", "float32"), ("float32",)):
            about = {"work": "statistics are right", "form": name, "dtype": dtype}
            n = machine.size(1000, 40)
            yield Job(about | {"tokens": n}, partial(right_statistics, machine, name, dtype, n))
    for name in machine.size(("causal", "plain"), ("causal",)):
        for n in machine.size((8192, 32_768), (40,)):
            about = {"work": "statistics, ms", "form": name, "dtype": _dtype(machine), "tokens": n}
            yield Job(about, partial(statistics_times, machine, name, n))
    for n in machine.size((1000, 8192), (40,)):
        for name in FORMS:
            about = {"work": "flex engine", "form": name, "dtype": _dtype(machine), "tokens": n}
            yield Job(about, partial(flex_engine, machine, name, n))


def _dtype(machine: Machine) -> str:
    """Triton's interpreter cannot multiply bfloat16."""
    return machine.size("bfloat16", "float32")


def problem(machine: Machine, n: int, dtype: str) -> list[Tensor]:
    kind = getattr(torch, dtype)
    return [machine.draw(1, HEADS, n, WIDTH, dtype=kind, seed=seed, host=True) for seed in range(3)]


@torch.no_grad()
def right_statistics(machine: Machine, name: str, dtype: str, n: int) -> Row:
    """Each statistic beside its formula on all weights in float64, relative to its largest number."""
    from regard.maps import gpu_reductions

    form, (query, key, value) = FORMS[name], problem(machine, n, dtype)
    weights = form.attention(n)(query, key, value).weights
    entropy, top, received, distance, cells = weights.summarize(*REDUCTIONS)
    terms = weights._compiled_terms()
    logsumexp = None if terms is None else gpu_reductions.gpu_logsumexp(terms)
    scores = form.scores(query, key)
    w, (_, i, j) = scores.softmax(-1), _numbers(query)
    places = torch.arange(n, device=w.device) * 16 // n
    squares = w.new_zeros(1, HEADS, 16, n).index_add(2, places, w) / places.bincount()[:, None]
    found = {
        "entropy": _off(entropy, -torch.xlogy(w, w).sum(-1)),
        "top": _off(top.weights, w.topk(4).values),
        "received": _off(received, w.sum(-2)),
        "distance": _off(distance, (w * (i - j).abs()).sum(-1)),
        "cells": _off(cells, w.new_zeros(1, HEADS, 16, 16).index_add(3, places, squares)),
        "logsumexp": None if logsumexp is None else _off(logsumexp, scores.logsumexp(-1)),
    }
    used = logsumexp is not None and not any(gpu_reductions.FAULTS.values())
    largest = max((x for x in found.values() if x is not None), default=0.0)
    return found | {"used": used, "holds": used and largest <= 1e-4}


def _off(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).abs().max() / exact.abs().max().clamp(min=1.0))


@torch.no_grad()
def statistics_times(machine: Machine, name: str, n: int) -> Row:
    """One pass of statistics, and of the log-sum-exp, beside the forward pass of SDPA and FlexAttention."""
    from regard.maps import gpu_reductions

    torch.compiler.reset()
    form, inputs = FORMS[name], problem(machine, n, _dtype(machine))
    weights = form.attention(n)(*inputs).weights
    terms = weights._compiled_terms()
    if terms is None:
        raise rg.RegardError("the Triton kernels do not compute this map.")
    _ = weights.row_statistic
    runs = (
        partial(gpu_reductions.gpu_logsumexp, terms),
        partial(weights.summarize, *REDUCTIONS),
        partial(F.scaled_dot_product_attention, *inputs, is_causal=name == "causal"),
        partial(flex_by_hand(machine, name, n), *inputs),
    )
    times = machine.medians(*runs, rounds=5)
    found = dict(zip(("logsumexp_ms", "statistics_ms", "sdpa_ms", "flex_ms"), times, strict=True))
    return found | {"statistics_gib": machine.peak(runs[1])}


@cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex_by_hand(machine: Machine, name: str, n: int) -> Callable[..., Tensor]:
    """FlexAttention as in its tutorial: a block mask made before, a rule for scores, compiled; eager in a dry run."""
    from torch.nn.attention.flex_attention import create_block_mask

    from regard.engine import flex

    form, change = FORMS[name], None
    if form.change is not None:
        of_form = form.change
        change = lambda score, b, h, i, j: of_form(score, h, i, j)  # noqa: E731
    rule = lambda b, h, i, j: form.allows(i, j, n)  # noqa: E731
    blocks = None if name == "plain" else create_block_mask(rule, None, None, n, n, device=str(machine.host))
    call = _compiled() if machine.is_cuda else flex._plain
    return partial(call, score_mod=change, block_mask=blocks)


def flex_engine(machine: Machine, name: str, n: int) -> Row:
    """Our engine beside FlexAttention by hand and SDPA with a dense mask, forward and backward (on a GPU)."""
    torch.compiler.reset()  # after eight programs torch would compile no more
    form, inputs = FORMS[name], problem(machine, n, _dtype(machine))
    attention = form.attention(n).to(machine.host)
    ours = lambda *x: attention(*x, engine="flex").output  # noqa: E731
    by_hand = flex_by_hand(machine, name, n)
    with torch.no_grad():
        output = ours(*inputs)
        difference, limit = None, (2 * torch.finfo(output.dtype).eps + 1e-5) * float(inputs[2].abs().max())
        if n <= 1000:
            exact = form.scores(*inputs[:2]).softmax(-1) @ inputs[2].double()
            difference = float((output.double() - exact).abs().max())
        runs = [partial(ours, *inputs), partial(by_hand, *inputs)]
        sdpa = _sdpa(name, inputs)
        times = machine.medians(*runs, *([] if sdpa is None else [partial(sdpa, *inputs)]))
    found = {"difference": difference, "limit": limit, "holds": difference is None or difference <= limit}
    found |= {"ms": times[0], "flex_ms": times[1], "sdpa_ms": times[2] if sdpa is not None else None}
    backward: list[float | None] = [None, None]
    if machine.is_cuda:  # FlexAttention has no backward pass on CPUs
        learned = [x.requires_grad_() for x in inputs]
        backward = [*machine.medians(partial(_learn, ours, learned), partial(_learn, by_hand, learned))]
    return found | {"backward_ms": backward[0], "flex_backward_ms": backward[1]}


def _sdpa(name: str, inputs: list[Tensor]) -> Callable[..., Tensor] | None:
    """SDPA with the flag or a dense mask; None for a soft cap, which it does not have."""
    if name in ("plain", "causal"):
        return partial(F.scaled_dot_product_attention, is_causal=name == "causal")
    if name == "soft cap":
        return None
    return partial(F.scaled_dot_product_attention, attn_mask=FORMS[name].dense_mask(inputs[0]))


def _learn(run: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    output = run(*inputs)
    return torch.autograd.grad(output, inputs, output.detach() / math.sqrt(output.numel()))
