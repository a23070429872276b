"""One line for each kind of warning, for many heads together."""

from __future__ import annotations

from collections.abc import Sequence

from regard.stats.numbering import head_name
from regard.stats.warnings import Finding

#: Kind of warning -> its text for several heads, for one head, and what it does not mean.
WARNINGS = {
    "uniform": (
        "give all tokens nearly the same weight",
        "gives all tokens nearly the same weight",
        "this does not make them useless",
    ),
    "special": (
        "put 90 % of their weight or more on special tokens",
        "puts 90 % of its weight or more on special tokens",
        "they may not matter",
    ),
    "sink": (
        "put 90 % of their weight or more on the first token",
        "puts 90 % of its weight or more on the first token",
        "they may not matter",
    ),
    "copies": (
        "have nearly the same map as another",
        "has nearly the same map as another",
        "what they carry may still differ",
    ),
}


def warning_lines(findings: Sequence[Finding], num_heads: int) -> dict[str, str]:
    """Kind of warning -> one line for all warnings of this kind, about a model of `num_heads` heads.

    >>> print(warning_lines([Finding("sink", 2, (0, 3), 0.95, "A sentence.")], num_heads=8)["sink"])
    2 of 8 heads (L2.H0, ...) put 90 % of their weight or more on the first token; they may not matter.
    """
    lines = {}
    for kind in dict.fromkeys(finding.kind for finding in findings):
        same = [finding for finding in findings if finding.kind == kind]
        lines[kind] = _line(same, num_heads) if kind in WARNINGS else _first_of(same)
    return lines


def _line(same: Sequence[Finding], num_heads: int) -> str:
    heads = [head_name(finding.layer, head) for finding in same for head in finding.heads]
    several, single, caution = WARNINGS[same[0].kind]
    text = several if len(heads) > 1 else single
    return f"{len(heads)} of {num_heads} heads ({heads[0]}{', ...' if len(heads) > 1 else ''}) {text}; {caution}."


def _first_of(same: Sequence[Finding]) -> str:
    more = f" The same in {len(same) - 1} more." if len(same) > 1 else ""
    return same[0].sentence + more
