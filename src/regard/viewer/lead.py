"""`lead_of`: the one link that the page opens with, of a pronoun or a repeated word if the text has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from regard.stats.profile import LayerProfile, Link, ModelProfile
from regard.stats.text_reading import TextReading, plain
from regard.viewer.sentences import HEAD, PLAIN, Part, layer_name, percent, token, weight_of

#: What these words refer to depends on the sentence.
PRONOUNS = frozenset(["he", "she", "it", "they", "him", "her", "them", "his", "hers", "its", "their", "theirs"])
#: Least number of letters of a repeated word: shorter ones, such as "the", are repeated in every text.
LETTERS = 4
#: Least weight of another link of the word that leads.
LINK = 0.3
#: Links of the word that are drawn as arcs.
NUM_ARCS = 5
#: Most words of one kind that are compared, so that a long text takes no longer than a short one.
CANDIDATES = 1000
#: Most tokens between the ends of a link that leads, so that a reader sees both.
REACH = 50


def lead_of(reading: TextReading) -> dict[str, Any] | None:
    """The strongest link of a pronoun, else of a repeated word, a whole word or any piece, and a sentence about it.

    In self-attention a link to the word itself, to a neighbor, to the first token or to a special token is left out,
    because many heads put most of their weight there in any text, and so is a link over more than `REACH` tokens.
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
    layer = reading.profile.layers[link["layer"]]
    place = f"{layer_name(layer)}, head {link['head']}"
    return [*token(reading, link["key"]), [f", {percent(link['weight'])} in ", PLAIN], [place, HEAD]]


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


def words(profile: ModelProfile) -> list[int]:
    """The queries that have a letter or a digit and are not special."""
    return [i for i in profile.ordinary if _is_word(profile.query_tokens[i])]


def _is_word(text: str) -> bool:
    return any(letter.isalnum() for letter in text)


def _is_whole(profile: ModelProfile, at: int) -> bool:
    """Whether a token is a word of its own, and no piece of one."""
    return not any(text.startswith("##") for text in profile.query_tokens[at : at + 2])


def other_link(reading: TextReading, lead: dict[str, Any]) -> dict[str, Any] | None:
    """The strongest link of the word that leads, to another key. None if it is weaker than `LINK`."""
    found = _strongest(reading.profile, [lead["query"]], without=lead["key"])
    return None if found is None or found[2].weight < LINK else _described(reading, *found)


def _strongest(profile: ModelProfile, queries: Sequence[int], without: int = -1) -> tuple[int, int, Link] | None:
    """The index of the layer, the head and the strongest link of some queries, among the links of the profile."""
    if not queries:
        return None
    allowed = _allowed(profile, without)
    best = None
    for index, layer in enumerate(profile.layers):
        head, link = _strongest_of_layer(layer, queries, allowed)
        if link.weight > (best[2].weight if best else 0.0):
            best = index, head, link
    return best


def _allowed(profile: ModelProfile, without: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function of queries and keys: whether a link between them may lead. The key `without` is left out."""
    is_self = profile.is_self_attention
    special = {*profile.special, without, *((0,) if is_self else ())}
    good = torch.tensor([j not in special and _is_word(name) for j, name in enumerate(profile.tokens)] + [False])
    past = len(profile.tokens) - len(profile.query_tokens)  # queries are the last keys

    def may_lead(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        distance = (key - query - past).abs()
        return good[key] & (distance > 1) & (distance <= REACH) if is_self else good[key]

    return may_lead


def _strongest_of_layer(
    layer: LayerProfile, queries: Sequence[int], allowed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> tuple[int, Link]:
    among = torch.tensor(list(queries))
    weights, keys = layer.links.weights[:, among], layer.links.keys[:, among]  # (H, queries, links)
    weights = weights.where(allowed(among[None, :, None], keys), 0.0)
    head, at, link = (int(n) for n in torch.unravel_index(weights.argmax(), weights.shape))
    return head, Link(int(among[at]), int(keys[head, at, link]), float(weights[head, at, link]))


def _described(reading: TextReading, index: int, head: int, link: Link) -> dict[str, Any]:
    layer = reading.profile.layers[index]
    row = list(reading.maps.values())[index][0, head, link.query].cpu()
    weight = float(row[link.key])
    top = row.topk(min(NUM_ARCS, len(row)))
    links = [[key, value] for key, value in zip(top.indices.tolist(), top.values.tolist(), strict=True) if value > 0]
    return {
        "layer": index,
        "head": head,
        "query": link.query,
        "key": link.key,
        "weight": weight,
        "links": links,
        "sentence": _sentence(reading, f"{layer_name(layer)}, head {head}", link, weight, weight_of(layer)),
    }


def _sentence(reading: TextReading, place: str, link: Link, weight: float, of: str) -> list[Part]:
    return [
        ["In ", PLAIN],
        [place, HEAD],
        [", ", PLAIN],
        *token(reading, link.query, query=True),
        [f" puts {percent(weight)} of its {of} on ", PLAIN],
        *token(reading, link.key),
        [".", PLAIN],
    ]
