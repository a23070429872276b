"""
# 1, 4, 8 and 16 heads at constant width

More heads of a smaller width add no parameters. They let one layer attend to several positions. But each head gets
narrower, and its width serves both to find a position and to carry its content (Vaswani et al. 2017,
arXiv:1706.03762, table 3A: one head and very many heads are both worse; Bhojanapalli et al. 2020, arXiv:2002.07028).
Here one layer learns a task that needs four positions at once, with three seeds. It shows both effects.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import regard as rg

width, length, symbols, steps, offsets = 32, 16, 8, 225, (1, 2, 4, 8)
heads, seeds, colors = (1, 4, 8, 16), (1, 2, 3), ("#999999", "#0072B2", "#E69F00", "#D55E00")

# %%
# "Eight heads cost the same as one." This is exactly true of parameters, and nearly true of operations: the softmax of
# more scores adds a few. It is false for the memory of scores: an engine that stores them needs a matrix for each head.
n, costs = 1024, {}
for H in heads:
    module = rg.nn.MultiHeadAttention(512, H)
    q = torch.zeros(1, H, n, 512 // H)
    cost = rg.plan(q, q, q, attention=rg.Attention(), engine="dense").cost
    costs[H] = sum(p.numel() for p in module.parameters()), cost.flops, cost.pairs * 4
    print(f"width 512, {H:2} heads: {costs[H][0]:,} parameters, {costs[H][1] / 1e9:.3f} billion operations on scores")
    print(f"    and values of {n:,} tokens, {costs[H][2] / 2**20:.0f} MiB of scores")
    assert costs[H] == (4 * 512 * 513, n * n * (4 * 512 + 4 * H), 4 * H * n * n)


# %%
# The task: 16 random symbols. The layer must name the symbols 1, 2, 4 and 8 positions before. Model, data and steps
# are equal; only the number of heads differs. Every batch is new, so a model has not seen the texts that it answers.
def train(H, seed):
    torch.manual_seed(seed)
    encoder = rg.nn.TransformerConfig(width, H).encoder(1, vocab_size=symbols)
    model = nn.Sequential(encoder, nn.Linear(width, 4 * symbols), nn.Unflatten(-1, (4, symbols)))
    optimizer, right = torch.optim.Adam(model.parameters(), lr=0.01, fused=True), []
    for _ in range(steps):
        ids = torch.randint(symbols, (16, length))
        answer, logits = torch.stack([ids.roll(n, 1) for n in offsets], -1)[:, 8:], model(ids)[:, 8:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 2), answer.flatten())
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        right.append((logits.argmax(-1) == answer).double().mean((0, 1)))
    return model, 100 * torch.stack(right).unflatten(0, (-1, 25)).mean(1)  # % right in 25 steps, (steps / 25, offsets)


curves, maps = {}, {}
for H in heads:
    models, runs = zip(*(train(H, seed) for seed in seeds), strict=True)
    curves[H] = torch.stack(runs).mean(-1)  # (seeds, steps / 25)
    found = [int((run[-1] > 60).sum()) for run in runs]
    print(f"{H:2} heads of width {width // H:2}: positions found in seeds {seeds}: {found}; % right", end="")
    for step in (175, steps):
        seen = curves[H][:, step // 25 - 1]
        print(f", step {step}: {seen.min():.0f} to {seen.max():.0f}", end="\n" if step == steps else "")
    with torch.no_grad(), rg.watch(models[0]) as seen:
        models[0](torch.randint(symbols, (100, length)))
    maps[H] = seen[0].summarize(rg.stats.Offsets())[0].mean(0)[:, :9] / (length - torch.arange(9))  # 0 to 8 back

# %%
# The line is the mean of three seeds, the band their range. One head is not limited to one position: it mixes two with
# unequal weights. Four heads miss a position if two of them take the same one. Eight find three or four. So do sixteen
# of width 2, but they start slowly. A harder task or more steps change the order (docs/claims.md, row 54).
last, at_175 = {H: runs[:, -1] for H, runs in curves.items()}, {H: runs[:, 6].mean() for H, runs in curves.items()}
assert min(last[8].min(), last[16].min()) > last[1].max() + 10 and at_175[8] > at_175[16] + 5
figure, (left, four, eight) = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained", width_ratios=(2, 1, 1))
for (H, runs), color in zip(curves.items(), colors, strict=True):
    middle = torch.arange(runs.shape[1]) * 25 + 12.5
    left.fill_between(middle, runs.min(0).values, runs.max(0).values, color=color, alpha=0.3, linewidth=0)
    left.plot(middle, runs.mean(0), color=color, label=f"{H} heads" if H > 1 else "1 head")
left.axhline(100 / symbols, color="black", linestyle=":")
left.set(xlabel="step", ylabel="% right (dotted: chance)", title="one layer of width 32, three seeds", ylim=(0, 105))
left.legend()
for H, axes in ((4, four), (8, eight)):
    rg.heatmap(maps[H].flip(1), title=f"{H} heads, seed 1", axes=axes, colorbar=H == 8)
    axes.set(xlabel="positions back", ylabel="head", aspect="auto")
rg.drawing.show_or_save("16_number_of_heads.png")
