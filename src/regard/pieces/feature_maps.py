"""Feature scores: s_ij = phi(q_i) . phi(k_j) with phi >= 0, for attention that costs O(n).

With `SumNormalizer`, output_i = phi(q_i) (sum_j phi(k_j) v_j) / phi(q_i) . sum_j phi(k_j). The sum in brackets is one
W x E matrix for all queries, so no pair is computed. `AttentionMap` still computes any weight on demand.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.base.checks import Size, checked
from regard.base.errors import RegardError
from regard.base.shapes import Sizes
from regard.pieces.holder import HoldsPieces
from regard.pieces.piece import Piece
from regard.pieces.score import Score, check_equal_widths


class FeatureMap(Piece):
    """phi: turns queries and keys into non-negative features, (..., D) -> (..., W).

    >>> import torch, regard as rg
    >>> class Positive(rg.scores.FeatureMap):
    ...     def __call__(self, query, key):
    ...         return query.relu() + 1, key.relu() + 1
    >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
    >>> linear = rg.Attention(rg.scores.FeatureScore(Positive()), normalizer=rg.normalizers.SumNormalizer())
    >>> linear(q, k, v).output.shape
    torch.Size([1, 2, 5, 8])
    """

    @abstractmethod
    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The features of queries (B, H, I, D) and of keys (B, G, J, D), both of width W."""


@dataclass(frozen=True)
class EluPlusOne(FeatureMap):
    """phi(x) = elu(x) + 1 (Katharopoulos et al. 2020, arXiv:2006.16236, eq. 7); W = D.

    >>> import torch, regard as rg
    >>> rg.scores.EluPlusOne()(torch.tensor([0.0, 2.0]), torch.tensor([-1e9, 4.0]))
    (tensor([1., 3.]), tensor([0., 5.]))
    """

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return F.elu(query).add_(1), F.elu(key).add_(1)


@checked
class RandomFeatures(nn.Module, FeatureMap):
    """FAVOR+: phi(x) = exp(w . x - |x|^2 / 2) / sqrt(m), w ~ N(0, I) (Choromanski et al. 2021, arXiv:2009.14794).

    x is the input divided by D^(1/4), so E[phi(q) . phi(k)] = exp(q . k / sqrt(D)): an unbiased estimate of the terms
    of softmax attention. The rows of w are orthogonal in blocks of D, which lowers the variance. `redraw(seed)` draws
    new rows. performer-pytorch subtracts the greatest key score of the whole sequence, so by rounding a later key
    changes earlier outputs. Here only a constant of each query is subtracted, which the normalizer cancels exactly.

    >>> import torch, regard as rg
    >>> features = rg.scores.RandomFeatures(head_dim=8, num_features=64, seed=0)
    >>> query, key = features(torch.randn(1, 1, 5, 8), torch.randn(1, 1, 7, 8))
    >>> query.shape, key.shape, bool((query >= 0).all() and (key >= 0).all())
    (torch.Size([1, 1, 5, 64]), torch.Size([1, 1, 7, 64]), True)
    """

    frequencies: Tensor

    def __init__(self, head_dim: Size, num_features: Size = 256, seed: int = 0) -> None:
        super().__init__()
        self.head_dim, self.num_features = head_dim, num_features
        self.register_buffer("frequencies", torch.empty(num_features, head_dim))
        self.redraw(seed)

    def redraw(self, seed: int) -> None:
        """Draw new orthogonal rows with the norms of Gaussian rows; the same seed gives the same rows."""
        self.frequencies.copy_(orthogonal_gaussian(self.num_features, self.head_dim, seed))

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries are scaled, so that the greatest feature of each is 1. Both factors 1 / sqrt(m) are in the keys."""
        scaled = self.frequencies.to(query.dtype) * self.head_dim**-0.25
        for_query, for_key = F.linear(query, scaled), F.linear(key, scaled)
        norms = key.square().sum(-1, keepdim=True) * (self.head_dim**-0.5 / 2) + math.log(self.num_features)
        # factors of the query alone cancel in the normalizer, so its |x|^2 / 2 is left out
        return for_query.sub_(for_query.detach().amax(-1, keepdim=True)).exp_(), for_key.sub_(norms).exp_()

    def extra_repr(self) -> str:
        return f"{self.head_dim}, num_features={self.num_features}"


def orthogonal_gaussian(num_rows: int, head_dim: int, seed: int) -> Tensor:
    """Rows that are orthogonal within each block of `head_dim` and have Gaussian norms: (num_rows, head_dim).

    Each single row is drawn from N(0, I). LAPACK chooses signs of Q that make its first channel biased; the signs that
    make the diagonal of R positive remove the bias (Mezzadri 2007, arXiv:math-ph/0609050).
    """
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-num_rows // head_dim)
    directions, triangle = torch.linalg.qr(torch.randn(blocks, head_dim, head_dim, generator=generator))
    directions = directions * triangle.diagonal(dim1=1, dim2=2).sign()[:, None]
    norms = torch.randn(num_rows, head_dim, generator=generator).norm(dim=1, keepdim=True)
    return directions.transpose(1, 2).reshape(-1, head_dim)[:num_rows] * norms


@checked
class FeatureScore(HoldsPieces, Score):
    """s_ij = phi(q_i) . phi(k_j) for a feature map phi; use it with `SumNormalizer`.

    `FeatureScore(EluPlusOne())` is linear attention, `FeatureScore(RandomFeatures(64))` the Performer.

    >>> import torch, regard as rg
    >>> x = torch.randn(1, 2, 5, 8)
    >>> linear = rg.Attention(rg.scores.FeatureScore(), normalizer=rg.normalizers.SumNormalizer())
    >>> weights = linear(x, x, x).weights.dense()
    >>> torch.allclose(weights.sum(-1), torch.ones(1, 2, 5)), bool((weights >= 0).all())
    (True, True)
    """

    nonnegative = True

    def __init__(self, features: FeatureMap | None = None) -> None:
        super().__init__()
        self.features = features or EluPlusOne()

    def prepare(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.features(query, key)

    def scale(self, head_dim: int) -> float:
        return 1.0

    def check(self, sizes: Sizes, key_dim: int) -> None:
        check_equal_widths("FeatureScore", sizes.D, key_dim)
        head_dim = getattr(self.features, "head_dim", sizes.D)
        if head_dim != sizes.D:
            raise RegardError(
                f"FeatureScore: its random features are of width {head_dim}, the queries of {sizes.D}. "
                f"Create the features with head_dim={sizes.D}."
            )

    def extra_repr(self) -> str:
        return "" if isinstance(self.features, nn.Module) else repr(self.features)
