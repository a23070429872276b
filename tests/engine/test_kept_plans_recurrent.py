"""Kept plans of calls with a transition, with tensors of the call and with a state: what a new plan gives."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import regard as rg
from plan_calls import assert_equal
from regard.engine import kept_plans as kept_plans_file
from regard.engine.kept_plans import kept_plans
from regard.pieces.call_tensors import needs_of

H, D = 2, 8


@pytest.fixture
def plans_made(monkeypatch):
    """The problems that were planned anew."""
    made, plan = [], rg.attention_output.engine_plan
    monkeypatch.setattr(rg.attention_output, "engine_plan", lambda *given: made.append(given) or plan(*given))
    kept_plans.clear()
    return made


def drawn(attention, n, heads=H, batch=1):
    """Queries, keys and values, and the tensors of the call."""
    shapes = {"B": batch, "H": heads, "J": n, "D": D, "I": n}
    tensors = {}
    for piece in attention.pieces():
        for name, words in needs_of(piece).items():
            x = torch.rand([shapes[letter] for letter in words.split()])
            tensors[name] = -x if name.startswith("log") else x
    return list(torch.randn(3, batch, H, n, D)), tensors


def results(attention, inputs, tensors, cache=None):
    """Output, weights, the next state, and gradients."""
    seen = attention(*inputs, cache=cache, **tensors)
    found = [seen.output, seen.weights.dense()]
    if isinstance(seen.cache, rg.caches.RecurrentCache):
        found.append(seen.cache.state)
    learned = [t for t in (*inputs, *tensors.values()) if t.requires_grad]
    if learned:
        found += torch.autograd.grad(seen.output.sin().sum(), learned)
    return found


def anew(*given):
    kept_plans.clear()
    return results(*given)


ATTENTIONS = {
    "gated delta": lambda: rg.Attention(transition=rg.transitions.GatedDelta()),
    "without lengths": lambda: rg.Attention(transition=rg.transitions.GatedDelta(unit=False)),
    "another score": lambda: rg.Attention(rg.Dot(2.0), transition=rg.transitions.GatedDelta()),
    "rotated": lambda: rg.Attention(position=rg.RoPE(D), transition=rg.transitions.GatedDelta()),
    "delta": lambda: rg.Attention(transition=rg.transitions.Delta()),
    "a decay": lambda: rg.Attention(transition=rg.transitions.Decay(-0.1)),
    "another decay": lambda: rg.Attention(transition=rg.transitions.Decay(-2.0)),
    "decays of heads": lambda: rg.Attention(transition=rg.transitions.Decay(-torch.rand(H))),
    "a decay of the call": lambda: rg.Attention(transition=rg.transitions.Decay()),
    "no transition": lambda: rg.Attention(mask=rg.causal()),
    "selected": lambda: rg.Attention(mask=rg.causal(), selection=rg.selections.BlockMeans(size=2, k=1)),
    "selected more": lambda: rg.Attention(mask=rg.causal(), selection=rg.selections.BlockMeans(size=2, k=2)),
}


def test_attentions_that_differ_in_one_piece_share_no_plan():
    """In one process, one after the other: each gives what it gives alone."""
    torch.manual_seed(0)
    attentions = {name: make() for name, make in ATTENTIONS.items()}
    inputs = drawn(rg.Attention(), 9)[0]
    tensors = {name: drawn(attention, 9)[1] for name, attention in attentions.items()}
    expected = {name: anew(a, inputs, tensors[name]) for name, a in attentions.items()}
    kept_plans.clear()
    for _ in range(2):
        for name, attention in attentions.items():
            assert_equal(results(attention, inputs, tensors[name]), expected[name])


def test_the_key_has_every_slot():
    """A new slot must decide about the key too."""
    with_pieces = rg.Attention(
        position=rg.RoPE(D), bias=rg.ALiBi(H), mask=rg.causal(), selection=rg.selections.BlockMeans(2, 1)
    )
    recurrent = rg.Attention(transition=rg.transitions.Delta())
    for attention in (with_pieces, recurrent):
        slots = [
            piece for slot in kept_plans_file._slots(attention) for piece in (slot if type(slot) is tuple else [slot])
        ]
        assert all(any(piece is slot for slot in slots) for piece in attention.pieces())


CALLS = {
    "one entry for all heads": lambda x, t: (x, {name: y[:, :1] for name, y in t.items()}),
    "another dtype": lambda x, t: (x, {name: y.bfloat16() for name, y in t.items()}),
    "all of another dtype": lambda x, t: ([y.double() for y in x], {name: y.double() for name, y in t.items()}),
    "strides": lambda x, t: ([y.mT.contiguous().mT for y in x], {name: y.mT.contiguous().mT for name, y in t.items()}),
    "gradients of a tensor of the call": lambda x, t: (x, {name: y.clone().requires_grad_() for name, y in t.items()}),
    "gradients of the values": lambda x, t: ([*x[:2], x[2].clone().requires_grad_()], t),
    "another order of names": lambda x, t: (x, dict(reversed(t.items()))),
    "shared keys": lambda x, t: ([x[0], x[1][:, :1], x[2][:, :1]], t),
}


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("change", CALLS)
def test_calls_that_differ_share_no_plan(change, with_state):
    attention = ATTENTIONS["gated delta"]()
    inputs, tensors = drawn(attention, 3)
    other = CALLS[change](inputs, tensors)
    state = torch.randn(1, H, D, D, dtype=other[0][0].dtype)
    caches = [rg.caches.RecurrentCache(state.to(x.dtype), 5) if with_state else None for x in (inputs[0], other[0][0])]
    expected = anew(attention, *other, caches[1])
    kept_plans.clear()
    results(attention, inputs, tensors, caches[0])
    assert_equal(results(attention, *other, caches[1]), expected)
    assert_equal(results(attention, *other, caches[1]), expected)


@pytest.mark.parametrize("engine", ["auto", "dense", "blocked"])
def test_a_bias_with_a_tensor_of_the_call_learns(engine, plans_made):
    """The tensor alone requires gradients, in the second call: a plan for none would lose them without a word."""
    attention = rg.Attention(mask=rg.causal(), bias=rg.biases.ForgettingBias())
    inputs, tensors = drawn(attention, 40)
    for _ in range(2):
        attention(*inputs, engine=engine, **tensors)
    assert len(plans_made) == 1
    (name,) = tensors
    learned = {name: tensors[name].clone().requires_grad_()}
    (found,) = torch.autograd.grad(attention(*inputs, engine=engine, **learned).output.sin().sum(), *learned.values())
    kept_plans.clear()
    fresh = attention(*inputs, engine=engine, **learned).output.sin().sum()
    assert len(plans_made) == 3 and torch.equal(found, *torch.autograd.grad(fresh, learned[name]))


def test_a_state_is_part_of_the_key():
    attention = ATTENTIONS["gated delta"]()
    inputs, tensors = drawn(attention, 1)
    caches = None, rg.caches.RecurrentCache(), rg.caches.RecurrentCache(torch.randn(1, H, D, D), 7), rg.GrowingCache()
    expected = [anew(attention, inputs, tensors, cache) for cache in caches]
    kept_plans.clear()
    for _ in range(2):
        for cache, found in zip(caches, expected, strict=True):
            assert_equal(results(attention, inputs, tensors, cache), found)


ONE_BY_ONE = {
    name: ATTENTIONS[name] for name in ("gated delta", "rotated", "decays of heads", "a decay of the call")
} | {
    "kimi delta": lambda: rg.Attention(transition=rg.transitions.KimiDelta()),
    "state space": lambda: rg.Attention(rg.Dot(1.0), transition=rg.transitions.StateSpace(-torch.rand(H, D))),
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_tokens_one_by_one_need_at_most_two_plans(name, plans_made):
    """The first has no state yet. Positions differ from token to token, and a RoPE reads them.

    Later tokens need no plan, if the pieces hold no tensor and no position.
    """
    attention = ONE_BY_ONE[name]()
    inputs, tensors = drawn(attention, 7)
    whole = attention(*inputs, **tensors)
    plans_made.clear()
    cache, outputs = rg.caches.RecurrentCache(), []
    for t in range(7):
        part = slice(t, t + 1)
        here = {key: x[:, :, part] for key, x in tensors.items()}
        seen = attention(*(x[:, :, part] for x in inputs), cache=cache, **here)
        cache = seen.cache
        outputs.append(seen.output)
        assert seen.weights.positions.start == t and cache.length == t + 1
        assert seen.weights.grid.query.tolist() == seen.weights.grid.key.tolist() == [t]
    torch.testing.assert_close(torch.cat(outputs, 2), whole.output, rtol=1e-4, atol=1e-5)
    assert len(plans_made) == (1 if name in ("gated delta", "kimi delta", "a decay of the call") else 2)


def test_new_numbers_of_a_transition_are_read(plans_made):
    rate = torch.nn.Parameter(-torch.rand(H))
    attention = rg.Attention(rg.Dot(1.0), transition=rg.transitions.StateSpace(rate))
    inputs, tensors = drawn(attention, 6)
    before = attention(*inputs, **tensors)
    gradient = torch.autograd.grad(before.output.sum(), rate)[0]
    with torch.no_grad():
        rate.mul_(3)
    after = attention(*inputs, **tensors)
    assert len(plans_made) == 1 and not torch.equal(before.output, after.output)
    assert not torch.equal(gradient, torch.autograd.grad(after.output.sum(), rate)[0])
    assert torch.equal(after.output, anew(attention, inputs, tensors)[0])


@pytest.mark.parametrize(("num_tokens", "num_plans"), [(2, 1), (1, 0)], ids=["a plan", "a step"])
def test_kept_plans_and_steps_hold_no_tensor_of_a_call(num_tokens, num_plans):
    attention = ATTENTIONS["gated delta"]()
    inputs, tensors = drawn(attention, num_tokens)
    cache = rg.caches.RecurrentCache(torch.randn(1, H, D, D), 3)
    kept_plans.clear()
    for _ in range(2):
        seen = attention(*inputs, cache=cache, **tensors)
    assert len(kept_plans) == num_plans
    watched = [weakref.ref(t) for t in (*inputs, *tensors.values(), cache.state, seen.output, seen.cache.state)]
    del inputs, tensors, cache, seen
    gc.collect()
    assert not [ref() for ref in watched if ref() is not None]


def test_mistakes_are_refused_after_a_kept_plan():
    attention = ATTENTIONS["gated delta"]()
    (q, k, v), tensors = drawn(attention, 2)
    attention(q, k, v, cache=rg.caches.RecurrentCache(), **tensors)
    for wrong in ({"beta": tensors["beta"]}, {**tensors, "gamma": v}, {**tensors, "beta": v}, {**tensors, "beta": 1.0}):
        with pytest.raises(rg.RegardError, match=r"log_decay|gamma|beta"):
            attention(q, k, v, cache=rg.caches.RecurrentCache(), **wrong)
    with pytest.raises(rg.RegardError, match="not both"):
        attention(q, k, v, cache=rg.caches.RecurrentCache(), positions=rg.types.Positions.of(0, 2, 2), **tensors)
