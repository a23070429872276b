"""Examples in docstrings stand as they are in the sources; here they become blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

#: From the first prompt to the line before a blank one, or the end.
SESSION = re.compile(r"^( *)>>> .*?(?=\n\s*\n|\Z)", re.M | re.S)


class Doctests(griffe.Extension):
    """Put sessions between fences; Markdown would read the prompts as quotations."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = SESSION.sub(_fenced, obj.docstring.value)


def _fenced(found: re.Match[str]) -> str:
    indent = found[1]
    return f"{indent}```pycon\n{found[0]}\n{indent}```"
