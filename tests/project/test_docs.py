"""Code of pages fits the site, public names have examples, and claims name their commands."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import runpy
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import regard as rg
from regard.engine.plan import ENGINES

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "hooks"))
catalog, reference, live_page = map(importlib.import_module, ("catalog", "reference", "live_page"))
sys.path.pop(0)
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("[dfg]*/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_fits_beside_the_menus_of_the_site(page):
    """At 1,440 pixels a line of code has 120 characters (docs/stylesheets/regard.css)."""
    inside = re.findall(r"^ *```.*?\n(.*?)^ *```", page.read_text(), re.M | re.S)
    assert [line for block in inside for line in block.splitlines() if len(line) > 120] == []


def test_the_live_page_is_on_the_first_screen_of_the_site():
    home = live_page.framed((ROOT / "README.md").read_text())
    assert home.count("<iframe") == 1 and f'src="{live_page.NAME}"' in "".join(home.splitlines()[:6])
    assert 'loading="lazy"' in home and "http" not in live_page.FRAME, "it works offline"


def test_every_mechanism_fits_the_model_of_its_picture():
    """The catalog draws each mechanism on queries and keys of MiniLM, here random ones of their shape."""
    query, key = torch.randn(2, 1, 12, 16, catalog.WIDTH)
    for entry in rg.mechanisms().values():
        attention, q, k = catalog._fitted(entry, query, key)
        with torch.no_grad():
            for weights in catalog._shown(entry, attention, q, k):
                assert not weights[0, 0].isnan().any(), entry.name


#: Public names without an example of their own, and why.
WITHOUT_EXAMPLE = {
    "RankLost": "raised where another process of a group ends, which takes two processes: tests/engine/test_ring.py",
    "RingPlan": "made by the example of Ring, which explains a ring and reads the plan",
}


def public():
    """The classes and functions that have a place in the reference; constants and aliases have no docstring."""
    for module in sorted(reference.REFERENCE.values()):
        package = importlib.import_module(module)
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.isclass(value) or inspect.isroutine(inspect.unwrap(value)):
                yield name, value


@cache
def with_examples(module):
    """The names whose docstrings have an example that tests/front/test_public.py runs."""
    owner = importlib.import_module(module)
    getattr(owner, "__all__", ())  # names of `regard` load at their first use
    found = doctest.DocTestFinder().find(owner)
    run = [test for test in found if any(not example.options.get(doctest.SKIP) for example in test.examples)]
    return {test.name.removeprefix(f"{module}.") for test in run}


def test_every_public_name_has_an_example_that_runs():
    names = dict(public())
    without = {name for name, value in names.items() if value.__qualname__ not in with_examples(value.__module__)}
    assert len(names) > 150
    assert without <= set(WITHOUT_EXAMPLE) <= set(names), sorted(without)


VERDICTS = {"holds", "holds with a condition", "does not hold", "not seen at this size"}
#: Claims that a training decides.
TRAINED = {14, 15, 16, 21, 22, 23, 24, 25, 26, 28, 30, 31, 34, 47, 48, 49, 52, 54, 55}


def claims():
    rows = [line for line in (ROOT / "docs" / "claims.md").read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[1:]]


def test_every_claim_has_a_verdict_and_a_command_that_is_there():
    assert len(claims()) >= 20
    for number, claim, verdict, measured, _where, command in claims():
        assert verdict.strip("*") in VERDICTS, (number, verdict)
        assert claim and re.search(r"\d", measured), number
        for script in re.findall(r"\b(?:examples|docs/claims)/\w+\.py", command):
            assert (ROOT / script).exists(), f"{number}: {script}"
        assert re.match(r"`(python|regard|make) ", command), number


def test_a_claim_that_a_training_decides_has_three_seeds_and_their_band():
    trained = {number: measured for number, _, _, measured, *_ in claims() if int(number) in TRAINED}
    assert set(trained) == set(map(str, TRAINED))
    for number, measured in trained.items():
        assert re.search(r"\b(3|three|5|five|6|six|10) (seeds|draws)\b", measured), f"{number}: which seeds?"
        assert re.search(r" ± |\d to \d", measured), f"{number}: a band"


def test_seeds_prints_the_range_of_numbers_that_differ():
    """The same line of three runs becomes one line; lines that differ in words stay."""
    merged = runpy.run_path(str(ROOT / "docs" / "claims" / "seeds.py"))["merged"]
    lines = [
        "L2.H1 after 1,000 steps: 9.5 %, 3",
        "L2.H1 after 1,000 steps: 10.25 %, 3",
        "L2.H1 after 1,000 steps: -1e-3 %, 3",
    ]
    assert merged(lines) == "L2.H1 after 1,000 steps: [-1e-3 to 10.25] %, 3"
    assert merged(["it is 1", "he is 1"]) == "it is 1\nhe is 1"


def test_lists_of_the_pages_are_those_of_the_code():
    """The engines of the glossary, and the slots of an `Attention`."""
    (engines,) = re.findall(r"^\| engine \|.*", (ROOT / "docs/guides/glossary.md").read_text(), re.M)
    assert set(re.findall(r"`(\w+)`", engines)) == {*ENGINES, "ring"}
    slots = re.findall(r"^\| `(\w+)` \| `", (ROOT / "docs/guides/attend.md").read_text(), re.M)
    fields = set(inspect.signature(rg.Attention).parameters)
    assert set(slots) == fields - {"dropout"}, fields
