"""Attentions with a transition: every engine, cache, map and refusal, for every transition."""

from __future__ import annotations

import math
import pickle
from dataclasses import fields

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regard as rg
from regard.engine.recurrent import chunked as chunked_module
from regard.engine.recurrent import engine as recurrent_engine
from regard.engine.recurrent import recur
from regard.engine.recurrent import transport as transport_module
from regard.maps import attention_map
from regard.maps.transported_map import TransportedMap
from regard.pieces.transition import Steps
from transports import NAMES, by_definition, drawn, steps_of

every_transition = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked_module, "CHUNK", 4)
    monkeypatch.setattr(transport_module, "CHUNK", 4)


def _numbers(*shape):
    return nn.Parameter(torch.linspace(-0.5, 2.0, math.prod(shape), dtype=torch.float64).view(shape))


def _unit(x):
    return x / x.norm(dim=-1, keepdim=True)


#: name: a score that is a dot product, and by definition the vectors of its queries and keys, and its factor.
SCORES = {
    "number": (rg.Dot(0.5), lambda q, k: (q, k), 0.5),
    "learned": (rg.Dot(factor := nn.Parameter(torch.tensor(0.3).double())), lambda q, k: (q, k), factor),
    "of heads": (rg.Dot(factors := _numbers(3, 1, 1)), lambda q, k: (q, k), factors),
    "cosine": (rg.scores.Cosine(3.0), lambda q, k: (_unit(q), _unit(k)), 3.0),
    "learned cosine": (rg.scores.Cosine(factors), lambda q, k: (_unit(q), _unit(k)), factors),
    "bilinear": (general := rg.scores.Bilinear(4, 4, 3).double(), lambda q, k: (q @ general.weight, k), 1.0),
    "features": (rg.scores.FeatureScore(), lambda q, k: (F.elu(q) + 1, F.elu(k) + 1), 1.0),
}
every_score = pytest.mark.parametrize("score", SCORES)


def made(name, J=14, I=None, score="number"):
    """An attention, its inputs, the tensors of the call, and its weights by definition."""
    transition, q, k, v, tensors = drawn(name, J, I)
    piece, vectors, factor = SCORES[score]
    attention = rg.Attention(piece, transition=transition)
    return attention, (q, k, v), tensors, by_definition(steps_of(transition, *vectors(q, k), tensors, factor))


@pytest.mark.parametrize("I", [14, 5])
@every_score
@every_transition
@torch.no_grad()
def test_output_and_weights_are_those_of_both_definitions(name, score, I):
    """`by_definition` multiplies batches of matrices, the reference engine one head at a time in NumPy."""
    attention, inputs, tensors, weights = made(name, I=I, score=score)
    seen = attention(*inputs, **tensors)
    by_numpy = attention(*inputs, **tensors, engine="reference")
    torch.testing.assert_close(seen.weights.dense(), weights)
    torch.testing.assert_close(seen.output, weights @ inputs[2])
    torch.testing.assert_close(by_numpy.output, seen.output)
    assert seen.weights.is_signed and not weights.triu(15 - I).any()


@pytest.mark.parametrize("score", [name for name, (piece, *_) in SCORES.items() if [*piece.parameters()]])
@every_transition
def test_gradients_of_a_learned_score_are_those_of_the_definition(name, score):
    attention, inputs, tensors, _ = made(name, score=score)
    piece, vectors, factor = SCORES[score]
    leaves = *(x.requires_grad_() for x in inputs), *piece.parameters()
    weights = by_definition(steps_of(attention.transition, *vectors(*inputs[:2]), tensors, factor))
    found = torch.autograd.grad(attention(*inputs, **tensors).output.sin().sum(), leaves)
    torch.testing.assert_close(found, torch.autograd.grad((weights @ inputs[2]).sin().sum(), leaves))


