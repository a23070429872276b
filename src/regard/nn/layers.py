"""Layers of the Transformer: attention, feed-forward, residuals and norms."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from regard.checks import Size, checked
from regard.errors import RegardError, nearest
from regard.nn.dropout import Dropout
from regard.nn.keys import Keys
from regard.nn.multi_head import MultiHeadAttention
from regard.pieces import Mask

ACTIVATIONS = ("relu", "gelu", "swiglu")
NORMS = ("pre", "post")


@checked
class FeedForward(nn.Module):
    """f(x W_1 + b_1) W_2 + b_2 at every position by itself (Vaswani et al. 2017, arXiv:1706.03762, section 3.3).

    `activation` is "relu", "gelu" or "swiglu": silu(x W_g) * (x W_1) in place of f (Shazeer 2020,
    arXiv:2002.05202), whose two matrices are 2/3 as wide, so that all three have as many parameters.
    `hidden` is 4 x `width` unless given.

    >>> sum(p.numel() for p in FeedForward(512, 2048).parameters())
    2099712
    """

    def __init__(self, width: Size, hidden: Size | None = None, activation: str = "relu", dropout: float = 0.0) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            known = nearest(str(activation), ACTIVATIONS)
            raise RegardError(f"FeedForward(activation={activation!r}): there is no such one. {known}")
        hidden = 4 * width if hidden is None else hidden
        self.activation = activation
        if activation == "swiglu":
            hidden = max(1, 2 * hidden // 3)
            self.gate = nn.Linear(width, hidden)
        self.inner = nn.Linear(width, hidden)
        self.outer = nn.Linear(hidden, width)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        if x.shape[-1] != self.inner.in_features:
            raise RegardError(f"FeedForward: made for width {self.inner.in_features}, got {tuple(x.shape)}.")
        hidden = self.inner(x)
        if self.activation == "swiglu":
            hidden = F.silu(self.gate(x)) * hidden
        else:
            hidden = F.relu(hidden) if self.activation == "relu" else F.gelu(hidden)
        return self.outer(self.dropout(hidden))

    def extra_repr(self) -> str:
        return self.activation


@checked
class Residual(nn.Module):
    """x + dropout(f(norm(x))) before ("pre"), or norm(x + dropout(f(x))) behind ("post").

    Post-norm is the paper's; pre-norm trains without warm-up (Xiong et al. 2020, arXiv:2002.04745), and a stack of it
    ends in a norm of its own.

    >>> import torch, regard as rg
    >>> x = torch.randn(1, 5, 8)
    >>> pre, post = rg.nn.Residual(8, "pre"), rg.nn.Residual(8, "post")
    >>> torch.equal(pre.after(x, torch.zeros(1, 5, 8)), x)  # what adds nothing changes nothing
    True
    >>> torch.allclose(post.after(x, x), pre.before(x), atol=1e-4)  # a norm knows no scale
    True
    """

    def __init__(self, width: Size, norm: str = "pre", dropout: float = 0.0) -> None:
        super().__init__()
        if norm not in NORMS:
            raise RegardError(f"Residual(norm={norm!r}): a norm stands before or behind. {nearest(str(norm), NORMS)}")
        self.place = norm
        self.norm = nn.LayerNorm(width)
        self.dropout = Dropout(dropout)

    def before(self, x: Tensor) -> Tensor:
        """What the sublayer is given."""
        return self.norm(x) if self.place == "pre" else x

    def after(self, x: Tensor, made: Tensor) -> Tensor:
        """What the sublayer made of it, added."""
        x = x + self.dropout(made)
        return x if self.place == "pre" else self.norm(x)

    def extra_repr(self) -> str:
        return self.place


@checked
class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each in a residual (Vaswani et al. 2017, arXiv:1706.03762, section 3.1).

    >>> import torch, regard as rg
    >>> layer = rg.nn.EncoderLayer(rg.nn.MultiHeadAttention(8, 2), rg.nn.FeedForward(8, 32))
    >>> layer(torch.randn(1, 5, 8), rg.padding([3])).shape
    torch.Size([1, 5, 8])
    """

    def __init__(
        self, self_attention: MultiHeadAttention, feed_forward: FeedForward, norm: str = "pre", dropout: float = 0.0
    ) -> None:
        super().__init__()
        width = self_attention.output.out_features
        self.self_attention, self.feed_forward = self_attention, feed_forward
        self.around_self = Residual(width, norm, dropout)
        self.around_feed = Residual(width, norm, dropout)

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        """(B, I, C) -> (B, I, C); `mask` says which are real, as `regard.padding(real)`."""
        x = self.around_self.after(x, self.self_attention(self.around_self.before(x), mask=mask))
        return self.around_feed.after(x, self.feed_forward(self.around_feed.before(x)))


@checked
class DecoderLayer(nn.Module):
    """Masked self-attention, attention to the encoder, then feed-forward, each in a residual (section 3.1).

    Without `cross_attention` it is the layer of a decoder alone, as language models have. That no token sees a later
    one is the business of the mask of `self_attention`.

    >>> import torch, regard as rg
    >>> own = rg.nn.MultiHeadAttention(8, 2, attention=rg.Attention(mask=rg.causal()))
    >>> layer = rg.nn.DecoderLayer(own, None, rg.nn.FeedForward(8))
    >>> output, past = layer(torch.randn(1, 5, 8))
    >>> output.shape, past.length
    (torch.Size([1, 5, 8]), 5)
    """

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        cross_attention: MultiHeadAttention | None,
        feed_forward: FeedForward,
        norm: str = "pre",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        width = self_attention.output.out_features
        self.self_attention, self.cross_attention, self.feed_forward = self_attention, cross_attention, feed_forward
        if cross_attention is not None:
            cross_attention.is_cross_attention = True
            self.around_cross = Residual(width, norm, dropout)
        self.around_self = Residual(width, norm, dropout)
        self.around_feed = Residual(width, norm, dropout)

    def forward(self, x: Tensor, keys: Keys | None = None, past: Keys | None = None) -> tuple[Tensor, Keys]:
        """The next tokens (B, I, C) -> (B, I, C), and the keys of all tokens so far, which are the next `past`.

        `keys` are what `cross_attention.keys` projected of the source.
        """
        made, present = self.self_attention.advance(self.around_self.before(x), past)
        x = self.around_self.after(x, made)
        if self.cross_attention is not None:
            if keys is None:
                raise RegardError("DecoderLayer: it reads a source; give cross_attention.keys(states) as keys.")
            start = present.length - x.shape[1]
            x = self.around_cross.after(x, self.cross_attention(self.around_cross.before(x), keys, start=start))
        return self.around_feed.after(x, self.feed_forward(self.around_feed.before(x))), present
