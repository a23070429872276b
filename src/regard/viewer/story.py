"""A story: a sequence of views of a page, each a link with a sentence. The page plays it, and prints one view a sheet.

`tour` is a story made of the findings of the texts: every sentence is computed from the weights.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl

from regard.base.errors import RegardError, nearest
from regard.viewer.sheet import Sheet

#: The views of the page: the files of frontend/src/views, as `make page` wrote their names down.
VIEWS = tuple(json.loads(files("regard.viewer").joinpath("static", "views.json").read_text(encoding="utf-8")))
#: The most views of a story, and the most characters of a title and of a sentence.
STEPS, TITLE, SENTENCE = 50, 80, 1000
#: The most bytes of a file.
FILE = 1 << 20
EXAMPLE = '{"title": "Pronouns", "steps": [{"link": "#head?layer=2&head=1&query=10", "sentence": "..."}]}'


@dataclass(frozen=True)
class Step:
    """A view as the address of the page names it, and the sentence below it.

    >>> Step("#head?layer=2&head=1", "One head.").link
    '#head?layer=2&head=1'
    """

    link: str
    sentence: str


@dataclass(frozen=True)
class Story:
    """A title, and views with a sentence each.

    >>> story = Story("Pronouns", (Step("#head?layer=2&head=1", "It attends to the animal."),))
    >>> story.about["steps"]
    [{'link': '#head?layer=2&head=1', 'sentence': 'It attends to the animal.'}]
    """

    title: str
    steps: tuple[Step, ...]

    @property
    def about(self) -> dict[str, Any]:
        """The story as JSON, for the page and for story.json."""
        return {"title": self.title, "steps": [vars(step) for step in self.steps]}

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Story:
        """The story of a JSON file, as the page saves it."""
        try:
            with open(path, "rb") as file:
                content = file.read(FILE + 1)
            data = json.loads(content.decode("utf-8-sig")) if len(content) <= FILE else None
        except OSError as error:
            raise RegardError(f"story: {path} cannot be read: {error.strerror or error}.") from None
        except (ValueError, RecursionError):
            raise RegardError(f"story: {path} is not JSON. Example: {EXAMPLE}") from None
        if len(content) > FILE:
            raise RegardError(f"story: {path} is larger than {FILE:,} bytes, so it is not a story.")
        return Story.of(data, str(path))

    @staticmethod
    def of(data: Any, name: str = "the story") -> Story:
        """The story of parsed JSON: a list of {"link", "sentence"}, or {"title", "steps": [...]}."""
        data = {"steps": data} if isinstance(data, list) else data
        steps = data.get("steps") if isinstance(data, dict) else None
        if not isinstance(steps, list) or not 0 < len(steps) <= STEPS:
            raise RegardError(f"story: {name} needs 1 to {STEPS} steps. Example: {EXAMPLE}")
        title = data.get("title", "Take the tour")
        if not isinstance(title, str) or not 0 < len(title.strip()) <= TITLE:
            raise RegardError(
                f"story: the title of {name} must be a text of 1 to {TITLE} characters, got {title!r:.60}."
            )
        return Story(title.strip(), tuple(_step(step, n, name) for n, step in enumerate(steps, 1)))

    def check(self, sheets: Sequence[Sheet]) -> Story:
        """The story itself, if these texts have every text, layer, head, query and key of its links."""
        return self.check_sizes([[weights.shape[1:] for weights in sheet.maps] for sheet in sheets])

    def check_sizes(self, texts: Sequence[Sequence[tuple[int, int, int]]]) -> Story:
        """The same as `check`, by the (heads, queries, keys) of each layer of each text."""
        for n, step in enumerate(self.steps, 1):
            _check_places(step.link, n, texts)
        return self


def story_of(story: Story | str | os.PathLike[str] | None, sheets: Sequence[Sheet]) -> Story | None:
    """A story for these texts: itself, or that of a file; None for None."""
    if story is None:
        return None
    if not isinstance(story, Story | str | os.PathLike):
        raise RegardError(f"story: give the path of a JSON file or a Story, got {type(story).__name__}.")
    return (story if isinstance(story, Story) else Story.read(story)).check(sheets)


def _step(step: Any, n: int, name: str) -> Step:
    """A step of parsed JSON. `n` is its number, from 1, and `name` that of the story, for errors."""
    if not isinstance(step, dict) or not all(isinstance(step.get(part), str) for part in ("link", "sentence")):
        raise RegardError(f'story: step {n} of {name} must be {{"link": "#...", "sentence": "..."}}, both texts.')
    if len(step["sentence"]) > SENTENCE:
        raise RegardError(f"story: the sentence of step {n} of {name} has more than {SENTENCE:,} characters.")
    link = step["link"][step["link"].find("#") :]  # a whole address may be pasted
    found = re.fullmatch(r"#([a-z]+)(\?[^#\s]*)?", link)
    if found is None or len(link) > SENTENCE:
        raise RegardError(f"story: the link of step {n} of {name} is {step['link']!r:.80}. Copy it from the address.")
    if found[1] not in (*VIEWS, "map", "pins", "text"):  # views of earlier pages, whose links the page redirects
        raise RegardError(f"story: step {n} of {name} has the view {found[1]!r}. {nearest(found[1], VIEWS)}")
    return Step(link, step["sentence"])


def _check_places(link: str, n: int, texts: Sequence[Sequence[tuple[int, int, int]]]) -> None:
    """Raise an error if a link names a text, layer, head, query or key that is not there.

    `texts` has (heads, queries, keys) of each layer of each text, and `n` is the number of the step.
    """
    places = dict(parse_qsl(link.partition("?")[2]))

    def within(part: str, size: int) -> int:
        """The number that the link gives for a part, 0 without one; it must be below `size`. The key -1 is none."""
        value = places.get(part, "0")
        if part == "key" and value == "-1":
            return 0
        if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value) < size):
            raise RegardError(f"story: step {n} has {part}={value[:20]}; there are {size}, numbered from 0.")
        return int(value)

    layers = texts[within("text", len(texts))]
    within("other", len(texts)) if places.get("other") != "-1" else None
    for part, size in zip(("head", "query", "key"), layers[within("layer", len(layers))], strict=True):
        within(part, size)


TOUR = "Take the tour"
#: The most texts whose leading link is told, and the most findings.
LEADS, CARDS = 2, 3


def tour(sheets: Sequence[Sheet]) -> Story | None:
    """At most six views: what leads in the first texts, findings about heads, and the alignment of a translation.

    None if the texts have fewer than two such views.

    >>> import regard as rg
    >>> result = rg.TextReader.load("minilm").read("The animal didn't cross the street because it was too tired.")
    >>> story = tour([rg.viewer.Sheet.of(result.reading)])
    >>> story.steps[0].link, 2 <= len(story.steps) <= 6
    ('#head?text=0&layer=2&head=1&query=10&key=13', True)
    """
    steps = [*_leads(sheets), *_cards(sheets), *_alignment(sheets)]
    return Story(TOUR, tuple(steps)) if len(steps) > 1 else None


def _leads(sheets: Sequence[Sheet]) -> Iterator[Step]:
    """What a word of each of the first texts attends to most. Cross-attention is left to `_alignment`."""
    own = [n for n, sheet in enumerate(sheets) if sheet.about["queries"] is None and sheet.about.get("lead")]
    for count, number in enumerate(own[:LEADS]):
        lead = sheets[number].about["lead"]
        more = "Point at another word to see what it attends to." if count == 0 else "This is another sentence."
        yield Step(_link("head", number, _place(lead)), f"{_written(lead['sentence'])} {more}")


def _cards(sheets: Sequence[Sheet]) -> Iterator[Step]:
    """At most `CARDS` findings of different kinds and places, those of texts with roles first."""
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
    """The place of a link, as names of the state of the page."""
    return {name: lead[name] for name in ("layer", "head", "query", "key")}


def _written(parts: Sequence[Sequence[str]]) -> str:
    """A sentence without the kinds of its parts; tokens are in quotes."""
    return "".join(f'"{text}"' if kind == "token" else text for text, kind in parts)


def _link(view: str, text: int, state: Mapping[str, object]) -> str:
    """The address of a view: its name, the number of the text, and the state."""
    return f"#{view}?text={text}" + "".join(f"&{name}={value}" for name, value in state.items())
