"""
# Scaled dot-product attention by hand

softmax(Q Kᵀ / sqrt(d)) V, the formula of Vaswani et al. (2017, arXiv:1706.03762), is four lines of PyTorch. Regard
computes the same output with a fast kernel, and its map gives the same weights.
"""

import matplotlib.pyplot as plt
import torch

import regard as rg

torch.manual_seed(0)
words = ["the", "cat", "sat", "on", "the", "mat"]
batch, heads, length, width = 1, 2, len(words), 8
q = torch.randn(batch, heads, length, width)
k = torch.randn(batch, heads, length, width)
v = torch.randn(batch, heads, length, width)

# %%
# By hand. The scores compare each query with each key. The softmax makes each row of scores a row of weights.
scores = q @ k.mT / width**0.5
weights = scores.softmax(dim=-1)
output = weights @ v
print("scores", tuple(scores.shape), "weights", tuple(weights.shape), "output", tuple(output.shape))

# %%
# With Regard. The kernel stores no weights; the map computes them from queries and keys when it is read.
attention = rg.Attention()
seen = attention(q, k, v)
print(seen.weights)
print("the weights of the first query:", seen.weights[0, 0, 0])

# %%
# Both are the same, to rounding.
assert torch.allclose(seen.output, output, atol=1e-6)
assert torch.allclose(seen.weights.dense(), weights, atol=1e-6)
assert torch.allclose(weights.sum(dim=-1), torch.ones(batch, heads, length))

# %%
# Scores and weights of the first head: a large score is a large weight, and each row of weights sums to 1.
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
rg.heatmap(scores[0, 0], words, kind="score", title="scores", axes=left)
rg.heatmap(seen.weights, words, head=0, title="weights", axes=right)
rg.drawing.show_or_save("scaled_dot_product.png")
