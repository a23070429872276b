"""A cache that is an argument: right ones in many styles, and mistakes by their names."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import regard as rg
from regard.cli.exercise_notebooks import Exercise

MANY = {"limit": 600.0}


class Decoder(nn.Module):
    """Causal multi-head attention that returns its keys and values; subclasses make one mistake each."""

    def __init__(self, d_model=16, num_heads=2):
        super().__init__()
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def join_keys(self, past, new):
        return torch.cat([past, new], 2)

    def join_values(self, past, new):
        return torch.cat([past, new], 2)

    def visible(self, I, J):
        return torch.ones(I, J, dtype=torch.bool).tril(J - I)

    def given(self, cache):
        return cache

    def kept(self, k, v):
        return k, v

    def forward(self, x, cache=None):
        B, n, C = x.shape
        q, k, v = (f(x).view(B, n, self.num_heads, -1).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        if cache is not None:
            past = self.given(cache)
            k, v = self.join_keys(past[0], k), self.join_values(past[1], v)
        scores = q @ k.transpose(-2, -1) / math.sqrt(C // self.num_heads)
        scores = scores.masked_fill(~self.visible(n, k.shape[2]), -torch.inf)
        return self.W_o((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, n, C)), self.kept(k, v)


class OfDict(Decoder):
    def given(self, cache):
        return cache["k"], cache["v"]

    def kept(self, k, v):
        return {"k": k, "v": v}


class OfOneTensor(Decoder):
    def kept(self, k, v):
        return torch.stack([k, v])


class Required(Decoder):
    def forward(self, x, past_key_value):
        return super().forward(x, past_key_value)


class OfTwoArguments(Decoder):
    def forward(self, x, past_k, past_v):
        output, (k, v) = super().forward(x, None if past_k is None else (past_k, past_v))
        return output, k, v


class OfTwoOptionalArguments(Decoder):
    def forward(self, x, key_cache=None, value_cache=None):
        return super().forward(x, None if key_cache is None else (key_cache, value_cache))


class WithWeights(Decoder):
    def forward(self, x, kv_cache=None):
        output, cache = super().forward(x, kv_cache)
        return {"output": output, "weights": None, "cache": cache}


class NotCausal(Decoder):
    def visible(self, I, J):
        return torch.ones(I, J, dtype=torch.bool)


def step(query, key, value, cache=None):
    if cache is not None:
        key, value = torch.cat((cache[0], key), -2), torch.cat((cache[1], value), -2)
    return (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1) @ value, (key, value)


RIGHT = [Decoder, OfDict, OfOneTensor, Required, OfTwoArguments, OfTwoOptionalArguments, WithWeights, NotCausal, step]


@pytest.mark.parametrize("subject", RIGHT)
def test_right_caches_have_no_alarm(subject):
    report = rg.check(subject, **MANY)
    assert report.mistakes == () and "cache" not in report.open_questions
    assert [finding.verdict for finding in report.findings if finding.what == "cache"] == ["right"]


class ValuesInFront(Decoder):
    def join_values(self, past, new):
        return torch.cat([new, past], 2)


class BothInFront(ValuesInFront):
    def join_keys(self, past, new):
        return torch.cat([new, past], 2)


class NotUsed(Decoder):
    def join_keys(self, past, new):
        return new

    join_values = join_keys


class KeysOfTheLastTwo(Decoder):
    def join_keys(self, past, new):
        return torch.cat([past, new], 2)[:, :, -2:]

    join_values = join_keys


class MaskOfTheFirst(Decoder):
    def visible(self, I, J):
        return torch.ones(I, J, dtype=torch.bool).tril(0 if I > 1 else J - I)


class MaskOfTheSquare(Decoder):
    def visible(self, I, J):
        return torch.ones(I, J, dtype=torch.bool).tril()


class ValuesOfTwoArgumentsInFront(OfTwoArguments, ValuesInFront):
    pass


class PositionsOfTheFirst(Decoder):
    """Each call adds the positions from 0 on."""

    def forward(self, x, cache=None):
        return super().forward(x + torch.arange(x.shape[1])[:, None], cache)


@pytest.mark.parametrize("like", [None, "causal_multi_head"])
@pytest.mark.parametrize(
    ("subject", "mistake"),
    [
        (ValuesInFront, "the cache joins keys and values in different orders"),
        (BothInFront, "new tokens stand in front of the cache"),
        (NotUsed, "the cache is not used"),
        (KeysOfTheLastTwo, "with a cache the outputs are others than in one call"),
        (MaskOfTheFirst, "the causal mask does not count the keys of the cache"),
        (MaskOfTheSquare, "the causal mask does not count the keys of the cache"),
        (ValuesOfTwoArgumentsInFront, "the cache joins keys and values in different orders"),
    ],
)
def test_mistakes_of_caches_are_named(subject, mistake, like):
    report = rg.check(subject, like=like, **MANY)
    assert report.mistakes == (mistake,) and report.ok is False


def remedy_of(subject):
    return next(finding.remedy for finding in rg.check(subject, **MANY).findings if finding.what == "cache")


@pytest.mark.parametrize("subject", [MaskOfTheFirst, MaskOfTheSquare, PositionsOfTheFirst])
def test_where_keys_and_values_are_joined_right_the_remedy_is_another(subject):
    assert "tril(J - I)" in remedy_of(subject) and "torch.cat" not in remedy_of(subject)


def test_caches_that_are_all_the_keys_there_are_are_the_keys():
    def decode(q, k_cache, v_cache):
        return (q @ k_cache.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v_cache

    assert rg.check(decode, **MANY).ok


def test_a_cache_of_two_arguments_must_be_two_tensors():
    class OfKeysAlone(OfTwoArguments):
        def forward(self, x, past_k, past_v):
            return super().forward(x, past_k, past_v)[:2]

    (finding,) = (finding for finding in rg.check(OfKeysAlone, **MANY).findings if finding.what == "cache")
    assert finding.verdict == "unknown" and "no cache of 2" in finding.evidence


def test_a_cache_that_is_not_returned_is_not_judged():
    def kept_elsewhere(q, k, v, cache=None):
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v

    report = rg.check(kept_elsewhere, **MANY)
    (finding,) = (finding for finding in report.findings if finding.what == "cache")
    assert finding.verdict == "unknown" and "it returns no cache" in finding.evidence


def test_the_solution_of_the_exercise_is_right():
    names: dict = {}
    exec(Exercise.read("kv_cache").solution, names)
    assert rg.check(names["step"], **MANY).mistakes == ()
