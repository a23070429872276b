"""Which files of `regard` import which: at the top, inside functions, and by a string given to `import_module`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import regard

SOURCE = Path(regard.__file__).parent


def module_name(path: Path) -> str:
    """The dotted name of a file below `src/regard`; a package has the name of its folder."""
    parts = ("regard", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


@cache
def imports(source: str) -> frozenset[str]:
    """The names below `regard` that a source text imports: "regard.hf.calls" or "regard.hf.calls.translate"."""
    names = chain.from_iterable(map(_names, ast.walk(ast.parse(source))))
    return frozenset(name for name in names if name.startswith("regard."))


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from ("regard.api" if alias.name == "regard" else alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, "relative imports are not used"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and called(node.func) in ("import_module", "__import__"):
        yield from (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))


def called(function: ast.expr) -> str:
    """The last part of the name of a function that is called, such as import_module of importlib.import_module."""
    return getattr(function, "attr", "") or getattr(function, "id", "")


def imported_files(name: str) -> set[str]:
    """The files that a file imports: `from regard.lab.data import Pair` is the front door of `data`."""
    names = imports(FILES[name].read_text())
    return {found if found in FILES else found.rpartition(".")[0] for found in names} & set(FILES) - {name}


def circle(files: dict[str, set[str]]) -> list[str]:
    """Files each of which imports the one before, the first and the last the same; empty if there is no circle."""
    try:
        TopologicalSorter(files).prepare()
    except CycleError as error:
        return error.args[1]
    return []
