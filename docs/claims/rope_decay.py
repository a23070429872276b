"""Does RoPE make scores fall with distance? For equal vectors, for unlike ones, and for a chosen one."""

import torch

import regard as rg

width, reach = 128, 4096
torch.manual_seed(0)


def scores(query, key):
    """Scores of one query at position `reach` - 1 with the same key at every position, by distance."""
    places, rope = torch.arange(reach), rg.RoPE(width)
    keys = rope.encode(key.expand(1, 1, reach, width), places)[0, 0]
    return (keys @ rope.encode(query.expand(1, 1, 1, width), places[-1:])[0, 0, 0]).flip(0) / width**0.5


alike = torch.stack([scores(x, x) / (x @ x) * width**0.5 for x in torch.randn(200, width)])
mean = alike.mean(0)
print("equal vectors, mean of 200:", ", ".join(f"{d}: {mean[d]:.2f}" for d in (0, 1, 16, 256, 1024, 4095)))
print(f"steps at which that mean rises again: {(mean.diff() > 0).float().mean():.0%}")
unlike = torch.stack([scores(*pair) for pair in torch.randn(200, 2, width)])
print(
    f"independent vectors, mean of 200: {unlike.mean():.3f} over all distances, spread {unlike.std():.2f} "
    f"({unlike[:, :64].std():.2f} near, {unlike[:, -64:].std():.2f} far)"
)
far = torch.zeros(width)
far[[0, width // 2]] = width**0.5 / 2**0.5
one = scores(far, far)
print(f"a vector in the first pair alone: score {one[0]:.2f} at 0, greatest beyond 1,000: {one[1000:].max():.2f}")
assert mean[4095] < 0.5 and (mean.diff() > 0).float().mean() > 0.2
assert abs(unlike[:, :64].std() / unlike[:, -64:].std() - 1) < 0.2 and one[1000:].max() > 0.99 * one[0]
