"""The reference: a page a room with its public names, and one page of all names. mkdocstrings fills in docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

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
    examples, described = list(_pages_with_code()), set[str]()
    for title, path in REFERENCE.items():
        module = importlib.import_module(path)
        names = [name for name in module.__all__ if path != "regard.api" or name not in others]
        used = "regard" if path == "regard.api" else path
        parts = [f"# {title}", (module.__doc__ or "").strip(), f"Names of `{used}`."]
        for name in _ordered(names, FIRST.get(path, "").split()):
            entry = _entry(module, name)
            parts += (
                [f"{_link(module, name)} is described there."]
                if entry in described
                else [entry, _in_use(name, examples)]
            )
            described.add(entry)
        yield path_of(title), "\n\n".join(part for part in parts if part)
    yield "reference/api.md", on_one_page()


#: A line of the docstring of `regard`: names, and what they are.
LISTED = re.compile(r"^    (\w+(?:, \w+)*) {2,}(.+)$", re.M)


def on_one_page() -> str:
    """The API on one page: the names of `regard` as `help(regard)` lists them, then those of each room."""
    front = importlib.import_module("regard").__doc__ or ""
    parts = ["---\ntags: [API, names, functions, cheat sheet]\n---", "# The API on one page"]
    parts += ["`help(regard)` prints the first part. Each name leads to its description."]
    for section in front.split("\n\n")[2:]:
        title, _, lines = section.strip().partition(":\n")
        parts += [f"## {title}", _table(_listed(LISTED.findall(lines)))]
    for title, path in list(REFERENCE.items())[1:]:
        module = importlib.import_module(path)
        summary = (module.__doc__ or "").strip().partition("\n")[0]
        rows = ((_link(module, name), _summary(module, name)) for name in sorted(module.__all__, key=str.lower))
        parts += [f"## {title}: `{path}`", summary, _table(rows)]
    return "\n\n".join(parts)


def _listed(lines: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The lines of a section with links: of names to their entries, of rooms to their pages."""
    api, pages = importlib.import_module("regard.api"), {module: path_of(title) for title, module in REFERENCE.items()}
    for names, meaning in lines:
        rooms = {name: pages.get(f"regard.{name}", "").removeprefix("reference/") for name in names.split(", ")}
        yield ", ".join(f"[`{name}`]({page})" if page else _link(api, name) for name, page in rooms.items()), meaning


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(["| name | what it is |", "|---|---|", *(f"| {names} | {meaning} |" for names, meaning in rows)])


def _link(module: ModuleType, name: str) -> str:
    """A name that leads to its entry; mkdocstrings finds the page."""
    value = getattr(module, name)
    home = _home(value, module) if inspect.isclass(value) or inspect.isroutine(value) else module.__name__
    return f"[`{name}`][{home}.{name}]"


def _summary(module: ModuleType, name: str) -> str:
    """The first line of a docstring, or the comment above a constant, as the cell of a table."""
    value = getattr(module, name)
    documented = inspect.isclass(value) or inspect.isroutine(inspect.unwrap(value))
    text = (inspect.getdoc(value) or "").partition("\n")[0] if documented else comment(module, name)
    return " ".join(text.split()).replace("|", "&#124;")


def _ordered(names: list[str], first: list[str]) -> list[str]:
    return [*(name for name in first if name in names), *sorted(set(names) - set(first), key=str.lower)]


def _entry(module: ModuleType, name: str) -> str:
    """The directive of mkdocstrings. A constant has no docstring: the comment above it is printed."""
    value = getattr(module, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        return f"::: {_home(value, module)}.{name}"
    return f"::: {module.__name__}.{name}\n    options:\n      show_attribute_values: false\n\n{comment(module, name)}"


def _home(value: Any, module: ModuleType) -> str:
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
    folders = (("docs/development", "p*.md"), ("docs/guides", "*.md"), ("docs/for", "*.md"))
    guides = [path for folder, names in folders for path in sorted((ROOT / folder).glob(names))]
    examples = [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "examples" / "studies").glob("*.py"))]
    for path in [*guides, *examples]:
        text = path.read_text()
        title = next(line.lstrip('"# ') for line in text.splitlines() if "# " in line)
        where = path.relative_to(ROOT / "docs" if path in guides else ROOT)
        yield title, f"../{where.with_suffix('.md').as_posix()}", text


def _in_use(name: str, pages: list[tuple[str, str, str]]) -> str:
    """Where a name can be seen at work: at most four pages, the examples last."""
    called = re.compile(rf"(?:\.|import [^\n]*\b|# .*\ban? ){name}\b(?!=)")
    links = [f"[{title}]({address})" for title, address, text in pages if name in text and called.search(text)]
    return f"*In use:* {' · '.join(links[:4])}\n" if links else ""
