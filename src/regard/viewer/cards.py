"""`cards_of`: a few findings about the heads of a text, each with a sentence, a small picture and a place on the page.

Every number is one that the API gives. A finding that shuffled words, a uniform map or an even distribution would
explain is not shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import torch

from regard.stats.profile import LayerProfile, ModelProfile
from regard.stats.roles import CONTENT, KINDS, LABEL, MARGIN, QUERIES, Role
from regard.stats.text_reading import NEARBY, HeadValue, TextReading, entropies_outside, nearby_shares
from regard.stats.warnings import COMMON_TARGETS, COPY
from regard.viewer.lead import other_link
from regard.viewer.sentences import HEAD, PLAIN, Part, joined, percent, short_name, token, weight_of

#: The most cards of a text, and the most bars of a picture.
NUM_CARDS, NUM_BARS = 5, 64
#: Roles of position that are findings: the sink has a card of its own.
POSITIONS = ("previous", "next", "positional")
#: Role or statistic -> the title of its card.
TITLES = {
    "previous": "Previous-token head",
    "next": "Next-token head",
    "itself": "Head of the token itself",
    "positional": "Fixed-offset head",
    "punctuation": "Punctuation head",
    "duplicate": "Duplicate-token head",
    "induction": "Induction head",
}
#: Statistic of `NEARBY` -> the tokens that the share of a card averages: those whose target is not the first token.
OVER = {
    "previous": "Mean over the tokens whose previous token is not the first token of the text.",
    "next": "Mean over the tokens that have a next token.",
    "itself": "Mean over all tokens except the first of the text.",
}
#: A token is a sink if it receives at least this share of all weight, and this multiple of its weight in uniform rows.
SINK, ABOVE_UNIFORM = 0.2, 2.0
#: Two heads are alike only if they also treat each query alike: their least `agreement`.
AGREE = 0.5
#: The broadest head attends to at least this many times as many tokens as the most focused one.
CONTRAST = 1.5


@dataclass(frozen=True)
class Card:
    """A finding: its title, a sentence and a note, what the picture shows, and the state of the page that shows it.

    `heads` are heads to draw, [index of the layer, head] each; `bars` are shares to draw, `at` the bar to mark.
    """

    kind: str
    title: str
    sentence: list[Part]
    note: str
    state: dict[str, Any]
    heads: list[list[int]] | None = None
    bars: list[float] | None = None
    at: int = -1


def cards_of(reading: TextReading, lead: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """At most `NUM_CARDS` findings as JSON, the most telling first. `lead` is the link that leads (`lead_of`)."""
    first = [*important(reading), *another_link(reading, lead)]
    found = [*first, *(card for make in CARDS for card in make(reading))]
    return [asdict(card) for card in found[:NUM_CARDS]]


def another_link(reading: TextReading, lead: dict[str, Any] | None) -> Iterator[Card]:
    """What else the word that leads attends to in its head. The page opens with a link in another head."""
    other = None if lead is None or lead["other"] is not None else other_link(reading, lead)
    if lead is not None and other is not None:
        yield Card(
            "link",
            "The same word and head",
            other["sentence"],
            f"Its strongest link to a word other than {joined(token(reading, lead['key']))}.",
            {"view": "text", **{name: other[name] for name in ("layer", "head", "query")}},
            heads=[[other["layer"], other["head"]]],
        )


def important(reading: TextReading) -> Iterator[Card]:
    """The head on which the loss depends most, if importance was measured."""
    heads = [
        HeadValue(value, layer.number, head)
        for layer in reading.profile.layers
        for head, value in enumerate(layer.values.get("importance", torch.empty(0)).tolist())
    ]
    if heads:
        best = max(heads)
        yield Card(
            "importance",
            "Most important head",
            [["Predicting the next token depends most on ", PLAIN], [_name(reading, best), HEAD], [".", PLAIN]],
            f"|d loss / d gate| is {best.value:.2g} nats.",
            {"view": "overview", "color": "importance", "sort": "down", **_place(reading, best)},
            heads=[_at(reading, best)],
        )


def content_role(reading: TextReading) -> Iterator[Card]:
    """The head whose role exceeds most what it scores on shuffled words and by chance."""
    yield from _role(reading, CONTENT, lambda role: role.score - max(role.null, role.chance))


def position_role(reading: TextReading) -> Iterator[Card]:
    """The head that attends most to one relative position, on shuffled words too."""
    yield from _role(reading, POSITIONS, lambda role: min(role.score, role.null) - role.chance)


def _role(
    reading: TextReading, kinds: frozenset[str] | tuple[str, ...], excess: Callable[[Role], float]
) -> Iterator[Card]:
    named = [role for role in (reading.roles.labeled if reading.roles else []) if role.kind in kinds]
    if not named:
        return
    best = max(named, key=excess)
    others = len({(role.layer, role.head) for role in named if role.kind == best.kind}) - 1
    more = f" {others} more head{'s have' if others > 1 else ' has'} this role." if others else ""
    where = HeadValue(best.score, best.layer, best.head)
    yield Card(
        best.kind,
        TITLES[best.kind],
        _share_sentence(reading, where, _target(best)),
        f"Mean over the words that have such a token. On shuffled words: {percent(best.null)}.{more}",
        {"view": "map", **_place(reading, where)},
        heads=[_at(reading, where)],
    )


def _target(role: Role) -> str:
    if role.offset is None:
        return KINDS[role.kind]
    side = "before" if role.offset < 0 else "after"
    return f"the token {abs(role.offset)} places {side}"


def _share_sentence(reading: TextReading, head: HeadValue, target: str) -> list[Part]:
    of = weight_of(reading.profile.layers[_at(reading, head)[0]])
    return [[_name(reading, head), HEAD], [f" puts {percent(head.value)} of its {of} on {target}.", PLAIN]]


def nearby(reading: TextReading) -> Iterator[Card]:
    """The head with most weight on a nearby token, where no roles were computed."""
    profile = reading.profile
    if reading.roles is not None or profile.query_tokens != profile.tokens or len(profile.tokens) < 3:
        return
    names = [name for name in NEARBY if name in profile.layers[0].values]
    best, name = max(((max(nearby_shares(reading, name)), name) for name in names), default=(None, ""))
    even = max(float((1 / layer.allowed[:, 1:]).mean()) for layer in profile.layers)
    if best is None or best.value < max(LABEL, even + MARGIN):
        return
    short = len(profile.tokens) - len(profile.special) <= QUERIES
    reason = f"that needs more than {QUERIES} tokens" if short else "roles were not computed"
    yield Card(
        name,
        TITLES[name],
        _share_sentence(reading, best, NEARBY[name]),
        f"{OVER[name]} Over all tokens the mean is {_mean(reading, best, name)}. "
        f"Not compared with shuffled words: {reason}.",
        {"view": "map", **_place(reading, best)},
        heads=[_at(reading, best)],
    )


def _mean(reading: TextReading, head: HeadValue, name: str) -> str:
    """The statistic of the head as its list of numbers shows it."""
    layer, number = _at(reading, head)
    return f"{float(reading.profile.layers[layer].values[name][number]):.3f}"


def sink(reading: TextReading) -> Iterator[Card]:
    """The token that receives the largest share of the weight of all heads."""
    profile = reading.profile
    shares, even, same = _received(profile)
    key = int(shares.argmax())
    share = float(shares[key])
    if len(profile.tokens) < 3 or share < max(SINK, ABOVE_UNIFORM * even):
        return
    rests = key == 0 or key in profile.special
    where = ", the first token" if key == 0 else ""
    most = "" if same else "at most "
    state: dict[str, Any] = {"view": "statistics"}
    if profile.query_tokens == profile.tokens:
        state = {"view": "text", "way": "words", "heads": "all", "side": "in", "query": key}
    yield Card(
        "sink",
        "Attention sink" if rests else "Where most weight goes",
        [[f"{percent(share)} of all weight goes to ", PLAIN], *token(reading, key), [f"{where}.", PLAIN]],
        f"Mean of all heads, over all words. If all weights were equal, it would get {most}{percent(even)}.",
        state,
        bars=[float(f"{value:.4g}") for value in _binned(shares)],
        at=key * min(len(shares), NUM_BARS) // len(shares),
    )


def _received(profile: ModelProfile) -> tuple[torch.Tensor, float, bool]:
    """The share of all weight that each key receives, the most that equal weights could give to a key, and whether
    they would give that to every key.
    """
    num_heads = sum(layer.num_heads for layer in profile.layers)
    num_queries = len(profile.query_tokens)
    total = torch.stack([layer.received.double().sum(0) for layer in profile.layers]).sum(0)
    even = sum(float((1 / layer.allowed.clamp_min(1)).mean(-1).sum()) for layer in profile.layers)
    same = all(bool((layer.allowed == len(profile.tokens)).all()) for layer in profile.layers)
    return total / (num_heads * num_queries), even / num_heads, same


def _binned(shares: torch.Tensor) -> list[float]:
    """The shares of at most `NUM_BARS` equal parts of the text; part n holds the keys j with j * parts // J == n."""
    count = min(len(shares), NUM_BARS)
    part = torch.arange(len(shares)) * count // len(shares)
    return torch.zeros(count, dtype=shares.dtype).index_add_(0, part, shares).tolist()