@pytest.mark.parametrize("make", [rg.GrowingCache, rg.caches.RecurrentCache])
@every_score
@every_transition
@torch.no_grad()
def test_caches_continue_the_memory(name, score, make):
    attention, (q, k, v), tensors, weights = made(name, score=score)
    cache, outputs, start = make(), [], 0
    for size in (6, 1, 5, 1, 1):
        part = slice(start, start := start + size)
        here = {tensor: x[:, :, part] for tensor, x in tensors.items()}
        seen = attention(q[:, :, part], k[:, :, part], v[:, :, part], cache=cache, **here)
        outputs.append(seen.output)
        cache = seen.cache
    torch.testing.assert_close(torch.cat(outputs, 2), weights @ v)
    assert cache.length == 14
    if make is rg.GrowingCache:
        torch.testing.assert_close(seen.weights.dense(), weights[:, :, -1:])


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("position", [None, rg.RoPE(4)])
def test_a_growing_cache_computes_new_tokens_only(position, learns, monkeypatch):
    """Its map has all keys; queries of earlier tokens, and other pieces, compute all tokens again."""
    transition, q, k, v, tensors = drawn("gated_deltanet", 14)
    attention, lengths = rg.Attention(transition=transition, position=position), []
    monkeypatch.setattr(recurrent_engine, "recur", lambda s, v, state: lengths.append(v.shape[2]) or recur(s, v, state))
    for t in (inputs := [q, k, v, *tensors.values()]):
        t.requires_grad_(learns)
    whole = attention(q, k, v, **tensors)
    cache, outputs, start = rg.GrowingCache(), [], 0
    for size in (6, 1, 5):
        part = slice(start, start := start + size)
        here = {name: x[:, :, part] for name, x in tensors.items()}
        seen = attention(q[:, :, part], k[:, :, part], v[:, :, part], cache=cache, **here)
        outputs.append(seen.output)
        cache = seen.cache
    late = {name: x[:, :, 12:] for name, x in tensors.items()}
    for queries, of in (
        (q[:, :, 12:], attention),
        (q[:, :, 11:], attention),
        (q[:, :, 12:], with_other_scale(attention)),
    ):
        seen = of(queries, k[:, :, 12:], v[:, :, 12:], cache=cache, **late)
        expected = of(queries, k, v, **tensors)
        torch.testing.assert_close(seen.output, expected.output)
        torch.testing.assert_close(seen.weights.dense(), expected.weights.dense())
    assert lengths == [14, 6, 1, 5, 2, 14, 14, 14, 14, 14]
    outputs = torch.cat((*outputs, attention(q[:, :, 12:], k[:, :, 12:], v[:, :, 12:], cache=cache, **late).output), 2)
    torch.testing.assert_close(outputs, whole.output)
    if learns:
        found, exact = (torch.autograd.grad(x.sin().sum(), inputs) for x in (outputs, whole.output))
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(one, other)


def with_other_scale(attention):
    return rg.Attention(rg.Dot(3.0), transition=attention.transition, position=attention.position)


@every_transition
def test_any_part_of_the_map_is_that_of_the_whole(name, monkeypatch):
    monkeypatch.setattr(attention_map, "TILE", (5, 6))
    monkeypatch.setattr("regard.maps.transported_map.TILE", (5, 6))
    for I in (14, 9):
        attention, inputs, tensors, dense = made(name, I=I)
        weights = attention(*inputs, **tensors).weights
        torch.testing.assert_close(weights[1, 2, 3], dense[1, 2, 3])
        torch.testing.assert_close(weights[0, :, 8, 2:11], dense[0, :, 8, 2:11])
        rows, cols = torch.tensor([8, 0, 8, 3]), torch.tensor([13, 1, 1])
        torch.testing.assert_close(weights.tile(rows=rows, cols=cols), dense[:, :, rows][..., cols])
        part = weights.select([1, 0], [2])
        torch.testing.assert_close(part.dense(), dense[[1, 0]][:, [2]])
        torch.testing.assert_close(pickle.loads(pickle.dumps(part)).dense(), part.dense())
        collected = torch.zeros_like(dense)
        for tile in weights.tiles():
            assert not collected[:, :, tile.rows, tile.cols].any()
            collected[:, :, tile.rows, tile.cols] = tile.weights
            forbidden = ~attention.mask.allowed(tile.grid)
            columns = torch.arange(tile.cols.start, tile.cols.stop)
            assert not (forbidden.any(-2)[0, 0] & ~torch.isin(columns, tile.undecided.tensor("cpu"))).any()
        torch.testing.assert_close(collected, dense)
        torch.testing.assert_close(weights.received(), dense.sum(-2).float(), rtol=1e-4, atol=1e-5)
        shares = dense.abs() / dense.abs().sum(-1, keepdim=True)
        torch.testing.assert_close(weights.shares()[0, 1], shares[0, 1])
        torch.testing.assert_close(weights.output(inputs[2]), dense @ inputs[2])


def test_query_heads_share_keys_and_have_their_own_decays():
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 6, 9, 4).double(), torch.randn(2, 2, 2, 9, 4).double()
    decay, beta = -torch.rand(2, 6, 9).double(), torch.rand(2, 2, 9).double()
    attention = rg.Attention(transition=rg.transitions.GatedDelta())
    seen = attention(q, k, v, log_decay=decay, beta=beta)
    k, v, beta = (x.repeat_interleave(3, 1) for x in (k, v, beta))
    apart = attention(q, k, v, log_decay=decay, beta=beta)
    torch.testing.assert_close(seen.output, apart.output)
    torch.testing.assert_close(seen.weights.dense() @ v, seen.output)


