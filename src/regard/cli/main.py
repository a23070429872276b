"""The entry point of `regard`: small, so that a missing dependency is a sentence and not a traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit status."""
    try:
        import rich  # noqa: F401 - tables need it; better missed here than in the middle of a command

        from regard.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich"):
            raise
        print("The regard command needs two more packages: pip install 'regard[cli]'", file=sys.stderr)
        raise SystemExit(1) from None
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without these characters shows ? in their place
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        app(args=None if arguments is None else list(arguments), prog_name="regard")
    except KeyboardInterrupt:  # one more Ctrl-C, while the first is seen to
        raise SystemExit(130) from None
    finally:
        if arguments is None and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would show a traceback of its own end


if __name__ == "__main__":
    main()
