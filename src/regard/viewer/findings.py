"""What stands out in a text: the link that the page opens with, and cards about heads, each with a sentence.

`lead_of` finds the link of a pronoun or a repeated word if the text has one. `cards_of` finds a few heads and tokens,
each with a small picture and a place on the page. Every number is one that the API gives. A finding that shuffled
words, a uniform map or an even distribution would explain is not shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import torch

from regard.base.whole_files import short_number
from regard.stats.numbering import head_name
from regard.stats.profile import LayerProfile, Link, ModelProfile
from regard.stats.roles import CONTENT, KINDS, LABEL, MARGIN, QUERIES, Role
from regard.stats.strongest_links import REACH, is_shown, links_of_layer, words
from regard.stats.text_reading import NEARBY, HeadValue, TextReading, entropies_outside, nearby_shares, plain
from regard.stats.warnings import COMMON_TARGETS, COPY

#: The kinds of parts of a sentence.
PLAIN, TOKEN, HEAD = "", "token", "head"
#: A part of a sentence: [text, kind]. The page shows tokens and heads in other styles.
Part = list[str]


def token(reading: TextReading, at: int, query: bool = False) -> list[Part]:
    """A token as parts of a sentence, with its index if the text has it several times. `query`: of the queries, not the
    keys.
    """
    tokens = reading.profile.query_tokens if query else reading.profile.tokens
    part = [tokens[at], TOKEN]
    return [part] if tokens.count(tokens[at]) < 2 else [part, [f" (token {at})", PLAIN]]


def number(value: float) -> str:
    """A weight or a share with three digits after the point, as the page writes all of them.

    >>> number(0.7149), number(0.9999), number(0.0002), number(0.0)
    ('0.715', '1.000', '<0.001', '0')
    """
    return "<0.001" if 0 < value < 0.0005 else f"{value:.3f}" if value else "0"


def layer_name(layer: LayerProfile) -> str:
    """`layer 2`, or the name of a mechanism, as the page names layers."""
    return f"layer {layer.number}" if _is_path(layer) else layer.name


def weight_of(layer: LayerProfile) -> str:
    """What the shares of a layer are shares of: |weight|, if weights have signs."""
    return "weight" if layer.negative is None else "|weight|"


def short_name(layer: LayerProfile, head: int) -> str:
    """`L2.H1`, or `Bahdanau, head 0`, as the page names heads in a grid."""
    return head_name(layer.number, head) if _is_path(layer) else f"{layer.name}, head {head}"


def _is_path(layer: LayerProfile) -> bool:
    """Whether the name of a layer is a module path, a long text or its number, so that it is not shown as a name."""
    return "." in layer.name or len(layer.name) >= 40 or layer.name == str(layer.number)


def joined(parts: list[Part]) -> str:
    """A sentence as text.

    >>> joined([["In layer 2, ", ""], ["it", "token"], [" ...", ""]])
    'In layer 2, “it” ...'
    """
    return "".join(f"“{text}”" if kind == TOKEN else text for text, kind in parts)


#: What these words refer to depends on the sentence.
PRONOUNS = frozenset(["he", "she", "it", "they", "him", "her", "them", "his", "hers", "its", "their", "theirs"])
#: Least number of letters of a repeated word: shorter ones, such as "the", are repeated in every text.
LETTERS = 4
#: Least weight of another link of the word that leads.
LINK = 0.3
#: Links of the word that are drawn as arcs.
NUM_ARCS = 5
#: Least number of other queries that tell of an offset.
EVIDENCE = 4
#: Most words of one kind that are compared, so that a long text takes no longer than a short one.
CANDIDATES = 1000


def lead_of(reading: TextReading) -> dict[str, Any] | None:
    """The strongest link of a pronoun, else of a repeated word, a whole word or any piece, and a sentence about it.

    In self-attention a link to the word itself, to a neighbor, to the first token or to a special token is left out,
    because many heads put most of their weight there in any text, and so is a link over more than `REACH` tokens. A
    link that the position of the key explains (`is_positional`) does not lead.
    `layer` is an index into the layers, and `links` are the strongest keys of the word in this head, with their
    weights. `other` is the strongest link of this word to another key, if it lies in another head; the page opens
    with `heading`, parts of sentences with the number of the link that they tell (0, 1 for `other`, -1 for none).
    `left_out` says which links never lead.
    Of each kind of words the first `CANDIDATES` are compared. None if the text has no such link.
    """
    for queries in (pronouns, repeated_words, whole_words, words):
        if (found := _strongest(reading.profile, queries(reading.profile)[:CANDIDATES])) is not None:
            lead = _described(reading, *found)
            return lead | _heading(reading, lead) | {"left_out": left_out(reading.profile)}
    return None


def left_out(profile: ModelProfile) -> str:
    """Which links never lead, as a sentence."""
    if not profile.is_self_attention:
        return "The sentence above leaves out special tokens and punctuation."
    far = (
        f", punctuation and words more than {REACH} tokens away" if len(profile.tokens) > REACH else " and punctuation"
    )
    return f"The sentence above leaves out the word itself, its neighbors, the first token, special tokens{far}."


def _heading(reading: TextReading, lead: dict[str, Any]) -> dict[str, Any]:
    """The link of the same word in another head, and what the page opens with: this and the link that leads."""
    other = other_link(reading, lead)
    if other is None or (other["layer"], other["head"]) == (lead["layer"], lead["head"]):
        return {"other": None, "heading": [[lead["sentence"], -1]]}
    beyond = " beyond its neighbors: " if reading.profile.is_self_attention else ": "
    start: list[Part] = [
        ["The strongest links of ", PLAIN],
        *token(reading, lead["query"], query=True),
        [beyond, PLAIN],
    ]
    links = [_clause(reading, link) for link in (lead, other)]
    heading = [[start, -1], [links[0], 0], [[[", and ", PLAIN]], -1], [links[1], 1], [[[".", PLAIN]], -1]]
    return {"other": other, "heading": heading}


def _clause(reading: TextReading, link: dict[str, Any]) -> list[Part]:
    """A part of the heading: the key of a link, its weight, and where it is."""
    layer = reading.profile.layers[link["layer"]]
    place = f"{layer_name(layer)}, head {link['head']}"
    return [*token(reading, link["key"]), [f", {number(link['weight'])} in ", PLAIN], [place, HEAD]]


def pronouns(profile: ModelProfile) -> list[int]:
    """The queries that are English pronouns as whole words."""
    return [i for i in words(profile) if plain(profile.query_tokens[i]) in PRONOUNS and _is_whole(profile, i)]


def repeated_words(profile: ModelProfile) -> list[int]:
    """The queries whose word stands in the text before."""
    seen: set[str] = set()
    repeated = []
    for i in words(profile):
        word = plain(profile.query_tokens[i])
        if len(word) >= LETTERS and _is_whole(profile, i):
            repeated += [i] if word in seen else []
            seen.add(word)
    return repeated


def whole_words(profile: ModelProfile) -> list[int]:
    """The words that are one token."""
    return [i for i in words(profile) if _is_whole(profile, i)]


def _is_whole(profile: ModelProfile, at: int) -> bool:
    """Whether a token is a word of its own, and no piece of one.

    WordPiece marks the pieces after the first by ##. Tokens of other tokenizers count as whole.
    """
    return not any(text.startswith("##") for text in profile.query_tokens[at : at + 2])


def other_link(reading: TextReading, lead: dict[str, Any]) -> dict[str, Any] | None:
    """The strongest link of the word that leads, to another key. None if it is weaker than `LINK`."""
    found = _strongest(reading.profile, [lead["query"]], without=lead["key"])
    return None if found is None or found[2].weight < LINK else _described(reading, *found)


def _strongest(profile: ModelProfile, queries: Sequence[int], without: int = -1) -> tuple[int, int, Link] | None:
    """The index of the layer, the head and the strongest link of some queries, among the links of the profile.

    The key `without` is left out (-1: none), and in self-attention every link that its position explains. None if there
    is no link.
    """
    if not queries:
        return None
    allowed = is_shown(profile, without)
    best = None
    for index, layer in enumerate(profile.layers):
        for head, link in links_of_layer(layer, queries, allowed):
            if link.weight <= (best[2].weight if best else 0.0):  # the links of a layer come with falling weights
                break
            if not (profile.is_self_attention and is_positional(layer, head, link)):
                best = index, head, link
    return best


def is_positional(layer: LayerProfile, head: int, link: Link) -> bool:
    """Whether a head puts half of the weight of a link, or more, on the same relative offset from its other queries.

    Such a link says where the key is, not what it is. Of fewer than `EVIDENCE` other queries nothing follows.
    """
    queries, offset = torch.arange(layer.links.keys.shape[1]), link.key - link.query
    others = (queries != link.query) & (queries + offset >= 0) & (queries + offset < layer.received.shape[-1])
    others &= layer.allowed[head] > 0
    at_offset = layer.links.keys[head] - queries[:, None] == offset
    weights = (layer.links.weights[head] * at_offset).sum(-1)[others]
    return len(weights) >= EVIDENCE and float(weights.mean()) >= link.weight / 2


def _described(reading: TextReading, index: int, head: int, link: Link) -> dict[str, Any]:
    """A link as JSON: its place, its weight, the `NUM_ARCS` strongest keys of its query, and a sentence.

    `index` is that of the layer in the profile, and `head` the number of the head.
    """
    layer = reading.profile.layers[index]
    row = list(reading.maps.values())[index][0, head, link.query].cpu()
    weight = float(row[link.key])
    top = row.topk(min(NUM_ARCS, len(row)))
    links = [[key, value] for key, value in zip(top.indices.tolist(), top.values.tolist(), strict=True) if value > 0]
    place = {"layer": index, "head": head, "query": link.query, "key": link.key, "weight": weight, "links": links}
    sentence = _sentence(reading, f"{layer_name(layer)}, head {head}", link, weight, weight_of(layer))
    return place | {"sentence": sentence}


def _sentence(reading: TextReading, place: str, link: Link, weight: float, of: str) -> list[Part]:
    """The sentence of a link, in parts. `place` names the head; `of` is what the weight is a share of."""
    return [
        ["In ", PLAIN],
        [place, HEAD],
        [", ", PLAIN],
        *token(reading, link.query, query=True),
        [f" puts {number(weight)} of its {of} on ", PLAIN],
        *token(reading, link.key),
        [".", PLAIN],
    ]


#: The most cards of a text, and the most bars of a picture.
NUM_CARDS, NUM_BARS = 5, 64
#: The largest number of heads that `telling_heads` returns.
TELLING = 6
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


def telling_heads(reading: TextReading) -> list[tuple[int, int]]:
    """The heads of the links and cards that the page opens with: (index of the layer, head), the most telling first."""
    lead = lead_of(reading)
    links = [] if lead is None else [lead, *([lead["other"]] if lead["other"] else [])]
    places = [(link["layer"], link["head"]) for link in links]
    places += [tuple(place) for card in cards_of(reading, lead) for place in card["heads"] or []]
    return list(dict.fromkeys(places))[:TELLING]


def another_link(reading: TextReading, lead: dict[str, Any] | None) -> Iterator[Card]:
    """What else the word that leads attends to in its head. The page opens with a link in another head."""
    other = None if lead is None or lead["other"] is not None else other_link(reading, lead)
    if lead is not None and other is not None:
        yield Card(
            "link",
            "The same word and head",
            other["sentence"],
            f"Its strongest link to a word other than {joined(token(reading, lead['key']))}.",
            {"view": "head", **{name: other[name] for name in ("layer", "head", "query")}},
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
    """The head whose role exceeds most what it scores on shuffled words and by chance.

    Roles without a title here, such as those of `syntax_roles`, are not of one text alone.
    """
    yield from _role(reading, CONTENT & TITLES.keys(), lambda role: role.score - max(role.null, role.chance))


def position_role(reading: TextReading) -> Iterator[Card]:
    """The head that attends most to one relative position, on shuffled words too."""
    yield from _role(reading, POSITIONS, lambda role: min(role.score, role.null) - role.chance)


def _role(
    reading: TextReading, kinds: frozenset[str] | tuple[str, ...], excess: Callable[[Role], float]
) -> Iterator[Card]:
    """The card of the role of these `kinds` with the largest `excess`; nothing if no head has one."""
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
        f"Mean over the words that have such a token. {_control(best)}{more}",
        {"view": "head", **_place(reading, where)},
        heads=[_at(reading, where)],
    )


def _control(role: Role) -> str:
    """What a role scores without its text: heads of a position must keep their score, others must lose it."""
    null, chance = number(role.null), number(role.chance)
    by_position = f"By position, not by content: {null} on shuffled words too; by chance {chance}."
    return f"On shuffled words: {null}." if role.kind in CONTENT else by_position


def _target(role: Role) -> str:
    """What a head with this role attends to, in words."""
    if role.offset is None:
        return KINDS[role.kind]
    side = "before" if role.offset < 0 else "after"
    return f"the token {abs(role.offset)} places {side}"


def _share_sentence(reading: TextReading, head: HeadValue, target: str) -> list[Part]:
    """The sentence that a head puts a share (its value) of its weight on a target."""
    of = weight_of(reading.profile.layers[_at(reading, head)[0]])
    return [[_name(reading, head), HEAD], [f" puts {number(head.value)} of its {of} on {target}.", PLAIN]]


def nearby(reading: TextReading) -> Iterator[Card]:
    """The head with most weight on a nearby token, where no roles were computed.

    It must have more of it than a role needs, and more than equal weights would give.
    """
    profile = reading.profile
    if reading.roles is not None or profile.query_tokens != profile.tokens or len(profile.tokens) < 3:
        return
    names = [name for name in NEARBY if name in profile.layers[0].values]
    best, name = max(((max(nearby_shares(reading, name)), name) for name in names), default=(None, ""))
    even = max(float(_equal_weights(layer.allowed[:, 1:]).mean()) for layer in profile.layers)
    if best is None or best.value < max(LABEL, even + MARGIN):
        return
    short = len(profile.tokens) - len(profile.special) <= QUERIES
    reason = f"that needs more than {QUERIES} tokens" if short else "roles were not computed"
    yield Card(
        name,
        TITLES[name],
        _share_sentence(reading, best, NEARBY[name]),
        f"{OVER[name]} Not compared with shuffled words: {reason}.",
        {"view": "head", **_place(reading, best)},
        heads=[_at(reading, best)],
    )


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
        state = {"view": "head", "way": "words", "heads": "all", "side": "in", "query": key}
    yield Card(
        "sink",
        "Attention sink" if rests else "Where most weight goes",
        [[f"{number(share)} of all weight goes to ", PLAIN], *token(reading, key), [f"{where}.", PLAIN]],
        f"Mean of all heads, over all words. If all weights were equal, it would get {most}{number(even)}.",
        state,
        bars=[short_number(value) for value in _binned(shares)],
        at=key * min(len(shares), NUM_BARS) // len(shares),
    )


def _received(profile: ModelProfile) -> tuple[torch.Tensor, float, bool]:
    """The share of all weight that each key receives (J,), the most that equal weights could give to a key, and whether
    they would give that to every key.

    A query that may attend to n keys gives 1 / n to each; `layer.allowed` (H, I) are these n. No key gets more than the
    mean of 1 / n over all queries. Queries without a key have no weight to give.
    """
    num_rows = sum(int((layer.allowed > 0).sum()) for layer in profile.layers)
    total = torch.stack([layer.received.double().sum(0) for layer in profile.layers]).sum(0)
    even = sum(float(_equal_weights(layer.allowed).sum()) for layer in profile.layers)
    same = all(bool((layer.allowed == len(profile.tokens)).all()) for layer in profile.layers)
    return total / max(1, num_rows), even / max(1, num_rows), same


def _equal_weights(allowed: torch.Tensor) -> torch.Tensor:
    """1 / n of each query that has n > 0 keys; (queries with a key,)."""
    return 1 / allowed[allowed > 0]


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
        {"view": "head", "way": "lines", "layer": index, "head": pair[0], "heads": f"{pair[0]},{pair[1]}"},
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
        {"view": "head", "way": "lines", "heads": ",".join(f"{layer}.{head}" for layer, head in places)}
        | _place(reading, least),
        heads=places,
    )


def _tokens(count: float) -> str:
    """An effective number of tokens in words, in whole tokens from 10 on: "2.5 tokens", "1 token"."""
    number = f"{count:.0f}" if count >= 10 else f"{count:.1f}".removesuffix(".0")
    return f"{number} token{'' if number == '1' else 's'}"


def _name(reading: TextReading, head: HeadValue) -> str:
    """The short name of a head."""
    return short_name(reading.profile.layers[_at(reading, head)[0]], head.head)


def _at(reading: TextReading, head: HeadValue) -> list[int]:
    """[the index of the layer in the profile, the head]. A `HeadValue` has the number of the layer in the model."""
    return [[layer.number for layer in reading.profile.layers].index(head.layer), head.head]


def _place(reading: TextReading, head: HeadValue) -> dict[str, int]:
    """The layer (its index) and the head, as names of the state of the page."""
    layer, number = _at(reading, head)
    return {"layer": layer, "head": number}


#: The makers of the other cards in their order; each yields a card or nothing.
CARDS: tuple[Callable[[TextReading], Iterator[Card]], ...] = (content_role, position_role, nearby, sink, twins, focused)