def test_gradients_reach_the_pieces_and_the_tensors_of_the_call():
    torch.manual_seed(0)
    rate, skip = (-torch.rand(3).double()).requires_grad_(), torch.rand(3).double().requires_grad_()
    _, q, k, v, tensors = drawn("ssd", 9)
    step = tensors["step"].requires_grad_()
    attention = rg.Attention(rg.Dot(1.0), transition=rg.transitions.StateSpace(rate, skip))

    def output(step, rate, skip):
        attention = rg.Attention(rg.Dot(1.0), transition=rg.transitions.StateSpace(rate, skip))
        return attention(q, k, v, step=step).output

    assert torch.autograd.gradcheck(output, (step, rate, skip))
    attention(q, k, v, step=step).output.sum().backward()
    assert rate.grad is not None and skip.grad is not None and step.grad is not None


@every_transition
@torch.no_grad()
def test_later_tokens_do_not_change_earlier_outputs(name):
    attention, (q, k, v), tensors, _ = made(name)
    first = attention(q, k, v, **tensors).output[:, :, :9]
    for x in (q, k, v, *tensors.values()):
        x[:, :, 9:] *= 0.3
    torch.testing.assert_close(attention(q, k, v, **tensors).output[:, :, :9], first, rtol=0, atol=1e-13)


def test_refusals_say_what_to_do():
    transition, q, k, v, tensors = drawn("gated_deltanet", 6)
    attention = rg.Attention(transition=transition)
    for pieces, reason in (
        ({"normalizer": rg.normalizers.Softmax()}, "not normalized"),
        ({"mask": rg.causal() & rg.window(3)}, "the mask is causal"),
        ({"bias": rg.ALiBi(4)}, "no single weights"),
        ({"dropout": 0.1}, "no single weights"),
    ):
        with pytest.raises(rg.RegardError, match=reason):
            rg.Attention(transition=transition, **pieces)
    with pytest.raises(rg.RegardError, match="expected a Transition, got the class Delta"):
        rg.Attention(transition=rg.transitions.Delta)
    with pytest.raises(rg.RegardError, match="this engine scores pairs"):
        attention(q, k, v, **tensors, engine="dense")
    with pytest.raises(rg.RegardError, match="it needs a transition"):
        rg.Attention()(q, k, v, engine="recurrent")
    with pytest.raises(rg.RegardError, match="needs a tensor for each call"):
        attention(q, k, v, beta=tensors["beta"])
    with pytest.raises(rg.RegardError, match="end where the queries end"):
        attention(torch.cat((q, q), 2), k, v, **tensors)
    with pytest.raises(rg.RegardError, match="the mask is causal"):
        rg.Attention(transition=rg.transitions.Decay(-0.1))(q, k, v, cache=rg.caches.RingCache(3))
    with pytest.raises(rg.RegardError, match="a dot product"):
        rg.Attention(rg.scores.Additive(4, 4, 3), transition=transition)
    with pytest.raises(rg.RegardError, match="a dot product"):
        replaced = rg.Attention(transition=transition)
        replaced.score = rg.scores.Additive(4, 4, 3).double()
        replaced(q, k, v, **tensors)
    with pytest.raises(rg.RegardError, match="2 heads"):
        rg.Attention(transition=rg.transitions.Decay(-torch.rand(2)))(q, k, v)
    with pytest.raises(rg.RegardError, match="bonus must be"):
        decays = {"log_decay": -torch.rand(2, 3, 6, 4).double()}
        rg.Attention(transition=rg.transitions.ChannelDecay(bonus=torch.zeros(3, 5)))(q, k, v, **decays)


@pytest.mark.parametrize("make_cache", [None, rg.GrowingCache, rg.caches.RecurrentCache])
@pytest.mark.parametrize("normalizer", [rg.normalizers.TopK(2), rg.normalizers.Softmax(temperature=2.0)])
def test_a_normalizer_that_is_assigned_later_is_refused_too(make_cache, normalizer):
    """Also in a call that had a plan, or a step of decoding, before."""
    attention, (q, k, v), tensors, _ = made("decay")

    def run():
        cache = None if make_cache is None else make_cache()
        for token in (slice(0, 3), slice(3, 4), slice(4, 5)):
            here = {name: x[:, :, token] for name, x in tensors.items()}
            cache = attention(q[:, :, token], k[:, :, token], v[:, :, token], cache=cache, **here).cache

    with torch.no_grad():
        run()
        attention.normalizer = normalizer
        with pytest.raises(rg.RegardError, match=r"not normalized.* got .*attention\.normalizer = regard\.normalizers"):
            run()
        attention.normalizer = rg.normalizers.Softmax()
        run()


