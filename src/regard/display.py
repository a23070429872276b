"""`viewer()` and `write_report`: parts of the viewer, which belongs to a higher layer, for the layers below it.

`regard/__init__.py` registers functions that import these parts; the first use calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

_import_viewer: list[Callable[[], Any]] = []
_import_report: list[Callable[[], Any]] = []


def register_viewer(import_viewer: Callable[[], Any]) -> None:
    """Set the function that returns the viewer: a module, or an object, with `show_map` and `show_watched`."""
    _import_viewer[:] = [import_viewer]


def register_report(import_report: Callable[[], Any]) -> None:
    """Set the function that returns a module, or an object, with `write_report`."""
    _import_report[:] = [import_report]


def viewer() -> Any:
    """The registered viewer."""
    return _import_viewer[0]()


def write_report(folder: Path) -> Path:
    """Write the report of a comparison into its folder; returns the path of its page."""
    return _import_report[0]().write_report(folder)
