"""A training step of a multi-head module: forward, backward and the update of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

import regard as rg
from benchmarks.case import Aim, BenchSettings, Case, Side
from benchmarks.peers import packages
from benchmarks.peers.package import X_TRANSFORMERS

BATCH, LENGTH, WIDTH, HEADS = 32, 128, 512, 8


def cases(setting: BenchSettings) -> Iterator[Case]:
    """Against torch's module, and against x-transformers, whose projections have no biases."""
    if setting.device == "cuda":
        return
    sides = (
        (True, Side("nn.MultiheadAttention", torchs, (Aim("time", 1.0),))),
        (False, Side("x-transformers", x_transformers, (Aim("time", 1.0),), X_TRANSFORMERS)),
    )
    for bias, side in sides:
        yield Case(
            group="module",
            work=f"training step of {HEADS} heads{'' if bias else ' without biases'}, batch {BATCH}, n = {LENGTH}, "
            f"width {WIDTH}",
            inputs=setting.inputs((BATCH, LENGTH, WIDTH), (BATCH, LENGTH, WIDTH)),
            mechanism="multi_head",
            ours=partial(ours, bias),
            peers=(side,),
        )


def trained(module: nn.Module, call: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """One step of gradient descent on a squared error. It returns the output before the step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def run(x: Tensor, wanted: Tensor) -> Tensor:
        with torch.enable_grad():
            output = call(x)
            nn.functional.mse_loss(output, wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
        return output.detach()

    return run


def _module(bias: bool) -> rg.nn.MultiHeadAttention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return rg.nn.MultiHeadAttention(WIDTH, HEADS, bias=bias)


def ours(bias: bool, *inputs: Tensor) -> Callable[..., Tensor]:
    """`regard.nn.MultiHeadAttention`."""
    module = _module(bias)
    return trained(module, lambda x: module(x).output)


def torchs(*inputs: Tensor) -> Callable[..., Tensor]:
    """torch's module with the same parameters and need_weights=False, which is its fast path."""
    mine, theirs = _module(True), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    assert mine.output is not None
    with torch.no_grad():
        parts = mine.query, mine.key, mine.value
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in parts]))
        theirs.in_proj_bias.copy_(torch.cat([p.bias for p in parts]))
        theirs.out_proj.weight.copy_(mine.output.weight)
        theirs.out_proj.bias.copy_(mine.output.bias)
    return trained(theirs, lambda x: theirs(x, x, x, need_weights=False)[0])


def x_transformers(*inputs: Tensor) -> Callable[..., Tensor]:
    """The layer of x-transformers with the same parameters."""
    layer = packages.x_transformers(_module(False), HEADS)
    return trained(layer, layer)
