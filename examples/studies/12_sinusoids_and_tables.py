"""
# Sinusoidal and learned positions

A position becomes a vector of sines and cosines with wavelengths from 2 pi to 10,000 x 2 pi (Vaswani et al. 2017,
arXiv:1706.03762, section 3.5), or a row of a learned table (Gehring et al. 2017, arXiv:1705.03122). Here we check the
laws of the sinusoids, correct two common mistakes, and show the table of a real model.
"""

import math

import matplotlib.pyplot as plt
import torch

import regard as rg
from regard.hf.models import load_model

torch.manual_seed(0)
width, base = 64, 10_000.0
waves = rg.encodings.Sinusoidal().table(torch.arange(512), width, torch.float64)
# %%
# The formula, by hand: channel 2m is sin(position / 10000^(2m / D)), channel 2m + 1 its cosine.
by_hand = [[(math.sin, math.cos)[c % 2](p / base ** (2 * (c // 2) / width)) for c in range(width)] for p in (0, 1, 100)]
assert torch.allclose(waves[[0, 1, 100]], torch.tensor(by_hand, dtype=torch.float64), atol=1e-12)

# %%
# Three laws. Every vector has length sqrt(D / 2). The product of two vectors depends only on their distance. A shift
# by 7 positions is one rotation, the same everywhere, and it is the rotation of RoPE.
assert torch.allclose(waves.norm(dim=1), torch.full((512,), math.sqrt(width / 2), dtype=torch.float64))
products = waves @ waves.T
assert torch.allclose(products[:-1, :-1], products[1:, 1:], atol=1e-9)
shifted_by_7 = rg.RoPE(width, interleaved=True).encode(waves[None, None, 7:], torch.tensor([7]))[0, 0]
assert torch.allclose(shifted_by_7, waves[:-7], atol=1e-9)
distances = torch.cdist(waves, waves).fill_diagonal_(torch.inf)
print(f"distance 1 to 2: {distances[1, 2]:.2f}, 1 to 100: {distances[1, 100]:.2f}, smallest: {distances.min():.2f}")
assert distances.min() > 1 and distances[1, 100] > 3 * distances[1, 2]

# %%
# "Low channels are the slow waves" is false: they are the fast waves. The wavelength of pair m is 2 pi 10000^(2m / D).
turns = (waves[1:, 0::2] * waves[:-1, 0::2] < 0).sum(0)
print(f"sign changes over 512 positions: channel 0 {int(turns[0])}, channel 32 {int(turns[16])}, 62 {int(turns[-1])}")
assert turns[0] > 150 and (turns.diff() <= 0).all() and turns[-1] == 0

# %%
# A widely copied snippet computes 10000^(2i / D) with i = 0, 2, 4 ..., which is already even. This squares the base:
# some waves have hundreds of millions of positions, and half of all channels hardly change over 512 tokens.
even = torch.arange(0, width, 2, dtype=torch.float64)
snippet = torch.arange(512)[:, None] * base ** (-2 * even / width)
right = torch.arange(512)[:, None] * base ** (-even / width)
still = [int((angles[-1] < 0.1).sum()) for angles in (right, snippet)]
longest = [2 * math.pi * 511 / float(angles[-1, -1]) for angles in (right, snippet)]
print(f"pairs that rotate by less than 0.1 over 512 positions: {still[0]} of 32, in the snippet {still[1]}")
print(f"longest wavelength: {longest[0]:,.0f} positions, in the snippet {longest[1]:,.0f}")
assert still[1] > 3 * max(still[0], 1) and longest[1] > 5000 * longest[0]

# %%
# A learned table starts as noise. In the table of MiniLM (512 rows, from BERT) neighbors have become similar. A
# table ends. Sinusoids do not end, but that does not mean that a model can use them beyond its training (example 13).
learned = load_model("minilm")[0].embeddings.position_embeddings.weight.detach()
fresh = rg.encodings.LearnedPositions(512, 384).table.detach()
normalized = [torch.nn.functional.normalize(table - table.mean(0), dim=1) for table in (fresh, learned)]
(start_1, start_100), (learned_1, learned_100) = ([(t @ t.T).diagonal(n).mean() for n in (1, 100)] for t in normalized)
print(f"cosine of rows 1, 100 apart: noise {start_1:.2f}, {start_100:.2f}; MiniLM {learned_1:.2f}, {learned_100:.2f}")
assert max(abs(start_1), abs(start_100)) < 0.05 and learned_1 > learned_100 + 0.2
try:
    rg.Attention(position=rg.encodings.LearnedPositions(512, 8))(*torch.randn(3, 1, 1, 513, 8))
except rg.RegardError as error:
    print(error)
figure, axes = plt.subplots(2, 2, figsize=(9, 6.6), layout="constrained")
rg.heatmap(waves[:128], kind="position", title="sinusoidal: low channels are the fast ones", axes=axes[0, 0])
for channel, color in ((0, "#999999"), (16, "#D55E00"), (32, "#0072B2"), (62, "#000000")):
    axes[0, 1].plot(waves[:64, channel], color=color, label=f"channel {channel}")
axes[0, 1].set(xlabel="position", ylabel="value", title="four of the waves", ylim=(-2, 1.1))
axes[0, 1].legend(fontsize=8, ncols=2, loc="lower center")
cosines = {"sinusoidal": products / 32, "MiniLM, learned": normalized[1] @ normalized[1].T}
for cell, (title, values) in zip(axes[1], cosines.items(), strict=True):
    rg.heatmap(values[:128, :128], kind="score", vmax=1.0, title=f"cosine of positions: {title}", axes=cell)
    cell.set(xlabel="position", ylabel="position"), cell.images[0].colorbar.set_label("cosine")
rg.drawing.show_or_save("12_sinusoids_and_tables.png")
