"""A mechanism of the catalogue in one of the three roles of a Transformer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from regard.attention import Attention
from regard.catalog import mechanism
from regard.checks import Size, checked
from regard.errors import RegardError, nearest
from regard.pieces import ALiBi, Bias, Dot, Mask, Position, RoPE, T5Bias, causal

ROLES = ("encoder", "decoder", "cross")
#: How positions enter; the first two are added to the embeddings, the next three act inside self-attention.
POSITIONS = ("sinusoidal", "learned", "rope", "alibi", "t5", "none")
#: Smaller than the catalogue's own where those are for long documents.
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
    width: Size = 64,
    key_width: Size | None = None,
    positions: str = "none",
    scaled: bool = True,
    dropout: float = 0.0,
) -> Attention:
    """The mechanism `name` of the catalogue for heads of `width`, as self-attention or as cross-attention.

    `name` is "full", a name of the catalogue, or a mapping {"name": ..., **arguments of its build}. The role decides
    about the direction: a "decoder" sees no later token, an "encoder" and "cross" are not causal. Of `positions`
    "rope", "alibi" and "t5" enter here, in self-attention only. `scaled=False` leaves 1 / sqrt(D) out.

    >>> attention_for("decoder", {"name": "sliding_window", "size": 4}, positions="rope", width=8)
    Attention(score=Dot(), position=RoPE(width=8, base=10000.0, interleaved=False, scaling=None),
      mask=(causal() & window(size=4)), normalizer=Softmax(temperature=1.0, sink=None))
    """
    _known("role", role, ROLES)
    _known("positions", positions, POSITIONS)
    given = {"name": name} if isinstance(name, str) else dict(name)
    chosen = given.pop("name", "full")
    made = Attention() if chosen == "full" else _build(chosen, given, role, num_heads, width, key_width or width)
    score = Dot(scale=1.0) if not scaled and isinstance(made.score, Dot) else made.score
    own = made.bias if role == "cross" else (*made.bias, *_biases(positions, role, num_heads))
    if own and made.normalizer.needs_nonnegative:
        raise RegardError(
            f"attention {chosen!r} divides by a sum of scores, which a bias ({positions}) would make negative. "
            "Use positions 'rope', 'sinusoidal' or 'learned' with it."
        )
    return Attention(
        score,
        position=_position(made.position, positions, role, width),
        bias=own,
        mask=_mask(made.mask, role),
        normalizer=made.normalizer,
        dropout=dropout or made.dropout,
    )


def _build(name: str, given: dict[str, Any], role: str, num_heads: int, width: int, key_width: int) -> Attention:
    """From the catalogue, with what the model knows filled in where the mechanism asks for it."""
    build = mechanism(name).build
    parameters = inspect.signature(build).parameters
    for argument in given:
        if argument not in parameters:
            raise RegardError(f"attention {name!r} has no argument {argument!r}. {nearest(argument, parameters)}")
    filled = {
        "num_heads": num_heads,
        "width": width,
        "query_width": width,
        "key_width": key_width,
        "hidden": width,
        "is_causal": False,
        "bidirectional": role != "decoder",
    }
    filled = {argument: value for argument, value in filled.items() if argument in parameters}
    made = build(**{**filled, **DEFAULTS.get(name, {}), **given})
    if name in ("luong_general", "luong_concat", "bahdanau", "luong_dot") or key_width == width:
        return made
    raise RegardError(
        f"attention {name!r} compares queries and keys of one width, these have {width} and {key_width}. "
        "Use bahdanau, luong_general or luong_concat."
    )


def _mask(mask: Mask | None, role: str) -> Mask | None:
    """The role decides who is earlier: a mechanism's own plain causal mask goes, that of a decoder comes."""
    mask = None if isinstance(mask, causal) else mask
    if role != "decoder":
        return mask
    return causal() if mask is None else causal() & mask


def _position(own: Position | None, positions: str, role: str, width: int) -> Position | None:
    if positions != "rope" or role == "cross":
        return own
    if own is not None and not isinstance(own, RoPE):
        raise RegardError("positions='rope': the mechanism has positions of its own. Use positions='none' with it.")
    return own or RoPE(width)


def _biases(positions: str, role: str, num_heads: int) -> tuple[Bias, ...]:
    if positions == "alibi":
        return (ALiBi(num_heads),)
    return (T5Bias(num_heads, bidirectional=role == "encoder"),) if positions == "t5" else ()


def _known(what: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise RegardError(f"attention: there is no {what} {given!r}. {nearest(str(given), known)}")
