"""Write src/regard/catalog/__init__.pyi: for type checkers, `rg.mechanism("rope").build` has its own parameters.

    python scripts/catalog_types.py

Run it after a mechanism was added, or after its parameters changed; tests/front/test_types.py asks for it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_type_hints

import regard as rg

STUB = Path(__file__).parents[1] / "src" / "regard" / "catalog" / "__init__.pyi"
HEAD = '''\
"""Written by scripts/catalog_types.py."""

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from regard.attention import Attention
from regard.catalog.entry import CatalogEntry as CatalogEntry
from regard.composites import Grouped, Nystrom, Sum, ThroughLatents
from regard.encodings import Scaling

__all__ = ["CatalogEntry", "mechanism", "mechanisms"]

def mechanisms() -> dict[str, CatalogEntry]: ...
'''
ENTRY = """
class _{title}(CatalogEntry):
    @staticmethod
    def build{parameters} -> {returned}: ...
"""
OVERLOAD = """
@overload
def mechanism(name: Literal["{name}"]) -> _{title}: ...
"""
ANY_NAME = """
@overload
def mechanism(name: str) -> CatalogEntry: ...
"""


def stub() -> str:
    """The text of the file."""
    entries = rg.mechanisms()
    titles = {name: "".join(part.title() for part in name.split("_")) for name in entries}
    signatures = {name: _wrapped(entry.signature.removeprefix(name)) for name, entry in entries.items()}
    returned = {name: get_type_hints(entry.build)["return"].__name__ for name, entry in entries.items()}
    classes = [
        ENTRY.format(title=titles[name], parameters=signatures[name], returned=returned[name]) for name in entries
    ]
    overloads = [OVERLOAD.format(name=name, title=titles[name]).removeprefix("\n") for name in entries]
    return "".join([HEAD, *classes, "\n", *overloads, ANY_NAME.removeprefix("\n")])


def _wrapped(parameters: str) -> str:
    """The parameters as ruff lays them out: one a line if they are too long for one line."""
    parameters = parameters.replace("10000.0", "10_000.0")
    if len(parameters) <= 60:
        return parameters
    inner = re.sub(r", (?=\w+:)", ",\n        ", parameters[1:-1])
    return f"(\n        {inner},\n    )"


if __name__ == "__main__":
    STUB.write_text(stub())
