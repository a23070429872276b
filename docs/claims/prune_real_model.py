"""How many heads of MiniLM can be removed? It embeds the halves of verses; three draws of verses.

Two measures, of which the second needs no whole model: the rank correlation (Spearman) of the cosines of all pairs
with those of the whole model, and how often the second half of the same verse is nearest to the first.
"""

import random

import torch
from torch.nn import functional as F

import regard as rg
from regard.hf.models import load_model

torch.set_num_threads(1)
model, tokenizer = load_model("minilm")
verses = [pair.source for pair in rg.lab.data.load_corpus("bible-en-fr").train if len(pair.source.split()) >= 12]


def cosines(model, batch):
    """Cosines of all first halves with all second halves."""
    words = [verse.split() for verse in batch]
    halves = [" ".join(w[: len(w) // 2]) for w in words] + [" ".join(w[len(w) // 2 :]) for w in words]
    inputs = tokenizer(halves, return_tensors="pt", padding=True)
    real = inputs.attention_mask[..., None]
    embedded = F.normalize((model(**inputs).last_hidden_state * real).sum(1) / real.sum(1), dim=-1)
    first, second = embedded.chunk(2)
    return first @ second.mT


def loss(model, batch):
    """Cross-entropy of the right second half among those of the batch."""
    return F.cross_entropy(20 * cosines(model, batch), torch.arange(len(batch)))


def spearman(a, b):
    ranks = torch.stack([x.flatten().argsort().argsort().double() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


results = {}
for seed in (0, 1, 2):
    drawn = random.Random(seed).sample(verses, 160)
    importance = rg.importance(model, loss, [drawn[n : n + 16] for n in range(0, 96, 16)])
    every = importance.least(72)
    orders = {"least important": every, "random": random.Random(seed).sample(every, len(every))}
    with torch.no_grad():
        whole = cosines(model, drawn[96:])
        found = float((whole.argmax(1) == torch.arange(64)).double().mean())
        print(f"draw {seed}: the right half is found in {found:.0%}")
        for order, heads in orders.items():
            for share in (0.2, 0.3):
                pruned = cosines(rg.prune(model, heads[: round(72 * share)], copy=True).model, drawn[96:])
                now = float((pruned.argmax(1) == torch.arange(64)).double().mean())
                results.setdefault((order, share), []).append(spearman(whole, pruned))
                print(f"  without {share:.0%} of heads, {order}:", end=" ")
                print(f"Spearman {results[order, share][-1]:.3f}; found {now:.0%}")
for (order, share), values in results.items():
    print(f"{order}, {share:.0%}: {min(values):.2f} to {max(values):.2f}")
assert min(results["least important", 0.2]) > 0.94 and min(results["least important", 0.3]) > 0.9
