"""Turns the examples of docstrings into code blocks."""

from __future__ import annotations

import re
from typing import Any

import griffe

#: From the first prompt to the line before a blank one, or the end.
SESSION = re.compile(r"^( *)>>> .*?(?=\n\s*\n|\Z)", re.M | re.S)


class Doctests(griffe.Extension):
    """Put each session between fences, because Markdown reads its prompts as quotations."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = SESSION.sub(_fenced, obj.docstring.value)


def _fenced(found: re.Match[str]) -> str:
    indent = found[1]
    return f"{indent}```pycon\n{found[0]}\n{indent}```"
