"""
# Compare the speed of attention mechanisms

A window, fewer key heads or a linear attention promise speed. Here each mechanism of a list reads texts of growing
length, and the fastest of ten runs is its time. `rg.mechanisms()` names all mechanisms.
"""

import time

import matplotlib.pyplot as plt
import torch

import regard as rg

torch.manual_seed(0)
heads, width = 4, 32
lengths = [256, 512, 1024, 2048, 4096]
mechanisms = {
    "causal": rg.Attention(mask=rg.causal()),
    "window of 128": rg.Attention(mask=rg.causal() & rg.window(128)),
    "1 key head for 4": rg.Attention(mask=rg.causal()),
    "linear": rg.mechanism("linear").build(),
}


# %%
# The fastest of several runs, because other programs slow a run down. The first run is not counted.
def fastest_time(attention, q, k, v, runs=10):
    attention(q, k, v)
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        attention(q, k, v)
        times.append(time.perf_counter() - start)
    return min(times)


# %%
# All mechanisms read the same random queries, keys and values, without gradients.
milliseconds = {name: [] for name in mechanisms}
for length in lengths:
    q = torch.randn(1, heads, length, width)
    k = torch.randn(1, heads, length, width)
    v = torch.randn(1, heads, length, width)
    for name, attention in mechanisms.items():
        key_heads = 1 if name == "1 key head for 4" else heads
        with torch.no_grad():
            seconds = fastest_time(attention, q, k[:, :key_heads], v[:, :key_heads])
        milliseconds[name].append(1000 * seconds)
for name, times in milliseconds.items():
    print(f"{name:17}", *(f"{time:8.2f} ms" for time in times))

# %%
# With four times the tokens, full attention has 16 times the weights to compute, and a window four times.
figure, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
for name, times in milliseconds.items():
    ax.loglog(lengths, times, "o-", label=name)
ax.set(xlabel="tokens", ylabel="milliseconds", title="Time of one layer, forward pass")
ax.set_xticks(lengths, [str(length) for length in lengths])
ax.minorticks_off()
ax.legend()
rg.drawing.show_or_save("compare_mechanisms.png")
