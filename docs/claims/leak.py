"""A decoder without its causal mask: the loss of training, and that of the only position that cannot see its answer."""

import numpy as np
import torch
from torch import nn

import regard as rg

torch.set_num_threads(1)
length = 32
verses = " ".join(pair.source for pair in rg.lab.data.load_corpus("bible-en-fr").train)
text = torch.from_numpy(np.frombuffer(verses.encode("ascii", "ignore"), np.uint8).astype(np.int64))
train, test = text[:-100_000], text[-100_000:]


def losses(model, source, count):
    """Nats a character, (texts, positions)."""
    ids = source[torch.randint(len(source) - length, (count, 1)) + torch.arange(length + 1)]
    return nn.functional.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none")


def train_and_test(is_causal, seed):
    torch.manual_seed(seed)
    plan = rg.nn.TransformerConfig(64)
    stack = plan.decoder(1, vocab_size=128, cross=False) if is_causal else plan.encoder(1, vocab_size=128)
    model = nn.Sequential(stack, nn.Linear(64, 128))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(300):
        optimizer.zero_grad()
        losses(model, train, 16).mean().backward()
        optimizer.step()
    with torch.no_grad():
        each = losses(model, test, 500).mean(0)
    return each[:-1].mean(), each[-1]


shares = torch.bincount(train, minlength=128).add(1).double() / (len(train) + 128)
unigram = -shares[test].log().mean()
print(f"frequencies of letters alone: {unigram:.2f} nats a character")
results = {}
for is_causal in (True, False):
    runs = torch.tensor([train_and_test(is_causal, seed) for seed in range(6)])
    results[is_causal] = (others, last) = runs.T
    print("with the causal mask:" if is_causal else "without it:", "nats a character,", end=" ")
    print(f"all positions but the last {others.min():.2f} to {others.max():.2f},", end=" ")
    print(f"the last {last.min():.2f} to {last.max():.2f}")
assert results[False][0].max() < 0.1 < 1 < results[True][0].min()
assert results[True][1].max() + 0.2 < results[False][1].min() and results[False][1].max() < unigram - 0.2
