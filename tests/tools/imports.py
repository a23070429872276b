"""Which files of `regard` import which: at the top, inside functions, and by a string given to `import_module`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import regard

SOURCE = Path(regard.__file__).parent


def module_name(path: Path) -> str:
    """The dotted name of a file below `src/regard`; a package has the name of its folder."""
    parts = ("regard", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imports(source: str) -> set[str]:
    """The names below `regard` that a source text imports: "regard.hf.calls" or "regard.hf.calls.translate"."""
    return {name for node in ast.walk(ast.parse(source)) for name in _names(node) if name.startswith("regard.")}


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from ("regard.api" if alias.name == "regard" else alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, "relative imports are not used"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        yield from (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))


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
