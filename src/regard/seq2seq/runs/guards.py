"""What keeps work from being lost: one process a folder, and signals that end it as Ctrl-C does."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from regard.errors import RegardError
from regard.whole_files import remove_drafts

LOCK = ".lock"
#: Asked to end by Ctrl-C, by `kill` or a scheduler, or because the terminal is gone.
POLITE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def alone(folder: Path, operation: str) -> Iterator[None]:
    """Refuse to work in a folder that another process is working in; the system forgets this with the process.

    Drafts that a killed process left are removed. A folder that was made for this, and in which nothing was written,
    is removed again.
    """
    if folder.exists() and not folder.is_dir():
        raise RegardError(f"{operation}: {folder} is a file. Give --out a folder.")
    made = not folder.exists()
    with _opened(folder / LOCK, operation) as lock:
        _lock(lock, folder, operation)
        remove_drafts(folder)
        try:
            yield
        finally:
            if made and [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                folder.rmdir()


def _opened(path: Path, operation: str) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w")
    except OSError as error:
        raise RegardError(f"{operation}: {path.parent} cannot be written to: {error.strerror or error}.") from None


def _lock(file: IO[str], folder: Path, operation: str) -> None:
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RegardError(
            f"{operation}: another process is working on {folder}. Wait for it, or give another --out."
        ) from None
    except OSError:  # a file system without locks: better to work unguarded than not at all
        pass


@contextlib.contextmanager
def polite_signals(handler: Callable[[int, Any], Any]) -> Iterator[list[int]]:
    """Call `handler(number, frame)` on each of `POLITE`; those that are ignored, as under nohup, stay so.

    Gives the signals that are handled: none in a thread other than the main one, which Python sends none to.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    held = {number: signal.getsignal(number) for number in POLITE}
    held = {number: before for number, before in held.items() if before is not signal.SIG_IGN}
    try:
        for number in held:
            signal.signal(number, handler)
        yield list(held)
    finally:
        for number, before in held.items():
            signal.signal(number, before)
