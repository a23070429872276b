"""`Embedding`: vectors of tokens plus encodings of their positions."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from regard.checks import Size, checked
from regard.errors import RegardError
from regard.nn.dropout import Dropout
from regard.pieces import Position, Sinusoidal
from regard.spans import Spans


@checked
class Embedding(nn.Module):
    """sqrt(C) E[token] + p[position] (Vaswani et al. 2017, arXiv:1706.03762, sections 3.4 and 3.5).

    `position` is `Sinusoidal()`, `LearnedPositions(length, C)`, or None if positions act inside the attention (RoPE,
    ALiBi, T5) or are not used. Id `padding` has the zero vector and is not trained. `scale=False` omits the factor
    sqrt(C), as recurrent networks do. `std` is the initial standard deviation of the vectors after the factor.

    >>> import torch, regard as rg
    >>> rg.nn.Embedding(100, 16, rg.Sinusoidal())(torch.tensor([[5, 7, 0]])).shape
    torch.Size([1, 3, 16])
    """

    def __init__(
        self,
        size: Size,
        width: Size,
        position: Position | None = None,
        dropout: float = 0.0,
        *,
        scale: bool = True,
        std: float = 1.0,
        padding: int | None = 0,
    ) -> None:
        super().__init__()
        if not 0 <= std < math.inf:
            raise RegardError(f"Embedding(std={std}): a standard deviation must be at least 0 and finite.")
        self.table = nn.Embedding(size, width, padding)
        self.factor = width**0.5 if scale else 1.0
        nn.init.normal_(self.table.weight, std=std / self.factor)
        if padding is not None:
            with torch.no_grad():
                self.table.weight[padding].zero_()
        self.position = position
        self.dropout = Dropout(dropout)

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        """Ids (B, T), the first at position `start`, -> (B, T, C)."""
        x = self.table(ids)
        x = x if self.factor == 1 else x * self.factor
        stop = start + ids.shape[1]
        if isinstance(self.position, Sinusoidal):
            length = max(64, 1 << (stop - 1).bit_length())
            x = x + _sinusoids(self.position, length, x.shape[-1], x.dtype, x.device)[start:stop]
        elif self.position is not None:
            self.position.check(Spans(((start, stop),)))
            x = self.position.encode(x[:, None], torch.arange(start, stop, device=ids.device))[:, 0]
        return self.dropout(x)


@lru_cache(maxsize=16)
def _sinusoids(position: Sinusoidal, length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The encodings of the first positions, (length, width). They are cached: computing them is slower than adding."""
    with torch.inference_mode(False):
        return position.table(torch.arange(length, device=device), width).to(dtype)
