"""The reference: one page a room, with every public name. mkdocstrings fills in the docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from regard.base.errors import RegardError

ROOT = Path(__file__).resolve().parents[2]
#: Title of a page, and the module whose public names it has: `regard` itself, then its rooms.
REFERENCE = {"Attend": "regard.api"} | {
    title: f"regard.{room}"
    for title, room in {
        "Masks": "masks",
        "Scores": "scores",
        "Encodings": "encodings",
        "Biases": "biases",
        "Normalizers": "normalizers",
        "Selections": "selections",
        "Transitions": "transitions",
        "Composites": "composites",
        "Caches": "caches",
        "Maps": "maps",
        "Models": "hf",
        "Edits": "edits",
        "Statistics": "stats",
        "Types": "types",
        "Modules": "nn",
        "Tests": "testing",
        "Viewer": "viewer",
        "Translators": "lab",
        "Texts": "lab.data",
    }.items()
}
#: What a page begins with: the names that most readers look for. The others follow in alphabetical order.
FIRST = {
    "regard.api": "attend plan scaled_dot_product_attention Attention mechanism mechanisms",
    "regard.masks": "causal window padding documents mask_tensor",
    "regard.scores": "Dot",
    "regard.encodings": "RoPE Sinusoidal",
    "regard.biases": "ALiBi T5Bias",
    "regard.normalizers": "Softmax",
    "regard.composites": "Sum Grouped",
    "regard.maps": "AttentionMap",
    "regard.edits": "Where KnockOut ScaleWeights AddToScores ReplaceWeights ActivationPatch AttentionEdit",
    "regard.hf": "watch WatchedAttention Generation WatchedStep edit load_model register importance prune",
    "regard.types": "AttentionOutput ExecutionPlan Attribution",
    "regard.stats": "profile roles findings",
    "regard.nn": "MultiHeadAttention CrossAttention EncoderLayer DecoderLayer Transformer TransformerConfig",
    "regard.lab": "build SYSTEMS train translate align evaluate_run compare",
    "regard.lab.data": "load_corpus train_tokenizer",
    "regard.viewer": "write_page save_run",
}


def path_of(title: str) -> str:
    """The file of a page."""
    return f"reference/{title.lower()}.md"


def pages() -> Iterator[tuple[str, str]]:
    """Path and text of each page. The page of `regard.api` has the names that no other page has."""
    others = {name for path in list(REFERENCE.values())[1:] for name in importlib.import_module(path).__all__}
    examples = list(_pages_with_code())
    for title, path in REFERENCE.items():
        module = importlib.import_module(path)
        names = [name for name in module.__all__ if path != "regard.api" or name not in others]
        used = "regard" if path == "regard.api" else path
        parts = [f"# {title}", (module.__doc__ or "").strip(), f"Names of `{used}`."]
        for name in _ordered(names, FIRST.get(path, "").split()):
            parts += [_entry(module, name), _in_use(name, examples)]
        yield path_of(title), "\n\n".join(part for part in parts if part)


def _ordered(names: list[str], first: list[str]) -> list[str]:
    return [*(name for name in first if name in names), *sorted(set(names) - set(first), key=str.lower)]


def _entry(module: ModuleType, name: str) -> str:
    """The directive of mkdocstrings. A constant has no docstring: the comment above it is printed."""
    value = getattr(module, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        return f"::: {_home(value, module)}.{name}"
    return f"::: {module.__name__}.{name}\n    options:\n      show_attribute_values: false\n\n{comment(module, name)}"


def _home(value: type, module: ModuleType) -> str:
    """The module that defines a class or function, where its docstring is read."""
    if value is RegardError:  # its __module__ is `regard`, for tracebacks
        return "regard.base.errors"
    return value.__module__ if value.__module__.startswith("regard.") else module.__name__


def comment(module: ModuleType, name: str) -> str:
    """The comment `#:` above a constant of a package."""
    found = re.compile(rf"((?:^#:.*\n)+){name}\b[^=\n]*=", re.M)
    for path in sorted(Path(module.__file__ or "").parent.rglob("*.py")):
        if match := found.search(path.read_text()):
            return re.sub(r"^#: ?", "", match[1], flags=re.M).strip()
    return ""


def _pages_with_code() -> Iterator[tuple[str, str, str]]:
    """Title, address from the reference, and text of the pages whose code is run: guides and examples."""
    guides = sorted((ROOT / "docs" / "guides").glob("*.md"), key=lambda path: path.stem != "pieces")
    examples = [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "examples" / "studies").glob("*.py"))]
    for path in [*guides, *examples]:
        text = path.read_text()
        title = next(line.lstrip('"# ') for line in text.splitlines() if "# " in line)
        where = path.relative_to(ROOT / "docs" if path in guides else ROOT)
        yield title, f"../{where.with_suffix('.md').as_posix()}", text


def _in_use(name: str, pages: list[tuple[str, str, str]]) -> str:
    """Where a name can be seen at work: at most four pages, the guides before the examples."""
    called = re.compile(rf"(?:\.|import [^\n]*\b|# .*\ban? ){name}\b(?!=)")
    links = [f"[{title}]({address})" for title, address, text in pages if name in text and called.search(text)]
    return f"*In use:* {' · '.join(links[:4])}\n" if links else ""
