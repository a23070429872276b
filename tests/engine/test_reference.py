"""The reference has one entry for every public name, and the entry has a text. No site is built for these tests."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections import Counter
from functools import cached_property
from importlib.util import find_spec
from operator import attrgetter

import pytest

import regard as rg
from imports import SOURCE
from regard.base.other_libraries import INNER_ROOMS, ROOMS

sys.path.insert(0, str(SOURCE.parents[1] / "docs" / "hooks"))
reference = importlib.import_module("reference")
sys.path.pop(0)

PAGES = dict(reference.pages())
ENTRIES = {path: re.findall(r"^::: ([\w.]+)$", text, re.M) for path, text in PAGES.items()}
LED = re.compile(r"^\[`\w+`\]\[([\w.]+)\] is described there", re.M)
#: A room for tests of one's own that `import regard` does not load.
IMPORTED_BY_NAME = "regard.testing"
#: Packages whose names are not for users: commands and their parts, and the engines behind `attend`.
INSIDE = {"base", "catalog", "cli", "engine", "pieces", "reference"}
INSIDE |= {"attribution", "diagnosis", "drawing", "profiling"}


#: Pages that `help(regard)` does not list: its own, and those of rooms inside of rooms or imported by name.
NOT_A_ROOM_OF_REGARD = {"api.md", "attend.md", "texts.md", "tests.md"}


def documented():
    """The classes of the results that readers hold, with their public members."""
    for kind in (
        rg.AttentionMap,
        rg.types.AttentionOutput,
        rg.hf.WatchedAttention,
        rg.maps.RingMap,
        rg.types.ModelProfile,
    ):
        for name, member in vars(kind).items():
            is_method = inspect.isroutine(member) or isinstance(member, property | cached_property | classmethod)
            if is_method and (not name.startswith("_") or name == "__getitem__"):
                yield kind, name


def test_every_package_with_public_names_has_a_page():
    packages = {f"regard.{module.name}" for module in pkgutil.iter_modules([str(SOURCE)]) if module.ispkg}
    packages -= {f"regard.{name}" for name in INSIDE}
    assert packages <= set(reference.REFERENCE.values())


def test_every_public_name_has_one_entry():
    """A class that two rooms have is described on the page of the first; the other page leads there."""
    found = Counter(entry for entries in ENTRIES.values() for entry in entries)
    led = Counter(link for path, text in PAGES.items() if path != "reference/api.md" for link in LED.findall(text))
    modules = [*(attrgetter(room)(rg) for room in (*ROOMS, *INNER_ROOMS)), importlib.import_module(IMPORTED_BY_NAME)]
    rooms = Counter(name for module in modules for name in module.__all__)
    own = set(rg.__all__) - set(ROOMS)
    assert set(found.values()) == {1} and set(led) <= set(found)
    assert Counter(entry.rpartition(".")[2] for entry in (found + led).elements()) == Counter(own - set(rooms)) + rooms


@pytest.mark.parametrize("entry", sorted(entry for entries in ENTRIES.values() for entry in entries))
def test_an_entry_finds_its_name_and_has_a_text(entry):
    home, _, name = entry.rpartition(".")
    value = getattr(importlib.import_module(home), name)
    assert find_spec(home).submodule_search_locations is None or find_spec(entry) is None, "a module hides the name"
    if inspect.isclass(value) or inspect.isroutine(value):
        assert inspect.unwrap(value).__doc__ and value.__module__ in (home, "builtins", "regard")
    else:
        assert reference.comment(importlib.import_module(home), name), f"write a comment #: above {name}"


@pytest.mark.parametrize(("kind", "name"), list(documented()), ids=lambda value: getattr(value, "__name__", value))
def test_every_method_of_a_result_is_documented(kind, name):
    in_order = [vars(base)[name] for base in kind.__mro__ if name in vars(base)]
    assert any(inspect.getdoc(getattr(member, "func", member)) for member in in_order)


def test_the_names_that_readers_look_for_come_first():
    assert ENTRIES["reference/attend.md"][:2] == ["regard.attention_output.attend", "regard.attention_output.plan"]
    for path, first in reference.FIRST.items():
        assert set(first.split()) <= set(importlib.import_module(path).__all__)
        page = next(reference.path_of(title) for title, package in reference.REFERENCE.items() if package == path)
        assert [entry.rpartition(".")[2] for entry in ENTRIES[page]][: len(first.split())] == first.split()


def test_help_lists_every_name_of_regard_once_in_short_lines():
    """`help(regard)` is the API on one page: each name in one line, with what it is."""
    listed = [name for names, _ in reference.LISTED.findall(rg.__doc__ or "") for name in names.split(", ")]
    assert sorted(listed) == sorted(rg.__all__)
    assert max(map(len, (rg.__doc__ or "").splitlines())) <= 120


def test_the_page_of_all_names_leads_to_the_entry_of_each():
    page = PAGES["reference/api.md"]
    entries = {entry for entries in ENTRIES.values() for entry in entries}
    assert set(re.findall(r"\]\[([\w.]+)\]", page)) == entries
    assert set(re.findall(r"\]\((\w+\.md)\)", page)) == {path[10:] for path in PAGES} - NOT_A_ROOM_OF_REGARD
    assert not re.search(r"\| *\|$", page, re.M), "a name without a text"
