"""Sweeps: variants of one system, for example with different numbers of heads or different positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from regard.base.errors import RegardError, nearest
from regard.lab.comparison.study import Entry

#: The sweeps and their default values.
SWEEPS: dict[str, tuple[str, ...]] = {
    "heads": ("1", "4", "8", "16"),
    "positions": ("sinusoidal", "learned", "rope", "alibi", "t5"),
    "attention": ("full", "sliding_window", "bigbird", "linear", "performer"),
    "prune": ("transformer",),
    "scaled": ("scaled", "unscaled"),
}
#: Most words of a training pair in the sweep of positions, which tests on longer sentences.
SHORT = 10


def entries(sweep: str, values: Sequence[str] = (), name: str = "transformer") -> tuple[Entry, ...]:
    """The variants of the system `name` in a sweep; `values` are by default those of `SWEEPS`.

    >>> [entry.label for entry in entries("heads", ["1", "2"])]
    ['heads-1', 'heads-2']
    >>> entries("attention", ["linear"])[0].settings
    {'attention': {'encoder': 'linear', 'decoder': 'linear'}}
    """
    if sweep not in SWEEPS:
        raise RegardError(f"compare: there is no sweep {sweep!r}. {nearest(sweep, SWEEPS)}")
    values = list(values) or list(SWEEPS[sweep])
    if sweep == "prune":
        return (Entry(name, name),)  # one system, whose heads are removed after its training
    labels = {value: value if sweep == "scaled" else f"{sweep}-{value}" for value in values}  # see `Entry.title`
    return tuple(Entry(name, labels[value], _SETTINGS[sweep](value)) for value in values)


def _heads(value: str) -> dict[str, Any]:
    """The option of a system with so many heads."""
    if not value.isdecimal() or int(value) < 1:
        raise RegardError(
            f"compare: --heads {value} is not a number of heads. Give whole numbers, as in --heads 1,4,8."
        )
    return {"num_heads": int(value)}


def _attention(value: str) -> dict[str, Any]:
    """Only self-attention varies: patterns over positions do not suit cross-attention between two word orders."""
    return {"attention": {"encoder": value, "decoder": value}}


def _scaled(value: str) -> dict[str, Any]:
    """The option of a Transformer whose scores are multiplied by 1 / sqrt(D), or not."""
    if value not in SWEEPS["scaled"]:
        raise RegardError(f"compare: --scaled compares {' and '.join(SWEEPS['scaled'])}, not {value!r}.")
    return {"scaled": value == "scaled"}


#: By sweep, the function from a value to the options of its variant; `Study.config_of` sets them.
_SETTINGS: dict[str, Callable[[str], dict[str, Any]]] = {
    "heads": _heads,
    "positions": lambda value: {"positions": value},
    "attention": _attention,
    "scaled": _scaled,
}
