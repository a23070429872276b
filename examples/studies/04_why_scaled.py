"""
# Why the scores are divided by the square root of d_k

The dot product of two random vectors of width d has variance d, so its size grows as sqrt(d). A softmax of large
scores puts all weight on one key (Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1). Here we measure widths 4 to
1,024, with and without the factor 1/sqrt(d): scores, largest weight, entropy and gradients. Two common claims do not
hold as they are taught: that weights become uniform without the factor (they do the opposite), and that all gradients
vanish.
"""

import math

import matplotlib.pyplot as plt
import torch

import regard as rg

torch.manual_seed(0)
widths, num_keys, num_queries = [2**n for n in range(2, 11)], 64, 2000


# %%
# For the weights w of one row, d w / d score is diag(w) - w wᵀ, which is 0 if one weight is 1. Multiplied with the
# keys and the factor, it is the derivative with respect to the query. PyTorch gives the same derivative.
def derivative(w):
    return w.diag_embed() - w[..., None] * w[..., None, :]


row = torch.randn(5)
assert torch.allclose(torch.autograd.functional.jacobian(lambda s: s.softmax(0), row), derivative(row.softmax(0)))

# %%
# 2,000 queries and 64 keys; all numbers are drawn from a normal distribution of variance 1.
table = {True: [], False: []}
for width in widths:
    q, k = torch.randn(1, 1, num_queries, width), torch.randn(1, 1, num_keys, width)
    for scaled in table:
        factor = width**-0.5 if scaled else 1.0
        weights = rg.Attention(rg.Dot(scale=factor))(q, k, k).weights
        sizes = [(q @ k.mT * factor).std(), weights[0, 0].amax(-1).mean(), weights.entropy().mean()]
        by_score = derivative(weights[0, 0])
        for gradient in (by_score, by_score @ k[0, 0] * factor):
            norms = gradient.flatten(1).norm(dim=1)
            sizes += [norms.median(), norms.mean()]
        table[scaled].append(torch.stack(sizes))
scaled, plain = (torch.stack(table[key]) for key in (True, False))
print("columns: d; scores; largest weight; entropy; |dw/ds| median, mean; |dw/dq| median, mean")
for name, rows in (("scaled", scaled), ("plain", plain)):
    for width, numbers in zip(widths, rows.tolist(), strict=True):
        print(f"{name:6} {width:5}", *(f"{number:8.2g}" for number in numbers))

# %%
# Scores grow as sqrt(d), and the factor keeps them at 1. The entropy is then that of a softmax of normal scores,
# about log n - 1/2 for many keys, at every width. Without the factor, at d = 256, the weights are nearly one-hot; a
# uniform row would have entropy 4.16.
assert torch.allclose(plain[:, 0] / torch.tensor(widths).sqrt(), torch.ones(len(widths)), atol=0.15)
assert torch.allclose(scaled[:, 0], torch.ones(len(widths)), atol=0.15)
assert (scaled[2:, 2] - (math.log(num_keys) - 0.5)).abs().max() < 0.1
assert plain[widths.index(256), 2] < 0.1 * math.log(num_keys) and plain[-1, 1] > 0.9 and scaled[-1, 1] < 0.15

# %%
# The gradients with respect to the scores vanish late, and only for most rows. At d = 64, the width of the paper's
# heads, the median is as large as with the factor. At 1,024 it is hundreds of times smaller, but the mean falls
# slowly, because a few rows have two nearly equal scores. The mean gradient with respect to the query does not fall
# at all.
assert 0.7 < plain[widths.index(64), 3] / scaled[widths.index(64), 3] < 1.4
assert plain[-1, 3] < 1e-2 * scaled[-1, 3] and plain[-1, 4] > 50 * plain[-1, 3]
assert plain[-1, 5] < 0.2 * scaled[-1, 5] and plain[-1, 6] > 5 * scaled[-1, 6]

# %%
# Blue with the factor, orange without.
titles = "scores: standard deviation", "largest weight: mean", "entropy (nats): mean", "|dw/ds|: median, mean dashed"
figure, axes = plt.subplots(2, 2, figsize=(7.5, 5.4), layout="constrained", sharex=True)
for rows, color, label in ((scaled, "#0072B2", "scores / sqrt(d)"), (plain, "#E69F00", "scores, not divided")):
    for column, (ax, title) in enumerate(zip(axes.flat, titles, strict=True)):
        ax.plot(widths, rows[:, column], "o-", ms=4, color=color, label=label)
        ax.set(title=title, xscale="log", yscale="log" if column in (0, 3) else "linear")
    axes[1, 1].plot(widths, rows[:, 4], "o--", ms=4, color=color)
axes[0, 0].legend(), figure.supxlabel("width d")
rg.drawing.show_or_save("04_why_scaled.png")
