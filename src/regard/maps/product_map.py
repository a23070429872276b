"""`ProductMap`: the product of maps, W = W_1 W_2 ..., for values that pass through several attentions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.attention import Attention
from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.spans import Spans
from regard.maps.attention_map import AttentionMap
from regard.maps.gradients import LiveRows, Rows, joined_rows
from regard.maps.indices import Index, indices
from regard.pieces.grid import Grid


class ProductMap(AttentionMap):
    """w_ij = sum_m u_im v_mj: the map of an attention that reads the output of another, and so on.

    The first map is the last attention: its keys are the queries of the next map. Only the rows and columns that are
    asked for are computed, so a product through few latents costs little more than its first and its last map.

    >>> import torch, regard as rg
    >>> latents, x = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 3, 4)
    >>> read = rg.Attention()(latents, x, x)  # 2 latents read 3 tokens
    >>> write = rg.Attention()(x, latents, read.output)  # 3 tokens read the latents
    >>> rg.maps.ProductMap([write.weights, read.weights])[0, 0, 0]
    tensor([0.3333, 0.3333, 0.3333])
    """

    _made_of: ClassVar[str] = "a product of maps, weights.factors"

    def __init__(self, factors: Sequence[AttentionMap], positions: Positions | None = None) -> None:
        """`positions` of queries and keys; by default the queries of the first map and the keys of the last."""
        self.factors = list(factors)
        _check_factors(self.factors)
        first, last = self.factors[0], self.factors[-1]
        self.positions = positions or Positions(first.positions.start, last.positions.keys)
        queries, keys = self.positions.query(slice(0, first.shape[2]), first.device), self.positions.key(first.device)
        self.grid = Grid(first.grid.batch, first.grid.head, queries, keys, self.positions)
        self.attention = Attention()

    @cached_property
    def is_signed(self) -> bool:  # type: ignore[override]
        return any(factor.is_signed for factor in self.factors)

    @cached_property
    def has_shares(self) -> bool:  # type: ignore[override]
        return all(factor.has_shares for factor in self.factors)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (*self.factors[0].shape[:3], self.factors[-1].shape[3])

    @property
    def _dtype(self) -> torch.dtype:
        return reduce(torch.promote_types, (factor._dtype for factor in self.factors))

    @property
    def _bytes_per_weight(self) -> int:
        return 2 * self._item_bytes + max(factor._bytes_per_weight for factor in self.factors)

    @checked
    def select(self, batch: Index, head: Index) -> ProductMap:
        """The map of some batch entries and heads (indices), still lazy."""
        b = indices("weights.select", "batch", batch, self.shape[0])
        h = indices("weights.select", "head", head, self.shape[1])
        return ProductMap([factor.select(b, h) for factor in self.factors], self.positions)

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        product: Tensor | None = None
        for number, factor in enumerate(self.factors):
            i = rows if number == 0 else torch.arange(factor.shape[2])
            j = cols if number == len(self.factors) - 1 else torch.arange(factor.shape[3])
            weights = factor._weights(i, j).to(self._dtype)
            product = weights if product is None else product @ weights
        assert product is not None
        return product

    @property
    def requires_grad(self) -> bool:
        return any(factor.requires_grad for factor in self.factors)

    def live_rows(self) -> LiveRows:
        sizes = [factor.shape[2:] for factor in self.factors]

        def combine(parts: list[Any]) -> Rows:
            def rows(queries: Tensor | slice, keys: Spans) -> tuple[Tensor, None]:
                product: Tensor | None = None
                for number, (part, (I, J)) in enumerate(zip(parts, sizes, strict=True)):
                    i = queries if number == 0 else slice(0, I)
                    weights = part(i, Spans.of((0, J)))[0].to(self._dtype)
                    product = weights if product is None else product @ weights
                assert product is not None
                return product[..., keys.tensor(product.device)], None

            return rows

        return joined_rows([factor.live_rows() for factor in self.factors], combine)


def _check_factors(factors: list[AttentionMap]) -> None:
    shapes = [factor.shape for factor in factors]
    if not factors:
        raise RegardError("ProductMap: give at least one map.")
    for left, right in pairwise(shapes):
        if left[:2] != right[:2] or left[3] != right[2]:
            raise RegardError(
                f"ProductMap: maps of shapes {left} and {right} cannot be multiplied. They need the same batch and "
                "heads, and as many keys in the first as there are queries in the second."
            )
