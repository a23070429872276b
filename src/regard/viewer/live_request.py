"""Requests of an open page to its live model: a text to read, and at most one of edits, generation and attribution.

| request | answer |
|---|---|
| {"text"} | the text as the model reads it |
| {"text", "edits": ["L5.H3: #9 -> #2", ...]} | the text as the model reads it without these weights; what changes |
| {"text", "generate": N} | the text as the model continues it by at most N tokens |
| {"text", "attribute": {"method": "weight-gradient", "target": null}} | which weights made the prediction of a token |

An edit is the short form of `rg.Where.parse`, with numbers of tokens in place of words. Every part is bounded, and a
field that the model does not know is refused, so no page shows the weights of another request than its own.

`TypedTexts` keeps the texts that a reader typed last.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from regard.attribution.attribute import METHODS as ATTRIBUTIONS
from regard.base.errors import RegardError, nearest
from regard.viewer.page import exact_bytes
from regard.viewer.sheet import Sheet

#: The most characters of a typed text, the most edits of one, and the most tokens by which a model continues it.
CHARACTERS, EDITS, STEPS = 2000, 64, 64
#: The methods of attribution that need nothing but the text, and the most characters of the token that one explains.
METHODS = tuple(name for name, method in ATTRIBUTIONS.items() if not method.required)
TARGET_CHARACTERS = 60
#: "L5.H3: #9 -> #2", "L5.H3", "L5", "*: * -> #2"; the length of a longest one.
EDIT = re.compile(r"(\*|L\d{1,4}(?:\.H\d{1,4})?)(?:: (\*|#\d{1,4}) -> (\*|#\d{1,4}))?")
EDIT_CHARACTERS = len("L1234.H1234: #1234 -> #1234")
#: The most bytes of a request: JSON escapes a character in at most 12 bytes.
BODY = 12 * CHARACTERS + EDITS * (EDIT_CHARACTERS + 4) + 200


@dataclass(frozen=True)
class LiveRequest:
    """A text, and the question about it: "" (none), "edits", "generate" or "attribute".

    `attribute` are the method and the token to explain; without a token, the model's own prediction.
    """

    text: str
    question: str = ""
    edits: tuple[str, ...] = ()
    generate: int = 0
    attribute: tuple[str, str | None] | None = None


def live_request(body: bytes, questions: Collection[str] = ()) -> LiveRequest:
    """The request of a body. Anything else is refused in words, and so are questions that the model cannot answer.

    >>> request = live_request(b'{"text": " a  b ", "edits": ["L5.H3: #1 -> #0"]}', ["edits"])
    >>> request.text, request.question, request.edits
    ('a b', 'edits', ('L5.H3: #1 -> #0',))
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise RegardError('The request is not JSON. It must be {"text": "..."}.') from None
    if not isinstance(request, dict) or not isinstance(request.get("text"), str):
        raise RegardError('The request must have the form {"text": "..."}.')
    others = sorted(set(request) - {"text"})
    if unknown := [name for name in others if name not in questions]:
        known = ", ".join(questions) or "no field"
        raise RegardError(f"The request has the field {unknown[0][:40]!r}; beside the text this model reads {known}.")
    if len(others) > 1:
        raise RegardError(f"The request has {' and '.join(others)}; ask one question at a time.")
    text = _text(request["text"])
    if not others:
        return LiveRequest(text)
    return LiveRequest(text, others[0], **{others[0]: READ[others[0]](request[others[0]])})


def _text(typed: str) -> str:
    """A typed text in one line, with at most `CHARACTERS` characters. What UTF-8 cannot hold becomes "?"."""
    text = " ".join(typed.replace("\0", " ").encode("utf-8", "replace").decode().split())
    if not text:
        raise RegardError("The text is empty. Type at least one word.")
    if len(text) > CHARACTERS:
        raise RegardError(f"The text has {len(text):,} characters; the page reads at most {CHARACTERS:,}.")
    return text


