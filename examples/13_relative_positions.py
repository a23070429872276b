"""
# Relative positions: train short, test long

Shaw (2018, arXiv:1803.02155), T5 (arXiv:1910.10683), RoPE (arXiv:2104.09864) and ALiBi (arXiv:2108.12409) tell
attention how far apart two tokens are; sinusoidal positions tell each token where it stands. Press et al. asked what
happens on texts longer than in training. Here five small models read 64 characters in training, and 512 in the test.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import regard as rg

torch.manual_seed(0)

# %%
# The law that makes a position relative: move all queries and keys by 1,000 places and no weight changes. Waves that
# are added break it, since the products of waves with contents remain.
q, k = torch.randn(2, 1, 4, 32, 16, dtype=torch.float64)
moved = rg.Positions(1000, rg.Spans.of((1000, 1032)))
positions = {"sinusoidal": rg.Sinusoidal(), "RoPE": rg.RoPE(16)}
biases = {"ALiBi": rg.ALiBi(4), "T5": rg.T5Bias(4, bidirectional=False).double(), "Shaw": rg.ShawBias(16, 8).double()}
for name in (*positions, *biases):
    attention = rg.Attention(mask=rg.causal(), position=positions.get(name), bias=biases.get(name, ()))
    here, there = (rg.attend(attention, q, k, k, positions=p).weights.dense() for p in (None, moved))
    change = float((here - there).abs().max())
    print(f"{name:10}: 1,000 places on, weights change by {change:.1g}")
    assert change > 0.01 if name == "sinusoidal" else change < 1e-10

# %%
# Five decoders that differ in their positions alone: 2 layers, width 64, trained on English verses as bytes.
# `TransformerConfig` puts positions where they belong: waves on the embeddings, the others inside each self-attention.
# T5's
# buckets end at 32, since those for distances that training never shows would stay as random as they began.
verses = " ".join(pair.source for pair in rg.data.load_corpus("bible-en-fr").train)
text = torch.from_numpy(np.frombuffer(verses.encode("ascii", "ignore"), np.uint8).astype(np.int64))
train, test = text[:-100_000], text[-100_000:]
variants = {
    "sinusoidal": {},
    "RoPE": {"positions": "rope"},
    "ALiBi": {"positions": "alibi"},
    "T5": {"positions": "none", "attention": {"name": "t5", "max_distance": 32}},
    "Shaw": {"positions": "none", "attention": {"name": "shaw", "reach": 16}},
}


def losses(model, source, count, length):
    ids = source[torch.randint(len(source) - length, (count, 1)) + torch.arange(length + 1)]
    return nn.functional.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none")


by_place = {}
for name, options in variants.items():
    torch.manual_seed(1)
    model = nn.Sequential(
        rg.nn.TransformerConfig(64, **options).decoder(2, vocabulary=128, cross=False), nn.Linear(64, 128)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(240):
        optimizer.zero_grad()
        losses(model, train, 16, 64).mean().backward()
        optimizer.step()
    with torch.no_grad():
        torch.manual_seed(2)
        by_place[name] = losses(model, test, 16, 512).mean(0).view(-1, 32).mean(1)

# %%
# Loss in nats a character, inside the length of training and at the end of 512. ALiBi, T5 and Shaw read on as before:
# ALiBi leaves far keys next to nothing, to the others they are like the farthest they know. Waves fail at once. RoPE
# fails a little later: to be relative is not enough, since it turns far pairs by angles that training never showed.
# (T5 begins with biases drawn at random, and has learned least after so few steps.)
for name, curve in by_place.items():
    print(f"{name:10}: places 32 to 63 {curve[1]:.2f}, 64 to 127 {curve[2:4].mean():.2f}, 480 to 511 {curve[-1]:.2f}")
rise = {name: float(curve[-4:].mean() - curve[1]) for name, curve in by_place.items()}
assert max(rise["ALiBi"], rise["T5"], rise["Shaw"]) < 0.2 < 0.3 < min(rise["sinusoidal"], rise["RoPE"])
colours = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7")
for (name, curve), colour, marker in zip(by_place.items(), colours, "osv^D", strict=True):
    plt.plot(torch.arange(16) * 32 + 16, curve, color=colour, marker=marker, markersize=5, label=name)
plt.axvline(64, color="black", linestyle=":")
plt.gca().set(xlabel="place in the text", ylabel="loss, nats a character", title="trained on 64 characters (dotted)")
plt.legend(ncols=3, framealpha=1, loc="upper right"), plt.ylim(top=max(map(max, by_place.values())) + 0.4), plt.show()