def twins(reading: TextReading) -> Iterator[Card]:
    """The two heads of a layer with the most similar maps, if no common target explains that."""
    pairs = [
        (float(layer.similarity[a, b]), index, layer, (a, b))
        for index, layer in enumerate(reading.profile.layers)
        for a, b in combinations(_copies(reading, layer), 2)
        if _alike(layer, a, b)
    ]
    if not pairs:
        return
    value, index, layer, pair = max(pairs, key=lambda found: found[0])
    names = [short_name(layer, head) for head in pair]
    parts = [[names[0], HEAD], [" and ", PLAIN], [names[1], HEAD], [" have nearly the same map.", PLAIN]]
    yield Card(
        "copies",
        "Near-identical heads",
        parts,
        f"Cosine of the two maps: {value:.2f}. What the heads carry may still differ.",
        {"view": "text", "way": "heads", "layer": index, "head": pair[0], "heads": f"{pair[0]},{pair[1]}"},
        heads=[[index, head] for head in pair],
    )


def _copies(reading: TextReading, layer: LayerProfile) -> list[int]:
    """The heads of the layer that a warning calls near copies."""
    groups = [f.heads for f in reading.findings if f.kind == "copies" and f.layer == layer.number]
    return sorted({head for group in groups for head in group})


def _alike(layer: LayerProfile, a: int, b: int) -> bool:
    """Whether two heads are near copies, query by query, and not because both rest on the same token."""
    if float(layer.similarity[a, b]) <= COPY:
        return False
    if any(bool((layer.values[name][[a, b]] > 0.5).all()) for name in COMMON_TARGETS if name in layer.values):
        return False
    return layer.agreement is None or float(layer.agreement[a, b]) >= AGREE


