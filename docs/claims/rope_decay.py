"""Does RoPE make scores fall with distance? For equal vectors, for independent vectors, and for a chosen vector."""

import torch

import regard as rg

width, reach = 128, 4096
torch.manual_seed(0)


def scores(query, key):
    """Scores of one query at position `reach` - 1 with the same key at every position, by distance."""
    positions, rope = torch.arange(reach), rg.RoPE(width)
    keys = rope.encode(key.expand(1, 1, reach, width), positions)[0, 0]
    return (keys @ rope.encode(query.expand(1, 1, 1, width), positions[-1:])[0, 0, 0]).flip(0) / width**0.5


equal = torch.stack([scores(x, x) / (x @ x) * width**0.5 for x in torch.randn(200, width)])
mean = equal.mean(0)
print("equal vectors, mean of 200:", ", ".join(f"{d}: {mean[d]:.2f}" for d in (0, 1, 16, 256, 1024, 4095)))
print(f"steps at which this mean rises: {(mean.diff() > 0).float().mean():.0%}")
independent = torch.stack([scores(*pair) for pair in torch.randn(200, 2, width)])
print(
    f"independent vectors, mean of 200: {independent.mean():.3f} over all distances, spread {independent.std():.2f} "
    f"({independent[:, :64].std():.2f} near, {independent[:, -64:].std():.2f} far)"
)
far = torch.zeros(width)
far[[0, width // 2]] = width**0.5 / 2**0.5
chosen = scores(far, far)
print(f"only the first pair of channels: score {chosen[0]:.2f} at 0, largest beyond 1,000: {chosen[1000:].max():.2f}")
assert mean[4095] < 0.5 and (mean.diff() > 0).float().mean() > 0.2
assert abs(independent[:, :64].std() / independent[:, -64:].std() - 1) < 0.2 and chosen[1000:].max() > 0.99 * chosen[0]