def _edits(given: Any) -> tuple[str, ...]:
    """The edits of a request, each once, if every one is a short form."""
    if not isinstance(given, list) or not given:
        raise RegardError('The edits must be a list, such as ["L5.H3: #9 -> #2"].')
    if len(given) > EDITS:
        raise RegardError(f"The request has {len(given)} edits; the page takes at most {EDITS}.")
    for edit in given:
        if not isinstance(edit, str) or not EDIT.fullmatch(edit):
            raise RegardError(
                f"An edit must have the form 'L5.H3: #9 -> #2' (head: query -> key), 'L5.H3' or '*: * -> #2', with "
                f"numbers of tokens; got {str(edit)[:60]!r}."
            )
    return tuple(dict.fromkeys(given))


def _steps(given: Any) -> int:
    """The number of tokens by which the model continues the text."""
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= STEPS:
        raise RegardError(f"A model continues a text by 1 to {STEPS} tokens; got {str(given)[:20]}.")
    return given


def _attribution(given: Any) -> tuple[str, str | None]:
    """The method and the token to explain; None stands for the model's own prediction."""
    if not isinstance(given, dict) or set(given) != {"method", "target"} or not isinstance(given["method"], str):
        raise RegardError(f'An attribution must have the form {{"method": "{METHODS[0]}", "target": null or a token}}.')
    if given["method"] not in METHODS:
        raise RegardError(f"There is no method {given['method'][:40]!r} here. {nearest(given['method'][:40], METHODS)}")
    target = given["target"]
    if target is not None and not (isinstance(target, str) and 0 < len(target) <= TARGET_CHARACTERS):
        raise RegardError(
            f"The target must be a token of 1 to {TARGET_CHARACTERS} characters; got {str(target)[:40]!r}."
        )
    return given["method"], target


#: Question -> the function that checks the value of its field; it gives the value of this field of a `LiveRequest`.
READ = {"edits": _edits, "generate": _steps, "attribute": _attribution}


#: The most typed texts that are kept, and the most bytes of their maps. The oldest are dropped first.
KEPT, KEPT_BYTES = 12, 128 << 20


class TypedTexts:
    """Typed texts get numbers from `first` on. A number is never used twice, so an open page never mixes two texts.

    A text may have several sheets: those of a translator are its alignment, its encoder and its decoder.
    """

    def __init__(self, first: int) -> None:
        self._first, self._next, self._lock = first, first, threading.Lock()
        self._numbers: dict[LiveRequest, list[int]] = {}  # the least recently typed text first
        self._sheets: dict[int, Sheet] = {}

    def find(self, request: LiveRequest) -> list[int]:
        """The numbers of a text that was typed before and is still kept; it then counts as typed last."""
        with self._lock:
            numbers = self._numbers.pop(request, [])
            if numbers:
                self._numbers[request] = numbers
            return numbers

    def add(self, request: LiveRequest, sheets: list[Sheet]) -> list[int]:
        """Keep the sheets of a text, drop the oldest texts beyond the limits, and return the numbers of the sheets."""
        with self._lock:
            numbers = list(range(self._next, self._next + len(sheets)))
            self._next += len(sheets)
            self._numbers[request] = numbers
            self._sheets |= dict(zip(numbers, sheets, strict=True))
            while len(self._numbers) > 1 and (len(self._numbers) > KEPT or self._bytes() > KEPT_BYTES):
                for number in self._numbers.pop(next(iter(self._numbers))):
                    del self._sheets[number]
            return numbers

    def get(self, number: int) -> Sheet | None:
        """The sheet of a number; None if there is none, or none any more."""
        return self._sheets.get(number)

    def titles(self) -> list[tuple[int, str]]:
        """The numbers and titles of all kept sheets."""
        with self._lock:
            return [(number, sheet.about["title"]) for number, sheet in self._sheets.items()]

    def dropped(self, number: int) -> bool:
        """Whether a text had this number and is not kept any more."""
        return self._first <= number < self._next and number not in self._sheets

    def _bytes(self) -> int:
        """The bytes of the maps of all kept texts."""
        return sum(exact_bytes(weights) for sheet in self._sheets.values() for weights in sheet.maps)
