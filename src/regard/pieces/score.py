"""Scores: how well query i and key j match.

A score has two steps. `prepare` does all O(n) work: projections, norms, feature maps. `tile` then computes the scores
of any rows and any columns. If the score of prepared vectors is a dot product, the score gives its `scale`, and fused
engines can compute it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.base.checks import Count, Number, Size, checked
from regard.base.errors import RegardError
from regard.base.shapes import Sizes, at_least_float32, grouped_scores
from regard.pieces.contents import learned_parts
from regard.pieces.grid import Grid, at
from regard.pieces.piece import Piece, computes_as


class Score(Piece):
    """Base of all scores.

    A score that is a dot product defines `prepare` and `scale`. Any other score defines `tile`, and `floats_per_score`:
    how many numbers it keeps in memory to compute one score, so that tiles fit in memory. `nonnegative` promises scores
    of at least 0, which `SumNormalizer` requires.

    >>> import torch, regard as rg
    >>> class Near(rg.scores.Score):
    ...     def tile(self, query, key, grid):
    ...         return -(query[:, :, :, None] - key[:, :, None]).square().sum(-1)
    ...     def check(self, sizes, key_dim):
    ...         rg.Dot().check(sizes, key_dim)
    >>> x = torch.randn(1, 2, 5, 8)  # every vector is nearest to itself
    >>> torch.equal(rg.Attention(Near(), normalizer=rg.normalizers.Hardmax())(x, x, x).output, x)
    True
    """

    floats_per_score: int = 1
    nonnegative: bool = False

    def prepare(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """All O(n) work: (B, H, I, D), (B, G, J, D) -> (B, H, I, W), (B, G, J, W)."""
        return query, key

    def scale(self, head_dim: int) -> float | Tensor | None:
        """The factor c with score = c * q.k for prepared q and k; None if the score is not a dot product.

        Fused kernels do not accept a tensor. Multiply the query by it in `prepare`, as `Dot` and `Cosine` do.
        """
        return None

    @abstractmethod
    def check(self, sizes: Sizes, key_dim: int) -> None:
        """Refuse widths and heads that this score cannot compare."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its learned numbers, as a module lists them. A dot product has none, unless its scale is learned."""
        parts = learned_parts("score", self).values()
        lists = (part.parameters() if isinstance(part, nn.Module) else (part,) for part in parts)
        yield from dict.fromkeys(parameter for each in lists for parameter in each)

    def tile(self, query: Tensor, key: Tensor, grid: Grid) -> Tensor:
        """Scores (B, H, I, J) of prepared rows (B, H, I, W) against prepared columns (B, G, J, W)."""
        scale = _scale_of_heads(self.scale(query.shape[-1]), query, grid)
        if scale is None:
            raise RegardError(
                f"{type(self).__name__}.tile: the default tile is a dot product times a scale, and scale(head_dim) is "
                "None. Define tile(query, key, grid) in the class, or return a number from scale(head_dim)."
            )
        return grouped_scores(query * scale, key)


def dot_scale(score: Score, head_dim: int) -> float | Tensor | None:
    """`score.scale`; None too if a subclass of a dot product has a `tile` of its own, which is another score."""
    return score.scale(head_dim) if computes_as(score, Score, "tile") else None


def scale_of_heads(score: Score, query: Tensor, grid: Grid) -> float | Tensor | None:
    """`dot_scale` for the heads of a tile, which may be a part of all heads, in the dtype of the queries."""
    return _scale_of_heads(dot_scale(score, query.shape[-1]), query, grid)


def _scale_of_heads(scale: float | Tensor | None, query: Tensor, grid: Grid) -> float | Tensor | None:
    """The factor of scores for the heads of a tile: a number, or (heads, 1, 1) in the dtype of the queries.

    None for a score without a scale.
    """
    if not isinstance(scale, Tensor):
        return scale
    return (at("score.scale", "heads", scale, 0, grid.head) if scale.ndim else scale).to(query.dtype)


