"""`make quick`: which tests it chooses for changed files, and that it stops in time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import changed

ROOT = Path(__file__).parents[2]


def test_a_changed_test_comes_first_then_those_that_name_the_module_most_often():
    mask, own = ROOT / "src/regard/pieces/mask.py", ROOT / "tests/pieces/test_projected_kv.py"
    assert own.exists()
    chosen = changed.tests_of([own, mask])
    assert chosen[:2] == [str(own), "tests/front/test_public.py::test_examples_in_docstrings_run[regard.pieces.mask]"]
    counts = changed.mentions(mask)
    named = [counts[Path(test)] for test in chosen[2:]]
    assert named == sorted(named, reverse=True) and str(ROOT / "tests/pieces/test_masks.py") in chosen


def test_private_names_choose_no_test(tmp_path):
    module = tmp_path / "module.py"
    module.write_text("class Public: ...\ndef public(): ...\ndef _private(): ...\nVALUE = 1\n")
    assert changed.public_names(module) == ["Public", "public"]


def test_no_test_begins_after_the_deadline(tmp_path):
    (tmp_path / "test_slow.py").write_text(
        "import time\nimport pytest\n\n@pytest.mark.parametrize('n', range(5))\ndef test(n):\n    time.sleep(0.3)\n"
    )
    code = "import sys, pytest, changed; sys.exit(pytest.main(['-q', '.'], plugins=[changed.Deadline(0.1)]))"
    command = [sys.executable, "-c", code]
    search = {"PYTHONPATH": str(ROOT / "scripts"), "PATH": ""}
    run = subprocess.run(command, cwd=tmp_path, env=search, capture_output=True, text=True)
    assert run.returncode == 2 and "1 passed" in run.stdout
    assert "4 of 5 tests were not run" in run.stdout
