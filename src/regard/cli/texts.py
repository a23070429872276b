"""The texts that a command line names: given in full, in UTF-8 files, or on standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from regard.base.errors import RegardError
from regard.base.texts.files import looks_like_path

#: Ends the errors about a source.
REMEDY = "Give a text, a UTF-8 file, or - for standard input."


def read_texts(sources: Sequence[str]) -> list[str]:
    """The texts in their order; empty ones are refused."""
    if sources.count("-") > 1:
        raise RegardError("analyze: standard input can be read once. Give - once, and the other texts as files.")
    texts = [_read_text(source) for source in sources]
    if not all(text.strip() for text in texts):
        raise RegardError("analyze: the text is empty. Give at least one word, a file, or - for standard input.")
    return texts


def _read_text(source: str) -> str:
    if source == "-":
        return _decode(sys.stdin.buffer.read(), "standard input")
    if os.path.isfile(source):
        with open(source, "rb") as file:
            return _decode(file.read(), source)
    if os.path.isdir(source):
        raise RegardError(f"analyze: {source} is a folder. {REMEDY}")
    if looks_like_path(source):
        raise RegardError(f"analyze: there is no file {source}. {REMEDY}")
    return source


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RegardError(
            f"analyze: {name} is not UTF-8 text (byte {error.start} is 0x{content[error.start]:02x}). Convert it, for "
            "example with: iconv -f latin1 -t utf-8"
        ) from None
