"""
# Recurrence and attention: path, sequential operations, cost

"Attention is all you need" (Vaswani et al. 2017, arXiv:1706.03762, table 1) compares layers by the path between two
positions, the number of sequential operations, and the number of all operations: n d^2 for a recurrent layer, n^2 d
for attention, which is less while n < d. We measure this on a GRU and on self-attention with its projections. The
last claim is true of operation counts, because of the constant factors, but not of measured time.
"""

from functools import cache, partial
from time import process_time
from timeit import repeat

import matplotlib.pyplot as plt
import torch
from torch.utils.flop_counter import FlopCounterMode

import regard as rg

torch.manual_seed(0)
torch.set_num_threads(1)
WIDTH = 128
gru, attention = torch.nn.GRU(WIDTH, WIDTH, batch_first=True), rg.nn.MultiHeadAttention(WIDTH, num_heads=4)
layers = {"GRU": lambda x: gru(x)[0], "attention": lambda x: attention(x).output}

# %%
# Path, before training: the gradient of the last output with respect to the first input, divided by that of the
# middle input. A recurrent layer loses some of it at every step. In attention both have the same size at any
# distance.
distances, gradients = [4, 8, 16, 32, 64], {name: [] for name in layers}
for name, layer in layers.items():
    for n in distances:
        x = torch.randn(64, n, WIDTH, requires_grad=True)
        gradient = torch.autograd.grad(layer(x)[:, -1].square().sum(), x)[0].norm(dim=-1).mean(0)
        gradients[name].append(float(gradient[0] / gradient[n // 2 - 1]))
    print(f"{name:9} gradient of the first input / of the middle one:", *(f"{ratio:.1e}" for ratio in gradients[name]))
assert gradients["GRU"][-1] < 1e-4 and all(0.25 < ratio < 4 for ratio in gradients["attention"])

# %%
# Sequential operations: the longest chain of operations that autograd recorded. "O(1)" is true of this graph. But a
# sum over n keys inside one operation is itself a tree of depth log2(n).
depth = cache(lambda node: 1 + max((depth(before) for before, _ in node.next_functions if before), default=0))
chains = {name: [depth(layers[name](torch.randn(1, n, WIDTH)).grad_fn) for n in (4, 8, 16)] for name in layers}
print("sequential operations for n = 4, 8, 16:", chains)
assert len(set(chains["attention"])) == 1 and chains["GRU"][2] - chains["GRU"][1] >= 8

# %%
# Cost, counted by PyTorch. A GRU has 6 matrices, 12 n d^2 operations. Attention has 4 projections and two products of
# pairs, 8 n d^2 + 4 n^2 d. So both are equal at n = d, because of the cost of the projections. For an LSTM (16 n d^2)
# they are equal at 2 d, for a plain RNN (4 n d^2) never. Without the projections they are equal at 3 d.
dense = partial(rg.attend, engine="dense")  # fused kernels are not counted
for n in (WIDTH // 2, WIDTH, 4 * WIDTH):
    x, heads, counted = torch.randn(1, n, WIDTH), torch.randn(1, 4, n, WIDTH // 4), []
    for run in (partial(gru, x), partial(attention.query, x), partial(dense, heads, heads, heads)):
        with FlopCounterMode(display=False) as counter:
            run()
        counted.append(counter.get_total_flops())
    print(f"n = {n:3} operations: GRU {counted[0]:,}, attention {4 * counted[1] + counted[2]:,}")
    assert counted == [12 * n * WIDTH**2, 2 * n * WIDTH**2, 4 * n**2 * WIDTH]

# %%
# Cost, measured in one thread. Every step of a GRU waits for the one before, so it does not use the whole processor.
# With equal operations, at n = d, attention is faster; it is slower only at lengths many times d.
lengths, took = [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192], {name: [] for name in layers}
for name, n in ((name, n) for name in layers for n in lengths):
    run = torch.no_grad()(partial(layers[name], torch.randn(1, n, WIDTH)))
    took[name].append(1e3 * min(repeat(run, timer=process_time, repeat=4, number=1)))
ratios = {n: a / b for n, a, b in zip(lengths, took["attention"], took["GRU"], strict=True)}
print("time of attention / time of the GRU:", ", ".join(f"{ratio:.2f} (n = {n:,})" for n, ratio in ratios.items()))
print("attention takes longer at n =", [n for n, ratio in ratios.items() if ratio > 1])
assert ratios[WIDTH] < 0.7 and ratios[4 * WIDTH] < 0.9
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for name, color in (("GRU", "#D55E00"), ("attention", "#0072B2")):
    axes[0].semilogy(distances, gradients[name], "o-", color=color, label=name)
    axes[1].semilogy([f"{n:,}" for n in lengths], took[name], "o-", color=color, label=name)
axes[0].set(title="Gradient of the first input", xlabel="length n (tokens)", ylabel="gradient: first / middle input")
axes[1].set(title="Time of one layer (dotted: n = d = 128)", xlabel="length n (tokens)", ylabel="milliseconds")
axes[1].axvline("128", color="gray", linestyle=":")
axes[0].legend(), axes[1].legend(), rg.drawing.show_or_save("24_rnn_against_attention.png")