def test_a_transition_that_is_assigned_later_refuses_the_normalizer():
    attention = rg.Attention(mask=rg.causal(), normalizer=rg.normalizers.TopK(2))
    attention.transition = rg.transitions.Decay(-0.1)
    with pytest.raises(rg.RegardError, match="not normalized"):
        attention(*torch.randn(3, 1, 2, 4, 8))


def test_the_error_of_second_derivatives_names_no_engine_that_cannot_run_a_transition():
    attention, (q, k, v), tensors, _ = made("decay")
    q.requires_grad_()
    (first,) = torch.autograd.grad(attention(q, k, v, **tensors).output.sin().sum(), q, create_graph=True)
    with pytest.raises(rg.RegardError, match="No engine has second derivatives of a transition") as error:
        first.sum().backward()
    assert "engine='" not in str(error.value)


def test_a_map_refuses_tensors_that_changed():
    attention, (q, k, v), tensors, _ = made("decay")
    with torch.no_grad():
        weights = attention(q, k, v, **tensors).weights
        k.mul_(2)
    with pytest.raises(rg.RegardError, match="changed in place"):
        weights.dense()


def test_a_map_of_tensors_of_a_model():
    transition, q, k, _, tensors = drawn("kimi_delta", 12, 5)
    steps = steps_of(transition, q, k, tensors)
    weights = TransportedMap.of_steps(steps)
    torch.testing.assert_close(weights.dense(), by_definition(steps))
    assert weights.shape == (2, 3, 5, 12)
    with pytest.raises(rg.RegardError, match="a key of its own"):
        TransportedMap.of_steps(rg.transitions.Steps(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 2, 2)))


@every_transition
def test_queries_without_keys_have_outputs_of_zeros(name):
    attention, (q, k, v), tensors, _ = made(name, J=6)
    none = {name: x[:, :, :0] for name, x in tensors.items()}
    seen = attention(q, k[:, :, :0], v[:, :, :0], **none)
    assert seen.output.shape == (2, 3, 6, 5) and not seen.output.any()
    assert seen.weights.dense().shape == (2, 3, 6, 0)


def test_empty_calls():
    attention, (q, k, v), tensors, _ = made("gated_deltanet", J=6)
    none = {name: x[:, :, :0] for name, x in tensors.items()}
    seen = attention(q[:, :, :0], k[:, :, :0], v[:, :, :0], **none)
    assert seen.output.shape == (2, 3, 0, 5) and seen.weights.dense().shape == (2, 3, 0, 0)
    state = attention(q[:, :, :0], k, v, **tensors, cache=rg.caches.RecurrentCache()).cache.state
    assert state is not None
    again = attention(q[:, :, :0], k[:, :, :0], v[:, :, :0], **none, cache=rg.caches.RecurrentCache(state, 6))
    assert torch.equal(again.cache.state, state)
    batch = {name: x[:0] for name, x in tensors.items()}
    assert attention(q[:0], k[:0], v[:0], **batch).output.shape == (0, 3, 6, 5)


@pytest.mark.parametrize("learned", [(0,), (1,), (3,), (0, 1, 2, 3)])
def test_a_map_keeps_no_graph_of_its_steps(learned):
    tensors = [*torch.randn(3, 1, 2, 5, 4).unbind(), torch.rand(1, 2, 5)]
    for number in learned:
        tensors[number].requires_grad_()
    *inputs, beta = tensors
    weights = rg.Attention(transition=rg.transitions.Delta())(*inputs, beta=beta).weights
    assert weights.requires_grad and not any(t.requires_grad for t in weights.steps.tensors())


def test_the_tensors_of_steps_are_their_fields_of_tensors():
    """A field that one list had and another had not would be lost, or land in the place of another."""
    names = [*Steps.ON_ROWS, *Steps.ON_COLS]
    assert sorted(names) == sorted(field.name for field in fields(Steps) if "Tensor" in str(field.type))
    numbers = {name: torch.full((1, 1, 1, 1), float(n)) for n, name in enumerate(names)}
    assert [int(tensor) for tensor in Steps(**numbers).tensors()] == [*range(len(names))]
    moved = Steps(**numbers).with_tensors([numbers[name] + 10 for name in names])
    assert [int(getattr(moved, name)) for name in names] == [n + 10 for n in range(len(names))]


def test_steps_of_as_many_heads_are_not_built_again():
    q, k = torch.randn(1, 4, 5, 3), torch.randn(1, 2, 5, 3)
    steps = Steps(q, k, log_decay=-torch.rand(1, 4, 5, 1))
    whole = steps.of_heads(4)
    assert whole is not steps and whole.of_heads(4) is whole
    assert {tensor.shape[1] for tensor in whole.tensors()} == {4}
    assert whole.key.equal(k.repeat_interleave(2, 1))
