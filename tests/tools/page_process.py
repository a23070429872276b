"""Runs the blocks of one page in their order, in a process of its own: `python page_process.py STEPS RESULTS`.

STEPS is a JSON list of [kind, text]. RESULTS gets, for each step that was run, what it printed, its error, and the
message of the error if it is a `RegardError`. The steps after an unexpected error are not run.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import signal
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

#: What a command that serves until Ctrl-C prints when it is ready.
READY = "http://"
LONGEST = 300  # seconds a command, on a machine that is busy with other things


def run_python(code: str, names: dict, title: str) -> dict:
    """Execute a block among the names of the blocks before it."""
    output = io.StringIO()
    linecache.cache[title] = (len(code), None, code.splitlines(keepends=True), title)  # for inspect.getsource
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(code, title, "exec"), names)
    except Exception as error:
        message = str(error) if type(error).__name__ == "RegardError" else None
        return {"output": output.getvalue(), "error": traceback.format_exc(), "message": message}
    return {"output": output.getvalue(), "error": None, "message": None}


def run_command(command: str) -> dict:
    """Run one command of a shell."""
    shell = ["bash", "-o", "pipefail", "-c", command]
    try:
        done = subprocess.run(shell, capture_output=True, text=True, timeout=LONGEST, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return {"output": "", "error": f"longer than {LONGEST} s", "message": None}
    return {"output": done.stdout, "error": done.stdout + done.stderr if done.returncode else None, "message": None}


def run_server(command: str) -> dict:
    """Run a command until it prints its address, then stop it as Ctrl-C does."""
    quoted = ["bash", "-c", f"exec {command}"]
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(quoted, start_new_session=True, **options)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
    signal.alarm(LONGEST)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if READY in line:
            os.killpg(process.pid, signal.SIGINT)
            break
    lines.append(process.stdout.read())
    status = process.wait()
    signal.alarm(0)
    output = "".join(lines)
    return {"output": output, "error": output if READY not in output or status not in (0, 130) else None}


def run_step(kind: str, text: str, names: dict, title: str) -> dict:
    """Run a block of Python, write a file, or run a command."""
    if kind == "python":
        return run_python(text, names, title)
    if kind == "command":
        return run_command(text)
    if kind == "server":
        return run_server(text)
    Path(kind.removeprefix("file:")).write_text(text)
    return {"output": "", "error": None}


def main() -> None:
    """Run the steps until one fails, and write what they gave."""
    steps, results = json.loads(Path(sys.argv[1]).read_text()), []
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="attend: mask_mod has no spans")  # as the guides say
    names: dict = {"__name__": "__main__"}
    for number, (kind, text) in enumerate(steps):
        results.append(run_step(kind, text, names, f"<block {number}>"))
        if results[-1]["error"] and results[-1].get("message") is None:
            break
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
