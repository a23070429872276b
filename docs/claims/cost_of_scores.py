"""The cost of one pair: a dot product multiplies d numbers; an additive score needs a small network."""

from time import process_time

import torch

import regard as rg

torch.set_num_threads(1)


def seconds(attention, q, k):
    times = []
    for _ in range(3):
        start = process_time()
        attention(q, k, k, engine="dense")
        times.append(process_time() - start)
    return min(times)


for n, width in ((128, 64), (1024, 64), (1024, 256)):
    q, k = torch.randn(2, 1, 1, n, width)
    with torch.no_grad():
        dot = seconds(rg.Attention(rg.Dot()), q, k)
        general = seconds(rg.Attention(rg.scores.Bilinear(width, width)), q, k)
        additive = seconds(rg.Attention(rg.scores.Additive(width, width, width)), q, k)
    print(f"d = hidden = {width}, {n:,} x {n:,} pairs, one thread's processor time, with the weighted sum of values:")
    print(f"  dot {dot * 1e3:6.0f} ms; general {general / dot:4.1f} x; additive {additive / dot:5.1f} x")
    print(f"  each pair: dot {2 * width} operations; additive {3 * width} and {width} tanh; projections once")
    assert n == 128 or (additive > 4 * dot and general < 3 * dot)
