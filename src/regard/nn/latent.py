"""`MultiHeadLatentAttention`: keys and values of all heads from one small latent vector for each token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.attention_output import AttentionOutput
from regard.base.checks import Count, Size, checked, explained
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.caches import LatentCache
from regard.encodings import Encoding, RoPE
from regard.engine.ring import Ring
from regard.masks import Mask, causal
from regard.nn.listener import Attends, listeners
from regard.nn.module_output import ModuleOutput
from regard.pieces.mask import sees_no_later_key
from regard.scores import Dot, LatentDot

#: How the heads read the latents: from keys and values of their own, or from the latents themselves.
Form = Literal["auto", "absorbed", "expanded"]


@checked
class MultiHeadLatentAttention(Attends):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): a cache of one latent for each token.

    A token has a latent c_j (`latent_dim`) and `rotary_dim` rotated channels, which all heads share. Head h has
    the keys U_h c_j (`head_dim`) beside the rotated channels, and the values V_h c_j (`value_dim`). Queries come
    from x, through a latent of their own if `query_latent_dim` is given. `position` rotates; by default RoPE. `mask`
    is causal by default.

    There are two forms with equal weights and outputs. "expanded" computes keys and values of every head. "absorbed"
    applies U_h to the queries and V_h to the output, and reads the latents alone, which is cheaper for few queries, as
    in decoding. By default the form with fewer operations runs.

    >>> import torch, regard as rg
    >>> layer = rg.nn.MultiHeadLatentAttention(64, num_heads=4, latent_dim=16, head_dim=16, rotary_dim=8)
    >>> x = torch.randn(1, 10, 64)
    >>> output, cache = layer.advance(x[:, :9])
    >>> last, cache = layer.advance(x[:, 9:], cache)
    >>> torch.allclose(last, layer(x).output[:, 9:], atol=1e-5), cache.store.key.shape
    (True, torch.Size([1, 1, 10, 24]))
    """

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size,
        latent_dim: Size,
        *,
        head_dim: Size,
        rotary_dim: Count = 0,
        value_dim: Size | None = None,
        query_latent_dim: Size | None = None,
        position: Encoding | None = None,
        mask: Mask | None = causal(),  # noqa: B008 - a mask is a value
    ) -> None:
        super().__init__()
        value_dim = head_dim if value_dim is None else value_dim
        self.num_heads, self.rotary_dim = num_heads, rotary_dim
        self.position = RoPE(rotary_dim) if position is None and rotary_dim else position
        inner = num_heads * (head_dim + rotary_dim)
        self.query = (
            nn.Linear(embed_dim, inner, bias=False)
            if query_latent_dim is None
            else nn.Sequential(
                nn.Linear(embed_dim, query_latent_dim, bias=False),
                nn.RMSNorm(query_latent_dim, eps=1e-6),
                nn.Linear(query_latent_dim, inner, bias=False),
            )
        )
        self.latent = nn.Linear(embed_dim, latent_dim + rotary_dim, bias=False)
        self.latent_norm = nn.RMSNorm(latent_dim, eps=1e-6)
        self.attention = Attention(LatentDot(num_heads, head_dim, latent_dim, rotary_dim), mask=mask)
        self.value = nn.Parameter(torch.empty(num_heads, latent_dim, value_dim).normal_(std=latent_dim**-0.5))
        self.output = nn.Linear(num_heads * value_dim, embed_dim, bias=False)

    @explained
    def forward(self, x: Tensor, *, mask: Mask | None = None, form: Form = "auto") -> ModuleOutput:
        """The output (B, n, C) for tokens (B, n, C), and the weights. `mask` is joined to that of the layer."""
        return self._advanced(x, None, mask, form)[0]

    def advance(
        self, x: Tensor, past: LatentCache | None = None, mask: Mask | None = None, *, form: Form = "auto"
    ) -> tuple[Tensor, LatentCache]:
        """Attention of the next tokens (B, n, C) to all tokens so far: the output, and the latents of all tokens."""
        seen, cache = self._advanced(x, past, mask, form)
        return seen.output, cache

    def _advanced(
        self, x: Tensor, past: LatentCache | None, mask: Mask | None, form: Form
    ) -> tuple[ModuleOutput, LatentCache]:
        """The attention of the tokens (B, n, C) that follow `past`, and the cache with their keys appended."""
        past = LatentCache() if past is None else past
        self._check(x, past, form)
        key = self._keys(x, past.length)
        # the values of the cache are the latents, which the keys contain
        extended = past.extend(key, key[..., self.rotary_dim :])
        seen = self._attend(self._queries(x, past.length), extended.key, extended.positions, mask, form)
        listeners.tell(self, lambda: seen.weights, lambda: extended.value @ self.value.to(extended.value.dtype))
        output = ModuleOutput(self.output(seen.output.transpose(1, 2).flatten(2)), lambda: seen.weights)
        return output, extended.cache  # type: ignore[return-value]  # a LatentCache, as `past` is

    @property
    def is_causal(self) -> bool:  # type: ignore[override]
        return sees_no_later_key(self.attention.mask)

    def _queries(self, x: Tensor, start: int) -> Tensor:
        """(B, n, C) -> (B, H, n, R + D): R rotated channels, then D that are compared with U_h c_j."""
        query = self.query(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        content, rotated = query.split([query.shape[-1] - self.rotary_dim, self.rotary_dim], -1)
        return torch.cat((self._rotated(rotated, start), content), -1)

    def _keys(self, x: Tensor, start: int) -> Tensor:
        """(B, n, C) -> the rotated channels and the latents, (B, 1, n, R + latent)."""
        both = self.latent(x)[:, None]
        latent, rotated = both.split([both.shape[-1] - self.rotary_dim, self.rotary_dim], -1)
        return torch.cat((self._rotated(rotated, start), self.latent_norm(latent)), -1)

    def _rotated(self, x: Tensor, start: int) -> Tensor:
        """Channels (B, heads, n, R) with the encodings of the positions `start`, `start` + 1, ..."""
        if self.position is None or not self.rotary_dim:
            return x
        return self.position.encode(x, torch.arange(start, start + x.shape[2], device=x.device))

    def _attend(
        self, query: Tensor, key: Tensor, positions: Positions, mask: Mask | None, form: Form
    ) -> AttentionOutput:
        """The attention of queries (B, H, I, R + D) to keys (B, 1, J, R + latent), in one of the two forms.

        Its output is (B, H, I, E), with E channels of the values of a head.
        """
        attention = self.attention if mask is None else self.attention.with_mask_too(mask)
        latent = key[..., self.rotary_dim :]
        if form == "absorbed" or (form == "auto" and self._absorbing_is_cheaper(query.shape[2], key.shape[2])):
            seen = attention(query, key, latent, positions=positions)
            return AttentionOutput(seen.output @ self.value.to(seen.output.dtype), seen.weights)
        score = self._score
        content = latent @ score.weight.mT.to(latent.dtype)  # U_h c_j
        rotated = key[..., : self.rotary_dim].expand(-1, self.num_heads, -1, -1)
        expanded = attention.with_pieces(score=Dot(scale=score.scale(0)))
        values = latent @ self.value.to(latent.dtype)
        return expanded(query, torch.cat((rotated, content), -1), values, positions=positions)

    @property
    def _score(self) -> LatentDot:
        score = self.attention.score
        if not isinstance(score, LatentDot):
            raise RegardError(
                "MultiHeadLatentAttention: the score of its attention must be LatentDot, which compares queries with "
                f"latents; got {type(score).__name__}. For another mask: layer.attention.with_mask(mask)."
            )
        return score

    def _absorbing_is_cheaper(self, num_queries: int, num_keys: int) -> bool:
        """Whether the absorbed form takes fewer multiply-adds for each head.

        A latent has C channels, a value E, and a query D and R rotated ones. Absorbed, a pair costs R + C for its score
        and C for its value, and each query C D + C E for U_h and V_h. Expanded, a pair costs R + D and E, and each key
        C D + C E.
        """
        (_, D, C), E, R = self._score.weight.shape, self.value.shape[-1], self.rotary_dim
        absorbed = num_queries * num_keys * (R + 2 * C) + num_queries * C * (D + E)
        return absorbed < num_queries * num_keys * (R + D + E) + num_keys * C * (D + E)

    def _check(self, x: Tensor, past: LatentCache, form: str) -> None:
        """Refuse inputs of another width, another cache, an unknown `form`, and a call inside `Ring.as_default`.

        Refused are also pieces that compare queries with keys in another way.
        """
        embed_dim = self.latent.in_features
        if x.ndim != 3 or x.shape[-1] != embed_dim:
            raise RegardError(
                f"MultiHeadLatentAttention: inputs must be (batch, length, {embed_dim}), got {tuple(x.shape)}."
            )
        if not isinstance(past, LatentCache):
            raise RegardError(
                f"MultiHeadLatentAttention.advance: past must be a LatentCache, got {type(past).__name__}. Begin with "
                "None, and continue with the cache that the call before returned."
            )
        if form not in ("auto", "absorbed", "expanded"):
            raise RegardError(f"MultiHeadLatentAttention(form={form!r}): give 'auto', 'absorbed' or 'expanded'.")
        for slot in ("position", "selection", "transition"):
            if (piece := getattr(self.attention, slot)) is not None:
                raise RegardError(
                    f"MultiHeadLatentAttention: {slot}={piece!r} reads the keys of a head, which its attention has in "
                    "one of its two forms only. Set it to None; to rotate: MultiHeadLatentAttention(position=...)."
                )
        if Ring.default() is not None:
            raise RegardError(
                "MultiHeadLatentAttention: inside Ring.as_default a rank has only its share of the latents. Call "
                "regard.attend with the latents as keys."
            )

    def extra_repr(self) -> str:
        _, D, C = self._score.weight.shape
        return f"{self.latent.in_features}, {self.num_heads}, latent_dim={C}, head_dim={D}"
