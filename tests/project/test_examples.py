"""Every script of examples/ and docs/claims/ runs as a reader would run it, and what it asserts holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted({*ROOT.glob("examples/*.py"), *ROOT.glob("docs/claims/*.py")} - {ROOT / "docs/claims/seeds.py"})
SEEDS = sorted(set(re.findall(r"`python docs/claims/seeds.py (\d+)` \|", (ROOT / "docs" / "claims.md").read_text())))
LONGEST = 600  # seconds on a machine that is busy with other things


@pytest.mark.example
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_runs(script, tmp_path):
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


@pytest.mark.parametrize("script", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.name)
def test_it_is_short_and_tells_what_it_is(script):
    lines = script.read_text().splitlines()
    assert len(lines) <= 80, f"{len(lines)} lines"
    assert "\n# " in "\n".join(lines[:3]), "the docstring starts with a title"
    assert any(line.startswith("# %%") for line in lines)
