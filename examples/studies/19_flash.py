"""
# Flash attention and SDPA: the same numbers, less memory

FlashAttention (Dao et al. 2022, arXiv:2205.14135) computes softmax(Q Kᵀ) V tile by tile and never stores the n x n
matrix. PyTorch has it as `scaled_dot_product_attention` (SDPA), on CPUs too. `attend` uses it for short sequences; a
kernel of its own does the same for long ones. Here we compare numbers, memory and time with plain torch. "Two to
four times less memory" does not hold: no factor is constant, as one grows with n^2 and the other with n.
"""

from functools import partial
from time import process_time
from timeit import repeat

import matplotlib.pyplot as plt
import torch

import regard as rg

torch.manual_seed(0)
torch.set_num_threads(1)
HEADS, WIDTH, MIB = 8, 64, 2**20
functions = {
    "formula": lambda q, k, v: torch.softmax(q @ k.mT / WIDTH**0.5, -1) @ v,
    "SDPA": torch.nn.functional.scaled_dot_product_attention,
    "attend": lambda q, k, v: rg.Attention()(q, k, v).output,
}

# %%
# The same numbers up to rounding, and the same gradients.
inputs, results = torch.randn(3, 1, HEADS, 512, WIDTH, requires_grad=True), {}
for name, function in functions.items():
    output = function(*inputs)
    results[name] = output.detach(), torch.autograd.grad(output.square().sum(), inputs)[0]
    off = [float((a - b).abs().max()) for a, b in zip(results[name], results["formula"], strict=True)]
    print(f"{name:7} differs from the formula by {off[0]:.1e}, its gradients by {off[1]:.1e}")
    assert max(off) < 1e-5
assert rg.plan(*inputs, attention=rg.Attention()).engine in ("kernel", "fused")

# %%
# The matrix, and its replacement: besides q, k, v and the output, flash stores one number for each row.
for n in (512, 4096, 32_768):
    matrix, rows = HEADS * n * n * 4 / MIB, HEADS * n * 4 / MIB
    print(f"n = {n:6,}, 8 heads: matrix {matrix:6,.0f} MiB, row numbers {rows:.3f} MiB: {matrix / rows:,.0f} x")

# %%
# Measured at n = 4,096: all memory that PyTorch's operators allocate, and the largest block. The formula allocates
# the matrix three times (scores, scaled scores, weights), SDPA the output. Regard's kernel also copies keys and values.
inputs, allocated = torch.randn(3, 1, HEADS, 4096, WIDTH), {}
for name, function in functions.items():
    with torch.profiler.profile(profile_memory=True) as profile:
        function(*inputs)
    sizes = [max(0, event.self_cpu_memory_usage) / MIB for event in profile.events()]
    allocated[name] = sum(sizes)
    print(f"{name:7} allocates {allocated[name]:7.1f} MiB, of which the largest block is {max(sizes):5.1f} MiB")
share = {name: allocated[name] * MIB / inputs[0].nbytes for name in functions}  # of the output
assert share["formula"] > 3 * 4096 / WIDTH and share["SDPA"] < 1.2 and share["attend"] < 3.2
# %%
# Time of one thread. Without writing the matrix the kernel is faster, by a factor that depends on n and the machine.
lengths, took = [256, 512, 1024, 2048, 4096], {name: [] for name in functions}
for n in lengths:
    inputs = torch.randn(3, 1, HEADS, n, WIDTH)
    for name, function in functions.items():
        took[name].append(1e3 * min(repeat(partial(function, *inputs), "pass", process_time, max(2, 4096 // n), 1)))
faster = {n: a / b for n, a, b in zip(lengths, took["formula"], took["attend"], strict=True)}
print("attend is faster by", ", ".join(f"{ratio:.2f} (n = {n:,})" for n, ratio in faster.items()))
assert faster[4096] > 1.2

# %%
# You can still read a row of the matrix that was never stored: one of 32,768, which would take 4 GiB a head.
q, k, v = torch.randn(3, 1, 1, 32_768, 16)
row = rg.Attention()(q, k, v).weights[0, 0, 20_000]
assert torch.allclose(row, torch.softmax(k[0, 0] @ q[0, 0, 20_000] / 4, -1), atol=1e-6)
print(f"row 20,000 of 32,768: its sum is {row.sum():.6f}, its largest weight {row.max():.4f}")
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for name, color, marker in zip(functions, ("#D55E00", "#000000", "#0072B2"), "o^s", strict=True):
    left.bar_label(left.bar(name, allocated[name], color=color), fmt="%.0f")
    right.semilogy([f"{n:,}" for n in lengths], took[name], marker=marker, color=color, label=name)
left.set(title="Memory allocated, n = 4,096", ylabel="MiB", yscale="log", ylim=(1, 4000))
right.set(title="Time of one thread", xlabel="length n (tokens)", ylabel="milliseconds")
right.legend(), rg.drawing.show_or_save("19_flash.png")
