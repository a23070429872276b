"""
# Scaled dot-product attention from scratch

softmax(Q Kᵀ / sqrt(d)) V is three lines of NumPy (Vaswani et al. 2017, arXiv:1706.03762, equation 1). Here four
queries of width 8 attend to six keys and values. Every number is compared with `rg.attend`, which computes the same
without storing the weights, and with PyTorch's own implementation.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn import functional as F

import regard as rg

rng = np.random.default_rng(0)
q, k, v = rng.normal(size=(4, 8)), rng.normal(size=(6, 8)), rng.normal(size=(6, 8))


# %%
# First come the scores: one dot product for each query and key, divided by sqrt(8). Then comes a softmax over each
# row. The largest score of the row is subtracted first: this changes no weight, and without it exp overflows.
def softmax(scores):
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


scores = q @ k.T / np.sqrt(8)
weights = softmax(scores)
output = weights @ v
print("scores", scores.shape, "weights", weights.shape, "output", output.shape)
print("weights of query 0:", weights[0].round(3), "their sum:", weights[0].sum().round(12))
assert scores.shape == weights.shape == (4, 6) and output.shape == (4, 8)
assert np.allclose(weights.sum(-1), 1) and (weights > 0).all()

# %%
# One entry by hand, with loops alone, so that no mistake in a matrix convention can hide.
powers = [np.exp(sum(q[2, c] * k[j, c] for c in range(8)) / 8**0.5) for j in range(6)]
by_hand = sum(powers[j] / sum(powers) * v[j, 5] for j in range(6))
print(f"output[2, 5] by loops {by_hand:.12f}, by matrices {output[2, 5]:.12f}")
assert np.isclose(by_hand, output[2, 5], rtol=1e-12)

# %%
# `attend` takes tensors (batch, heads, length, width). `weights` is a map: it computes one weight, a row, or all of
# them when you read them. Inputs in double precision give outputs in double precision.
Q, K, V = (torch.tensor(x)[None, None] for x in (q, k, v))
seen = rg.Attention()(Q, K, V)
theirs = F.scaled_dot_product_attention(Q, K, V)
pairs = {"attend": (seen.output, output), "its weights": (seen.weights.dense(), weights), "PyTorch": (theirs, output)}
for name, (actual, expected) in pairs.items():
    print(f"largest difference to {name}: {np.abs(actual[0, 0].numpy() - expected).max():.1e}")
    assert np.allclose(actual[0, 0], expected, atol=1e-12)

# %%
# Every engine of Regard gives these numbers. `reference` is a separate definition in NumPy.
for engine in ("reference", "dense", "fused", "blocked"):
    assert np.allclose(rg.Attention()(Q, K, V, engine=engine).output[0, 0], output, atol=1e-12)

# %%
# Two common mistakes. If the largest score is not subtracted, exp overflows at scores of 1,000 and the weights are
# NaN. A softmax over the wrong axis also gives numbers between 0 and 1, but its rows do not sum to 1.
large = scores * 1000 / scores.max()
with np.errstate(over="ignore", invalid="ignore"):
    naive = np.exp(large) / np.exp(large).sum(-1, keepdims=True)
print("weights that are NaN if the largest score is not subtracted:", np.isnan(naive).sum(), "of", naive.size)
assert np.isnan(naive).any() and np.isfinite(softmax(large)).all()
wrong = softmax(scores.T).T
print("row sums of a softmax over the wrong axis:", wrong.sum(-1).round(2))
assert not np.allclose(wrong.sum(-1), 1) and np.allclose(wrong.sum(0), 1)

# %%
# The three matrices, from queries to outputs.
figure, axes = plt.subplots(1, 3, figsize=(10, 2.4), layout="constrained")
for ax, title, matrix in zip(axes, ("scores", "weights", "output"), (scores, weights, output), strict=True):
    rg.heatmap(matrix, kind="weight" if title == "weights" else "score", title=title, axes=ax)
axes[2].set(xlabel="channel"), axes[2].images[0].colorbar.set_label("output")
rg.drawing.show_or_save("03_scaled_dot_product.png")
