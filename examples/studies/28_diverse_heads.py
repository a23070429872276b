"""
# Heads made diverse: similarity as a loss

One layer must name the symbols 1, 2, 4 and 8 positions before, with four heads (example 16). If two heads take the
same position, another is missed. Li et al. 2018 (arXiv:1810.10183) add a term to the loss that makes heads disagree.
Here the term is the cosine between the maps of every two heads. With `rg.watch(model, grad=True)` weights have
gradients, so the statistic `similarity()` is a loss.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import regard as rg

width, length, symbols, steps, heads, offsets, seeds = 32, 16, 8, 300, 4, (1, 2, 4, 8), (1, 2, 3)
others = ~torch.eye(heads, dtype=torch.bool)


def answers(ids):
    return torch.stack([ids.roll(n, 1) for n in offsets], -1)[:, 8:]


# %%
# The same data, model and steps, with and without the term. It grows in the first half of the training: at the start
# all heads are nearly uniform, hence alike, and a strong term would make them sharp before they know where to look.
def train(seed, strength):
    torch.manual_seed(seed)
    encoder = rg.nn.TransformerConfig(width, heads).encoder(1, vocab_size=symbols)
    model = nn.Sequential(encoder, nn.Linear(width, 4 * symbols), nn.Unflatten(-1, (4, symbols)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for step in range(steps):
        ids = torch.randint(symbols, (16, length))
        with rg.watch(model, verify=False, grad=True) as seen:
            logits = model(ids)[:, 8:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 2), answers(ids).flatten())
        if strength:
            similarity = seen[0].similarity()[:, others].mean()
            loss = loss + strength * min(1.0, 2 * step / steps) * similarity
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    ids = torch.randint(symbols, (200, length))
    with torch.no_grad(), rg.watch(model) as seen:
        right = 100 * (model(ids)[:, 8:].argmax(-1) == answers(ids)).double().mean()
    back = seen[0].summarize(rg.stats.Offsets(-8, 0))[0].mean(0) / (length - torch.arange(8, -1, -1))  # 8 to 0 back
    return float(seen[0].similarity()[:, others].mean()), float(right), back


results = {}
for strength in (0.0, 0.2):
    results[strength] = [train(seed, strength) for seed in seeds]
    for seed, (similarity, right, _) in zip(seeds, results[strength], strict=True):
        print(f"strength {strength}, seed {seed}: similarity of two heads {similarity:.2f}, {right:.0f} % right")

# %%
# Heads become less alike in every seed, and the answers better on average: a head that had copied another one looks
# elsewhere. The term does not say where to look. With strength 1 from the first step the same model learns little.
plain, diverse = (torch.tensor([run[:2] for run in results[strength]]) for strength in results)
assert (diverse[:, 0] < plain[:, 0] / 2).all() and diverse[:, 1].mean() > plain[:, 1].mean() + 5
figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
for axes, (strength, runs) in zip(panels, results.items(), strict=True):
    similarity, right, back = runs[1]
    rg.heatmap(back, axes=axes, colorbar=False)
    axes.set(xlabel="positions back", ylabel="head", yticks=range(heads), xticks=range(9), xticklabels=range(8, -1, -1))
    axes.set_title(f"strength {strength}, seed 2: similarity {similarity:.2f}, {right:.0f} % right", fontsize=9)
figure.colorbar(axes.images[0], ax=panels, label="mean weight, square root scale", shrink=0.8)
rg.drawing.show_or_save("28_diverse_heads.png")
