"""`MultiHeadAttention`: the module with projections of queries, keys, values and outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Attention, Mechanism
from regard.base.checks import Size, checked, explained
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes
from regard.call_options import read_mask
from regard.masks import Mask, causal
from regard.nn.listener import Attends
from regard.nn.module_output import ModuleOutput
from regard.nn.projected_kv import ProjectedKV, read
from regard.pieces.call_tensors import refuse_needs
from regard.pieces.mask import sees_no_later_key
from regard.pieces.mask_conventions import mask_remedy


@checked
class MultiHeadAttention(Attends):
    """sum_h head_h W_h, head_h = attend(x Q_h, y K_h, z V_h) (Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2).

    `attention` is the attention of every head: any score, position, bias, mask and normalizer; by default the softmax
    of scaled dot products. A composite of several attentions runs too, such as `regard.composites.Sum`: its parts have
    the masks, so calls take none. If `num_key_value_heads` is below `num_heads`, groups of query heads share a key and
    value head (grouped-query attention; 1 is multi-query attention). `key_dim` and `value_dim` are the widths of the
    inputs for keys and values, by default `embed_dim`. `dropout` and `is_causal` are for the default attention: the
    share of dropped weights, and the mask `regard.causal()` in every call. An `attention` of yours has its own. Without
    `output_projection` the heads are only joined. With `output_gate` each channel of the joined heads is multiplied by
    sigmoid(x G) (Qiu et al. 2025, arXiv:2505.06708), which does not change the weights.

    Inputs are (B, I, C), batch first. The result unpacks to the output and the weights, as that of
    `nn.MultiheadAttention`, but the weights (B, H, I, J) of every head are an `AttentionMap`, which computes them when
    they are read. `module(x).output` is the output alone. Boolean masks of `nn.MultiheadAttention` have the opposite
    meaning (True = may not attend). `from_torch` copies its weights, `from_projections` those of a class of yours.

    >>> import torch, regard as rg
    >>> attention, x = rg.nn.MultiHeadAttention(512, 8, bias=False), torch.randn(2, 5, 512)
    >>> sum(p.numel() for p in attention.parameters())
    1048576
    >>> output, weights = attention(x, x, x, mask=rg.causal())
    >>> output.shape, weights.shape, weights[0, 3, 1].gt(0).tolist()
    (torch.Size([2, 5, 512]), (2, 8, 5, 5), [True, True, False, False, False])
    """

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size,
        num_key_value_heads: Size | None = None,
        attention: Mechanism | None = None,
        *,
        key_dim: Size | None = None,
        value_dim: Size | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        is_causal: bool = False,
        output_projection: bool = True,
        output_gate: bool = False,
    ) -> None:
        super().__init__()
        num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        _check(embed_dim, num_heads, num_key_value_heads)
        self.embed_dim = embed_dim
        self.num_heads, self.num_key_value_heads, self.head_dim = num_heads, num_key_value_heads, embed_dim // num_heads
        inner = num_key_value_heads * self.head_dim
        self.query = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.key = nn.Linear(key_dim or embed_dim, inner, bias=bias)
        self.value = nn.Linear(value_dim or key_dim or embed_dim, inner, bias=bias)
        self.output = nn.Linear(embed_dim, embed_dim, bias=bias) if output_projection else None
        self.gate = nn.Linear(embed_dim, embed_dim, bias=bias) if output_gate else None
        self.attention: Any = _attention(attention, dropout, is_causal)
        _initialize(filter(None, (self.query, self.key, self.value, self.output, self.gate)))

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> MultiHeadAttention:
        """An equal module with copies of the weights of an `nn.MultiheadAttention`.

        >>> import torch, regard as rg
        >>> theirs, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 3, 8)
        >>> torch.allclose(rg.nn.MultiHeadAttention.from_torch(theirs)(x).output, theirs(x, x, x)[0], atol=1e-6)
        True
        """
        if module.bias_k is not None or module.add_zero_attn:
            raise RegardError(
                "MultiHeadAttention.from_torch: add_bias_kv and add_zero_attn add keys that are in no input. "
                "Softmax(sink=0.0) has the effect of add_zero_attn on the weights."
            )
        ours = cls(
            module.embed_dim,
            module.num_heads,
            dropout=module.dropout,
            key_dim=module.kdim,
            value_dim=module.vdim,
            bias=module.in_proj_bias is not None,
        )
        separate = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
        weights = separate if module.in_proj_weight is None else module.in_proj_weight.chunk(3)
        biases = [None] * 3 if module.in_proj_bias is None else [*module.in_proj_bias.chunk(3)]
        ours._copy((*weights, module.out_proj.weight), (*biases, module.out_proj.bias))
        return ours.train(module.training)

    @classmethod
    @checked
    def from_projections(
        cls,
        query: nn.Linear,
        key: nn.Linear,
        value: nn.Linear,
        output: nn.Linear | None = None,
        *,
        num_heads: Size,
        attention: Mechanism | None = None,
        is_causal: bool = False,
    ) -> MultiHeadAttention:
        """A module with copies of the weights of four linear layers, such as W_q, W_k, W_v and W_o of a class of yours.

        Head h reads the h-th block of channels, as after `view(batch, length, num_heads, head_dim)`. Keys and values of
        fewer channels than the queries are those of shared heads. Without `output` the heads are only joined.

        >>> import torch, regard as rg
        >>> W_q, W_k, W_v, W_o = (torch.nn.Linear(8, 8) for _ in range(4))
        >>> ours, x = rg.nn.MultiHeadAttention.from_projections(W_q, W_k, W_v, W_o, num_heads=2), torch.randn(1, 3, 8)
        >>> q, k, v = (W(x).view(1, 3, 2, 4).transpose(1, 2) for W in (W_q, W_k, W_v))
        >>> heads = (q @ k.mT / 4**0.5).softmax(-1) @ v
        >>> torch.allclose(ours(x).output, W_o(heads.transpose(1, 2).reshape(1, 3, 8)), atol=1e-6)
        True
        """
        given = {"query": query, "key": key, "value": value} | ({} if output is None else {"output": output})
        _check_projections(given, num_heads)
        ours = cls(
            query.in_features,
            num_heads,
            key.out_features * num_heads // query.out_features,
            attention,
            key_dim=key.in_features,
            value_dim=value.in_features,
            bias=any(layer.bias is not None for layer in given.values()),
            is_causal=is_causal,
            output_projection=output is not None,
        )
        ours._copy([layer.weight for layer in given.values()], [layer.bias for layer in given.values()])
        return ours.train(query.training)

    @torch.no_grad()
    def _copy(self, weights: Iterable[Tensor], biases: Iterable[Tensor | None]) -> None:
        """Copy weights and biases into the projections of queries, keys, values and outputs; None leaves zeros."""
        projections = filter(None, (self.query, self.key, self.value, self.output))
        for projection, weight, bias in zip(projections, weights, biases, strict=True):
            self.to(weight)  # its dtype and device
            projection.weight.copy_(weight)
            if bias is not None:
                projection.bias.copy_(bias)

    @explained
    def forward(
        self,
        query: Tensor,
        key: Tensor | ProjectedKV | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        is_causal: bool = False,
        start: int | None = None,
    ) -> ModuleOutput:
        """The output (B, I, C) and the weights, for inputs of queries (B, I, C), and of keys and values (B, J, C').

        `key` defaults to `query`, and `value` to `key`. `key` may also be the result of `keys`. `mask` is added to that
        of the attention: `regard.padding(real)`, or a tensor as `attend` takes it, (I, J) or (B, J), where True = may
        attend. `start` is the position of the first query; by default the last query has the position of the last key.

        `is_causal` adds `regard.causal()` to the masks of this call: a pair must be allowed by all. In
        `nn.MultiheadAttention` it is only a hint: without `attn_mask` it raises an error, and with one it may replace
        it. torch gives the first query the position of the first key, Regard the last query that of the last key. If
        the numbers of queries and keys differ, give `start`: 0 is torch's rule. The result of `keys` needs no `start`,
        because its keys are those of all tokens so far.
        """
        if isinstance(key, ProjectedKV) and not (value is None and mask is None):
            raise RegardError("MultiHeadAttention: projected keys hold their values and mask: keys(key, value, mask).")
        if isinstance(mask, Tensor):
            mask = self._mask_of(mask, query, query if key is None else key, start)
        keys = key if isinstance(key, ProjectedKV) else self.keys(query if key is None else key, value, mask)
        heads = self._heads(self.query, query)
        if is_causal:
            if start is None and not isinstance(key, ProjectedKV):
                _check_aligned(query.shape[1], keys.length)
            keys = keys.causal()
        seen = read(self, heads, keys, start)
        return seen.with_output(self._mixed(query, seen.output))

    def _mask_of(self, mask: Tensor, query: Tensor, key: Any, start: int | None) -> Mask | None:
        """The mask that a tensor of the call stands for; an error if it is a bias. `read_mask` ignores D and E.

        `query` (B, I, C) and `key` (B, J, C) are the inputs, and `start` is the position of the first query, or None.
        """
        num_queries, num_keys = query.shape[1], key.shape[1]
        sizes = Sizes(B=len(query), H=self.num_heads, G=self.num_key_value_heads, I=num_queries, J=num_keys, D=1, E=1)
        positions = None if start is None else Positions.of(start, num_queries, num_keys)
        allowed, bias = read_mask("MultiHeadAttention", mask, sizes, positions, num_keys)
        if bias is not None:
            raise RegardError(
                "MultiHeadAttention(mask=...): the tensor has other numbers than 0 and very negative ones, so it is a "
                "bias of the scores. Give the module attention=regard.Attention(bias=...)."
            )
        return allowed

    def keys(self, key: Tensor, value: Tensor | None = None, mask: Mask | None = None) -> ProjectedKV:
        """Project inputs (B, J, C') to keys and values, once for all later queries."""
        if not (mask is None or isinstance(mask, Mask)):
            raise RegardError(f"MultiHeadAttention(mask=...): expected a Mask. {mask_remedy(mask)}")
        value = key if value is None else value
        return ProjectedKV(self.attention, self._heads(self.key, key), self._heads(self.value, value), mask)

    def advance(
        self, x: Tensor, past: ProjectedKV | None = None, mask: Mask | None = None, *, is_causal: bool = False
    ) -> tuple[Tensor, ProjectedKV]:
        """Self-attention of the next tokens (B, n, C) to all tokens so far: the output, and the keys of all tokens.

        `mask` excludes some of all tokens so far, such as padding. Without it the mask of `past` stays. `is_causal`
        is that of a call: no token attends to a later one.
        """
        keys = self.keys(x, mask=mask)
        keys = keys if past is None else past.extended(keys.key, keys.value, mask)
        return self(x, keys, is_causal=is_causal).output, keys

    @property
    def is_causal(self) -> bool:  # type: ignore[override]
        return sees_no_later_key(self.attention.mask)

    def _heads(self, projection: nn.Linear, x: Tensor) -> Tensor:
        """(B, I, C) -> (B, heads, I, D)."""
        if not isinstance(x, Tensor):
            raise RegardError(
                f"MultiHeadAttention: inputs must be tensors, got {type(x).__name__}. An array becomes one by "
                "torch.tensor(array, dtype=torch.float32)."
            )
        if x.ndim != 3 or x.shape[-1] != projection.in_features:
            raise RegardError(
                f"MultiHeadAttention: inputs must be (batch, length, {projection.in_features}), got {tuple(x.shape)}."
            )
        return projection(x).unflatten(-1, (projection.out_features // self.head_dim, self.head_dim)).transpose(1, 2)

    def _mixed(self, query: Tensor, heads: Tensor) -> Tensor:
        """The output (B, I, C) from that of the heads (B, H, I, D): joined, gated by the inputs `query`, projected."""
        joined = heads.transpose(1, 2).flatten(2)
        joined = joined if self.gate is None else joined * self.gate(query).sigmoid()
        return joined if self.output is None else self.output(joined)

    def extra_repr(self) -> str:
        shared = (
            "" if self.num_key_value_heads == self.num_heads else f", num_key_value_heads={self.num_key_value_heads}"
        )
        gate = "" if self.gate is None else ", output_gate=True"
        return f"{self.query.in_features}, {self.num_heads}{shared}{gate}"


def _check_aligned(num_queries: int, num_keys: int) -> None:
    """Refuse a causal mask for which torch and Regard differ."""
    if num_queries != num_keys:
        raise RegardError(
            f"MultiHeadAttention(is_causal=True): {num_queries} queries and {num_keys} keys can be aligned in two "
            f"ways. Give start=0 for torch's: the first query attends to the first key only. Give start="
            f"{num_keys - num_queries} for that of regard.causal(): the last query attends to all keys."
        )


def _check_projections(given: dict[str, nn.Linear], num_heads: int) -> None:
    """Refuse layers that are not the projections of heads of equal width. `given` are the layers by their role."""
    shapes = ", ".join(f"{name} {layer.in_features} -> {layer.out_features}" for name, layer in given.items())
    query, key, value = given["query"], given["key"], given["value"]
    widths = {(layer.in_features, layer.out_features) for name, layer in given.items() if name in ("query", "output")}
    if len(widths) > 1 or query.in_features != query.out_features or query.out_features % num_heads:
        rule = f"query and output map a width to itself, and {num_heads} heads divide it"
    elif key.out_features != value.out_features or key.out_features % (query.out_features // num_heads):
        rule = f"keys and values have the same heads, of {query.out_features // num_heads} channels as the queries"
    else:
        return
    raise RegardError(
        f"MultiHeadAttention.from_projections: {rule}; got {shapes}. A matrix W of your own, x @ W, is a linear layer "
        "with weight W.T."
    )


def _attention(attention: Mechanism | None, dropout: float, is_causal: bool) -> Mechanism:
    """The given attention, which has its own dropout and mask, or the default one with these.

    `dropout` is a share, and `is_causal` asks for a causal mask. Beside an attention both are refused.
    """
    if attention is None:
        return Attention(mask=causal() if is_causal else None, dropout=dropout)
    if dropout or is_causal:
        option = f"dropout={dropout}" if dropout else "is_causal=True"
        part = option if dropout else "mask=regard.causal()"
        raise RegardError(
            f"MultiHeadAttention({option}): this is for the default attention. It is a part of your own attention: "
            f"regard.Attention(..., {part})."
        )
    # a piece may read further tensors of each call, such as the gates of a decay
    refuse_needs("MultiHeadAttention", attention.pieces(), "the module passes none. Project it, and call regard.attend")
    return attention


def _initialize(projections: Iterable[nn.Linear]) -> None:
    """Xavier weights (Glorot and Bengio, 2010) and biases of zero."""
    for projection in projections:
        nn.init.xavier_uniform_(projection.weight)
        if projection.bias is not None:
            nn.init.zeros_(projection.bias)


def _check(embed_dim: int, num_heads: int, num_key_value_heads: int) -> None:
    """Refuse a number of heads that does not divide the width, and key heads that do not divide the query heads."""
    if num_heads < 1 or embed_dim % num_heads:
        is_swapped = num_heads > embed_dim and num_heads % embed_dim == 0
        order = f" The width comes first: MultiHeadAttention({num_heads}, {embed_dim})." if is_swapped else ""
        raise RegardError(
            f"MultiHeadAttention({embed_dim}, {num_heads}): heads have equal width, so the number of heads "
            f"must divide {embed_dim}: "
            f"{', '.join(str(n) for n in range(1, embed_dim + 1) if embed_dim % n == 0)}.{order}"
        )
    if num_key_value_heads < 1 or num_heads % num_key_value_heads:
        raise RegardError(
            f"MultiHeadAttention(num_key_value_heads={num_key_value_heads}): equal groups of the {num_heads} query "
            "heads share a key head: "
            f"give one of {', '.join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)}."
        )
