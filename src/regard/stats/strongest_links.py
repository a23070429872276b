"""The strongest link of each head between two words.

Left out are special tokens, punctuation, the first token, neighbors and words more than `REACH` tokens apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from regard.stats.profile import LayerProfile, Link, ModelProfile

#: Most links of a layer that `links_of_layer` gives.
TRIED = 64
#: Most tokens between the ends of a link, so that a reader sees both.
REACH = 50


def strongest_links(profile: ModelProfile, layer: LayerProfile) -> list[Link]:
    """The strongest link of each head between two words; without one, the strongest of all."""
    links = strongest_word_links(profile, layer)
    return [link or layer.strongest(head, profile.ordinary) for head, link in enumerate(links)]


def strongest_word_links(profile: ModelProfile, layer: LayerProfile) -> list[Link | None]:
    """The strongest link of each head between two words; None if there is none."""
    among = torch.tensor(words(profile), dtype=torch.long)
    if not len(among):
        return [None] * layer.num_heads
    weights, keys = _allowed_links(layer, among, is_shown(profile, -1))
    best = weights.flatten(1).max(1)  # of each head, over (queries, links)
    queries, key = among[best.indices // weights.shape[2]], keys.flatten(1).gather(1, best.indices[:, None])
    links = map(Link, queries.tolist(), key.flatten().tolist(), best.values.tolist())
    return [link if link.weight > 0 else None for link in links]


def words(profile: ModelProfile) -> list[int]:
    """The queries that have a letter or a digit and are not special."""
    return [i for i in profile.ordinary if _is_word(profile.query_tokens[i])]


def _is_word(text: str) -> bool:
    """Whether a token has a letter or a digit."""
    return any(letter.isalnum() for letter in text)


def is_shown(profile: ModelProfile, without: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of indices of queries and keys: whether links between them are shown.

    The key `without` is left out; -1 leaves no further key out.
    """
    is_self = profile.is_self_attention
    left_out = {*profile.special, without, *((0,) if is_self else ())}
    # the last entry is for key -1, which stands for no link
    is_word = torch.tensor([j not in left_out and _is_word(name) for j, name in enumerate(profile.tokens)] + [False])
    past = len(profile.tokens) - len(profile.query_tokens)  # queries are the last keys

    def of_pair(query: Tensor, key: Tensor) -> Tensor:
        distance = (key - query - past).abs()
        return is_word[key] & (distance > 1) & (distance <= REACH) if is_self else is_word[key]

    return of_pair


def links_of_layer(
    layer: LayerProfile, queries: Sequence[int], allowed: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[tuple[int, Link]]:
    """The `TRIED` strongest allowed links of these queries in all heads: (head, link), the strongest first."""
    among = torch.tensor(list(queries), dtype=torch.long)
    weights, keys = _allowed_links(layer, among, allowed)
    best = weights.flatten().topk(min(TRIED, weights.numel()))
    for weight, place in zip(best.values.tolist(), best.indices, strict=True):
        if weight > 0:
            head, at, link = (int(n) for n in torch.unravel_index(place, weights.shape))
            yield head, Link(int(among[at]), int(keys[head, at, link]), weight)


def _allowed_links(
    layer: LayerProfile, among: Tensor, allowed: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The weights and keys of the links of the queries `among` in a profile, (H, queries, links).

    Weights are 0 where `allowed`, a function of queries and keys like that of `is_shown`, is False.
    """
    weights, keys = layer.links.weights[:, among], layer.links.keys[:, among]
    return weights.where(allowed(among[None, :, None], keys), 0.0), keys
