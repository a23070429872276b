"""The Transformer: encoder, decoder, both together, and the settings that build them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from regard.base.checks import Size, checked
from regard.base.errors import RegardError
from regard.encodings import Encoding, LearnedPositions, Sinusoidal
from regard.masks import Mask
from regard.nn.attention_roles import ROLES, attention_for
from regard.nn.embedding import Embedding
from regard.nn.layers import DecoderLayer, EncoderLayer, FeedForward
from regard.nn.multi_head import MultiHeadAttention
from regard.nn.projected_kv import ProjectedKV

Mechanism = str | Mapping[str, Any]


@checked
@dataclass(frozen=True)
class TransformerConfig:
    """The settings of the layers of a Transformer. It builds encoders and decoders.

    `attention` is a mechanism of the catalog for all roles, or a mapping from "encoder", "decoder" and "cross" to
    mechanisms. `positions` is "sinusoidal", "learned", "rope", "alibi", "t5" or "none". `feed_forward` is the inner
    width, by default 4 x `embed_dim`. `scaled=False` omits the factor 1 / sqrt(D) of the scores, to show its effect.
    `bias=False` omits the biases of all linear layers and norms.

    >>> import torch
    >>> decoder = TransformerConfig(32, num_heads=4, positions="rope").decoder(2, vocab_size=100, cross=False)
    >>> decoder(torch.tensor([[2, 7, 9]])).shape
    torch.Size([1, 3, 32])
    """

    embed_dim: Size
    num_heads: Size = 4
    num_key_value_heads: Size | None = None
    feed_forward: Size | None = None
    activation: str = "relu"
    norm: str = "pre"
    dropout: float = 0.0
    positions: str = "sinusoidal"
    attention: Mechanism | Mapping[str, Mechanism] = "full"
    scaled: bool = True
    max_length: Size = field(default=512, kw_only=True)
    bias: bool = field(default=True, kw_only=True)

    def encoder(self, layers: int, vocab_size: int | None = None) -> Encoder:
        """A stack of `layers`. Its input is ids if a vocabulary size is given, otherwise vectors."""
        stack = [
            EncoderLayer(self._attention("encoder"), self._feed_forward(), self.norm, self.dropout, bias=self.bias)
            for _ in range(layers)
        ]
        return Encoder(stack, self._embedding(vocab_size))

    def decoder(self, layers: int, vocab_size: int | None = None, cross: bool = True) -> Decoder:
        """A stack of causal `layers`; with `cross` they also attend to an encoder.

        With `vocab_size` it reads token ids, by an embedding; without, vectors.
        """
        stack = []
        for _ in range(layers):
            cross_attention = self._attention("cross") if cross else None
            own, feed_forward = self._attention("decoder"), self._feed_forward()
            stack.append(DecoderLayer(own, cross_attention, feed_forward, self.norm, self.dropout, bias=self.bias))
        return Decoder(stack, self._embedding(vocab_size))

    def _attention(self, role: str) -> MultiHeadAttention:
        """A module with the mechanism for "encoder", "decoder" or "cross"."""
        if self.embed_dim % self.num_heads:
            return MultiHeadAttention(self.embed_dim, self.num_heads)  # raises the error
        mechanism = self.attention
        if isinstance(mechanism, Mapping) and "name" not in mechanism:
            if set(mechanism) - set(ROLES):
                raise RegardError(f"attention={dict(mechanism)}: the keys must be roles: {', '.join(ROLES)}.")
            mechanism = mechanism.get(role, "full")
        options = {"positions": self.positions, "scaled": self.scaled, "num_heads": self.num_heads}
        attention = attention_for(role, mechanism, head_dim=self.embed_dim // self.num_heads, **options)
        return MultiHeadAttention(self.embed_dim, self.num_heads, self.num_key_value_heads, attention, bias=self.bias)

    def _feed_forward(self) -> FeedForward:
        return FeedForward(self.embed_dim, self.feed_forward, self.activation, self.dropout, bias=self.bias)

    def _embedding(self, vocab_size: int | None) -> Embedding | None:
        return None if vocab_size is None else Embedding(vocab_size, self.embed_dim, self._position(), self.dropout)

    def _position(self) -> Encoding | None:
        """The encoding that is added to the embeddings; None if positions act inside the attention or are not used."""
        if self.positions == "learned":
            return LearnedPositions(self.max_length, self.embed_dim)
        return Sinusoidal() if self.positions == "sinusoidal" else None


@checked
class Encoder(nn.Module):
    """A stack of encoder layers, as in BERT. A stack of pre-norm layers ends with a final norm.

    With an `embedding` it reads ids (B, n), without one vectors (B, n, C).

    >>> import torch, regard as rg
    >>> encoder = rg.nn.TransformerConfig(16, num_heads=2).encoder(layers=2, vocab_size=50)
    >>> encoder(torch.tensor([[4, 8, 3, 0]]), rg.padding([3])).shape
    torch.Size([1, 4, 16])
    """

    def __init__(self, layers: Iterable[EncoderLayer], embedding: Embedding | None = None) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)
        self.norm = _last_norm([layer.around_feed for layer in self.layers])

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        """Ids (B, I), or vectors (B, I, C) without an embedding, -> (B, I, C)."""
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


@dataclass(frozen=True, eq=False)
class DecoderCache:
    """The keys of the tokens so far, for each layer of a decoder.

    >>> import torch, regard as rg
    >>> decoder = rg.nn.TransformerConfig(8, num_heads=2).decoder(layers=3, vocab_size=9, cross=False)
    >>> _, past = decoder.advance(torch.tensor([[2, 4]]))
    >>> _, longer = decoder.advance(torch.tensor([[8]]), past=past)
    >>> past.length, longer.length, len(longer.keys)
    (2, 3, 3)
    """

    keys: tuple[ProjectedKV, ...]

    def __repr__(self) -> str:
        return f"DecoderCache({len(self.keys)} layers, {self.length} tokens)"

    @property
    def length(self) -> int:
        return self.keys[0].length


@checked
class Decoder(nn.Module):
    """A stack of decoder layers. Without cross-attention it is a language model, as GPT.

    With an `embedding` it reads ids (B, n), without one vectors (B, n, C).

    >>> import torch, regard as rg
    >>> decoder = rg.nn.TransformerConfig(16, num_heads=2).decoder(layers=2, vocab_size=50, cross=False)
    >>> ids = torch.tensor([[2, 4, 8, 3]])
    >>> whole = decoder(ids)
    >>> first, past = decoder.advance(ids[:, :2])
    >>> second, past = decoder.advance(ids[:, 2:], past=past)
    >>> torch.allclose(torch.cat((first, second), 1), whole, atol=1e-6)
    True
    """

    def __init__(self, layers: Iterable[DecoderLayer], embedding: Embedding | None = None) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)
        self.norm = _last_norm([layer.around_feed for layer in self.layers])

    def keys(self, states: Tensor, mask: Mask | None = None) -> tuple[ProjectedKV, ...]:
        """The keys of encoder states (B, J, C) for the cross-attention of each layer, once per source."""
        modules = [layer.cross_attention for layer in self.layers]
        return tuple(module.keys(states, mask=mask) for module in modules if isinstance(module, MultiHeadAttention))

    def forward(self, x: Tensor, keys: tuple[ProjectedKV, ...] = (), mask: Mask | None = None) -> Tensor:
        """Ids (B, I), or vectors (B, I, C) without an embedding, -> (B, I, C); `mask` excludes padding among them."""
        return self.advance(x, keys, mask=mask)[0]

    def advance(
        self,
        x: Tensor,
        keys: tuple[ProjectedKV, ...] = (),
        past: DecoderCache | None = None,
        mask: Mask | None = None,
    ) -> tuple[Tensor, DecoderCache]:
        """The outputs (B, I, C) of the tokens that follow those of `past`, and the `past` for the next call.

        `x` are ids (B, I), or vectors (B, I, C) without an embedding. `keys` are those of the source, one for each
        layer, from `decoder.keys(states)`; () without cross-attention. Without `past` the tokens are the first ones.
        `mask` excludes padding among all tokens so far, those of `past` included.
        """
        start = 0 if past is None else past.length
        x = x if self.embedding is None else self.embedding(x, start)
        if keys and len(keys) != len(self.layers):
            raise RegardError(
                f"Decoder: it has {len(self.layers)} layers, got keys for {len(keys)}. Use decoder.keys(states)."
            )
        present = []
        for number, layer in enumerate(self.layers):
            source_keys, past_keys = keys[number] if keys else None, None if past is None else past.keys[number]
            x, all_keys = layer(x, source_keys, past_keys, mask)
            present.append(all_keys)
        return self.norm(x), DecoderCache(tuple(present))


@checked
class Transformer(nn.Module):
    """An encoder, and a decoder that attends to it (Vaswani et al. 2017, arXiv:1706.03762).

    >>> import torch, regard as rg
    >>> config = rg.nn.TransformerConfig(16, num_heads=2)
    >>> model = rg.nn.Transformer(config.encoder(2, vocab_size=50), config.decoder(2, vocab_size=40))
    >>> model(torch.tensor([[4, 8, 3]]), torch.tensor([[2, 7]])).shape
    torch.Size([1, 2, 16])
    """

    def __init__(self, encoder: Encoder, decoder: Decoder) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(
        self, source: Tensor, target: Tensor, mask: Mask | None = None, target_mask: Mask | None = None
    ) -> Tensor:
        """Source (B, J) and target (B, I) -> (B, I, C); `mask` excludes source tokens, `target_mask` target tokens."""
        return self.decoder(target, self.decoder.keys(self.encoder(source, mask), mask), target_mask)


def _last_norm(residuals: list[Any]) -> nn.Module:
    """The final norm of a stack of pre-norm layers, or the identity for post-norm.

    `residuals` has the last `Residual` of each layer. The norm has a bias if theirs has one.
    """
    if not residuals or residuals[-1].place == "post":
        return nn.Identity()
    norm = residuals[-1].norm
    return nn.LayerNorm(norm.normalized_shape, bias=norm.bias is not None)
