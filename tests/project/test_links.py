"""Each relative link of a page, and its anchor, has a target in the repository and in the site."""

from __future__ import annotations

import importlib
import re
import sys
import unicodedata
from functools import cache
from pathlib import Path

import pytest

import regard as rg

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "hooks"))
links, reference = map(importlib.import_module, ("links", "reference"))
sys.path.pop(0)
WRITTEN = [path for path in (ROOT / "docs").rglob("*.md") if "docs/examples" not in str(path)]
PAGES = sorted([ROOT / path for path in (*links.PAGES, "examples/README.md")] + WRITTEN)
FENCED = re.compile(r"^ *```.*?^ *```", re.M | re.S)


def named(path):
    return str(path.relative_to(ROOT))


@cache
def headings(path):
    """The headings of a page, as they are read."""
    lines = re.findall(r"^#+ +(.+?) *#*$", FENCED.sub("", path.read_text()), re.M)
    return [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line).replace("`", "").replace("*", "") for line in lines]


def of_github(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def of_the_site(heading):
    """As Python-Markdown makes it: `markdown.extensions.toc.slugify`."""
    ascii_only = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())


def has_anchor(path, anchor, slug):
    return not anchor or path.suffix != ".md" or anchor in map(slug, headings(path))


def missing_in_the_repository(page, link):
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return not target.exists() or not has_anchor(target, anchor, of_github)


@cache
def made():
    """Pages of the site that the build makes from the sources."""
    pages = {reference.path_of(title) for title in reference.REFERENCE} | {"reference/api.md", "catalog/index.md"}
    pages |= {f"catalog/{name}.md" for name in rg.mechanisms()} | {*links.PAGES.values(), "examples/index.md"}
    examples = {path.relative_to(ROOT) for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".ipynb")}
    return pages | {str(path.with_suffix(".md" if path.suffix == ".py" else path.suffix)) for path in examples}


def missing_in_the_site(page, link):
    shown = named(page)
    address = links.PAGES.get(shown, shown.removeprefix("docs/"))
    path, _, anchor = links.moved(link, address).partition("#")
    if path.startswith("https:"):
        return False
    target = Path(links.posixpath.normpath(str(Path(address).parent / path))) if path else Path(address)
    source = ROOT / links.source_of(str(target))
    if str(target) in made() and not source.exists():
        return False
    return not source.exists() or not has_anchor(source, anchor, of_the_site)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_a_place(page):
    found = list(links.links(page.read_text()))
    assert [link for link in found if missing_in_the_repository(page, link)] == []
    if named(page) != "examples/README.md":  # the gallery writes its page
        assert [link for link in found if missing_in_the_site(page, link)] == []


def test_a_link_is_moved_to_the_place_of_its_target():
    moved = {
        "../../src/regard/catalog/rope.py": "../catalog/rope.md",
        "../../src/regard/catalog/": "../catalog/index.md",
        "../../src/regard/stats/": "../reference/statistics.md",
        "../../src/regard/masks.py": "../reference/masks.md",
        "../../examples/studies/03_scaled_dot_product.py": "../examples/studies/03_scaled_dot_product.md",
        "../../CONTRIBUTING.md#your-first-change": "../CONTRIBUTING.md#your-first-change",
        "../../LICENSE": "https://www.apache.org/licenses/LICENSE-2.0",
        "see.md#profile": "see.md#profile",
        "#here": "#here",
    }
    for link, place in moved.items():
        assert links.for_site(f'[a]({link}) `[b]({link})` [c]({link} "d")', "guides/x.md") == (
            f'[a]({place}) `[b]({link})` [c]({place} "d")'
        )
    assert links.for_site("[a](docs/guides/see.md) [b](https://a.org/b.md)", "index.md") == (
        "[a](guides/see.md) [b](https://a.org/b.md)"
    )
    with pytest.raises(ValueError, match="no page of the site"):
        links.moved("../../src/regard/version.py", "guides/x.md")
