"""Runs commands of `regard` as if packages were not installed: `python hiding_process.py CASES RESULTS`.

CASES is a JSON list of [arguments, hidden modules]. Each case is a fork of this process, which has imported what is
slow to import, and nothing of regard.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

LONGEST = 200  # seconds a case, on a machine that is busy with other things
SLOW = ("torch", "transformers", "lightning.pytorch", "matplotlib.pyplot", "sacrebleu")


def hide(module: str) -> None:
    """Python then finds no such module, and what was imported from it stays with others who have it."""
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        del sys.modules[name]
    sys.modules[module] = None


def run(arguments: list[str], hidden: list[str], log: Path) -> None:
    """Run one command in this process, with its output in a file."""
    signal.alarm(LONGEST)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if "uvicorn" not in hidden:
        import uvicorn

        uvicorn.Server.run = lambda *_, **__: None  # a page that was opened need not be served
    for module in hidden:
        hide(module)
    from regard.cli.main import main

    main(arguments)


def status_of(arguments: list[str], hidden: list[str], log: Path) -> int:
    """The exit status of a command in a process of its own."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        run(arguments, hidden, log)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Run all cases, and write the status and the output of each."""
    warnings.simplefilter("ignore")
    cases, results, log = json.loads(Path(sys.argv[1]).read_text()), [], Path("hidden.log").absolute()
    for name in SLOW:
        module = name.partition(".")[0]
        if find_spec(module) and not all(module in hidden for _, hidden in cases):
            import_module(name)
    for arguments, hidden in cases:
        status = status_of(arguments, hidden, log)
        results.append({"status": status, "output": log.read_text(errors="replace")})
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
