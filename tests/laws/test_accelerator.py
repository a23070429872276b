"""What holds on the CPU holds on any device: each module runs on a pretend accelerator, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["budget", *(pytest.param(name, marks=pytest.mark.example) for name in ("laws", "models"))]
)
def test_on_a_pretend_accelerator(module):
    """Registering a device changes a whole process: autograd starts a thread for it, torch.accelerator finds it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, TOOLS / f"accelerator_{module}.py"], cwd=TOOLS.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
