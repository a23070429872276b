"""The cost of a call: what Python adds to the compiled kernel when a call is like an earlier one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import byref, c_void_p
from functools import partial

import torch
from torch import Tensor

import regard as rg
from benchmarks.case import CALLS, Aim, BenchSettings, Build, Case, Side
from regard.base.positions import Positions
from regard.base.shapes import Sizes
from regard.catalog import mechanism
from regard.diagnosis.laws import Example
from regard.engine.flash import flash
from regard.engine.kernel import KernelProblem
from regard.engine.kernel.attention import forward_call
from regard.engine.kernel.library import load
from regard.engine.problem import Problem

HEADS, WIDTH = 4, 32
#: Tokens of a call, and of a cache before the first of its steps.
TOKENS, CACHED = 192, 512


def cases(setting: BenchSettings) -> Iterator[Case]:
    """Calls that one thread computes, each beside the kernel alone; the goals are microseconds a call over it."""
    if setting.device == "cuda" or load() is None:
        return
    attention, allowed = rg.Attention(mask=rg.causal()), torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    given = rg.Attention(mask=rg.mask_tensor(allowed))
    square, one = (TOKENS, TOKENS), (1, CACHED)
    rows: list[tuple[str, tuple[int, int], float, Build, Build]] = [
        (f"n = {TOKENS}", square, 25, partial(repeated, attention, False), partial(bare, attention, False)),
        (
            f"n = {TOKENS}, recorded by autograd",
            square,
            60,
            partial(repeated, attention, True),
            partial(bare, attention, True),
        ),
        (f"one query, {CACHED} keys", one, 25, partial(repeated, attention, False), partial(bare, attention, False)),
        (f"n = {TOKENS}, the mask as a tensor", square, 60, partial(masked, allowed), partial(bare, given, False)),
        (f"n = {TOKENS}, with a listener", square, 40, partial(listened, attention), partial(bare, attention, False)),
        (f"tokens after a cache of {CACHED}", one, 40, partial(cached, attention), buffered),
    ]
    for work, (queries, keys), most, ours, peer in rows:
        yield Case(
            group="calls",
            work=f"{CALLS} calls of causal attention, {work}, {HEADS} heads of {WIDTH}",
            inputs=setting.inputs(*[(1, HEADS, n, WIDTH) for n in (queries, keys, keys)]),
            mechanism="masked",
            example=small_causal,
            ours=ours,
            peers=(Side("the bare kernel", peer, (Aim("overhead", most),)),),
            weighs=False,
        )


def small_causal() -> Example:
    """A causal mask over a few tokens."""
    return mechanism("masked").example()


def repeated(attention: rg.Attention, learns: bool, *inputs: Tensor) -> Callable[..., Tensor]:
    """`attend`, again and again."""
    q, k, v = (t.clone().requires_grad_(learns) for t in inputs)

    def run(*tensors: Tensor) -> Tensor:
        with torch.set_grad_enabled(learns):
            for _ in range(CALLS):
                seen = attention(q, k, v, engine="kernel")
        return seen.output.detach()

    return run


def masked(allowed: Tensor, *inputs: Tensor) -> Callable[..., Tensor]:
    """A boolean mask in each call."""

    def run(*tensors: Tensor) -> Tensor:
        for _ in range(CALLS):
            seen = rg.attend(*inputs, mask=allowed, engine="kernel")
        return seen.output

    return run


def listened(attention: rg.Attention, *inputs: Tensor) -> Callable[..., Tensor]:
    """Each map is given to a listener, as inside `watch`."""
    calls = repeated(attention, False, *inputs)

    class Keeper:
        def on_attention(self, module: object, weights: rg.AttentionMap) -> None:
            self.last = weights

    def run(*tensors: Tensor) -> Tensor:
        with rg.attention_output.attend_listeners.to(Keeper()):
            return calls()

    return run


def cached(attention: rg.Attention, query: Tensor, key: Tensor, value: Tensor) -> Callable[..., Tensor]:
    """One token after another, with a cache that grows."""
    start = attention(query, key, value, cache=rg.GrowingCache()).cache

    def run(*tensors: Tensor) -> Tensor:
        cache = start
        for _ in range(CALLS):
            seen = attention(query, key[:, :, :1], value[:, :, :1], cache=cache)
            cache = seen.cache
        return seen.output

    return run


def buffered(query: Tensor, key: Tensor, value: Tensor) -> Callable[..., Tensor]:
    """torch's fused kernel on a buffer with room for all tokens."""
    keys, values = (torch.cat((t, t[:, :, :1].expand(-1, -1, CALLS, -1)), 2) for t in (key, value))

    def run(*tensors: Tensor) -> Tensor:
        for n in range(CACHED, CACHED + CALLS):
            keys[:, :, n], values[:, :, n] = key[:, :, 0], value[:, :, 0]
            output = flash(query, keys[:, :, : n + 1], values[:, :, : n + 1], scale=WIDTH**-0.5)[0]
        return output

    return run


def bare(attention: rg.Attention, learns: bool, *inputs: Tensor) -> Callable[..., Tensor]:
    """The function of the library, with its structure and its memory prepared, on this thread."""
    query, key, value = (t.clone().requires_grad_(learns) for t in inputs)
    sizes = Sizes.of(query, key, value)
    with torch.set_grad_enabled(learns):
        positions = Positions.aligned_to_end(sizes.I, sizes.J)
        terms = KernelProblem.of(Problem(attention, query, key, value, positions, sizes))
    output, logsumexp = torch.zeros(inputs[0].shape), torch.zeros(inputs[0].shape[:3])
    workspace, library, name, call = forward_call(terms.setting(), terms.inputs(), output, logsumexp)
    function, num_counters = library.function(name), len(call.units)

    def run(*tensors: Tensor) -> Tensor:
        arguments = byref(call), c_void_p(workspace.address)
        for _ in range(CALLS):
            call.count(num_counters)
            function(*arguments)
        return output

    return run
