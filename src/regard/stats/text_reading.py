"""One text read by one model: its maps, its profile, its warnings, and what a word looks at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from regard.maps import AttentionMap, Fold
from regard.stats.profile import Link, Profile, one_text, profile
from regard.stats.roles import RoleTable
from regard.stats.warnings import Finding, findings


@dataclass(frozen=True, eq=False)
class HeadLink:
    """A link of one head of one layer, by their numbers in the model.

    >>> import torch, regard as rg
    >>> from regard.stats import TextReading
    >>> q, k = 20 * torch.eye(4).roll(2, 1).expand(1, 1, 4, 4), torch.eye(4).expand(1, 1, 4, 4)
    >>> reading = TextReading.of("", {"layers.5": rg.attend(rg.Attention(), q, k, k).weights})
    >>> (found,) = reading.notable(query=0)
    >>> found.layer, found.head, found.link.query, found.link.key
    (5, 0, 0, 2)
    """

    layer: int
    head: int
    link: Link


@dataclass(frozen=True, eq=False)
class TextReading:
    """A title, the maps of every layer (of one text each), and the profile made of them.

    `roles` is None where they were not told (the text is too short, or nobody asked); `masks` are the
    warnings about masks.

    >>> import torch, regard as rg
    >>> from regard.stats import TextReading
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> maps = {"layer": rg.attend(rg.Attention(), x, x, x).weights}
    >>> reading = TextReading.of("A title", maps, ["the", "un", "##lock", "key"])
    >>> reading.find("unlock"), [finding.kind for finding in reading.findings]
    (1, ['uniform'])
    """

    title: str
    maps: Mapping[str, AttentionMap]
    profile: Profile
    roles: RoleTable | None = None
    masks: list[Finding] = field(default_factory=list)

    @staticmethod
    def of(
        title: str,
        maps: Mapping[str, AttentionMap],
        tokens: Sequence[str] | None = None,
        special: Sequence[int] | None = None,
        numbers: Sequence[int] | None = None,
        *,
        queries: Sequence[str] | None = None,
        batch: int = 0,
        also: Callable[[AttentionMap], Sequence[Fold]] = lambda weights: (),
    ) -> TextReading:
        """Measure maps of one size as `profile` does; without tokens, positions are their names.

        `tokens` are those of the keys; `queries`, where they are others, those of the queries, which are
        otherwise the last of the keys.

        >>> import torch, regard as rg
        >>> x = torch.zeros(1, 1, 2, 4)
        >>> TextReading.of("", {"layer": rg.attend(rg.Attention(), x, x, x).weights}).profile.tokens
        ['0', '1']
        """
        _, _, I, J = next(iter(maps.values())).shape if maps else (0, 0, 0, 0)
        keys = [str(j) for j in range(J)] if tokens is None else list(tokens)
        if queries is None and I != J:
            queries = keys[J - I :] if I < J else [str(i) for i in range(I)]
        found = profile(maps, keys, query_tokens=queries, special=special, batch=batch, numbers=numbers, also=also)
        return TextReading(title, {name: one_text(weights, batch) for name, weights in maps.items()}, found)

    @cached_property
    def findings(self) -> list[Finding]:
        """Warnings about the masks, then those about the heads."""
        return [*self.masks, *findings(self.profile)]

    def looks(self, query: int) -> list[Tensor]:
        """The exact weights of one query, (H, J) for each layer."""
        return [weights[0, :, query].cpu() for weights in self.maps.values()]

    def notable(self, query: int, count: int = 3) -> list[HeadLink]:
        """The heads that look hardest from `query` at an ordinary token further than its neighbours, one link each.

        Of a text that attends to itself the first token is left out too: heads rest on it, whatever it is.
        """
        special = {*self.profile.special, *((0,) if self.profile.of_itself else ())}
        others = [j for j in range(len(self.profile.tokens)) if abs(j - query) > 1 and j not in special]
        links = []
        for layer, weights in zip(self.profile.layers, self.looks(query), strict=True):
            for head, row in enumerate(weights[:, others] if others else []):
                best = int(row.argmax())
                links.append(HeadLink(layer.number, head, Link(query, others[best], float(row[best]))))
        return sorted(links, key=lambda link: -link.link.weight)[:count]

    def top(self, query: int, layer: int, count: int = 5) -> list[tuple[int, float]]:
        """The keys that a layer's heads look at from `query` on average, strongest first: (index, weight).

        `layer` is the place of the layer among those read.
        """
        mean = self.looks(query)[layer].mean(0)
        best = mean.topk(min(count, len(mean)))
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def find(self, word: str) -> int | None:
        """The first token that is `word`, or the first of the pieces that make it up; None if there is none."""
        return next(iter(self.places(word)), None)

    def places(self, word: str) -> list[int]:
        """Every token that is `word`, or the first of the pieces that make it up."""
        tokens = self.profile.query_tokens
        pieces, inside = [plain(token) for token in tokens], [token.startswith("##") for token in [*tokens, ""]]
        target = word.strip().lower()
        return [
            start
            for start in range(len(pieces))
            for stop in range(start + 1, min(start + 12, len(pieces)) + 1)
            if "".join(pieces[start:stop]) == target and not inside[start] and not inside[stop]
        ]


def plain(token: str) -> str:
    """A token without the marks that tokenizers put on pieces of words, in lower case."""
    return token.removeprefix("##").lstrip("Ġ▁").strip().lower()
