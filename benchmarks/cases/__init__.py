"""The cases of `python -m benchmarks`, one file per group."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from benchmarks.case import BenchSettings, Case
from regard.base.errors import RegardError, nearest

#: The names of the groups, in the order of the report. Each is a file of this folder.
GROUPS = (
    "softmax",
    "window",
    "packed",
    "sparse",
    "selected",
    "planning",
    "calls",
    "bias",
    "today",
    "additive",
    "linear",
    "recurrent",
    "convolutions",
    "catalog",
    "composites",
    "decoding",
    "statistics",
    "model",
    "module",
)


def cases(setting: BenchSettings, only: Iterable[str] = ()) -> list[Case]:
    """The cases of the groups `only` (default: all) for the device of the setting."""
    names = [name.strip() for name in only] or list(GROUPS)
    for name in names:
        if name not in GROUPS:
            raise RegardError(f"bench: there is no group {name!r}. {nearest(name, GROUPS)}")
    chosen = [case for name in names for case in import_module(f"{__name__}.{name}").cases(setting)]
    if not chosen:
        raise RegardError(
            f"bench: {', '.join(names)} {'has' if len(names) == 1 else 'have'} no case on {setting.device}; "
            "--device cpu has all cases."
        )
    return chosen
