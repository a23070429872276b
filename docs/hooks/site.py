"""The pages that are made from the sources while the site is built; none of them is committed."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))
catalogue = importlib.import_module("catalogue")

#: The packages whose public names make a page of the reference: title, module, what it is for.
REFERENCE = {
    "Attend": "regard.api",
    "Pieces": "regard.pieces",
    "Maps": "regard.maps",
    "Pictures": "regard.drawing",
    "Models": "regard.hf",
    "Statistics": "regard.stats",
    "Corpora": "regard.profiling",
    "Modules": "regard.nn",
    "Translators": "regard.seq2seq",
    "Texts": "regard.data",
}
#: Those that are used by their own names; the names of the others are names of `regard`.
SEPARATE = {"regard.nn", "regard.stats", "regard.seq2seq", "regard.data"}
#: Files of the repository that are pages of the site too.
PAGES = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}

#: Pages that the search lists below others that have the same words.
SEARCHED_LAST = {"log.md", "CHANGELOG.md", "CONTRIBUTING.md", "architecture.md", "benchmarks.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the sections of the navigation that follow from the sources."""
    names = {"Catalogue": ["catalogue/index.md", *({name: f"catalogue/{name}.md"} for name in catalogue.names())]}
    names["Reference"] = [_reference_path(title) for title in REFERENCE]
    config.nav = [{title: names.get(title, where)} for entry in config.nav or [] for title, where in entry.items()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the home page, the catalogue, the reference, and the notebook beside the examples."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_at_home((ROOT / source).read_text())))
    for path, content in [*catalogue.pages(), *_reference()]:
        files.append(File.generated(config, path, content=content))
    for path in (ROOT / "examples").glob("*.ipynb"):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    # The report is a page and a file of its own, and both would be report.html: the page moves.
    files.src_uris["comparison/report.md"].dest_uri = "comparison/tables.html"
    whole = ROOT / "docs" / "comparison" / "report.html"
    kept = {"abs_src_path": str(whole), "inclusion": InclusionLevel.INCLUDED}
    files.append(File.generated(config, "comparison/report.html", **kept))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Pages of docs/ link files of the repository as they lie there; those that are in the site have another place."""
    path = page.file.src_uri
    if path in SEARCHED_LAST:
        page.meta["search"] = {"boost": 0.01}
    if path.startswith("examples/"):  # the gallery takes each page for a folder, which none is that opens as a file
        return re.sub(r'href="(\d\d_\w+)"', r'href="\1.html"', markdown.replace("../images/", "images/"))
    if path == "claims.md":  # a wide table; each command leads to what it runs
        page.meta["hide"] = ["navigation", "toc"]
        markdown = re.sub(r"(?ms)^(\| # .*)", r'<div class="cards claims" markdown>\n\n\1\n\n</div>', markdown)
        markdown = re.sub(r"(`python (examples/\w+)\.py`)", r"[\1](\2.md)", markdown)
        return re.sub(r"(`python docs/(claims/\w+\.py)(?: \d+)?`)", r"[\1](\2)", markdown)
    markdown = re.sub(r"\]\(((?:\.\./)+)examples/(\d\d_\w+)\.py\)", r"](\1examples/\2.md)", markdown)
    outside = "../" * (1 + path.count("/"))  # docs/ is left to reach the examples in the repository, not in the site
    return markdown.replace(f"]({outside}examples/", f"]({outside[3:]}examples/")


def _at_home(text: str) -> str:
    """A page of the repository's root, as one of docs/; the licence has no page."""
    return re.sub(r"\]\(LICENSE\)", "](https://www.apache.org/licenses/LICENSE-2.0)", text.replace("](docs/", "]("))


def _reference_path(title: str) -> str:
    return f"reference/{title.lower()}.md"


def _reference() -> Iterator[tuple[str, str]]:
    """One page a package: every public name with its docstring. `regard.api` keeps those that no other page has."""
    others = {name for module in list(REFERENCE.values())[1:] for name in importlib.import_module(module).__all__}
    pages = list(_pages_with_code())
    for title, path in REFERENCE.items():
        module = importlib.import_module(path)
        names = [name for name in module.__all__ if path != "regard.api" or name not in others]
        used = path if path in SEPARATE else "regard"
        parts = [f"# {title}", (module.__doc__ or "").strip(), f"Names of `{used}`."]
        for name in names:
            parts += [f"::: {_home(module, name)}", _in_use(name, pages)]
        yield _reference_path(title), "\n\n".join(part for part in parts if part)


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
    links = [f"[{title}]({address})" for title, address, text in pages if called.search(text)]
    return f"*In use:* {' · '.join(links[:4])}\n" if links else ""


def _home(module: ModuleType, name: str) -> str:
    """Where a name is defined, which is where its docstring is read; only classes and functions know their module."""
    value = getattr(module, name)
    home = value.__module__ if inspect.isclass(value) or inspect.isroutine(value) else ""
    return f"{home if home.startswith('regard.') else module.__name__}.{name}"
