"""`Embedding`: vectors of tokens plus encodings of their positions. `PositionalEncoding`: these encodings alone."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from regard.base.checks import Size, checked
from regard.base.errors import RegardError
from regard.base.spans import Spans
from regard.encodings import Encoding, RoPE, Sinusoidal
from regard.engine.ring import Ring
from regard.nn.dropout import Dropout
from regard.pieces.holder import HoldsPieces


@checked
class Embedding(HoldsPieces):
    """sqrt(C) E[token] + p[position] (Vaswani et al. 2017, arXiv:1706.03762, sections 3.4 and 3.5).

    `position` is `Sinusoidal()`, `LearnedPositions(length, C)`, or None if positions act inside the attention (RoPE,
    ALiBi, T5) or are not used. Id `padding` has the zero vector and is not trained. `scale=False` omits the factor
    sqrt(C), as recurrent networks do. `std` is the initial standard deviation of the vectors after the factor.

    >>> import torch, regard as rg
    >>> rg.nn.Embedding(100, 16, rg.encodings.Sinusoidal())(torch.tensor([[5, 7, 0]])).shape
    torch.Size([1, 3, 16])
    """

    def __init__(
        self,
        size: Size,
        embed_dim: Size,
        position: Encoding | None = None,
        dropout: float = 0.0,
        *,
        scale: bool = True,
        std: float = 1.0,
        padding: int | None = 0,
    ) -> None:
        super().__init__()
        if not 0 <= std < math.inf:
            raise RegardError(f"Embedding(std={std}): a standard deviation must be at least 0 and finite.")
        self.table = nn.Embedding(size, embed_dim, padding)
        self.factor = embed_dim**0.5 if scale else 1.0
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
        return self.dropout(x if self.position is None else _with_positions(self.position, x, start))


@checked
class PositionalEncoding(HoldsPieces):
    """x + p[position]: sinusoids, or a learned table (Vaswani et al. 2017, arXiv:1706.03762, section 3.5).

    `position` is `Sinusoidal()` by default, which has no parameters and no greatest length, or
    `LearnedPositions(length, embed_dim)`. `Embedding` adds positions itself.

    >>> import torch, regard as rg
    >>> encoding = rg.nn.PositionalEncoding(16, dropout=0.1).eval()
    >>> x = torch.randn(2, 5, 16)
    >>> torch.allclose(encoding(x) - x, rg.encodings.Sinusoidal().table(torch.arange(5), 16).float(), atol=1e-6)
    True
    """

    def __init__(self, embed_dim: Size, dropout: float = 0.0, *, position: Encoding | None = None) -> None:
        super().__init__()
        if isinstance(position, RoPE):
            raise RegardError(
                "PositionalEncoding(position=RoPE(...)): RoPE is not added to vectors. It rotates queries and keys "
                "inside the attention: regard.Attention(position=regard.RoPE(head_dim))."
            )
        self.embed_dim = embed_dim
        self.position = Sinusoidal() if position is None else position
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """(B, T, C), the first at position `start`, -> (B, T, C)."""
        if x.ndim != 3 or x.shape[-1] != self.embed_dim:
            raise RegardError(
                f"PositionalEncoding: inputs must be (batch, length, {self.embed_dim}), got {tuple(x.shape)}."
            )
        return self.dropout(_with_positions(self.position, x, start))

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.position!r}" if isinstance(self.position, Sinusoidal) else str(self.embed_dim)


def _with_positions(position: Encoding, x: Tensor, start: int) -> Tensor:
    """Vectors (B, T, C) with the encodings of the positions `start`, `start` + 1, ..."""
    if Ring.default() is not None:
        raise RegardError(
            f"{position!r}: inside Ring.as_default a rank has a share of the tokens, and encodings would count from "
            "its first one. Encode the whole sequence before the block, and take ring.share(x, axis=1)."
        )
    stop = start + x.shape[1]
    if isinstance(position, Sinusoidal):
        length = max(64, 1 << (stop - 1).bit_length())  # a power of two, so that texts of many lengths share a table
        return x + _sinusoids(position, length, x.shape[-1], x.dtype, x.device)[start:stop]
    position.check(Spans(((start, stop),)))
    return position.encode(x[:, None], torch.arange(start, stop, device=x.device))[:, 0]


@lru_cache(maxsize=16)
def _sinusoids(position: Sinusoidal, length: int, embed_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The encodings of the first positions, (length, embed_dim). They are kept, since computing them takes longer
    than adding them.
    """
    with torch.inference_mode(False):  # a later call may be in training, which refuses tensors of inference mode
        return position.table(torch.arange(length, device=device), embed_dim, dtype)
