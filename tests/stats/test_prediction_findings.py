"""Warnings about whole models: planted faults are found, and right models have none."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import regard as rg
from regard.stats import prediction_findings

V, B, N = 12, 6, 9


class Reader(nn.Module):
    """A decoder of one layer, causal, that attends to embedded source tokens."""

    def __init__(self, swapped=False):
        super().__init__()
        self.embedding, self.output, self.swapped = nn.Embedding(V, 16), nn.Linear(16, V), swapped
        self.own = rg.nn.MultiHeadAttention(16, 2, attention=rg.Attention(mask=rg.causal()))
        self.cross = rg.nn.MultiHeadAttention(16, 2)

    def forward(self, source, target):
        memory, x = self.embedding(source), self.embedding(target)
        x = x + self.own(x).output
        return self.output(x + (self.cross(memory, x).output if self.swapped else self.cross(x, memory).output))


def texts(count=B, length=N):
    return torch.randint(V, (count, length + 1))


def language_model(mask):
    decoder = rg.nn.TransformerConfig(16, num_heads=2).decoder(2, vocab_size=V, cross=False)
    decoder.layers[1].self_attention.attention = rg.Attention(mask=mask)
    return nn.Sequential(decoder, nn.Linear(16, V)).eval()


def predictor(ids, offset):
    """A model that is sure of the token at this distance from the one that it reads, whatever it reads."""
    known = nn.functional.pad(ids, (1, 4))[:, 1 + offset : 1 + offset + ids.shape[1] - 1]
    return lambda read: 9.0 * nn.functional.one_hot(known, V)


@pytest.mark.parametrize(("mask", "count"), [(None, N - 1), (rg.window(3), 2), (rg.window(2), 1)], ids=str)
def test_a_mask_that_is_not_causal_leaks(mask, count):
    (leak,) = prediction_findings(language_model(mask), texts())
    assert (leak.kind, leak.layer, leak.heads) == ("leak", -1, ()) and leak.number > 0
    assert f"at {count} of the {N - 1} positions" in leak.sentence


@pytest.mark.parametrize("mask", [rg.causal(), rg.causal() & rg.window(3)], ids=str)
def test_a_causal_model_does_not_leak(mask):
    assert prediction_findings(language_model(mask), texts()) == []


def test_swapped_queries_and_keys_of_cross_attention_leak():
    ids, source = texts(), texts()[:, :-1]
    right, swapped = Reader().eval(), Reader(swapped=True).eval()
    (leak,) = prediction_findings(lambda read: swapped(source, read), ids)
    assert leak.kind == "leak" and "keys are those of the target" in leak.sentence
    assert prediction_findings(lambda read: right(source, read), ids) == []


def test_the_sentence_of_a_leak_has_the_loss_at_the_last_position():
    model, ids = language_model(None), texts()
    with torch.no_grad():
        nats = -model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].mean(0)
    (leak,) = prediction_findings(model, ids)
    found = re.search(r"loss is ([\d.]+) nats a token at these positions and ([\d.]+) at the last", leak.sentence)
    others, last = map(float, found.groups())
    assert others == pytest.approx(float(nats[:-1].mean()), abs=0.006) and last == pytest.approx(
        float(nats[-1]), abs=0.006
    )


@pytest.mark.parametrize(("offset", "words"), [(-1, "before the one"), (0, "token that they read"), (2, "but one")])
def test_labels_that_are_shifted_wrongly_are_named(offset, words):
    ids = texts()
    (finding,) = prediction_findings(predictor(ids, offset), ids)
    assert (finding.kind, finding.number) == ("offset", offset) and words in finding.sentence


def test_labels_that_are_right_or_undecided_give_no_finding():
    ids = texts()
    assert prediction_findings(predictor(ids, 1), ids) == []
    assert prediction_findings(lambda read: torch.randn(V).expand(*read.shape, V) * 0, ids) == []
    same = torch.arange(2).repeat(5)[None]  # in a text that alternates, the next token is also the one before
    assert prediction_findings(predictor(same, -1), same) == []


@pytest.mark.parametrize(
    ("model", "ids", "text"),
    [
        (lambda read: torch.rand(*read.shape, V), texts(), r"model\.eval\(\)"),
        (lambda read: torch.zeros(read.shape), texts(), r"must return logits"),
        (lambda read: {"logits": read}, texts(), r"got dict.*\.logits"),
        (lambda read: torch.zeros(*read.shape, V), texts(length=3), r"at least 5 tokens"),
        (lambda read: torch.zeros(*read.shape, V), texts().float(), r"ids are integers"),
        (lambda read: torch.zeros(*read.shape, V), torch.ones(2, 8, dtype=torch.long), r"all ids are equal"),
    ],
)
def test_mistakes_are_told(model, ids, text):
    with pytest.raises(rg.RegardError, match=text):
        prediction_findings(model, ids)
