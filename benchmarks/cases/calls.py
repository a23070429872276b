"""The cost of a call: what Python adds to the compiled kernel when a call is like an earlier one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import byref, c_void_p
from functools import partial

import torch
from torch import Tensor

import regard as rg
from benchmarks.case import CALLS, Aim, BenchSettings, Case, Side
from regard.base.positions import Positions
from regard.base.shapes import Sizes
from regard.catalog import mechanism
from regard.diagnosis.laws import Example
from regard.engine.kernel import KernelProblem
from regard.engine.kernel.attention import forward_call
from regard.engine.kernel.library import load
from regard.engine.problem import Problem

HEADS, WIDTH = 4, 32
#: The goal in microseconds.
MICROSECONDS = 60


def cases(setting: BenchSettings) -> Iterator[Case]:
    """Few queries and many, with and without gradients. One thread computes each of these calls."""
    if setting.device == "cuda" or load() is None:
        return
    for queries, keys, learns in ((192, 192, False), (192, 192, True), (1, 512, False)):
        size = f"n = {queries}" if queries > 1 else f"one query, {keys} keys"
        yield Case(
            group="calls",
            work=f"{CALLS} calls of causal attention, {size}, {HEADS} heads of {WIDTH}"
            f"{', which autograd records' if learns else ''}",
            inputs=setting.inputs(*[(1, HEADS, n, WIDTH) for n in (queries, keys, keys)]),
            mechanism="masked",
            example=small_causal,
            ours=partial(attended, learns),
            peers=(Side("the bare kernel", partial(bare, learns), (Aim("overhead", MICROSECONDS),)),),
            weighs=False,
        )


def small_causal() -> Example:
    """A causal mask over a few tokens."""
    return mechanism("masked").example()


def attended(learns: bool, *inputs: Tensor) -> Callable[..., Tensor]:
    """`attend`, again and again."""
    attention = rg.Attention(mask=rg.causal())
    q, k, v = (t.clone().requires_grad_(learns) for t in inputs)

    def run(*tensors: Tensor) -> Tensor:
        with torch.set_grad_enabled(learns):
            for _ in range(CALLS):
                seen = attention(q, k, v, engine="kernel")
        return seen.output.detach()

    return run


def bare(learns: bool, *inputs: Tensor) -> Callable[..., Tensor]:
    """The function of the library, with its structure and its memory prepared, on this thread."""
    query, key, value = (t.clone().requires_grad_(learns) for t in inputs)
    sizes = Sizes.of(query, key, value)
    with torch.set_grad_enabled(learns):
        positions = Positions.aligned_to_end(sizes.I, sizes.J)
        terms = KernelProblem.of(Problem(rg.Attention(mask=rg.causal()), query, key, value, positions, sizes))
    output, logsumexp = torch.zeros(inputs[0].shape), torch.zeros(inputs[0].shape[:3])
    setting = terms.setting()
    workspace, library, name, call = forward_call(setting, terms.inputs(), output, logsumexp)
    function, num_counters = library.function(name), len(call.units)

    def run(*tensors: Tensor) -> Tensor:
        arguments = byref(call), c_void_p(workspace.address)
        for _ in range(CALLS):
            call.count(num_counters)
            function(*arguments)
        return output

    return run
