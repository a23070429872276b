"""Sentences of the page as parts [text, kind], so that the page can set tokens and heads apart."""

from __future__ import annotations

from regard.stats.numbering import head_name
from regard.stats.profile import LayerProfile
from regard.stats.text_reading import TextReading

#: The kinds of parts of a sentence.
PLAIN, TOKEN, HEAD = "", "token", "head"
Part = list[str]


def token(reading: TextReading, at: int, query: bool = False) -> list[Part]:
    """A token, with its index if the text has it several times."""
    tokens = reading.profile.query_tokens if query else reading.profile.tokens
    part = [tokens[at], TOKEN]
    return [part] if tokens.count(tokens[at]) < 2 else [part, [f" (token {at})", PLAIN]]


def percent(share: float) -> str:
    """A share as a rounded percentage; 0 % and 100 % stand for nothing else.

    >>> percent(0.713), percent(0.999), percent(0.002), percent(1.0)
    ('71 %', 'more than 99 %', 'less than 1 %', '100 %')
    """
    if share in (0, 1) or 0.005 <= share < 0.995:
        return f"{100 * share:.0f} %"
    return "less than 1 %" if share < 0.5 else "more than 99 %"


def layer_name(layer: LayerProfile) -> str:
    """`layer 2`, or the name of a mechanism, as the page names layers."""
    return f"layer {layer.number}" if _is_path(layer) else layer.name


def weight_of(layer: LayerProfile) -> str:
    """What the shares of a layer are shares of: |weight|, if weights have signs."""
    return "weight" if layer.negative is None else "|weight|"


def short_name(layer: LayerProfile, head: int) -> str:
    """`L2.H1`, or `Bahdanau, head 0`, as the page names heads in a grid."""
    return head_name(layer.number, head) if _is_path(layer) else f"{layer.name}, head {head}"


def _is_path(layer: LayerProfile) -> bool:
    return "." in layer.name or len(layer.name) >= 40 or layer.name == str(layer.number)


def joined(parts: list[Part]) -> str:
    """A sentence as text.

    >>> joined([["In layer 2, ", ""], ["it", "token"], [" ...", ""]])
    'In layer 2, “it” ...'
    """
    return "".join(f"“{text}”" if kind == TOKEN else text for text, kind in parts)
