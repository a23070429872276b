"""The goals of the spine: attention at the cost of the kernel, windows, statistics, additive scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import regard as rg
from benchmarks.measure import Goal, added_memory, in_turn

WINDOWED = rg.Attention(mask=rg.causal() & rg.window(256))


def inputs(n: int, width: int = 64, heads: int = 8, learn: bool = False) -> list[Tensor]:
    return [torch.randn(1, heads, n, width, requires_grad=learn) for _ in range(3)]


def goals() -> Iterator[Goal]:
    """Every goal, measured as it is asked for."""
    yield from plain_costs_what_the_kernel_costs()
    yield from windows_cost_what_they_see()
    yield from statistics_cost_about_a_forward()
    yield from additive_scores_need_no_cube()


def plain_costs_what_the_kernel_costs(n: int = 4096) -> Iterator[Goal]:
    fixed, learned = inputs(n), inputs(n, learn=True)
    for name, mask in (("plain", None), ("causal", rg.causal())):
        ours = partial(output_of, rg.Attention(mask=mask))
        theirs = partial(F.scaled_dot_product_attention, is_causal=mask is not None)
        a, b = in_turn(partial(ours, *fixed), partial(theirs, *fixed), rounds=9)
        yield Goal(f"{name} attend, n = {n}, forward", a / b, 1.05, "x SDPA")
        a, b = in_turn(partial(backward, ours, *learned), partial(backward, theirs, *learned))
        yield Goal(f"{name} attend, n = {n}, forward + backward", a / b, 1.05, "x SDPA")


def output_of(attention: rg.Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return rg.attend(attention, q, k, v).output


def backward(attention: Callable[..., Tensor], *tensors: Tensor) -> None:
    torch.autograd.grad(attention(*tensors).sum(), tensors)


def windows_cost_what_they_see(n: int = 16_384) -> Iterator[Goal]:
    q, k, v = inputs(n)
    dense = WINDOWED.mask.allowed(rg.Grid.whole(rg.Positions.aligned_to_end(n, n), 1, 1, n))
    ours, theirs = in_turn(
        lambda: rg.attend(WINDOWED, q, k, v),
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=dense),
        rounds=3,
    )
    yield Goal(f"causal & window 256, n = {n}", theirs / ours, 8, "x faster", at_most=False)
    long = inputs(2 * n)
    short, twice = in_turn(lambda: rg.attend(WINDOWED, q, k, v), lambda: rg.attend(WINDOWED, *long))
    yield Goal(f"causal & window 256, n = {2 * n} against {n}", twice / short, 2.2, "x as long")
    start = time.perf_counter()
    rg.explain(WINDOWED, q, k, v)
    yield Goal(f"plan of causal & window 256, n = {n}", 1000 * (time.perf_counter() - start), 20, "ms")
    yield Goal(f"memory of causal & window 256, n = {n}", added_memory(prepare_window), 400, "MiB")


def prepare_window() -> Callable[[], object]:
    q, k, v = inputs(16_384)
    rg.attend(WINDOWED, *inputs(64))
    return lambda: rg.attend(WINDOWED, q, k, v)


def statistics_cost_about_a_forward(n: int = 8192) -> Iterator[Goal]:
    q, k, v = inputs(n)
    for name, mask in (("plain", None), ("causal", rg.causal())):
        weights = rg.attend(rg.Attention(mask=mask), q, k, v).weights
        kernel = partial(F.scaled_dot_product_attention, q, k, v, is_causal=mask is not None)
        ours, theirs = in_turn(partial(summarize, weights), kernel)
        yield Goal(f"entropy + strongest + received, {name}, n = {n}", ours / theirs, 2, "x SDPA forward")
    yield Goal("memory of the same at n = 32768", added_memory(prepare_statistics), 500, "MiB")


def summarize(weights: rg.AttentionMap) -> object:
    return weights.summarize(rg.Entropy(), rg.Top(1), rg.Received())


def prepare_statistics() -> Callable[[], object]:
    q, k, v = inputs(32_768)
    weights = rg.attend(rg.Attention(mask=rg.causal()), q, k, v).weights
    summarize(rg.attend(rg.Attention(), *inputs(64)).weights)
    return lambda: summarize(weights)


def additive_scores_need_no_cube(n: int = 2048) -> Iterator[Goal]:
    work = f"memory of additive scores, {n} x {n}, hidden 256"
    yield Goal(f"{work}, forward + backward", added_memory(prepare_additive), 300, "MiB")
    yield Goal(f"{work}, forward, direct formula", added_memory(prepare_direct_additive), 4000, "MiB", at_most=False)


def additive(n: int) -> tuple[rg.Attention, list[Tensor]]:
    return rg.Attention(rg.Additive(256, 256, 256)), inputs(n, width=256, heads=1, learn=True)


def prepare_additive() -> Callable[[], object]:
    attention, tensors = additive(2048)
    backward(partial(output_of, attention), *additive(16)[1])
    return partial(backward, partial(output_of, attention), *tensors)


def prepare_direct_additive() -> Callable[[], object]:
    attention, tensors = additive(2048)
    score = attention.score

    @torch.no_grad()
    def direct(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = (score.query(q)[:, :, :, None] + score.key(k)[:, :, None]).tanh_()
        return (hidden @ score.direction).softmax(-1) @ v

    direct(*additive(16)[1])
    return lambda: direct(*tensors)
