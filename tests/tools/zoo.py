"""A zoo of attention modules that people write: what each computes, and what `watch`, `edit`, `prune` and `check` do.

Adding a module is one entry of `ZOO`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard as rg
from attentions import CausalSelfAttention, Grouped, Head, JointMatrix, MultiHead, MultiQuery

B, N, C, H = 2, 6, 16, 4


class Own(nn.Module):
    """Attention as in a tutorial: with torch's function, or dense with an edit of its weights written out."""

    def __init__(self, causal=True):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(C, C) for _ in range(4))
        self.causal, self.change = causal, None

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.change is None:
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            s = q @ k.mT * (C // H) ** -0.5
            s = s.masked_fill(~torch.ones(x.shape[1], x.shape[1]).tril().bool(), -torch.inf) if self.causal else s
            heads = self.change(s) @ v
        return self.out_proj(heads.transpose(1, 2).flatten(2))


class Attending(Own):
    """The same with `regard.attend`."""

    def forward(self, x):
        if self.change is not None:
            return super().forward(x)
        q, k, v = (p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        seen = rg.Attention(mask=rg.causal())(q, k, v)
        return self.out_proj(seen.output.transpose(1, 2).flatten(2))


class OwnAttention(nn.Module):
    """What timm writes where no kernel is fused."""

    def __init__(self, dim=-1, times=1):
        super().__init__()
        self.qkv, self.dim, self.times = nn.Linear(16, 48), dim, times

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        for _ in range(self.times):
            q = (q @ k.transpose(-2, -1)).softmax(dim=self.dim) @ v
        return q.transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Parts:
    """What a module computes from, in float64: heads of queries, keys and values, and the output of joined heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    finish: Callable[[Tensor], Tensor] = lambda joined: joined
    is_causal: bool = False
    scale: float | None = None

    def weights(self, pair: tuple[int, int, int] | None = None) -> Tensor:
        """(B, H, N, N): the softmax of scaled products. `pair`: a head, query and key that is masked too."""
        scores = self.query @ self.key.mT * (self.query.shape[-1] ** -0.5 if self.scale is None else self.scale)
        if self.is_causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        if pair is not None:
            scores[:, pair[0], pair[1], pair[2]] = -torch.inf
        return scores.softmax(-1)

    def output(self, weights: Tensor, gates: Tensor | None = None) -> Tensor:
        heads = weights @ self.value
        heads = heads if gates is None else heads * gates[:, None, None]
        return self.finish(heads.transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class Specimen:
    """A module, its formula, and for each column None, or the words of the refusal.

    `num_inputs` is how often the module takes the input. `mechanism` is the name that `rg.check` finds, if any.
    """

    make: Callable[[], nn.Module]
    parts: Callable[[Any, Tensor], Parts]
    num_inputs: int = 1
    watch: str | None = None
    edit: str | None = None
    gate: str | None = None
    prune: str | None = "cannot be pruned"
    mechanism: str | None = "multi_head"

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        """The output alone."""
        result = module(*[x] * self.num_inputs)
        return result if isinstance(result, Tensor) else next(iter(result))


def split(x: Tensor, num_heads: int = H) -> Tensor:
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def separate(names: str, **options: Any) -> Callable[[Any, Tensor], Parts]:
    """Projections of queries, keys, values and outputs with these names."""

    def parts(module, x):
        q, k, v, o = (getattr(module, name) for name in names.split())
        return Parts(split(q(x)), split(k(x)), split(v(x)), o, **options)

    return parts


def joint(name: str, output: str | None, **options: Any) -> Callable[[Any, Tensor], Parts]:
    """One projection to queries, keys and values."""

    def parts(module, x):
        q, k, v = map(split, getattr(module, name)(x).chunk(3, -1))
        return Parts(q, k, v, *([getattr(module, output)] if output else []), **options)

    return parts


def grouped(module, x):
    q, k, v = split(module.q_proj(x)), split(module.k_proj(x), 2), split(module.v_proj(x), 2)
    return Parts(q, *(each.repeat_interleave(2, 1) for each in (k, v)), module.o_proj)


def multi_query(module, x):
    k, v = (each[:, None].expand(-1, H, -1, -1) for each in module.kv(x).chunk(2, -1))
    return Parts(split(module.q(x)), k, v, module.out)


def one_head(module, x):
    return Parts(*(split(x @ w, 1) for w in (module.W_query, module.W_key, module.W_value)))


def of_torch(module, x):
    q, k, v = F.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    return Parts(split(q), split(k), split(v), module.out_proj)


OF_REGARD = "query key value output"
OWN = "q_proj k_proj v_proj out_proj"
NO_OUTPUT = "has no output projection of a known name"
NO_COUNT = "does not say how its output projection of 16 inputs divides into heads"
UNCALLED = "reads the weight of its output projection without calling it"
ZOO = {
    "tutorial": Specimen(lambda: MultiHead(C, H, 0.0), separate("W_q W_k W_v W_o"), 3),
    "nanoGPT": Specimen(
        lambda: CausalSelfAttention(C, H, 8, 0.0),
        joint("c_attn", "c_proj", is_causal=True),
        mechanism="masked",
    ),
    "grouped": Specimen(lambda: Grouped(C, H), grouped),
    "multi-query": Specimen(lambda: MultiQuery(C, H), multi_query),
    "timm, fused": Specimen(lambda: JointMatrix(C, H), joint("qkv", "proj")),
    "timm, unscaled": Specimen(
        OwnAttention,
        joint("qkv", None, scale=1.0),
        gate=NO_OUTPUT,
        prune=NO_OUTPUT,
        mechanism=None,
    ),
    "one head": Specimen(lambda: Head(C, 8), one_head, gate=NO_OUTPUT, prune=NO_OUTPUT, mechanism="self_attention"),
    "torch's function": Specimen(Own, separate(OWN, is_causal=True), gate=NO_COUNT, prune=NO_COUNT, mechanism=None),
    "rg.attend": Specimen(Attending, separate(OWN, is_causal=True), gate=NO_COUNT, prune=NO_COUNT, mechanism=None),
    "torch's module": Specimen(
        lambda: nn.MultiheadAttention(C, H, batch_first=True), of_torch, 3, gate=UNCALLED, prune=UNCALLED
    ),
    "rg.nn": Specimen(lambda: rg.nn.MultiHeadAttention(C, H), separate(OF_REGARD), prune=None),
    "rg.nn, causal": Specimen(
        lambda: rg.nn.MultiHeadAttention(C, H, is_causal=True),
        separate(OF_REGARD, is_causal=True),
        prune=None,
        mechanism="masked",
    ),
}
