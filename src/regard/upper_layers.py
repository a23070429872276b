"""What a lower layer uses of an upper one, which it must not import: `attend` for a call of an `Attention`, the viewer.

`regard/__init__.py` registers one importing function for each; the first use calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: The functions that import the modules, by the name of the module.
importers: dict[str, Callable[[], Any]] = {}


def upper_layer(name: str) -> Any:
    """A module: "attention" has `attend`, "widget" shows maps, "drawing" draws them, "report" has `write_report`.

    "api" has the public names of `regard`, and "nn", "viewer", "data" and "seq2seq" those of its rooms.
    """
    return importers[name]()
