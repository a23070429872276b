"""How `show()` of a map or of a watched model finds the viewer, which belongs to a higher layer.

`regard/__init__.py` registers a function that imports `regard.viewer.widget`; the first `show()` calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_import_viewer: list[Callable[[], Any]] = []


def register_viewer(import_viewer: Callable[[], Any]) -> None:
    """Set the function that returns the viewer: a module, or an object, with `show_map` and `show_watched`."""
    _import_viewer[:] = [import_viewer]


def viewer() -> Any:
    """The registered viewer."""
    return _import_viewer[0]()
