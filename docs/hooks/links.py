"""Links of pages. They are written for the repository; in the site, some of their targets have another place."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from reference import REFERENCE, path_of

#: Files of the repository that are pages of the site too.
PAGES = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
#: Other targets outside of docs/, and their place in the site.
PLACES = PAGES | {
    "LICENSE": "https://www.apache.org/licenses/LICENSE-2.0",
    "examples": "examples/index.md",
    "examples/README.md": "examples/index.md",
    "src/regard/catalog": "catalog/index.md",
}
ROOMS = {module.replace(".", "/"): path_of(title) for title, module in REFERENCE.items()}

#: Code, in which nothing is a link, and the target of a link.
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]*`)", re.M | re.S)
LINK = re.compile(r"\]\((?!\w+:)([^()\s]*)(?=[\s)])")


def source_of(page: str) -> str:
    """The file of the repository that a page of the site shows."""
    return {place: path for path, place in PAGES.items()}.get(page, f"docs/{page}")


def links(text: str) -> Iterator[str]:
    """The relative links of a page."""
    for part in CODE.split(text)[::2]:
        yield from LINK.findall(part)


def for_site(text: str, page: str) -> str:
    """The text of a page with links as the site has them."""
    parts = CODE.split(text)
    parts[::2] = [LINK.sub(lambda link: f"]({moved(link[1], page)}", part) for part in parts[::2]]
    return "".join(parts)


def moved(link: str, page: str) -> str:
    """A link of the repository as a link of the site."""
    path, hash_sign, anchor = link.partition("#")
    if not path:
        return link
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source_of(page)), path))
    place = place_of(target)
    if place is None:
        raise ValueError(f"{source_of(page)}: the link {link} leads to {target}, which is no page of the site")
    if place.startswith("https:"):
        return place
    return posixpath.relpath(place, posixpath.dirname(page) or ".") + hash_sign + anchor


def place_of(path: str) -> str | None:
    """Where a file or folder of the repository is in the site: nowhere, if it is no page."""
    if path in PLACES:
        return PLACES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("examples/"):
        return re.sub(r"\.py$", ".md", path)
    if path.startswith("src/regard/catalog/"):
        return re.sub(r"^src/regard/(\w+/\w+)\.py$", r"\1.md", path)
    return ROOMS.get(re.sub(r"(/__init__)?\.py$", "", path.removeprefix("src/")))
