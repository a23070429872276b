"""The parts of the viewer, for packages in lower layers, which must not import the viewer.

`regard/__init__.py` registers one importing function for each part; the first use of the part calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: The functions that import the parts, by the name of the part.
importers: dict[str, Callable[[], Any]] = {}


def viewer_part(name: str) -> Any:
    """A part of the viewer: "widget" shows maps in a notebook, "drawing" has pictures, "report" has `write_report`."""
    return importers[name]()
