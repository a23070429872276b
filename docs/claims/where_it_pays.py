"""From which length windows, linear attention, Longformer, BigBird and shared key heads are faster than full attention.

`python docs/claims/where_it_pays.py` measures all parts. Names of parts after it (causal, windows, encoders, cache,
prompt) measure these. `THREADS=2 python docs/claims/where_it_pays.py` measures with two threads.
"""

import os
import sys
from pathlib import Path

import torch

import regard as rg

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is not in the package
from benchmarks.measure import in_turn

torch.manual_seed(0)
torch.set_num_threads(int(os.environ.get("THREADS", "1")))
LENGTHS = (256, 512, 768, 1024, 2048, 4096, 8192)
full = rg.Attention(mask=rg.causal())
linear = rg.Attention(
    rg.scores.FeatureScore(rg.scores.EluPlusOne()), mask=rg.causal(), normalizer=rg.normalizers.SumNormalizer()
)


def window(size):
    return rg.Attention(mask=rg.causal() & rg.window(size))


def run(attention, inputs, learns):
    """One call of attend, with its backward pass if `learns`."""

    def call():
        with torch.set_grad_enabled(learns):
            output = attention(*inputs).output
        if learns:
            output.sum().backward()

    return call


def milliseconds(attentions, n, learns=False):
    """Median times of attentions of 8 heads of 64, run in turn."""
    inputs = [torch.randn(1, 8, n, 64, requires_grad=learns) for _ in range(3)]
    runs = [run(attention, inputs, learns) for attention in attentions]
    return [1e3 * seconds for seconds in in_turn(*runs, rounds=21 if n <= 1024 else 7 if n <= 2048 else 3)]


def causal():
    for learns in (False, True):
        print("8 heads of 64, causal, forward" + (" and backward" if learns else ""))
        for n in LENGTHS:
            plain, near, summed = milliseconds((full, window(256), linear), n, learns)
            print(f"  n = {n:5,}: full {plain:7.1f} ms; window 256 {near:6.1f} ms, {plain / near:5.2f} x", end="; ")
            print(f"linear {summed:6.1f} ms, {plain / summed:5.2f} x")
        assert plain > 2 * near and plain > 2 * summed


def windows():
    print("other windows, forward: how many times as fast as full causal attention")
    for size, lengths in ((64, (128, 256, 512, 1024, 2048)), (256, (300, 400)), (1024, (1024, 1200, 1536, 2048, 4096))):
        ratios = {n: milliseconds((full, window(size)), n) for n in lengths}
        print(f"  window {size:5,}:", ", ".join(f"{a / b:.2f} at n = {n:,}" for n, (a, b) in ratios.items()))


def encoders():
    """No causal mask. Longformer and BigBird as the catalog builds them: 256 keys on each side, blocks of 64."""
    every, longformer = rg.Attention(), rg.mechanism("longformer").build()
    for learns in (False, True):
        print("8 heads of 64, both directions, forward" + (" and backward" if learns else ""))
        for n in (512, 768, 1024, 1536, 2048, 4096, 8192):
            sparse = longformer, rg.Attention(mask=rg.window(257)), rg.mechanism("bigbird").build(n)
            plain, *times = milliseconds((every, *sparse), n, learns)
            ratios = zip(("longformer", "its window alone", "bigbird"), times, strict=True)
            print(f"  n = {n:5,}: full {plain:7.1f} ms;", end=" ")
            print(", ".join(f"{name} {took:.1f} ms, {plain / took:.2f} x" for name, took in ratios))
        assert plain > 2 * max(times)


def cache():
    print("one query of 32 heads of 128, one layer: bytes of the cache in float32, and the time of one token")
    for n in (128, 512, 2048, 8192):
        query = torch.randn(1, 32, 1, 128)
        caches = {heads: torch.randn(2, 1, heads, n, 128) for heads in (32, 8, 1)}
        times = in_turn(*(run(full, (query, *cache), False) for cache in caches.values()), rounds=41)
        cells = (
            f"{caches[heads].nbytes / 1e6:6.1f} MB {1e3 * took:6.2f} ms"
            for heads, took in zip(caches, times, strict=True)
        )
        print(f"  {n:5,} keys, 32 / 8 / 1 key heads:", "; ".join(cells))
        assert caches[32].nbytes == 2 * 32 * n * 128 * 4 == 4 * caches[8].nbytes == 32 * caches[1].nbytes
    assert times[0] > 2 * times[1] > 2 * times[2]


def prompt():
    query = torch.randn(1, 32, 1024, 128)
    shapes = [torch.randn(2, 1, heads, 1024, 128) for heads in (32, 8)]
    separate, shared = in_turn(*(run(full, (query, *keys), False) for keys in shapes), rounds=5)
    print(f"a prompt of 1,024 tokens: {1e3 * separate:.0f} ms with 32 key heads, {1e3 * shared:.0f} ms with 8")


PARTS = {part.__name__: part for part in (causal, windows, encoders, cache, prompt)}
print(f"threads: {torch.get_num_threads()}, float32, batch 1, medians of runs in turn")
for name in sys.argv[1:] or PARTS:
    PARTS[name]()
