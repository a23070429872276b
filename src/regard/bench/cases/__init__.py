"""The cases, by group: one file each, in the order in which they are run."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from regard.bench.case import Case, Setting
from regard.errors import RegardError, nearest

#: Names of groups, which are those of the files beside this one.
GROUPS = (
    "softmax",
    "window",
    "packed",
    "sparse",
    "planning",
    "bias",
    "additive",
    "linear",
    "decoding",
    "statistics",
    "model",
    "module",
)


def cases(setting: Setting, only: Iterable[str] = ()) -> list[Case]:
    """The cases of some groups, all unless said, that make sense on the device of the setting."""
    names = [name.strip() for name in only] or list(GROUPS)
    for name in names:
        if name not in GROUPS:
            raise RegardError(f"bench: there is no group {name!r}. {nearest(name, GROUPS)}")
    found = [case for name in names for case in import_module(f"{__name__}.{name}").cases(setting)]
    if not found:
        raise RegardError(
            f"bench: {', '.join(names)} {'has' if len(names) == 1 else 'have'} no case on {setting.device}; "
            "--device cpu runs them all."
        )
    return found
