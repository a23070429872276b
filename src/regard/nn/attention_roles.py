"""`attention_for`: a mechanism of the catalog for one of the three roles in a Transformer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from regard.attention import Attention
from regard.base.checks import Size, checked
from regard.base.errors import RegardError, nearest
from regard.biases import ALiBi, Bias, T5Bias
from regard.catalog import mechanism
from regard.encodings import Encoding, RoPE
from regard.masks import Mask, causal
from regard.scores import Dot

#: Self-attention of an encoder, causal self-attention of a decoder, and attention of a decoder to an encoder.
ROLES = ("encoder", "decoder", "cross")
#: How positions are used. The first two are added to the embeddings; the next three act inside self-attention.
POSITIONS = ("sinusoidal", "learned", "rope", "alibi", "t5", "none")
#: Arguments of `build` for sentences. The defaults of the catalog are for long documents.
DEFAULTS: dict[str, dict[str, Any]] = {
    "bigbird": {"length": 1024, "block": 4, "num_random": 2},
    "learned_positions": {"length": 1024},
    "sliding_window": {"size": 8},
    "longformer": {"size": 8},
    "block_local": {"size": 8, "before": 1},
    "dilated": {"size": 4},
    "performer": {"num_features": 64},
    "top_k": {"k": 4},
}


@checked
def attention_for(
    role: str,
    name: str | Mapping[str, Any] = "full",
    *,
    num_heads: Size = 1,
    head_dim: Size = 64,
    key_dim: Size | None = None,
    positions: str = "none",
    scaled: bool = True,
    dropout: float = 0.0,
) -> Attention:
    """The mechanism `name` of the catalog for heads of `head_dim`, as self-attention or as cross-attention.

    `name` is "full", a name of the catalog, or a mapping {"name": ..., **arguments of its build}. The role decides the
    direction: a "decoder" is causal, an "encoder" and "cross" are not. The `positions` "rope", "alibi" and "t5" are
    used here, in self-attention only. `scaled=False` omits the factor 1 / sqrt(D). `key_dim` is the width of the keys,
    if it is not that of the heads, and `dropout` the share of the weights that are dropped.

    >>> attention_for("decoder", {"name": "sliding_window", "size": 4}, positions="rope", head_dim=8)
    Attention(score=Dot(), position=RoPE(head_dim=8, base=10000.0, interleaved=False, scaling=None),
      mask=(causal() & window(size=4)), normalizer=Softmax(temperature=1.0, sink=None))
    """
    _check_known("role", role, ROLES)
    _check_known("positions", positions, POSITIONS)
    arguments = {"name": name} if isinstance(name, str) else dict(name)
    mechanism_name = arguments.pop("name", "full")
    is_full = mechanism_name == "full"
    built = (
        Attention() if is_full else _build(mechanism_name, arguments, role, num_heads, head_dim, key_dim or head_dim)
    )
    score = Dot(scale=1.0) if not scaled and isinstance(built.score, Dot) else built.score
    bias = built.bias if role == "cross" else (*built.bias, *_biases(positions, role, num_heads))
    if bias and built.normalizer.needs_nonnegative:
        raise RegardError(
            f"attention {mechanism_name!r} divides by a sum of scores, which a bias ({positions}) could make negative. "
            "Use positions 'rope', 'sinusoidal' or 'learned' with it."
        )
    position = _position(built.position, positions, role, head_dim)
    if role != "decoder" and not built.family.applies_mask:
        raise RegardError(
            f"attention {mechanism_name!r} goes from token to token, so it is causal, and the {role} is not. Use "
            "it in a decoder."
        )
    attention = built.with_pieces(score=score, position=position, bias=bias, mask=_mask(built.mask, role))
    attention.dropout = dropout or built.dropout
    attention.family.check_pieces(attention)
    return attention


def _build(name: str, arguments: dict[str, Any], role: str, num_heads: int, head_dim: int, key_dim: int) -> Attention:
    """The mechanism `name` of the catalog. Sizes of the model are filled in where its `build` has such a parameter.

    `DEFAULTS` come before these, and the `arguments` of the caller before both. `role` is one of `ROLES`; `head_dim`
    and `key_dim` are the widths of queries and of keys in a head.
    """
    build = mechanism(name).build
    parameters = inspect.signature(build).parameters
    for argument in arguments:
        if argument not in parameters:
            raise RegardError(f"attention {name!r} has no argument {argument!r}. {nearest(argument, parameters)}")
    sizes = {
        "num_heads": num_heads,
        "head_dim": head_dim,
        "query_dim": head_dim,
        "key_dim": key_dim,
        "hidden": head_dim,
        "is_causal": False,
        "bidirectional": role != "decoder",
    }
    sizes = {argument: value for argument, value in sizes.items() if argument in parameters}
    attention = build(**{**sizes, **DEFAULTS.get(name, {}), **arguments})
    if not isinstance(attention, Attention):
        raise RegardError(
            f"attention {name!r} is made of several attentions, and a module has one. Call regard.attend with it."
        )
    if name in ("luong_general", "luong_concat", "bahdanau", "luong_dot") or key_dim == head_dim:
        return attention
    raise RegardError(
        f"attention {name!r} needs queries and keys of the same width, got {head_dim} and {key_dim}. "
        "Use bahdanau, luong_general or luong_concat."
    )


def _mask(mask: Mask | None, role: str) -> Mask | None:
    """The mask for a role: causal for a decoder, otherwise without a plain causal mask of the mechanism.

    None allows all pairs.
    """
    mask = None if mask is not None and mask.is_lower_triangular else mask
    if role != "decoder":
        return mask
    return causal() if mask is None else causal() & mask


def _position(own: Encoding | None, positions: str, role: str, head_dim: int) -> Encoding | None:
    """The encoding for a role: RoPE if `positions` ask for it in self-attention, else the mechanism's own."""
    if positions != "rope" or role == "cross":
        return own
    if own is not None and not isinstance(own, RoPE):
        raise RegardError("positions='rope': this mechanism has its own positions. Use positions='none' with it.")
    return own or RoPE(head_dim)


def _biases(positions: str, role: str, num_heads: int) -> tuple[Bias, ...]:
    """The biases that `positions` ask for in self-attention, beside those of the mechanism."""
    if positions == "alibi":
        return (ALiBi(num_heads),)
    return (T5Bias(num_heads, bidirectional=role == "encoder"),) if positions == "t5" else ()


def _check_known(option: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a value of an option that is not one of the known values."""
    if value not in known:
        raise RegardError(f"attention: there is no {option} {value!r}. {nearest(str(value), known)}")
