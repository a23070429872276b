"""Learned and sinusoidal positions: the same small decoder on English characters, with three seeds each."""

import numpy as np
import torch
from torch import nn

import regard as rg

torch.set_num_threads(1)
length, stops = 32, (250, 500, 1000, 2000)
verses = " ".join(pair.source for pair in rg.lab.data.load_corpus("bible-en-fr").train)
text = torch.from_numpy(np.frombuffer(verses.encode("ascii", "ignore"), np.uint8).astype(np.int64))
train, test = text[:-100_000], text[-100_000:]


def loss_of(model, source, count):
    ids = source[torch.randint(len(source) - length, (count, 1)) + torch.arange(length + 1)]
    return nn.functional.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:])


def test_loss(model):
    """Nats a character on the same held-out text for all models."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        return float(loss_of(model, test, 1000))


def train_and_test(positions, seed):
    torch.manual_seed(seed)
    plan = rg.nn.TransformerConfig(64, positions=positions, max_length=length)
    model = nn.Sequential(plan.decoder(1, vocab_size=128, cross=False), nn.Linear(64, 128))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=3e-3), []
    for step in range(1, max(stops) + 1):
        optimizer.zero_grad()
        loss_of(model, train, 16).backward()
        optimizer.step()
        if step in stops:
            losses.append(test_loss(model))
    return losses


means = {}
for kind in ("sinusoidal", "learned"):
    losses = np.array([train_and_test(kind, seed) for seed in (1, 2, 3)])
    means[kind] = losses.mean(0)
    results = (
        f"{mean:.3f} (+-{off:.3f}) after {stop:,}"
        for mean, off, stop in zip(losses.mean(0), losses.std(0), stops, strict=True)
    )
    print(f"{kind:10} nats a character:", ", ".join(results))
difference = means["learned"] - means["sinusoidal"]
assert difference[0] > 0.1 and abs(difference[-1]) < difference[0] / 5
try:
    rg.Attention(position=rg.encodings.LearnedPositions(length, 8))(*torch.randn(3, 1, 1, length + 1, 8))
except rg.RegardError as error:
    print(error)
