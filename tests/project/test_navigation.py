"""The navigation of the site: each page has one place, pages of users are short, and no number in them goes stale."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
#: Pages that the build makes, or takes from the root of the repository.
FROM_ELSEWHERE = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
#: Sections that are read to learn something or to do it. The others are looked up.
READ = ("Start", "By reader", "Guides")


def pages(nav):
    """The pages of a part of the navigation."""
    if isinstance(nav, str):
        return [FROM_ELSEWHERE.get(nav, f"docs/{nav}")]
    return [page for part in nav for page in pages(part if isinstance(nav, list) else nav[part])]


SECTIONS = {title: pages(part) for entry in NAV for title, part in entry.items()}
OF_USERS = sorted({page for title, part in SECTIONS.items() if title != "Development" for page in part if "." in page})


def test_every_page_has_one_place_in_the_navigation():
    listed = [page for part in SECTIONS.values() for page in part if page.endswith(".md")]
    listed += ["docs/guides/left-out.md"]  # the build puts it into the catalog
    written = [path for path in (ROOT / "docs").rglob("*.md") if "docs/examples" not in str(path)]
    assert sorted(listed) == sorted([*map(str, (path.relative_to(ROOT) for path in written)), *FROM_ELSEWHERE.values()])


@pytest.mark.parametrize("page", sorted({page for title in READ for page in SECTIONS.get(title, ())}))
def test_a_page_that_is_read_has_at_most_1500_words(page):
    assert len((ROOT / page).read_text().split()) <= 1500


#: A number that somebody typed, of what grows: it is wrong after the next addition.
GROWING = "mechanisms|examples|guides|claims|engines|rooms|notebooks|recipes"
TYPED = re.compile(rf"\b(?:\d[\d,]*|\w+ty|hundreds?|dozens?) (?:\w+ )?(?:{GROWING})\b")


def typed_counts(text):
    return TYPED.findall(re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S))


@pytest.mark.parametrize("page", [page for page in OF_USERS if not page.endswith("CHANGELOG.md")])
def test_no_count_of_what_grows_is_typed(page):
    assert typed_counts((ROOT / page).read_text()) == []


def test_typed_counts_are_found():
    assert typed_counts("34 examples, more than sixty named mechanisms, 73 mechanisms, 4 heads") == [
        *("34 examples", "sixty named mechanisms", "73 mechanisms")
    ]
