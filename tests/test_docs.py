"""Every Python block of the README and of docs/ runs, public names have examples, and claims name their commands."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import re
import runpy
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch

import regard as rg
from fabricated import fabricate

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "hooks"))
reference = importlib.import_module("reference")
sys.path.pop(0)
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md")])
SAME = doctest.OutputChecker().check_output
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


def blocks(page):
    return BLOCK.findall(page.read_text())


def of_the_page(folder):
    """Maps and runs that docs/page.md takes for granted."""
    from transformers import BertConfig, BertModel

    from regard.seq2seq.runs.config import make_config
    from regard.seq2seq.training.fitting import fit
    from regard.seq2seq.training.preparation import prepare

    fabricate(folder / "fabricated")
    tokens = ["das", "Haus", "ist", "klein"]
    model = BertModel(BertConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
    with rg.watch(model.eval()) as watched:
        model(torch.tensor([[1, 2, 3, 4]]))
    weights = next(iter(watched.maps.values()))
    short = {"data": {"corpus": "grammar", "size": 60}, "training": {"steps": 1}, "model": {"width": 8}}
    for name in "ab":
        fit(prepare(make_config(short), folder / "runs" / name).task)
    names = {"tokens": tokens, "source": tokens, "target": tokens, "source_tokens": tokens, "target_tokens": tokens}
    return {
        "weights": weights,
        "seen": rg.attend(rg.Attention(), *torch.randn(3, 1, 2, 4, 8)),
        "watched": watched,
    } | names


GIVEN = {"page.md": of_the_page}
#: Pages where what is printed stands under every print, as a comment.
COMPLETE = {"README.md", "first-hour.md", "from-tutorials.md", "how-to.md", "install.md", "troubleshooting.md"}
#: A print with its output, and an error that a block ends with. An output may be wrapped, and "..." leaves out a part.
SHOWN = re.compile(r"^ *print\(.*\n((?:#.*\n)+)|^(# RegardError: .*\n(?:#.*\n)*)", re.M)


def shown(code):
    """What a block says that it prints or raises."""
    return re.sub("^# ?", "", "".join(printed or error for printed, error in SHOWN.findall(code)), flags=re.M)


def run(code, page, names):
    """What a block prints. A block that shows an error has to raise it."""
    output, shows_error = io.StringIO(), "\n# RegardError: " in code
    with contextlib.redirect_stdout(output):
        try:
            exec(compile(code, str(page), "exec"), names)
        except rg.RegardError as error:
            assert shows_error, error
            print(f"RegardError: {error}")
        else:
            assert not shows_error, "no error was raised"
    return output.getvalue()


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks_run_in_their_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = GIVEN.get(page.name, lambda _: {})(tmp_path)
    for code in blocks(page):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="attend: mask_mod has no spans")  # as the guides say
            printed = run(code, page, names)
        if page.name in COMPLETE:
            assert len(SHOWN.findall(code)) == code.count("print(") + code.count("\n# RegardError: ")
            assert SAME(shown(code), printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE), printed


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_fits_beside_the_menus_of_the_site(page):
    """At 1,440 pixels a line of code has 120 characters (docs/stylesheets/regard.css)."""
    inside = re.findall(r"^ *```.*?\n(.*?)^ *```", page.read_text(), re.M | re.S)
    assert [line for block in inside for line in block.splitlines() if len(line) > 120] == []


#: Public names without an example of their own, and why.
WITHOUT_EXAMPLE = {
    "RankLost": "raised where another process of a group ends, which takes two processes: tests/test_ring.py",
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
    """The names whose docstrings have an example that tests/test_public.py runs."""
    found = doctest.DocTestFinder().find(importlib.import_module(module))
    run = [test for test in found if any(not example.options.get(doctest.SKIP) for example in test.examples)]
    return {test.name.removeprefix(f"{module}.") for test in run}


def test_every_public_name_has_an_example_that_runs():
    names = dict(public())
    without = {name for name, value in names.items() if value.__qualname__ not in with_examples(value.__module__)}
    assert len(names) > 150
    assert without <= set(WITHOUT_EXAMPLE) <= set(names), sorted(without)


VERDICTS = {"holds", "holds with a condition", "does not hold", "not seen at this size"}
#: Claims that a training decides.
TRAINED = {14, 15, 16, 21, 22, 23, 24, 25, 26, 28, 30, 31, 34, 47, 48, 49, 52, 54}


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
        assert re.search(r"\b(3|three|5|five|10) (seeds|draws)\b", measured), f"{number}: which seeds?"
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
