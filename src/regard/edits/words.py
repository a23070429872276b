"""Words and slices of a selection as numbers of tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence

from regard.base.errors import RegardError, first_few
from regard.base.spans import INFINITY
from regard.stats.text_reading import plain

#: A part of a selection: a number, a name or a word, a slice, or a list of them. None: all.
Choice = int | str | slice | Sequence[int | str | slice] | None
#: The occurrence of a word: it#2 is the second "it".
NUMBERED = re.compile(r"(.+)#(\d+)", re.DOTALL)
#: The most tokens of one word.
PIECES = 12


def listed(value: Choice) -> Sequence[int | str | slice]:
    """The values of a part of a selection; none for None."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int | str | slice) else value


def numbers(choice: Choice, tokens: Sequence[str] | None) -> Choice:
    """Numbers of tokens in place of words, and in place of numbers that count from the end."""
    if choice is None or tokens is None:
        return choice
    found = [number for one in listed(choice) for number in _numbers(one, tokens)]
    return found[0] if len(found) == 1 else found


def _numbers(one: int | str | slice, tokens: Sequence[str]) -> Sequence[int | slice]:
    if isinstance(one, str):
        return occurrence(one, tokens)
    if isinstance(one, int):
        return [one + len(tokens) if -len(tokens) <= one < 0 else one]
    start, stop = (n if n is None or n >= 0 else max(n + len(tokens), 0) for n in (one.start, one.stop))
    return [slice(start, stop, one.step)]


def occurrence(word: str, tokens: Sequence[str]) -> range:
    """The numbers of the tokens of a word that is there once, or of the one that is meant (it#2).

    >>> occurrence("it", ["and", "it", "is"]), occurrence("it#2", ["it", "was", "it"])
    (range(1, 2), range(2, 3))
    """
    found, numbered = places_of(word, tokens), NUMBERED.fullmatch(word)
    if not found and numbered is not None:
        same = places_of(numbered[1], tokens)
        if 1 <= int(numbered[2]) <= len(same):
            return same[int(numbered[2]) - 1]
        raise RegardError(f"edit: {numbered[1]!r} is {_times(len(same))} in the text, so there is no {word!r}.")
    if not found:
        raise RegardError(f"edit: the text has no word {word!r}. Its tokens are: {first_few(tokens, 40)}.")
    if len(found) > 1:
        which = " or ".join(f"{word}#{n + 1}" for n in range(min(len(found), 3)))
        at = ", ".join(str(place.start) for place in found)
        raise RegardError(f"edit: {word!r} is {_times(len(found))} in the text (tokens {at}). Write {which}.")
    return found[0]


def places_of(word: str, tokens: Sequence[str]) -> list[range]:
    """Where a word is in a text: the numbers of its tokens, for each occurrence.

    >>> places_of("animal", ["the", "ani", "##mal", "Animal"])
    [range(1, 3), range(3, 4)]
    """
    pieces, inside = [plain(token) for token in tokens], [token.startswith("##") for token in [*tokens, ""]]
    target = plain(word)
    places = [
        range(start, stop)
        for start in range(len(pieces))
        for stop in range(start + 1, min(start + PIECES, len(pieces)) + 1)
        if "".join(pieces[start:stop]) == target and not inside[start] and not inside[stop] and pieces[start]
    ]
    exact = [range(n, n + 1) for n, token in enumerate(tokens) if token == word]
    return places or exact


def range_of(one: int | slice) -> tuple[int, int, int]:
    """A number or a slice as (start, stop, step); a slice without an end has the stop `INFINITY`."""
    start, stop, step = (one, one + 1, 1) if isinstance(one, int) else (one.start or 0, one.stop, one.step or 1)
    stop = INFINITY if stop is None else stop
    if start < 0 or stop < 0:
        raise RegardError(
            f"edit: {one!r} counts from the end, which moves while a model generates. Count from 0, or give tokens: "
            "rg.edit(model, edit, tokens=[...])."
        )
    if max(start, stop, step) > INFINITY:
        raise RegardError(f"edit: {one!r} is larger than any number of a token, a head or a layer.")
    if step < 1 or start >= stop:
        raise RegardError(
            f"edit: {one!r} selects nothing. A slice has a stop above its start, and a step of at least 1."
        )
    return start, stop, step


def _times(count: int) -> str:
    return "not" if count == 0 else "once" if count == 1 else f"{count} times"
