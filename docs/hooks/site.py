"""Makes pages of the site from the sources. They are not committed."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))
catalog, gallery_outputs, links, live_page, reference = map(
    importlib.import_module, ("catalog", "gallery_outputs", "links", "live_page", "reference")
)

#: Pages that the search lists below others that have the same words.
SEARCHED_LAST = {"log.md", "CHANGELOG.md", "CONTRIBUTING.md", "architecture.md", "architectures.md"}
SEARCHED_LAST |= {"development/benchmarks.md", "reference/api.md"}

#: Folders of pages that are made from the sources, with the links of the site.
MADE = ("catalog/", "reference/")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the sections of the navigation that come from the sources."""
    mechanisms = [{name: f"catalog/{name}.md"} for name in catalog.names()]
    names = {"Catalog": ["catalog/index.md", {"What is left out": "guides/left-out.md"}, *mechanisms]}
    rooms = [{title: reference.path_of(title)} for title in reference.REFERENCE]
    first = {"Reference": [{"The API on one page": "reference/api.md"}, {"Names by room": rooms}]}
    parts = [(title, names.get(title, where)) for entry in config.nav or [] for title, where in entry.items()]
    config.nav = [{title: [*first[title], *(part or [])] if title in first else part} for title, part in parts]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, the live page, the lectures, the catalog, the reference, and notebooks of examples."""
    for source, page in links.PAGES.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=live_page.framed(text) if page == "index.md" else text))
    files.append(File.generated(config, live_page.NAME, content=live_page.content()))
    for path, file in live_page.lectures():
        files.append(File.generated(config, path, content=file))
    for path, content in [*catalog.pages(), *reference.pages()]:
        files.append(File.generated(config, path, content=content))
    for path in (ROOT / "examples").glob("*.ipynb"):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    # The report is a page and a file of its own, and both would be report.html: the page moves.
    files.src_uris["comparison/report.md"].dest_uri = "comparison/tables.html"
    whole = ROOT / "docs" / "comparison" / "report.html"
    kept = {"abs_src_path": str(whole), "inclusion": InclusionLevel.INCLUDED}
    files.append(File.generated(config, "comparison/report.html", **kept))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Put the outputs of the examples into their notebooks, as their pages show them."""
    gallery, site = Path(config.docs_dir) / "examples", Path(config.site_dir) / "examples"
    stored = {path.name for path in (ROOT / "examples").glob("*.ipynb")}  # these have their outputs
    for path in site.rglob("*.ipynb"):
        if path.name in stored:
            continue
        source = (gallery / path.relative_to(site)).with_suffix(".md")
        notebook = gallery_outputs.with_outputs(
            json.loads(path.read_text()), source.read_text(), source.parent / "images"
        )
        path.write_text(json.dumps(notebook, ensure_ascii=False, indent=1))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change links to files of the repository that have another place in the site."""
    path = page.file.src_uri
    if path in SEARCHED_LAST:
        page.meta["search"] = {"boost": 0.01}
    if path.startswith("examples/"):  # the gallery takes each page for a folder, which none is that opens as a file
        return re.sub(r'href="((?:studies/)?\w+)"', r'href="\1.html"', markdown.replace("../images/", "images/"))
    if path.startswith(MADE):
        return markdown
    markdown = links.for_site(markdown, path)
    if path == "claims.md":  # a wide table; each command leads to what it runs
        page.meta["hide"] = ["navigation", "toc"]
        markdown = re.sub(r"(?ms)^(\| # .*)", r'<div class="cards claims" markdown>\n\n\1\n\n</div>', markdown)
        markdown = re.sub(r"(`python (examples/[\w/]+)\.py`)", r"[\1](\2.md)", markdown)
        markdown = re.sub(r"(`python docs/(claims/\w+\.py)[ \d]*`)", r"[\1](\2)", markdown)
    return markdown
