"""`alone`: one process for each folder. `stop_signals`: SIGTERM and SIGHUP stop work as Ctrl-C does."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from regard.base.errors import RegardError
from regard.base.whole_files import remove_drafts

LOCK = ".lock"
#: Signals of Ctrl-C, of `kill` or a scheduler, and of a closed terminal.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def alone(folder: Path, operation: str) -> Iterator[None]:
    """Lock a folder; raises an error if another process has locked it. The system unlocks it when the process ends.

    Drafts of killed processes are removed. If the folder was made here and is still empty afterwards, it is removed.
    """
    if folder.exists() and not folder.is_dir():
        raise RegardError(f"{operation}: {folder} is a file. Give --out a folder.")
    is_new = not folder.exists()
    with _opened(folder / LOCK, operation) as lock:
        _lock(lock, folder, operation)
        remove_drafts(folder)
        try:
            yield
        finally:
            if is_new and [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                folder.rmdir()


def _opened(path: Path, operation: str) -> IO[str]:
    """The lock file, open for writing; its folder is made if it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w")
    except OSError as error:
        raise RegardError(f"{operation}: {path.parent} cannot be written to: {error.strerror or error}.") from None


def _lock(file: IO[str], folder: Path, operation: str) -> None:
    """Lock an open file, without waiting."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RegardError(
            f"{operation}: another process is working on {folder}. Wait for it, or give another --out."
        ) from None
    except OSError:  # a file system without locks
        pass


@contextlib.contextmanager
def stop_signals(handler: Callable[[int, Any], Any]) -> Iterator[list[int]]:
    """Inside, `handler(number, frame)` handles the signals of `STOP_SIGNALS`, except ignored signals, as under nohup.

    Yields the handled signals. There are none outside the main thread, because Python sends no signals to others.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    former = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    former = {number: before for number, before in former.items() if before is not signal.SIG_IGN}
    try:
        for number in former:
            signal.signal(number, handler)
        yield list(former)
    finally:
        for number, before in former.items():
            signal.signal(number, before)
