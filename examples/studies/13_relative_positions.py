"""
# Relative positions: train short, test long

Shaw (2018, arXiv:1803.02155), T5 (arXiv:1910.10683), RoPE (arXiv:2104.09864) and ALiBi (arXiv:2108.12409) use the
distance of two tokens; sinusoidal positions give each token its own position. Press et al. asked how models read
texts longer than in training. Here five small models read 64 characters in training, and 512 in the test.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import regard as rg

torch.manual_seed(0)

# %%
# The law of a relative position: if queries and keys move by 1,000 positions, no weight changes. Sinusoids break it.
q, k = torch.randn(2, 1, 4, 32, 16, dtype=torch.float64)
shifted = rg.types.Positions(1000, rg.types.Spans.of((1000, 1032)))
positions = {"sinusoidal": rg.encodings.Sinusoidal(), "RoPE": rg.RoPE(16)}
biases = {"ALiBi": rg.ALiBi(4), "T5": rg.biases.T5Bias(4, bidirectional=False).double()}
biases["Shaw"] = rg.biases.ShawBias(16, 8).double()
for name in (*positions, *biases):
    attention = rg.Attention(mask=rg.causal(), position=positions.get(name), bias=biases.get(name, ()))
    here, there = (attention(q, k, k, positions=p).weights.dense() for p in (None, shifted))
    change = float((here - there).abs().max())
    print(f"{name:10}: moved by 1,000 positions, weights change by {change:.1g}")
    assert change > 0.01 if name == "sinusoidal" else change < 1e-10

# %%
# Five decoders that differ only in their positions: 2 layers, width 64, trained on English verses as bytes.
# `TransformerConfig` adds sinusoids to the embeddings and uses the others inside each self-attention. T5's buckets
# end at 32, because training would never change those for larger distances.
verses = " ".join(pair.source for pair in rg.lab.data.load_corpus("bible-en-fr").train)
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


curves = {}
for name, options in variants.items():
    torch.manual_seed(1)
    decoder = rg.nn.TransformerConfig(64, **options).decoder(2, vocab_size=128, cross=False)
    model = nn.Sequential(decoder, nn.Linear(64, 128))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(240):
        optimizer.zero_grad()
        losses(model, train, 16, 64).mean().backward()
        optimizer.step()
    with torch.no_grad():
        torch.manual_seed(2)
        curves[name] = losses(model, test, 16, 512).mean(0).view(-1, 32).mean(1)

# %%
# Loss in nats a character, within the training length and at the end of 512. ALiBi, T5 and Shaw stay the same: ALiBi
# gives far keys almost no weight, the others treat them like the farthest known key. Sinusoids fail at once. RoPE
# fails a little later: far pairs get angles that never occurred in training. (T5 starts at random, and learned least.)
for name, curve in curves.items():
    print(f"{name:10}: loss at 32 to 63 {curve[1]:.2f}, 64 to 127 {curve[2:4].mean():.2f}, 480 to 511 {curve[-1]:.2f}")
rise = {name: float(curve[-4:].mean() - curve[1]) for name, curve in curves.items()}
assert max(rise["ALiBi"], rise["T5"], rise["Shaw"]) < 0.2 < 0.3 < min(rise["sinusoidal"], rise["RoPE"])
colors = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7")
for (name, curve), color, marker in zip(curves.items(), colors, "osv^D", strict=True):
    plt.plot(torch.arange(16) * 32 + 16, curve, color=color, marker=marker, markersize=5, label=name)
plt.axvline(64, color="black", linestyle=":"), plt.legend(ncols=3, framealpha=1, loc="upper right")
plt.gca().set(xlabel="position in the text", ylabel="loss, nats a character", title="trained on 64 characters (dotted)")
plt.ylim(top=max(map(max, curves.values())) + 0.4), rg.drawing.show_or_save("13_relative_positions.png")
