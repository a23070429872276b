"""Compares heads: their divergence on sampled rows, groups of similar heads, and a map of heads in two dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regard.base.checks import Count, Size, checked
from regard.base.errors import RegardError
from regard.maps import AttentionMap
from regard.maps.indices import indices

#: Rows of every head that `head_divergence` holds at once.
ROWS = 16


@checked
def sample_rows(num_queries: Count, count: Count = 64, seed: int = 0) -> Tensor:
    """Draw up to `count` different queries, in ascending order; the same seed gives the same queries.

    >>> sample_rows(4, 10)
    tensor([0, 1, 2, 3])
    """
    drawn = torch.randperm(num_queries, generator=torch.Generator().manual_seed(seed))
    return drawn[:count].sort().values


@checked
@torch.no_grad()
def head_divergence(
    maps: Mapping[str, AttentionMap] | Sequence[AttentionMap],
    rows: Sequence[int] | Tensor | None = None,
    batch: Count = 0,
) -> Tensor:
    """The Jensen-Shannon divergence between every two heads, in nats, averaged over rows; (N, N).

    JS(p, q) = H((p + q) / 2) - H(p) / 2 - H(q) / 2, 0 for equal rows and log 2 for rows that share no
    key; its square root is a metric (Lin 1991). The N heads of all maps are numbered layer by layer. `rows` are
    the indices of the queries, by default 64 random ones (`sample_rows`). At most 16 rows of each head are in
    memory at once. Signed weights are compared as shares of |weight|.

    >>> import torch, regard as rg
    >>> x = torch.randn(1, 2, 5, 4)
    >>> head_divergence([rg.Attention()(x, x, x).weights]).shape
    torch.Size([2, 2])
    """
    layers = list(maps.values()) if isinstance(maps, Mapping) else list(maps)
    if not layers or len({layer.shape[2:] for layer in layers}) > 1:
        raise RegardError(
            "head_divergence: heads are compared row by row. Give at least one map, and maps with the same numbers of "
            f"queries and keys; got {[tuple(layer.shape) for layer in layers]}."
        )
    num_queries = layers[0].shape[2]
    chosen = sample_rows(num_queries) if rows is None else indices("head_divergence", "row", rows, num_queries)
    if not len(chosen):
        raise RegardError("head_divergence: there are no rows. Give at least one query.")
    layers = [layer if layer.has_shares else layer.shares() for layer in layers]
    total = torch.zeros((), dtype=torch.float32)
    for part in chosen.split(ROWS):
        total = total + _divergences(
            torch.cat([layer.tile(batch=batch, rows=part)[0].float().cpu() for layer in layers])
        )
    result = (total / len(chosen)).clamp_min(0.0)
    return (result + result.T).fill_diagonal_(0.0)  # rounding leaves a little on the diagonal


def _divergences(weights: Tensor) -> Tensor:
    """The divergences of heads a <= b, of their rows (N, r, J), summed over rows; (N, N), 0 below the diagonal."""
    found, entropies = torch.zeros(len(weights), len(weights)), _entropy(weights)
    for head, rows in enumerate(weights):
        between = _entropy((rows + weights[head:]) / 2)
        found[head, head:] = (between - (entropies[head] + entropies[head:]) / 2).sum(-1)
    return found


def _entropy(weights: Tensor) -> Tensor:
    """The entropy of rows (..., J) in nats; (...). A logarithm is vectorized, and `xlogy` is not: 5 times as fast."""
    return -weights.clamp_min(torch.finfo(weights.dtype).tiny).log_().mul_(weights).sum(-1)


@checked
def head_groups(distance: Tensor, threshold: float) -> list[tuple[int, ...]]:
    """Group heads by average linkage: join the two nearest groups until all distances exceed `threshold`.

    The distance between two groups is the mean over their pairs (UPGMA, Sokal & Michener 1958). `distance`
    is (N, N): `head_divergence(maps)`, or 1 - cosine. Largest groups first; a head without
    similar heads is a group of its own.

    >>> head_groups(torch.tensor([[0.0, 0.1, 0.9], [0.1, 0.0, 0.8], [0.9, 0.8, 0.0]]), 0.5)
    [(0, 1), (2,)]
    """
    groups: list[tuple[int, ...]] = [(head,) for head in range(len(_square("head_groups", distance)))]
    between = distance.double().clone().fill_diagonal_(torch.inf)
    while len(groups) > 1 and float(between.min()) <= threshold:
        a, b = sorted(divmod(int(between.argmin()), len(groups)))  # the two nearest groups; a stays, b is deleted
        sizes = len(groups[a]), len(groups[b])
        joined = (sizes[0] * between[a] + sizes[1] * between[b]) / sum(sizes)
        between[a] = between[:, a] = joined
        between[a, a] = torch.inf
        remaining = [group for group in range(len(groups)) if group != b]
        between = between[remaining][:, remaining]
        groups[a] = tuple(sorted(groups[a] + groups[b]))
        del groups[b]
    return sorted(groups, key=lambda group: (-len(group), group))


@checked
def head_map(distance: Tensor, dimensions: Size = 2) -> Tensor:
    """Place heads so that their Euclidean distances approximate `distance`: classical scaling; (N, dimensions).

    With D^2 the squares of the distances and C = I - 1/N, which subtracts the mean, -1/2 C D^2 C = V diag(l) V', and
    the coordinates are V sqrt(l) of the largest eigenvalues (Torgerson 1952). An eigenvector may have either sign: the
    entry of largest magnitude on each axis is positive. Of N heads at most N axes are used, and the others are 0. Give
    a metric: `head_divergence(maps).sqrt()`.

    >>> coordinates = head_map(torch.tensor([[0.0, 3.0, 4.0], [3.0, 0.0, 5.0], [4.0, 5.0, 0.0]]))
    >>> torch.cdist(coordinates, coordinates)[1, 2].round(decimals=4)
    tensor(5., dtype=torch.float64)
    """
    squared = _square("head_map", distance).double().square()
    inner = -0.5 * (squared - squared.mean(0) - squared.mean(1, keepdim=True) + squared.mean())
    values, vectors = torch.linalg.eigh((inner + inner.T) / 2)
    kept = min(dimensions, len(squared))
    # eigh sorts eigenvalues in ascending order; some are negative if no points have exactly these distances
    coordinates = vectors.flip(-1)[:, :kept] * values.flip(-1)[:kept].clamp_min(0.0).sqrt()
    largest = coordinates.gather(0, coordinates.abs().argmax(0, keepdim=True))
    coordinates = coordinates * torch.where(largest < 0, -1.0, 1.0)
    return torch.nn.functional.pad(coordinates, (0, dimensions - kept))


def _square(name: str, distance: Tensor) -> Tensor:
    """`distance`; an error that names the function `name` if it is not (N, N) with N at least 1."""
    if distance.ndim != 2 or distance.shape[0] != distance.shape[1] or not len(distance):
        raise RegardError(
            f"{name}: distances are a square (N, N), one row for each head, got {tuple(distance.shape)}. "
            "Give head_divergence(maps), or 1 - map.similarity()[0] for the first text of one map."
        )
    return distance
