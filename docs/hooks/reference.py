"""The reference: one page a package, with every public name. mkdocstrings fills in the docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
#: Title of a page, and the package whose public names it has.
REFERENCE = {
    "Attend": "regard.api",
    "Pieces": "regard.pieces",
    "Composites": "regard.composites",
    "Maps": "regard.maps",
    "Pictures": "regard.drawing",
    "Models": "regard.hf",
    "Edits": "regard.edits",
    "Statistics": "regard.stats",
    "Attribution": "regard.attribution",
    "Corpora": "regard.profiling",
    "Diagnosis": "regard.diagnosis",
    "Modules": "regard.nn",
    "Translators": "regard.seq2seq",
    "Texts": "regard.data",
    "Viewer": "regard.viewer",
}
#: Those that are used by their own names; the names of the others are names of `regard`.
SEPARATE = {"regard.nn", "regard.stats", "regard.seq2seq", "regard.data", "regard.viewer"}
#: What a page begins with: the names that most readers look for. The others follow in alphabetical order.
FIRST = {
    "regard.api": "attend plan scaled_dot_product_attention Attention AttentionOutput mechanism mechanisms",
    "regard.pieces": "Dot causal window padding mask_tensor RoPE ALiBi Softmax",
    "regard.composites": "Sum Grouped",
    "regard.maps": "AttentionMap",
    "regard.edits": "Where where KnockOut ScaleWeights Steer ReplaceWeights Patch Edit",
    "regard.hf": "watch WatchedAttention Generation WatchedStep edit load_model register importance prune",
    "regard.attribution": "attribute Attribution Target faithfulness",
    "regard.stats": "profile roles findings",
    "regard.nn": "MultiHeadAttention CrossAttention EncoderLayer DecoderLayer Transformer TransformerConfig",
    "regard.seq2seq": "build SYSTEMS train translate align evaluate_run compare",
    "regard.data": "load_corpus train_tokenizer",
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
        used = path if path in SEPARATE else "regard"
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
    for path in [*guides, *sorted((ROOT / "examples").glob("[0-9]*.py"))]:
        text = path.read_text()
        title = next(line.lstrip('"# ') for line in text.splitlines() if "# " in line)
        yield title, f"../{path.parent.name}/{path.stem}.md", text


def _in_use(name: str, pages: list[tuple[str, str, str]]) -> str:
    """Where a name can be seen at work: at most four pages, the guides before the examples."""
    called = re.compile(rf"(?:\.|import [^\n]*\b|# .*\ban? ){name}\b(?!=)")
    links = [f"[{title}]({address})" for title, address, text in pages if name in text and called.search(text)]
    return f"*In use:* {' · '.join(links[:4])}\n" if links else ""
