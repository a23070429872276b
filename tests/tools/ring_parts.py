"""Cases of rings.py: how the parts of the keys are computed, forward and backward, also with dropout."""

from __future__ import annotations

import itertools
import random

import torch
import torch.distributed as dist

import regard as rg
from regard.engine.kernel.library import load
from ring_tools import BIASES, LAYOUTS, MASKS, NORMALIZERS, case, check, check_in, cut, some, ways


@case
def compiled_kernels_compute_chunks():
    """All of them, forward and backward, where `KernelProblem` does not refuse; learned biases and sinks too."""
    drawn = random.Random(1)
    biases = {name: make for name, make in BIASES.items() if name not in ("shaw", "transformer_xl")}
    biases["table"], all_used = lambda: rg.biases.LearnedTable(4, reach=3), []
    for layout, mask in itertools.product(LAYOUTS, MASKS):
        n, heads = drawn.choice((37, 130, 223)), drawn.choice((1, 2, 4))
        bias, normalizer = drawn.choice([*biases.values()])(), drawn.choice([*NORMALIZERS.values()])()
        torch.manual_seed(n)
        attention = rg.Attention(bias=bias, normalizer=normalizer, mask=MASKS[mask](n), position=rg.RoPE(6))
        for parameter in attention.parameters():
            torch.nn.init.normal_(parameter)
        q, k, v = some(2, 4, n, 6), some(2, heads, n, 6, seed=1), some(2, heads, n, 5, seed=2)
        dtype, relative = drawn.choice(((torch.float32, 1e-5), (torch.bfloat16, 2**-4)))
        with ways(kernel=True) as used:
            check_in(dtype, relative, attention, q, k, v, rg.Ring(layout=layout))
        all_used += used
    if load() is not None:  # a bias over keys with gaps between them is refused
        assert all_used.count("_of_kernel") > 0.8 * len(all_used), all_used


@case
def compiled_kernels_compute_additive_scores():
    """With the gradient of the direction, to which every chunk adds."""
    for layout, mask in itertools.product(LAYOUTS, (None, rg.causal(), rg.causal() & rg.window(20))):
        torch.manual_seed(5)
        attention = rg.Attention(
            rg.scores.Additive(6, 6, 11, bias=True), mask=mask, normalizer=rg.normalizers.LearnedSink(4)
        )
        q, k, v = some(2, 4, 130, 6), some(2, 2, 130, 6, seed=1), some(2, 2, 130, 5, seed=2)
        with ways(kernel=True) as used:
            check_in(torch.float32, 1e-5, attention, q, k, v, rg.Ring(layout=layout))
        assert load() is None or {*used} <= {"_of_kernel"}, used


@case
def compiled_kernels_compute_the_shortest_shares():
    """Shares of one query and of one key, keys with gaps between them, and rows without a key."""
    W = dist.get_world_size()
    lengths, key_lengths = [1, 9, 97, 2][:W], [3, 1, 1, 40][:W]
    I, J = sum(lengths), sum(key_lengths)
    q, k, v = some(2, 4, I, 8), some(2, 2, J, 8, seed=1), some(2, 2, J, 3, seed=2)
    for mask in (
        None,
        rg.causal(),
        rg.causal() & rg.window(2),
        rg.masks.dilated(2, 3),
        rg.window(2) | rg.masks.global_tokens([0]),
    ):
        cuts = (lambda x: cut(x, lengths)), (lambda x: cut(x, key_lengths))
        with ways(kernel=True) as used:
            check_in(torch.float32, 1e-5, rg.Attention(mask=mask), q, k, v, rg.Ring(), *cuts)
        assert load() is None or {*used} <= {"_of_kernel"}, used


@case
def whole_chunks_use_the_fused_backward_pass():
    """In float64, which the compiled kernels refuse; a learned bias needs scores."""
    q, k, v = (some(2, 4, 40, 8, seed=n) for n in range(3))
    pieces = [(rg.causal(), ()), (rg.window(4), rg.ALiBi(4)), (rg.documents([9, 31]), ()), (rg.padding([0, 7]), ())]
    for (mask, bias), layout in itertools.product(pieces, LAYOUTS):
        with ways() as used:
            check(
                rg.Attention(mask=mask, bias=bias, normalizer=rg.normalizers.LearnedSink(4)).double(),
                q,
                k,
                v,
                rg.Ring(layout=layout),
            )
        assert {*used} <= {"_of_fused"}, used
    with ways() as used:
        check(rg.Attention(mask=rg.causal(), bias=rg.biases.T5Bias(4)).double(), q, k, v, rg.Ring())
    assert {*used} == {"_from_scores"}


@case
def the_same_weights_are_dropped_as_in_one_process():
    """Whatever the number of ranks, the layout and the way of a chunk: the seed is that of rank 0."""
    n, feature_scores = (
        130,
        rg.Attention(
            rg.scores.FeatureScore(), normalizer=rg.normalizers.SumNormalizer(), mask=rg.causal(), dropout=0.4
        ),
    )
    torch.manual_seed(4)
    masks = rg.causal(), rg.window(9) | rg.masks.global_tokens([0, 60]), rg.documents([50, 80]), rg.padding([n - 3, 2])
    attentions = [rg.Attention(mask=mask, bias=rg.biases.T5Bias(4), dropout=0.3) for mask in masks]
    attentions += [rg.Attention(normalizer=rg.normalizers.LearnedSink(4), dropout=0.7), feature_scores]
    q, k, v = some(2, 4, n, 6), some(2, 2, n, 6, seed=1), some(2, 2, n, 5, seed=2)
    for attention, layout in itertools.product(attentions, LAYOUTS):
        for kernel, dtype, relative in ((True, torch.float32, 2e-5), (False, torch.float64, 1e-10)):
            with ways(kernel):
                check_in(dtype, relative, attention.to(dtype), q, k, v, rg.Ring(layout=layout))


@case
def a_coarse_row_statistic_needs_scores():
    """Beside 2^20 float32 has steps of 1/8. Gradients of scores that differ by less need the remainder."""
    q, k, v = (some(1, 2, 130, 8, seed=n) for n in range(3))
    bias = rg.biases.LearnedTable(2, reach=3)
    torch.nn.init.constant_(bias.table, 2.0**20)
    bias.table.requires_grad_(False)
    with ways(kernel=True) as used:
        check_in(torch.float32, 1e-4, rg.Attention(bias=bias, mask=rg.causal()), q * 0, k, v, rg.Ring())
    assert {*used} == {"_from_scores"}


@case
def compiled_kernels_compute_parts_of_additive_scores():
    torch.manual_seed(4)
    score, n = rg.scores.Additive(6, 6, 8), 130
    q, k, v = some(2, 4, n, 6), some(2, 2, n, 6, seed=1), some(2, 2, n, 5, seed=2)
    for mask, layout in itertools.product((None, rg.causal(), rg.padding([n - 3, 2])), LAYOUTS):
        with ways(kernel=True) as used:
            check_in(torch.float32, 1e-5, rg.Attention(score, mask=mask), q, k, v, rg.Ring(layout=layout))
        assert load() is None or {*used} == {"_of_kernel"}, used
