"""Commands whose processes start without the seconds of importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent


def environment(commands: Path) -> dict[str, str]:
    """That of a user's shell: `commands` on the path, this source, one thread, no browser and no screen."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": path, "PYTHONPATH": str(HERE.parents[1] / "src"), "PYTHON_EXEC": str(commands / "python")}
    return rest | own | {"MPLBACKEND": "Agg", "BROWSER": "true", "OMP_NUM_THREADS": "1"}


@contextmanager
def warm_commands() -> Iterator[Path]:
    """A folder with `python`, `regard` and `torchrun`, each of which starts a fork of warm_server.py.

    Where the system has no `pidfd_open`, they are the real ones.
    """
    bin_folder = Path(sys.executable).parent
    if not hasattr(os, "pidfd_open"):
        yield bin_folder
        return
    with tempfile.TemporaryDirectory(prefix="warm") as name:
        folder, address = Path(name), Path(name) / "socket"
        client = f"exec {sys.executable} -SE {HERE / 'warm_client.py'} {address} {folder / 'python'}"
        scripts = {command: shutil.which(command, path=bin_folder) for command in ("regard", "torchrun")}
        for command, script in {"python": "", **scripts}.items():
            if script is not None:
                (folder / command).write_text(f'#!/bin/sh\n{client} {script} "$@"\n')
                (folder / command).chmod(0o755)
        server = subprocess.Popen([sys.executable, HERE / "warm_server.py", address], env=environment(folder))
        try:
            while not address.exists():
                assert server.poll() is None, "warm_server.py has ended"
                time.sleep(0.02)
            yield folder
        finally:
            server.kill()
            server.wait()
