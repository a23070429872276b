"""How often the host may wait for a pretend accelerator; run by test_accelerator.py, in a process of its own."""

from __future__ import annotations

import copy

import pytest
import torch

import regard as rg
from accelerator import DEVICE, moved, no_float64, waits
from cataloged import SELECTED, SHARES
from regard.catalog import mechanisms
from regard.catalog.entry import call_tensors
from regard.diagnosis.laws import runs
from regard.engine import ENGINES

pytestmark = pytest.mark.usefixtures("small_blocks")
every_mechanism = pytest.mark.parametrize("name", SHARES)


def example(name: str):
    """A small example in float32. No wait depends on the length; 13 queries cross borders of tiles too."""
    mechanism = mechanisms()[name]
    return mechanism.example(dtype=torch.float32, **({} if "queries" in mechanism.sizes else {"queries": 13}))


def problem(name: str):
    return moved(copy.deepcopy(example(name)))


@every_mechanism
def test_forward_and_backward_wait_for_nothing(name):
    attention, *tensors = problem(name)
    inputs = [x.requires_grad_() for x in tensors]
    for engine in set(ENGINES) - {"flex", "reference"}:
        with waits() as counted:
            seen = runs(engine, attention, *inputs)
            if seen is not None:
                seen.output.sum().backward()
        assert counted == [], engine


#: Transitions, composites and selections, and those that choose keys by the numbers of a call, which the host reads.
OTHERS = sorted(set(mechanisms()) - set(SHARES))
CHOOSING = {*SELECTED, "nsa"}


def other_problem(name: str):
    """A problem in float32, and the tensors of its call."""
    found = example(name)
    of_call = {key: moved(x).requires_grad_() for key, x in call_tensors(*found).items()}
    return *moved(found), of_call


@pytest.mark.parametrize("name", OTHERS)
def test_other_mechanisms_compute_without_float64_and_wait_for_nothing(name):
    """As on Apple's GPUs, which have no float64."""
    attention, *tensors, of_call = other_problem(name)
    with no_float64(), waits() as counted:
        seen = attention(*(x.requires_grad_() for x in tensors), **of_call)
        seen.output.sum().backward()
        seen.weights.dense()
    assert counted == [] or name in CHOOSING


#: A look, and how many waits it is allowed. Which distances there are to a list of queries, only the device knows.
LOOKS = {
    "a row": (lambda w: w[1, -1, 2], 0),
    "a tile": (lambda w: w[0, :, 1:-1, 3:], 0),
    "keys from a list": (lambda w: w[..., [3, 0, 0]], 0),
    "queries from a list": (lambda w: w[0, 0, [3, 0, 0]], 1),
    "entropy": (lambda w: w.entropy(), 0),
    "received": (lambda w: w.received(), 0),
    "distance": (lambda w: w.distance(), 0),
    "mass": (lambda w: w.mass([0, 2]), 0),
    "pool": (lambda w: w.pool(3, 3), 0),
    "similarity": (lambda w: w.similarity(), 0),
    "top": (lambda w: w.top(2), 0),
}


@every_mechanism
@torch.no_grad()
def test_a_look_stays_in_its_budget(name):
    attention, *inputs = problem(name)
    seen, found = attention(*inputs), {}
    for look, (run, allowed) in LOOKS.items():
        with waits() as counted:
            run(seen.weights)
        if len(counted) > allowed:
            found[look] = counted
    assert not found


@pytest.mark.parametrize("name", sorted(set(OTHERS) - CHOOSING))
@torch.no_grad()
def test_a_look_at_another_mechanism_stays_in_its_budget(name):
    attention, *tensors, of_call = other_problem(name)
    weights, found = attention(*tensors, **of_call).weights, {}
    shares = weights if weights.has_shares else weights.shares()  # of some composites the host reads it, once
    for look, (run, allowed) in LOOKS.items():
        reads_weights = look in ("a row", "a tile", "keys from a list", "queries from a list")
        with waits() as counted:
            run(weights if reads_weights else shares)
        if len(counted) > allowed:
            found[look] = counted
    assert not found


@every_mechanism
@torch.no_grad()
def test_a_decoding_step_waits_for_nothing(name):
    attention, q, k, v = problem(name)
    attention = attention.with_mask(rg.causal() if attention.mask is None else attention.mask & rg.causal())
    if q.shape[2] != k.shape[2]:
        return
    for cache in (rg.GrowingCache(), rg.caches.RingCache(size=q.shape[2], sinks=1)):
        with waits() as counted:
            for step in (slice(0, 4), slice(4, 5), slice(5, 6)):
                cache = attention(q[:, :, step], k[:, :, step], v[:, :, step], cache=cache).cache
        assert counted == []


#: What is known to the device alone has to be read once; what is known to the host never.
MASKS = {
    "lengths": (lambda: rg.padding([13, 5]), 0),
    "lengths on the device": (lambda: rg.padding(torch.full((2,), 5, device=DEVICE)), 1),
    "a vector": (lambda: rg.padding(torch.ones(2, 13, dtype=torch.bool)), 0),
    "a vector on the device": (lambda: rg.padding(torch.ones(2, 13, dtype=torch.bool, device=DEVICE)), 1),
    "a tensor": (lambda: rg.mask_tensor(torch.ones(13, 13, dtype=torch.bool).tril()), 0),
    "a tensor on the device": (lambda: rg.mask_tensor(torch.ones(13, 13, dtype=torch.bool, device=DEVICE).tril()), 1),
    "documents": (lambda: rg.documents([6, 7]), 0),
    "random blocks": (lambda: rg.masks.random_blocks(4, 1, 13), 0),
    "a predicate": (lambda: rg.mask_mod(lambda b, h, i, j: (i + 2 * j + b) % 3 != 0), 0),
    "global tokens": (lambda: rg.causal() & (rg.window(4) | rg.masks.global_tokens([0])), 0),
    "blocks": (lambda: rg.masks.block_local(4) | rg.masks.dilated(3, 2), 0),
    "prefix": (lambda: rg.causal() | rg.masks.prefix(3), 0),
}


@pytest.mark.parametrize("engine", ["auto", "dense", "fused", "blocked"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_is_read_at_most_once(mask, engine):
    attention, *tensors = problem("multi_head")
    inputs = [x.requires_grad_() for x in tensors]
    make, allowed = MASKS[mask]
    with waits() as counted:
        attention.with_mask(make())(*inputs, engine=engine).output.sum().backward()
    assert len(counted) <= allowed, counted


@torch.no_grad()
def test_a_check_for_finite_numbers_asks_once_for_each_input():
    attention, *tensors = problem("multi_head")
    with waits() as counted:
        attention(*tensors, check=True)
    assert len(counted) == 3


def test_waits_are_counted():
    x = torch.ones(3, device=DEVICE)
    with waits() as counted:
        for wait in (x.sum().item, x.tolist, x.cpu, x.nonzero, lambda: bool(x.any()), lambda: torch.equal(x, x)):
            wait()
        x[x > 0], x.unique(), torch.tensor([1.0], device=DEVICE), torch.ones(2).to(DEVICE)
    assert len(counted) == 10, counted
    with waits() as counted:
        x[1:] = x[:-1] + torch.tensor(2.0)
        torch.ones(2).to(DEVICE, non_blocking=True), x.masked_fill(x > 1, 0.0)
    assert counted == []
