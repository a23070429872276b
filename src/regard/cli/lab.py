"""The commands of the translation lab. Only this table names `regard.lab`, a layer above the command line."""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: A command, or the pages -> the module of the lab.
MODULES = {
    "data": "regard.lab.commands.data",
    "train": "regard.lab.commands.train",
    "translate": "regard.lab.commands.translate",
    "align": "regard.lab.commands.align",
    "evaluate": "regard.lab.commands.evaluate",
    "compare": "regard.lab.commands.comparison",
    "pages": "regard.lab.pages",
}


def lab(name: str) -> Any:
    """The module of the lab for a command; it is imported at the first use."""
    return import_module(MODULES[name])
