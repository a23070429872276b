"""
# 1, 4, 8 and 16 heads at constant width

More heads of a smaller width add no parameters. They let one layer attend to several positions. But each head gets
narrower, and its width serves both to find a position and to carry its content (Vaswani et al. 2017,
arXiv:1706.03762, table 3A: one head and very many heads are both worse; Bhojanapalli et al. 2020, arXiv:2002.07028).
Here one layer learns a task that needs four positions at once, which shows both effects.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import regard as rg

width, length, symbols, heads = 32, 32, 16, (1, 4, 8, 16)
offsets = (1, 2, 4, 8)

# %%
# "Eight heads cost the same as one." This is exactly true of parameters, and nearly true of operations: the softmax of
# more scores adds a few. It is false for the memory of scores: an engine that stores them needs a matrix for each head.
n, costs = 1024, {}
for H in heads:
    module = rg.nn.MultiHeadAttention(512, H)
    q = torch.zeros(1, H, n, 512 // H)
    cost = rg.explain(rg.Attention(), q, q, q, engine="dense").cost
    costs[H] = sum(p.numel() for p in module.parameters()), cost.flops, cost.pairs * 4
    print(f"width 512, {H:2} heads: {costs[H][0]:,} parameters, {costs[H][1] / 1e9:.3f} billion operations on scores")
    print(f"    and values of {n:,} tokens, {costs[H][2] / 2**20:.0f} MiB of scores")
    assert costs[H] == (4 * 512 * 513, n * n * (4 * 512 + 4 * H), 4 * H * n * n)


# %%
# The task: 32 random symbols. At each position the layer must name the symbols 1, 2, 4 and 8 positions before. Model,
# data and steps are equal; only the number of heads differs.
def batch_of(count):
    ids = torch.randint(symbols, (count, length))
    return ids, torch.stack([ids.roll(offset, 1) for offset in offsets], -1)


right, maps = {}, {}
for H in heads:
    torch.manual_seed(1)
    encoder = rg.nn.TransformerConfig(width, H).encoder(1, vocabulary=symbols)
    model = nn.Sequential(encoder, nn.Linear(width, 4 * symbols), nn.Unflatten(-1, (4, symbols)))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for _ in range(400):
        ids, answer = batch_of(32)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids)[:, 8:].flatten(0, 2), answer[:, 8:].flatten()).backward()
        optimizer.step()
    with torch.no_grad(), rg.watch(model) as seen:
        ids, answer = batch_of(200)
        right[H] = (model(ids)[:, 8:].argmax(-1) == answer[:, 8:]).double().mean((0, 1))
    maps[H] = seen[0].summarize(rg.Offsets())[0].mean(0)[:, :9] / length
    shares = ", ".join(f"{offset} back {share:.0%}" for offset, share in zip(offsets, right[H], strict=True))
    print(f"{H:2} heads of width {width // H:2}: {right[H].mean():.1%} right ({shares}; by chance {1 / symbols:.1%})")

# %%
# One head is not limited to one position: it mixes two with unequal weights and can separate them. Of four heads,
# each takes one of the four positions. Sixteen heads of width 2 are enough heads, but too narrow to find the
# positions, and learn slowly.
assert right[4].mean() > max(right[1].mean(), right[16].mean()) + 0.2
figure, (left, side) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for place, (H, colour) in enumerate(zip(heads, ("#999999", "#0072B2", "#E69F00", "#D55E00"), strict=True)):
    left.bar(torch.arange(4) + (place - 1.5) * 0.2, right[H], width=0.2, color=colour, label=str(H))
left.axhline(1 / symbols, color="black", linestyle=":")
left.set_xticks(range(4), [f"{offset} back" for offset in offsets])
left.set(ylabel="share of right answers (dotted: chance)", ylim=(0, 1.4), title="one layer of width 32, 400 steps")
left.legend(ncols=4, title="heads")
image = side.imshow(maps[4].flip(1), cmap="cividis", vmin=0, vmax=1, aspect="auto")
side.set(xlabel="positions back", ylabel="head", title="where the 4 heads attend", yticks=range(4))
figure.colorbar(image, ax=side, label="mean weight")
plt.show()
