"""Random scores by width: which numbers depend on d, and where the variance d of a dot product comes from."""

import torch

torch.manual_seed(0)
rows, widths = 20_000, (1, 4, 16, 64, 256)


def dot_products(rows, width, num_keys):
    """Dot products of independent standard normal vectors, (rows, num_keys)."""
    return (torch.randn(rows, 1, width) @ torch.randn(rows, width, num_keys))[:, 0]


# The table that tutorials print: the largest of a few weights, with and without the factor 1/sqrt(d).
largest = {}
for num_keys, num_rows in ((5, rows), (64, 2000)):
    for width in widths[1:]:
        scores = dot_products(num_rows, width, num_keys)
        largest[num_keys, width] = [float(x.softmax(-1).amax(-1).mean()) for x in (scores / width**0.5, scores)]
        scaled, plain = largest[num_keys, width]
        print(f"{num_keys:2} keys, d = {width:3}: mean of the largest weight", end=" ")
        print(f"{scaled:.2f} with the factor, {plain:.2f} without")
    scaled = [largest[num_keys, width][0] for width in widths[1:]]
    assert max(scaled) - min(scaled) < 0.04 and largest[num_keys, 256][1] > largest[num_keys, 4][1] + 0.2

# The gradient of the weights with respect to the scores, diag(w) - w wT, by the number of keys: three draws.
for num_keys in (8, 64, 256):
    medians = {True: [], False: []}
    for scaled in medians:
        for _ in range(3):
            weights = (dot_products(200, 64, num_keys) / (8 if scaled else 1)).softmax(-1)
            gradient = weights.diag_embed() - weights[..., None] * weights[..., None, :]
            medians[scaled].append(float(gradient.flatten(1).norm(dim=1).median()))
    (least, most), factor = (min(medians[False]), max(medians[False])), sum(medians[True]) / 3
    print(
        f"{num_keys:3} keys, d = 64: median |dw/ds| {least:.2f} to {most:.2f} without the factor, {factor:.2f} with it"
    )
    assert most < factor / 3 if num_keys == 8 else least > 0.8 * factor

# Variances of independent terms add up, for any number of terms. A central limit theorem says something else: that
# the sum of many terms is nearly normal. It is not needed for the variance, and does not hold at small widths.
for width in widths:
    scores = dot_products(rows, width, 1)[:, 0]
    excess = float((scores**4).mean() / (scores**2).mean() ** 2 - 3)  # 0 for a normal distribution
    print(f"d = {width:3}: variance / d {scores.var() / width:.2f},", end=" ")
    print(f"excess kurtosis {excess:.1f} (in theory {6 / width:.2f})")
    assert abs(scores.var() / width - 1) < 0.1
same = (torch.randn(rows, 1, 64) ** 2).sum(-1)  # a vector with itself: its terms are not centered
print(f"d = 64, a vector with itself: mean {same.mean():.1f}, variance {same.var():.0f}, which is 2 d")
assert abs(same.mean() / 64 - 1) < 0.02 and abs(same.var() / 128 - 1) < 0.1
