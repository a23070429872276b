"""Starts Python processes without the seconds of importing torch: `python warm_server.py SOCKET OWNER`.

The server imports regard and packages that are slow to import, and calls nothing of them. Each request of
warm_client.py becomes a fork of it, with the standard streams, folder, environment and arguments of the client. So each
command has a process of its own, which nothing was computed in before. The server ends when the process OWNER has
ended, which may be killed.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from importlib import import_module

#: A package that is not installed is left to the command, which names it.
SLOW = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "lightning.pytorch",
    "lightning.pytorch.strategies",
    "matplotlib.pyplot",
    "sacrebleu",
    "typer.main",
    "rich.table",
    "uvicorn",
    "starlette.applications",
    "regard.api",
)

#: Packages that read the rank of their process when they are imported, and the variables that tell it.
RANKED, RANKS = ("lightning", "lightning_utilities"), ("RANK", "LOCAL_RANK", "SLURM_PROCID")


def receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """A request: eight bytes of its length with the three standard streams, then JSON."""
    header, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as stream:
        return json.loads(stream.read(int.from_bytes(header, "little"))), descriptors


def supervise(child: int, connection: socket.socket) -> None:
    """Tell the client the number and the status of its process; end the process if the client is killed."""
    connection.sendall(child.to_bytes(8, "little", signed=True))
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(OSError):
        connection.sendall(status.to_bytes(8, "little", signed=True))


def serve(path: str, owner: str) -> dict:
    """Wait for requests while the owner runs. Returns in a process of its own for each of them."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{path}.new")
    server.listen(64)
    os.rename(f"{path}.new", path)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        if not select.select([server], [], [], 10)[0]:
            if not os.path.exists(f"/proc/{owner}"):
                sys.exit()
            continue
        connection, _ = server.accept()
        if os.fork():
            connection.close()
            continue
        server.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        request, descriptors = receive(connection)
        child = os.fork()
        os.setpgid(child, child)  # here and there: neither goes on without it
        if child:
            supervise(child, connection)
            os._exit(0)
        connection.close()
        take(descriptors)
        return request


def take(descriptors: list[int]) -> None:
    """Make these the standard streams of this process, opened as Python opens them."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def run(request: dict) -> None:
    """Run a request in this process as `python` would: a file, `-m MODULE` or `-c CODE`."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if any(name in os.environ for name in RANKS):
        for name in [name for name in sys.modules if name.partition(".")[0] in RANKED]:
            del sys.modules[name]
    kind, *sys.argv = request["arguments"]
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.executable = request["python"]
    if kind == "-c":
        sys.path.insert(0, "")
        code, sys.argv[0] = sys.argv[0], "-c"
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")


def run_and_end(request: dict) -> None:
    """Run a request and end this process as Python does, but for freeing objects, for which their memory is copied."""
    status = 0
    try:
        run(request)
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        status = end.code or 0
    threading._shutdown()
    atexit._run_exitfuncs()
    with suppress(OSError):  # a closed pipe, of which Python complains when it ends
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status & 255)
    sys.exit(status)


def main() -> None:
    """Import packages, then serve."""
    for name in SLOW:
        with suppress(ModuleNotFoundError):
            import_module(name)
    del sys.path[0]  # the folder of this file
    # A fork that looks for garbage among these objects, as at its end, copies the memory of each: 1.7 s.
    gc.collect()
    gc.freeze()
    run_and_end(serve(*sys.argv[1:]))


if __name__ == "__main__":
    main()
