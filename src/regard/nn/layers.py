"""Layers of the Transformer: encoder and decoder layers, feed-forward networks, residual connections with norms."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from regard.base.checks import Size, checked
from regard.base.errors import RegardError, nearest
from regard.masks import Mask
from regard.nn.dropout import Dropout
from regard.nn.multi_head import MultiHeadAttention
from regard.nn.projected_kv import ProjectedKV

ACTIVATIONS = ("relu", "gelu", "swiglu")
NORMS = ("pre", "post")


@checked
class FeedForward(nn.Module):
    """f(x W_1 + b_1) W_2 + b_2 at every position independently (Vaswani et al. 2017, arXiv:1706.03762, section 3.3).

    `activation` is "relu", "gelu" or "swiglu". "swiglu" is silu(x W_g) * (x W_1) in place of f (Shazeer 2020,
    arXiv:2002.05202). Its three matrices have 2/3 of the hidden width, so that all activations have about the same
    number of parameters. `hidden` is 4 x `embed_dim` by default. `bias=False` omits b_1 and b_2.

    >>> sum(p.numel() for p in FeedForward(512, 2048).parameters())
    2099712
    """

    def __init__(
        self,
        embed_dim: Size,
        hidden: Size | None = None,
        activation: str = "relu",
        dropout: float = 0.0,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            known = nearest(str(activation), ACTIVATIONS)
            raise RegardError(f"FeedForward(activation={activation!r}): unknown activation. {known}")
        hidden = 4 * embed_dim if hidden is None else hidden
        self.activation = activation
        if activation == "swiglu":
            hidden = max(1, 2 * hidden // 3)
            self.gate = nn.Linear(embed_dim, hidden, bias=bias)
        self.inner = nn.Linear(embed_dim, hidden, bias=bias)
        self.outer = nn.Linear(hidden, embed_dim, bias=bias)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        if x.shape[-1] != self.inner.in_features:
            raise RegardError(
                f"FeedForward: the width is {self.inner.in_features}, got an input of shape {tuple(x.shape)}."
            )
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
    """x + dropout(f(norm(x))) for pre-norm ("pre"), norm(x + dropout(f(x))) for post-norm ("post").

    The Transformer paper has post-norm. Pre-norm trains without warm-up (Xiong et al. 2020, arXiv:2002.04745); a stack
    of pre-norm layers ends with a final norm. `bias=False` omits the bias of the norm.

    >>> import torch, regard as rg
    >>> x = torch.randn(1, 5, 8)
    >>> pre, post = rg.nn.Residual(8, "pre"), rg.nn.Residual(8, "post")
    >>> torch.equal(pre.after(x, torch.zeros(1, 5, 8)), x)  # pre-norm: adding zeros changes nothing
    True
    >>> torch.allclose(post.after(x, x), pre.before(x), atol=1e-4)  # a norm ignores the scale
    True
    """

    def __init__(self, embed_dim: Size, norm: str = "pre", dropout: float = 0.0, *, bias: bool = True) -> None:
        super().__init__()
        if norm not in NORMS:
            raise RegardError(f"Residual(norm={norm!r}): unknown norm. {nearest(str(norm), NORMS)}")
        self.place = norm  # "pre" or "post"
        self.norm = nn.LayerNorm(embed_dim, bias=bias)
        self.dropout = Dropout(dropout)

    def before(self, x: Tensor) -> Tensor:
        """The input of the sublayer."""
        return self.norm(x) if self.place == "pre" else x

    def after(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """The sum of x and the output of the sublayer, with norm for post-norm."""
        x = x + self.dropout(sublayer_output)
        return x if self.place == "pre" else self.norm(x)

    def extra_repr(self) -> str:
        return self.place


@checked
class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each with a residual (Vaswani et al. 2017, arXiv:1706.03762, section 3.1).

    `bias=False` omits the biases of the norms; `self_attention` and `feed_forward` have a `bias` of their own.

    >>> import torch, regard as rg
    >>> layer = rg.nn.EncoderLayer(rg.nn.MultiHeadAttention(8, 2), rg.nn.FeedForward(8, 32))
    >>> layer(torch.randn(1, 5, 8), rg.padding([3])).shape
    torch.Size([1, 5, 8])
    """

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        feed_forward: FeedForward,
        norm: str = "pre",
        dropout: float = 0.0,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.self_attention, self.feed_forward = self_attention, feed_forward
        self.around_self = Residual(self_attention.embed_dim, norm, dropout, bias=bias)
        self.around_feed = Residual(self_attention.embed_dim, norm, dropout, bias=bias)

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        """(B, I, C) -> (B, I, C); `mask` excludes keys, such as `regard.padding(real)`."""
        x = self.around_self.after(x, self.self_attention(self.around_self.before(x), mask=mask).output)
        return self.around_feed.after(x, self.feed_forward(self.around_feed.before(x)))


@checked
class DecoderLayer(nn.Module):
    """Masked self-attention, attention to the encoder, then feed-forward, each with a residual (section 3.1).

    Without `cross_attention` it is a layer of a decoder-only model, such as a language model. `self_attention`
    must have a causal mask if a token may not attend to later tokens. `bias=False` omits the biases of the norms.

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
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        embed_dim = self_attention.embed_dim
        self.self_attention, self.cross_attention, self.feed_forward = self_attention, cross_attention, feed_forward
        if cross_attention is not None:
            cross_attention.is_cross_attention = True
            self.around_cross = Residual(embed_dim, norm, dropout, bias=bias)
        self.around_self = Residual(embed_dim, norm, dropout, bias=bias)
        self.around_feed = Residual(embed_dim, norm, dropout, bias=bias)

    def forward(
        self,
        x: Tensor,
        keys: ProjectedKV | None = None,
        past: ProjectedKV | None = None,
        mask: Mask | None = None,
    ) -> tuple[Tensor, ProjectedKV]:
        """The outputs (B, I, C) of the next tokens (B, I, C), and the keys of all tokens so far: the next `past`.

        `keys` are the keys of the source, from `cross_attention.keys(states, mask=...)`, whose mask excludes padding of
        the source. `mask` excludes padding of the layer's own tokens: of all tokens so far, those of `past` included.
        """
        attention_output, present = self.self_attention.advance(self.around_self.before(x), past, mask)
        x = self.around_self.after(x, attention_output)
        if self.cross_attention is not None:
            if keys is None:
                raise RegardError(
                    "DecoderLayer: this layer has cross-attention; give keys=cross_attention.keys(states)."
                )
            start = present.length - x.shape[1]  # the position of the first of these tokens
            seen = self.cross_attention(self.around_cross.before(x), keys, start=start)
            x = self.around_cross.after(x, seen.output)
        return self.around_feed.after(x, self.feed_forward(self.around_feed.before(x))), present
