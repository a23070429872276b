"""Commands whose processes start without the seconds of importing torch."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent


def environment(commands: Path) -> dict[str, str]:
    """That of a user's shell: `commands` on the path, this source, one thread, no browser and no screen."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": path, "PYTHONPATH": str(HERE.parents[1] / "src"), "PYTHON_EXEC": str(commands / "python")}
    return rest | own | {"MPLBACKEND": "Agg", "BROWSER": "true", "OMP_NUM_THREADS": "1"}


def warm_commands(folder: Path) -> Path:
    """A folder with `python`, `regard` and `torchrun`, each of which starts a fork of warm_server.py.

    All processes of a run of the tests have one server: the first that asks starts it, and `end_server` ends it. Where
    the system has no `pidfd_open`, the commands are the real ones.
    """
    bin_folder, started = Path(sys.executable).parent, folder / "server"
    if not hasattr(os, "pidfd_open"):
        return bin_folder
    with (folder / "lock").open("w") as lock:
        import fcntl  # POSIX only

        fcntl.flock(lock, fcntl.LOCK_EX)
        if not started.exists():
            started.write_text(str(start_server(folder, bin_folder)))
    return folder


def start_server(folder: Path, bin_folder: Path) -> int:
    """Write the commands into the folder and start the server, which outlives this process. Returns its number."""
    address = folder / "socket"
    client = f"exec {sys.executable} -SE {HERE / 'warm_client.py'} {address} {folder / 'python'}"
    scripts = {command: shutil.which(command, path=bin_folder) for command in ("regard", "torchrun")}
    for command, script in {"python": "", **scripts}.items():
        if script is not None:
            (folder / command).write_text(f'#!/bin/sh\n{client} {script} "$@"\n')
            (folder / command).chmod(0o755)
    arguments = [sys.executable, str(HERE / "warm_server.py"), str(address), (folder / "owner").read_text()]
    server = os.posix_spawn(sys.executable, arguments, environment(folder), setsid=True)
    while not address.exists():
        assert os.waitpid(server, os.WNOHANG) == (0, 0), "warm_server.py has ended"
        time.sleep(0.02)
    return server


def end_server(folder: Path) -> None:
    """End the server of this folder, if a test has started one."""
    with suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int((folder / "server").read_text()), signal.SIGKILL)
