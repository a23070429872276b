"""The entry point of `regard`: small, so that a missing dependency is a sentence and not a traceback."""

from __future__ import annotations

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
    app(args=None if arguments is None else list(arguments), prog_name="regard")


if __name__ == "__main__":
    main()
