"""Token embeddings, and where tokens stand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.nn.dropout import Dropout
from regard.pieces import Position


class Embedding(nn.Module):
    """sqrt(C) E[token] + p[position] (Vaswani et al. 2017, arXiv:1706.03762, sections 3.4 and 3.5).

    `position` is what is added: `Sinusoidal()`, `LearnedPositions(length, C)`, or None where positions act
    inside the attention (RoPE, ALiBi, T5) or nowhere. Id `padding` has the zero vector and learns nothing. The
    numbers start at variance 1, the factor included; `scale=False` leaves it out, as recurrent networks do.

    >>> import torch, regard as rg
    >>> rg.nn.Embedding(100, 16, rg.Sinusoidal())(torch.tensor([[5, 7, 0]])).shape
    torch.Size([1, 3, 16])
    """

    def __init__(
        self,
        size: int,
        width: int,
        position: Position | None = None,
        dropout: float = 0.0,
        *,
        scale: bool = True,
        padding: int | None = 0,
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(size, width, padding)
        self.factor = width**0.5 if scale else 1.0
        nn.init.normal_(self.table.weight, std=1 / self.factor)
        if padding is not None:
            with torch.no_grad():
                self.table.weight[padding].zero_()
        self.position = position
        self.dropout = Dropout(dropout)

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        """Ids (B, T), the first at position `start`, -> (B, T, C)."""
        x = self.table(ids)
        x = x if self.factor == 1 else x * self.factor
        if self.position is not None:
            places = torch.arange(start, start + ids.shape[1], device=ids.device)
            x = self.position.encode(x[:, None], places)[:, 0]
        return self.dropout(x)