def with_factor(factor: float | Tensor | None, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Queries times a factor that is a tensor, so that the score is a plain dot product for every engine."""
    if not isinstance(factor, Tensor):
        return query, key
    query, key = at_least_float32(query), at_least_float32(key)
    return query * factor.to(query.dtype), key


def check_equal_widths(score: str, query_dim: int, key_dim: int) -> None:
    """Refuse queries and keys of different widths."""
    if query_dim != key_dim:
        raise RegardError(
            f"{score}: query width {query_dim} and key width {key_dim} must be equal. Project one of them, "
            "or use Bilinear, Additive or Concat, which compare different widths."
        )


def check_factor(score: str, factor: float | Tensor | None, sizes: Sizes) -> None:
    """Refuse a tensor that is neither one number nor one for each head."""
    if isinstance(factor, Tensor) and (not factor.is_floating_point() or factor.shape not in ((), (sizes.H, 1, 1))):
        raise RegardError(
            f"{score}: a tensor must hold one floating-point number, or one for each head in the shape "
            f"({sizes.H}, 1, 1); got {factor.dtype} of shape {tuple(factor.shape)}."
        )


class FactorScore(Score):
    """Base of dot products of `vectors` with a `factor`: a number, or a tensor that multiplies the queries.

    A tensor may be learned: one number, or one for each head (H, 1, 1). So every engine computes a plain dot product.
    """

    factor: float | Tensor | None

    def vectors(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors of queries and keys before the factor: unchanged, unless a subclass changes them."""
        return query, key

    def prepare(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return with_factor(self.factor, *self.vectors(query, key))


@checked
@dataclass(frozen=True)
class Dot(FactorScore):
    """s_ij = c q_i . k_j, with c = 1 / sqrt(D) unless given (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

    `scale` may be a learned tensor: one number, or one for each head (H, 1, 1).
    The factor keeps the variance of the scores at 1 for inputs of variance 1. T5 and Luong's
    "dot" use c = 1. The cost is a matrix product, 2 D operations for each pair.

    >>> Dot().scale(64), Dot(scale=1.0).scale(64)
    (0.125, 1.0)
    """

    factor: Number | Tensor | None = None

    def __init__(self, scale: Number | Tensor | None = None) -> None:
        object.__setattr__(self, "factor", scale)

    def scale(self, head_dim: int) -> float:
        factor = head_dim**-0.5 if self.factor is None else self.factor
        return 1.0 if isinstance(factor, Tensor) else factor  # `prepare` multiplies by a tensor

    def check(self, sizes: Sizes, key_dim: int) -> None:
        check_equal_widths("Dot", sizes.D, key_dim)
        check_factor("Dot(scale=...)", self.factor, sizes)

    def __repr__(self) -> str:
        return "Dot()" if self.factor is None else f"Dot(scale={self.factor})"


@checked
@dataclass(frozen=True)
class Cosine(FactorScore):
    """s_ij = c cos(q_i, k_j): it depends on directions only, so |s| <= c (Swin v2, arXiv:2111.09883, section 3.2).

    >>> import torch, regard as rg
    >>> q, k = torch.tensor([[[[3.0, 4.0]]]]), torch.tensor([[[[3.0, 4.0], [30.0, 40.0]]]])
    >>> rg.Attention(rg.scores.Cosine())(q, k, k).weights.dense()  # the longer key has the same weight
    tensor([[[[0.5000, 0.5000]]]])
    """

    factor: Number | Tensor = 10.0

    def vectors(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(at_least_float32(query), dim=-1), F.normalize(at_least_float32(key), dim=-1)

    def scale(self, head_dim: int) -> float:
        return 1.0 if isinstance(self.factor, Tensor) else self.factor  # `prepare` multiplies by a tensor

    def check(self, sizes: Sizes, key_dim: int) -> None:
        check_equal_widths("Cosine", sizes.D, key_dim)
        check_factor("Cosine(factor=...)", self.factor, sizes)


@checked
class Bilinear(nn.Module, Score):
    """s_ij = q_i W k_j: Luong's "general" (Luong et al. 2015, arXiv:1508.04025, eq. 8).

    W is (H, D, D'), one matrix for each head. It is applied to each query once, so a pair costs as much as a dot
    product. There is no factor 1 / sqrt(D), as in the paper.

    W begins uniform with the variance 2 / (D' (D + H)): `xavier_uniform_` counts the fans of three axes. That is less
    than the 2 / (D + D') of Xavier's rule for each matrix: for one head of 48 x 48 the standard deviation is 0.029, and
    the rule's is 0.144. The published trainings of Luong's translators begin so. For the rule:
    `for w in score.weight: nn.init.xavier_uniform_(w)`.

    >>> import torch, regard as rg
    >>> score = rg.scores.Bilinear(query_dim=4, key_dim=6, num_heads=2)
    >>> q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 6)
    >>> score.weight.shape, rg.Attention(score)(q, k, k).output.shape
    (torch.Size([2, 4, 6]), torch.Size([1, 2, 3, 6]))
    """

    def __init__(self, query_dim: Size, key_dim: Size, num_heads: Size = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, query_dim, key_dim))
        nn.init.xavier_uniform_(self.weight)

    def prepare(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.weight[0] if len(self.weight) == 1 else self.weight  # one product for the whole batch
        projected = query.to(self.weight.dtype) @ weight
        return projected, key.to(projected.dtype)  # torch.autocast has rounded the product

    def scale(self, head_dim: int) -> float:
        return 1.0

    def check(self, sizes: Sizes, key_dim: int) -> None:
        _check_widths("Bilinear", tuple(self.weight.shape[1:]), (sizes.D, key_dim))
        if len(self.weight) not in (1, sizes.H):
            raise RegardError(
                f"Bilinear: made for {len(self.weight)} heads, the query has {sizes.H}. Create it with "
                f"num_heads={sizes.H}, or 1 to share one matrix."
            )

    def extra_repr(self) -> str:
        H, D, K = self.weight.shape
        return f"{D}, {K}, num_heads={H}"


@checked
class LatentDot(nn.Module, Score):
    """s_ij = (r_i . r_j + q_i W_h c_j) / sqrt(R + D): multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    A query holds R rotated channels r_i and D content channels q_i. A key holds R rotated channels r_j and a latent
    c_j, which all heads share. W_h (D, C) belongs to the key projection of head h. It is applied to each query once,
    the "absorbed" form, so the keys of the heads are never computed.

    >>> import torch, regard as rg
    >>> score = rg.scores.LatentDot(num_heads=4, content_dim=8, latent_dim=16, rotary_dim=2)
    >>> q, key = torch.randn(1, 4, 3, 10), torch.randn(1, 1, 5, 18)
    >>> rg.Attention(score)(q, key, key[..., 2:]).output.shape
    torch.Size([1, 4, 3, 16])
    """

    def __init__(self, num_heads: Size, content_dim: Size, latent_dim: Size, rotary_dim: Count = 0) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim
        self.weight = nn.Parameter(torch.empty(num_heads, content_dim, latent_dim))
        nn.init.normal_(self.weight, std=latent_dim**-0.5)

    def prepare(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (r_i, W_h^T q_i), as wide as the keys, which stay as they are: (B, H, I, R + C)."""
        query = query.to(self.weight.dtype)
        rotated, content = query[..., : self.rotary_dim], query[..., self.rotary_dim :]
        absorbed = content @ self.weight
        prepared = torch.cat((rotated.to(absorbed.dtype), absorbed), -1)  # torch.autocast may have rounded the product
        return prepared, key.to(prepared.dtype)

    def scale(self, head_dim: int) -> float:
        return float((self.rotary_dim + self.weight.shape[1]) ** -0.5)

    def check(self, sizes: Sizes, key_dim: int) -> None:
        H, D, C = self.weight.shape
        _check_widths("LatentDot", (self.rotary_dim + D, self.rotary_dim + C), (sizes.D, key_dim))
        if sizes.H != H:
            raise RegardError(
                f"LatentDot: made for {H} heads, the query has {sizes.H}. Create it with {sizes.H} heads."
            )

    def extra_repr(self) -> str:
        return ", ".join(map(str, (*self.weight.shape, self.rotary_dim)))


class TanhScore(nn.Module, Score):
    """v . tanh(q_i + k_j) of prepared queries and keys, with v = `direction`."""

    direction: nn.Parameter

    @property
    def floats_per_score(self) -> int:  # type: ignore[override]
        return self.direction.shape[0]

    def tile(self, query: Tensor, key: Tensor, grid: Grid) -> Tensor:
        return additive_scores(query, key, self.direction)


@checked
class Additive(TanhScore):
    """s_ij = v . tanh(W q_i + U k_j + b): Bahdanau (Bahdanau et al. 2015, arXiv:1409.0473, appendix A.1.2).

    W (D, hidden) and U (D', hidden) are applied once to each query and key. Each pair then costs `hidden` additions,
    tanh and products; a dot product costs D products. All heads share one set of weights.

    The paper has no b. With `bias=True` there is one vector b. Classes with two `nn.Linear` have two: b is their sum.
    A bias after v adds the same number to all scores of a query, so it changes no weight of a softmax. The layer of
    this name in Keras has no projections.

    >>> import torch, regard as rg
    >>> score = rg.scores.Additive(query_dim=4, key_dim=6, hidden=8)
    >>> sum(p.numel() for p in score.parameters())  # 4 * 8 + 6 * 8 + 8
    88
    >>> rg.Attention(score)(torch.randn(1, 2, 3, 4), *torch.randn(2, 1, 2, 5, 6)).output.shape
    torch.Size([1, 2, 3, 6])
    >>> rg.scores.Additive(4, 6, hidden=8, bias=True).query.bias.shape
    torch.Size([8])
    """

    def __init__(self, query_dim: Size, key_dim: Size, hidden: Size, bias: bool = False) -> None:
        super().__init__()
        self.query = nn.Linear(query_dim, hidden, bias=bias)
        self.key = nn.Linear(key_dim, hidden, bias=False)
        self.direction = nn.Parameter(torch.empty(hidden))
        nn.init.uniform_(self.direction, -(hidden**-0.5), hidden**-0.5)

    def prepare(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.query(query.to(self.direction.dtype)), self.key(key.to(self.direction.dtype))

    def check(self, sizes: Sizes, key_dim: int) -> None:
        _check_widths("Additive", (self.query.in_features, self.key.in_features), (sizes.D, key_dim))


@checked
class Concat(TanhScore):
    """s_ij = v . tanh(W [q_i ; k_j] + b): Luong's "concat" (Luong et al. 2015, arXiv:1508.04025, eq. 8).

    W = [W_q W_k] splits in two, so W [q ; k] = W_q q + W_k k. This is Bahdanau's score in another notation, and it is
    computed as such, without a tensor of size I x J x (D + D'). b is there with `bias=True` only; the paper has none.

    >>> import torch, regard as rg
    >>> concat, additive = rg.scores.Concat(4, 6, hidden=8), rg.scores.Additive(4, 6, hidden=8)
    >>> additive.query.weight.data, additive.key.weight.data = concat.projection.weight.data.split([4, 6], 1)
    >>> additive.direction = concat.direction
    >>> q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 6)
    >>> torch.allclose(*(rg.Attention(score)(q, k, k).output for score in (concat, additive)), atol=1e-6)
    True
    """

    def __init__(self, query_dim: Size, key_dim: Size, hidden: Size, bias: bool = False) -> None:
        super().__init__()
        self.query_dim = query_dim
        self.projection = nn.Linear(query_dim + key_dim, hidden, bias=bias)
        self.direction = nn.Parameter(torch.empty(hidden))
        nn.init.uniform_(self.direction, -(hidden**-0.5), hidden**-0.5)

    def prepare(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        for_query, for_key = self.projection.weight.split(
            [self.query_dim, self.projection.in_features - self.query_dim], dim=1
        )
        dtype = self.direction.dtype
        return F.linear(query.to(dtype), for_query, self.projection.bias), F.linear(key.to(dtype), for_key)

    def check(self, sizes: Sizes, key_dim: int) -> None:
        widths = (self.query_dim, self.projection.in_features - self.query_dim)
        _check_widths("Concat", widths, (sizes.D, key_dim))


def additive_scores(query: Tensor, key: Tensor, direction: Tensor) -> Tensor:
    """v . tanh(q_i + k_j): (B, H, I, W), (B, G, J, W), (W,) -> (B, H, I, J)."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return torch.tanh(query[:, :, :, None] + key[:, :, None]) @ direction.to(query.dtype)


def _check_widths(score: str, expected: tuple[int, ...], got: tuple[int, int]) -> None:
    """Refuse other widths (query, key) than those that the score was made for."""
    if expected != got:
        raise RegardError(
            f"{score}: made for query width {expected[0]} and key width {expected[1]}, got {got[0]} and {got[1]}. "
            f"Create it as {score}({got[0]}, {got[1]}, ...)."
        )
