"""`tour`: a story about the texts of a page, made of their findings: every sentence is computed from the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from regard.viewer.sheet import Sheet
from regard.viewer.story import Step, Story

TITLE = "Take the tour"
#: The most texts whose leading link is told, and the most findings.
LEADS, CARDS = 2, 3


def tour(sheets: Sequence[Sheet]) -> Story | None:
    """At most six views: what leads in the first texts, findings about heads, and the alignment of a translation.

    None if the texts have fewer than two such views.

    >>> import regard as rg
    >>> result = rg.TextReader.load("minilm").read("The animal didn't cross the street because it was too tired.")
    >>> story = tour([rg.viewer.Sheet.of(result.reading)])
    >>> story.steps[0].link, 2 <= len(story.steps) <= 6
    ('#text?text=0&layer=2&head=1&query=10&key=13', True)
    """
    steps = [*_leads(sheets), *_cards(sheets), *_alignment(sheets)]
    return Story(TITLE, tuple(steps)) if len(steps) > 1 else None


def _leads(sheets: Sequence[Sheet]) -> Iterator[Step]:
    """What a word of each text attends to most."""
    own = [n for n, sheet in enumerate(sheets) if sheet.about["queries"] is None and sheet.about.get("lead")]
    for count, number in enumerate(own[:LEADS]):
        lead = sheets[number].about["lead"]
        more = "Point at another word to see what it attends to." if count == 0 else "This is another sentence."
        yield Step(_link("text", number, _place(lead)), f"{_written(lead['sentence'])} {more}")


def _cards(sheets: Sequence[Sheet]) -> Iterator[Step]:
    """Findings of different kinds, those of texts with roles first."""
    by_roles = sorted(range(len(sheets)), key=lambda n: not sheets[n].about["has_roles"])
    told: set[str] = {"link"}  # another link of a word that a step before may not have told
    places: set[tuple[object, ...]] = set()
    for number in by_roles:
        for card in sheets[number].about.get("cards", ()):
            place = _shown(number, card["state"])
            if card["kind"] not in told and len(told) <= CARDS and place not in places:
                told.add(card["kind"])
                places.add(place)
                state = dict(card["state"])
                note = f" {card['note']}" if card["note"][:1].isupper() else ""  # others are formulas
                sentence = f"{card['title']}: {_written(card['sentence'])}{note}"
                yield Step(_link(state.pop("view"), number, state), sentence)


def _alignment(sheets: Sequence[Sheet]) -> Iterator[Step]:
    """What a word of the first translation attends to most."""
    for number, sheet in enumerate(sheets):
        lead = sheet.about.get("lead")
        if sheet.about["aligned"] and lead:
            sentence = f"A translator aligns two sentences by attention. {_written(lead['sentence'])}"
            yield Step(_link("alignment", number, _place(lead) | {"panels": "heads", "scale": "linear"}), sentence)
            return


def _shown(text: int, state: Mapping[str, object]) -> tuple[object, ...]:
    """What a step shows, so that no two steps show the same."""
    return text, *(state.get(name) for name in ("view", "layer", "head", "heads", "query"))


def _place(lead: Mapping[str, Any]) -> dict[str, int]:
    return {name: lead[name] for name in ("layer", "head", "query", "key")}


def _written(parts: Sequence[Sequence[str]]) -> str:
    """A sentence without the kinds of its parts; tokens are in quotes."""
    return "".join(f'"{text}"' if kind == "token" else text for text, kind in parts)


def _link(view: str, text: int, state: Mapping[str, object]) -> str:
    return f"#{view}?text={text}" + "".join(f"&{name}={value}" for name, value in state.items())
