"""`regard view` serves the page of a saved text, a run, a comparison, or of a model that reads what you type."""

from __future__ import annotations

import secrets
import webbrowser
from functools import partial
from pathlib import Path

from rich.console import Console

from regard.base.errors import MissingPackage, RegardError
from regard.cli.demo import SENTENCES
from regard.cli.lab import lab
from regard.cli.outputs import shown_steps
from regard.viewer import Sheet
from regard.viewer.live_model import LiveModel
from regard.viewer.saved import STORY
from regard.viewer.story import story_of


def run(
    folder: Path | None, model: str | None, story: Path | None, host: str, port: int, token: str, open_: bool
) -> None:
    """Load the texts and the model, print the address of the page, and serve it until Ctrl-C.

    If other machines can ask, and no token is given, one is made; it is a part of the address.
    """
    from regard.viewer.server import LOOPBACK, listen, serve

    errors = Console(stderr=True)
    if host not in LOOPBACK:
        token = token or secrets.token_urlsafe(16)
    with listen(host, port, token) as listening:
        with shown_steps(errors, f"Opening {folder or model}"):
            sheets, live = opened(folder, model)
            told = story_of(story or _kept_story(folder), sheets)
        try:
            serve(sheets, listening, host, token, partial(_tell, errors, open_), model=live, story=told)
        except KeyboardInterrupt:
            errors.print("The server ended.")
            raise


def opened(folder: Path | None, model: str | None) -> tuple[list[Sheet], LiveModel | None]:
    """The texts of a folder or of a packaged translator, and the model that reads typed texts.

    The model is that of `model`, or of the folder if it is a run of a translator. Without texts the page begins with
    one that the model reads.
    """
    pages = lab("pages")
    if folder is None and model is None:
        raise RegardError(
            "view: give a folder that `regard analyze --save`, `train` or `compare` wrote, a translator of the package "
            f"({', '.join(pages.pretrained_runs())}), or a model that reads what you type, such as --model minilm."
        )
    place = None if folder is None else pages.folder_of(folder)
    live = pages.live_model(model) if model is not None else None
    if place is not None and live is None and pages.is_run(place):
        live = pages.live_model(str(place))
    sheets = _texts(place, live) if place is not None else []
    return (sheets or _first_texts(live)), live


def _texts(folder: Path, live: LiveModel | None) -> list[Sheet]:
    """The texts of a folder. Without the packages that read a corpus, a translator begins with one sentence."""
    try:
        return lab("pages").open_folder(folder)
    except MissingPackage:
        if live is None or live.kind != "translation":
            raise
        return []


def _kept_story(folder: Path | None) -> Path | None:
    """The story that was saved with the texts of a folder."""
    return folder / STORY if folder is not None and (folder / STORY).exists() else None


def _first_texts(live: LiveModel | None) -> list[Sheet]:
    """The sheets of an example that the model reads, for a page without texts; none without a model."""
    if live is None:
        return []
    return live.read(lab("pages").TRANSLATED if live.kind == "translation" else SENTENCES[0], lambda: None)


def _tell(errors: Console, open_: bool, address: str) -> None:
    """Print the address of the page, and open it with --open."""
    errors.print(f"The page is at {address}  (Ctrl-C ends it)", markup=False, highlight=False, soft_wrap=True)
    if open_:
        webbrowser.open(address)
