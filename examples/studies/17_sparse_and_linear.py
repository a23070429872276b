"""
# Local, sparse, linear and Performer attention against full attention

Full attention scores all n^2 pairs. A window scores few of them. Longformer (Beltagy et al. 2020, arXiv:2004.05150)
and BigBird (Zaheer et al. 2020, arXiv:2007.14062) add global tokens and random blocks. Linear attention
(Katharopoulos et al. 2020, arXiv:2006.16236) and the Performer (Choromanski et al. 2021, arXiv:2009.14794) score no
pairs. We measure memory, time by length, and accuracy in a task that needs attention to one far token.
"""

from functools import partial
from time import process_time
from timeit import repeat

import matplotlib.pyplot as plt
import torch

import regard as rg

torch.manual_seed(0)
N = 8192
built = {
    "full": rg.Attention(),
    "window": rg.mechanism("sliding_window").build(size=129, is_causal=False),
    "longformer": rg.mechanism("longformer").build(size=129),
    "bigbird": rg.mechanism("bigbird").build(length=N),
    "linear": rg.mechanism("linear").build(is_causal=False),
    "performer": rg.mechanism("performer").build(head_dim=64, num_features=128),
}

# %%
# Memory and processor time of 4 heads of width 64 by length. `explain` returns the memory besides inputs and output.
# The matrix of all pairs would take 1 GiB at 8,192 tokens; here not even full attention stores it.
lengths, took = [N // 8, N // 4, N // 2, N], {name: [] for name in built}
for name, attention in built.items():
    for n in lengths:
        run = partial(attention, *(qkv := torch.randn(3, 1, 4, n, 64)))
        took[name].append(1e3 * min(repeat(run, timer=process_time, repeat=2, number=1)))
    cost, (_, quarter, _, whole) = rg.plan(*qkv, attention=attention).cost, took[name]
    print(f"{name:10} {cost.pairs / 4 / N**2:6.1%} of pairs, {cost.bytes / 2**20:4.1f} MiB, {whole:5.0f} ms,", end=" ")
    print(f"{whole / quarter:4.1f} x as long as at n = {N // 4:,}")
    assert whole > 10 * quarter if name == "full" else whole < min(8 * quarter, 0.7 * took["full"][-1])
    assert cost.bytes < 2**30 / 8

# %%
# How close is the Performer to softmax? Half the sum of |w - w'| in a row: 0 for equal rows, 1 for rows with nothing
# in common. Four times as many features halve the error of small scores. It cannot imitate large scores.
for size in (0.5, 1.0, 2.0):
    q, k = size * torch.randn(2, 1, 4, 256, 32)
    exact = rg.Attention()(q, k, k).weights.dense()
    drawn = [rg.mechanism("performer").build(head_dim=32, num_features=m) for m in (16, 64, 256, 1024)]
    off = [float((a(q, k, k).weights.dense() - exact).abs().sum(-1).mean()) / 2 for a in drawn]
    print(f"scores of deviation {size**2:4.2f}: {', '.join(f'{x:.3f}' for x in off)} with 16, 64, 256, 1,024 features")
    assert 0.35 < off[-1] / off[-2] < 0.65 if size == 0.5 else off[-1] > 0.3

# %%
# Accuracy: one layer learns to name, at each of 64 positions, the token 32 positions further (cyclically). Full
# attention attends to it. A window of 8 cannot, nor with a global token; BigBird can if a random block contains it.
# Linear attention and the Performer use all tokens, less sharply, and learn later.
right = {}
for name in built:
    torch.manual_seed(0)
    plan = rg.nn.TransformerConfig(64, num_heads=2, attention="sliding_window" if name == "window" else name)
    model = torch.nn.Sequential(plan.encoder(1, vocab_size=16), torch.nn.Linear(64, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for _ in range(250):
        scores = model(x := torch.randint(16, (8, 64)))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(scores.mT, x.roll(-32, 1)).backward()
        optimizer.step()
    right[name] = 100 * float((model(x := torch.randint(16, (64, 64))).argmax(-1) == x.roll(-32, 1)).float().mean())
    print(f"{name:10} {right[name]:5.1f} % right (chance {100 / 16:.1f} %)")
assert right["full"] > 95 and max(right["window"], right["longformer"]) < 20
figure, (left, side) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
colors = "#000000", "#0072B2", "#56B4E9", "#009E73", "#D55E00", "#CC79A7"
for (name, times), color, marker in zip(took.items(), colors, "osv^DP", strict=True):
    left.semilogy([f"{n:,}" for n in lengths], times, marker=marker, color=color, label=name)
side.barh(list(right), list(right.values()), color=colors)
left.set(title="Processor time of 4 heads", xlabel="length n (tokens)", ylabel="milliseconds")
side.set(title="Attention to one token 32 positions away", xlabel="% right after 250 steps (chance: 6 %)")
left.legend(fontsize=8), rg.drawing.show_or_save("17_sparse_and_linear.png")
