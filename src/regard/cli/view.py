"""`regard view` serves the page of a saved text, a run or a comparison."""

from __future__ import annotations

import secrets
import webbrowser
from functools import partial
from pathlib import Path

from rich.console import Console

from regard.viewer.runs import open_folder


def run(folder: Path, host: str, port: int, token: str, open_: bool) -> None:
    """Load the folder, print the address of the page, and serve it until Ctrl-C.

    If other machines can ask, and no token is given, one is made; it is a part of the address.
    """
    from regard.viewer.server import LOOPBACK, listen, serve

    errors = Console(stderr=True)
    if host not in LOOPBACK:
        token = token or secrets.token_urlsafe(16)
    with listen(host, port, token) as listening:
        with errors.status(f"Opening {folder}"):
            sheets = open_folder(folder)
        serve(sheets, listening, host, token, partial(_tell, errors, open_))


def _tell(errors: Console, open_: bool, address: str) -> None:
    errors.print(f"The page is at {address}  (Ctrl-C ends it)", markup=False, highlight=False, soft_wrap=True)
    if open_:
        webbrowser.open(address)
