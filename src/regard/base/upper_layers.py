"""What a lower layer uses of an upper one, which it must not import: `attend` for a call of an `Attention`, the viewer.

`regard/__init__.py` registers one importing function for each; the first use calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: The functions that import the modules, by the name of the module.
importers: dict[str, Callable[[], Any]] = {}


def upper_layer(name: str) -> Any:
    """A module: "attention" has `attend`, "widget" shows maps, "drawing" draws them.

    "api" has the public names of `regard`, and "nn", "viewer", "lab" and "lab.data" those of its rooms.
    """
    return importers[name]()
