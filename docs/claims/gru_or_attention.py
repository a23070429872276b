"""A GRU and self-attention at n = 1,000 and d = 512: weights, operations, sequential steps, time, the next token."""

import sys
from functools import partial
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

import regard as rg

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is not in the package
from benchmarks.measure import in_turn

torch.manual_seed(0)
torch.set_num_threads(1)
N, D, HEADS = 1000, 512, 8
gru, attention = torch.nn.GRU(D, D, batch_first=True), rg.nn.MultiHeadAttention(D, HEADS)
layers = {"GRU": lambda x: gru(x)[0], "attention": lambda x: attention(x).output}


def operations(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def longest_chain(layer, n):
    """The longest chain of operations that autograd recorded."""
    depths, output = {}, layer(torch.randn(1, n, D))
    waiting = [output.grad_fn]
    while waiting:
        before = [node for node, _ in waiting[-1].next_functions if node]
        if missing := [node for node in before if node not in depths]:
            waiting += missing
        else:
            depths[waiting.pop()] = 1 + max(map(depths.get, before), default=0)
    return depths[output.grad_fn]


def call(layer, x, learns):
    with torch.set_grad_enabled(learns):
        output = layer(x)
    if learns:
        output.sum().backward()


def next_token(cache, token):
    """The output of one new token. Each call reads the same cache of N tokens."""
    with torch.no_grad():
        projections = attention.query(token), attention.key(token), attention.value(token)
        heads = (projected.view(1, 1, HEADS, -1).transpose(1, 2) for projected in projections)
        seen = rg.Attention(mask=rg.causal())(*heads, cache=cache)
        return attention.output(seen.output.transpose(1, 2).flatten(2))


sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in (("GRU", gru), ("attention", attention))}
print(f"weights: GRU {sizes['GRU']:,}, attention {sizes['attention']:,}")
assert sizes == {"GRU": 6 * D**2 + 6 * D, "attention": 4 * D**2 + 4 * D}

x, heads = torch.randn(1, N, D), torch.randn(1, HEADS, N, D // HEADS)
pairs = operations(lambda: rg.Attention()(heads, heads, heads, engine="dense"))  # fused kernels do not count
counted = operations(lambda: gru(x)), 4 * operations(lambda: attention.query(x)) + pairs
print(f"operations at n = {N:,}: GRU 12 n d^2 = {counted[0]:,}, attention 8 n d^2 + 4 n^2 d = {counted[1]:,}")
assert counted == (12 * N * D**2, 8 * N * D**2 + 4 * N**2 * D)

chains = {name: [longest_chain(layer, n) for n in (10, 100, N)] for name, layer in layers.items()}
print("sequential operations at n = 10, 100, 1,000:", chains)
assert chains["attention"][-1] <= chains["attention"][0] and chains["GRU"][-1] > N

print("one thread, float32, medians of runs in turn")
for batch, n, learns in (
    (1, N, False),
    (1, N, True),
    (16, N, False),
    (16, N, True),
    (1, 2 * N, False),
    (1, 4 * N, False),
):
    x = torch.randn(batch, n, D)
    times = in_turn(*(partial(call, layer, x, learns) for layer in layers.values()), rounds=7 if batch == 1 else 3)
    what = "forward and backward" if learns else "forward"
    print(f"  batch {batch:2}, n = {n:,}, {what}: GRU {1e3 * times[0]:,.0f} ms, attention {1e3 * times[1]:,.0f} ms")
    assert batch * n > N or times[1] < times[0]

cache = rg.GrowingCache().extend(heads, heads).cache
token, state = torch.randn(1, 1, D), torch.randn(1, 1, D)
with torch.no_grad():
    times = in_turn(lambda: gru(token, state), partial(next_token, cache, token), rounds=101)
held = state.nbytes, cache.store.key.nbytes + cache.store.value.nbytes
print(f"the next token after {N:,}: GRU {1e3 * times[0]:.2f} ms, attention {1e3 * times[1]:.2f} ms;", end=" ")
print(f"kept for it: GRU {held[0]:,} bytes, attention {held[1]:,} bytes")
assert held == (4 * D, 2 * 4 * N * D)