def focused(reading: TextReading) -> Iterator[Card]:
    """The most focused and the broadest head, if they differ."""
    if "elsewhere" not in reading.profile.layers[0].values:
        return
    heads = list(entropies_outside(reading.profile))
    least, most = min(heads, default=None), max(heads, default=None)
    if least is None or most is None or math.exp(most.value - least.value) < CONTRAST:
        return
    counts = [_tokens(math.exp(head.value)) for head in (least, most)]
    places = [_at(reading, head) for head in (least, most)]
    yield Card(
        "focused",
        "Most focused head",
        [
            [_name(reading, least), HEAD],
            [f" attends to about {counts[0]}; the broadest, ", PLAIN],
            [_name(reading, most), HEAD],
            [f", to about {counts[1].split()[0]}.", PLAIN],
        ],
        "The effective number of tokens, without the first token and special tokens.",
        {"view": "text", "way": "heads", "heads": ",".join(f"{layer}.{head}" for layer, head in places)}
        | _place(reading, least),
        heads=places,
    )


def _tokens(count: float) -> str:
    """An effective number of tokens as words, in whole tokens from 10 on."""
    number = f"{count:.0f}" if count >= 10 else f"{count:.1f}".removesuffix(".0")
    return f"{number} token{'' if number == '1' else 's'}"


def _name(reading: TextReading, head: HeadValue) -> str:
    return short_name(reading.profile.layers[_at(reading, head)[0]], head.head)


def _at(reading: TextReading, head: HeadValue) -> list[int]:
    """The index of the layer in the list of layers, and the head."""
    return [[layer.number for layer in reading.profile.layers].index(head.layer), head.head]


def _place(reading: TextReading, head: HeadValue) -> dict[str, int]:
    layer, number = _at(reading, head)
    return {"layer": layer, "head": number}


#: The makers of the other cards in their order; each yields a card or nothing.
CARDS: tuple[Callable[[TextReading], Iterator[Card]], ...] = (
    content_role,
    position_role,
    nearby,
    sink,
    twins,
    focused,
)
