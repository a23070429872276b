"""`main` runs the command line. It imports little, so that a missing package is a message and not a traceback."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from regard.base.errors import MissingPackage
from regard.cli.extras import COMMANDS, extra_of, read_options
from regard.version import __version__

#: Exit status after Ctrl-C.
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and exit with its status."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # it was closed: nothing can be read  # noqa: SIM115
    try:
        _run_to_the_end(arguments)
    except KeyboardInterrupt:  # while commands are imported, or at exit
        raise SystemExit(INTERRUPTED) from None
    finally:
        if arguments is None and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C while Python exits would print a traceback


def _run_to_the_end(arguments: Sequence[str] | None) -> None:
    """Run the command line, and write all of its output; one line says that it cannot be written, as on a full disk."""
    try:
        try:
            _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left cannot be written, either
        if error.errno != errno.EPIPE:  # of a pipe that ended nobody wants more
            print(f"regard: the output cannot be written: {error.strerror}.", file=sys.stderr)
        raise SystemExit(1) from None


def _stop(number: int, frame: Any) -> None:
    """First Ctrl-C: the running command saves its state and ends."""
    signal.signal(signal.SIGINT, _leave)
    raise KeyboardInterrupt


def _leave(number: int, frame: Any) -> None:
    """Second Ctrl-C: exit at once, without output."""
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # a progress bar may have hidden the cursor
    os._exit(INTERRUPTED)


def _run(arguments: Sequence[str] | None) -> None:
    """Run the command line.

    Where typer or rich is not installed, it prints the version, the list of commands, or an error with the extra that
    the command needs. `read_options` then reads the options, because their values decide about the extra.
    """
    try:
        import rich  # noqa: F401 - tables need it; it should fail here, not inside a command

        from regard.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich"):
            raise
        given = sys.argv[1:] if arguments is None else list(arguments)
        if given[:1] == ["--version"]:
            print(f"regard {__version__}")
            return
        if given[:1] in ([], ["--help"]):
            print("Usage: regard COMMAND\n\nEach command needs packages, which one extra installs:\n")
            print("\n".join(f"  {name:10} pip install 'regard[{extra}]'" for name, extra in COMMANDS.items()))
            return
        command = given[0]
        print(
            MissingPackage(command, error.name or "", extra_of(command, read_options(given))),
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without a character prints ? instead
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app(args=None if arguments is None else list(arguments), prog_name="regard")


if __name__ == "__main__":
    main()
