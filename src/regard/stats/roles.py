"""Roles of heads, each beside its null: what the same head does when the words are shuffled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from regard.checks import Count, checked
from regard.errors import RegardError, nearest
from regard.maps import AttentionMap, Entropy
from regard.stats.numbering import layer_numbers
from regard.stats.statistics import Allowed, entropy_beside
from regard.stats.targets import Diagonals, TargetMass, Text, Where, beginning

#: Share of the weight from which a head may carry a role's name: two fifths of what it looks at. Less than that and
#: most of what the head does goes unnamed.
LABEL = 0.4
#: How far a score must stand above what it is held against. The mean of `QUERIES` numbers between 0 and 1 has a
#: standard error of at most 0.5 / sqrt(25) = 0.1; the margin is two of them.
MARGIN = 0.2
#: Queries that a score must be the mean of before it can become a label.
QUERIES = 25
#: Evenness from which a head is broad. Scores that differ by one unit at random give log n - 1/2 nats, which is 0.9
#: of the largest entropy for n = 150.
BROAD = 0.9
#: Offsets that a positional head may keep, those with names of their own (-1, 0, 1) left out.
FIXED = (*range(-8, -1), *range(2, 9))
#: Said once beside any table of roles.
ROLE_CAVEAT = (
    "A role says where a head looked in this input, beside the same places when the words are shuffled. It does not "
    "say that the model uses what the head finds there, nor that the head does nothing else on other inputs."
)

#: Kind -> what such a head looks at.
KINDS: dict[str, str] = {
    "previous": "the token just before",
    "next": "the token just after",
    "positional": "one fixed offset",
    "first": "the first token (a sink)",
    "special": "special tokens other than the first, such as [SEP] (at rest)",
    "broad": "everything nearly alike",
    "punctuation": "punctuation",
    "duplicate": "other places of the same token",
    "induction": "the token after an earlier occurrence of the current one",
}
#: Kinds that depend on what the tokens are: a shuffle must take the score away. The others must survive it.
CONTENT = frozenset({"punctuation", "duplicate", "induction"})


@dataclass(frozen=True)
class Role:
    """How much one head plays one role: its score, the null, and whether that earns the name.

    `score` is a share of the weight, averaged over the `queries` that have a key to play the role
    with (NaN if there are none); for "broad" it is the evenness. Weight on the first token counts for
    the role "first" alone. `null` is the same on shuffled input,
    `chance` what a head that looks at all keys alike would score, `offset` the offset of "positional".

    >>> from regard.stats import Role
    >>> Role("previous", layer=2, head=4, score=0.93, null=0.91, label=True, chance=0.05).sentence
    'Layer 2 head 4 looks at the token just before: 0.93, shuffled 0.91, by chance 0.05.'
    """

    kind: str
    layer: int
    head: int
    score: float
    null: float
    label: bool
    chance: float = 0.0
    queries: int = 0
    offset: int | None = None

    @property
    def sentence(self) -> str:
        """`Layer 2 head 4 looks at the token just before: 0.93, shuffled 0.91, by chance 0.05.`."""
        what = KINDS[self.kind] if self.offset is None else f"the token {self.offset:+d} places away"
        return (
            f"Layer {self.layer} head {self.head} looks at {what}: {self.score:.2f}, "
            f"shuffled {self.null:.2f}, by chance {self.chance:.2f}."
        )


@dataclass(frozen=True, eq=False)
class RoleTable:
    """Every role of every head. `labelled` are those that earned their name; `print(table.table())` for people.

    >>> from regard.stats import Role, RoleTable
    >>> roles = [Role("previous", 0, head, score, null=0.9, label=score > 0.5) for head, score in enumerate((0.1, 0.9))]
    >>> table = RoleTable(roles)
    >>> [role.head for role in table.labelled], [role.score for role in table.of("previous")]
    ([1], [0.9, 0.1])
    """

    roles: list[Role]

    @property
    def labelled(self) -> list[Role]:
        return [role for role in self.roles if role.label]

    def of(self, kind: str) -> list[Role]:
        """One kind, of all heads, the highest scores first (those without a score last)."""
        if kind not in KINDS:
            raise RegardError(f"roles: there is no role {kind!r}. {nearest(kind, KINDS)}")
        found = [role for role in self.roles if role.kind == kind]
        return sorted(found, key=lambda role: -role.score if role.score == role.score else 1.0)

    def head(self, layer: int, head: int) -> list[Role]:
        """All roles of one head."""
        return [role for role in self.roles if (role.layer, role.head) == (layer, head)]

    def table(self) -> str:
        """The labelled heads, one line each, under the caveat."""
        lines = [ROLE_CAVEAT, "layer head  score   null chance  role"]
        for role in self.labelled:
            numbers = f"{role.score:6.3f} {role.null:6.3f} {role.chance:6.3f}"
            what = KINDS[role.kind] if role.offset is None else f"{KINDS[role.kind]} ({role.offset:+d})"
            lines.append(f"{role.layer:5d} {role.head:4d} {numbers}  {role.kind}: {what}")
        return "\n".join(lines if self.labelled else [ROLE_CAVEAT, "No head earned a name."])


@checked
def roles(
    maps: Mapping[str, AttentionMap],
    tokens: Sequence[str] | Sequence[int],
    *,
    null: Mapping[str, AttentionMap],
    null_tokens: Sequence[str] | Sequence[int],
    special: Sequence[int] | None = None,
    batch: Count = 0,
    numbers: Sequence[int] | None = None,
) -> RoleTable:
    """Score every head for every role, beside the same head on shuffled input.

    A score is the mean, over ordinary queries that have such a key, of sum_j w_ij over the keys of
    the role; for induction this is the prefix-matching score of Olsson et al. 2022, arXiv:2209.11895.
    The first key belongs to the role "first" alone, whatever its token is: many heads rest on it, and would
    pass for punctuation heads on a text that begins with a quotation mark. For "broad" the score is
    (1 - f) H' / ((1 - 1/n) log(n - 1)), at most 1, with f the weight on the first key, H' the entropy of the rest, and
    n the keys that the query may attend to: 1 for a head that looks at all of them alike.
    `null` are the maps of a run on the shuffled tokens `null_tokens` (`shuffle_order`; for duplicate
    and induction heads shuffle `probe_tokens`).

    Roles of content (punctuation, duplicate, induction) hold the score against the weight that the
    shuffled run puts on the same places, as a share of what it does not put on links that the shuffle
    happened to keep: a head that goes by position alone scores as much there. A name needs a score of
    `LABEL` and a `MARGIN` above both that and chance. Roles of place (previous, next, positional,
    first, special, broad) do not depend on the words, so they must hold on both inputs, the lower of
    the two a `MARGIN` above chance.
    Neither is given on fewer than `QUERIES` queries. `numbers` are those of the layers; without them
    they are read off the module paths.

    >>> import torch, regard as rg
    >>> from regard.stats import shuffle_order
    >>> before = 20.0 * torch.eye(40).roll(1, -1)  # every query asks for the key before it
    >>> x = [t.expand(1, 1, 40, 40) for t in (before, torch.eye(40), before)]
    >>> maps = {"layer": rg.attend(rg.Attention(score=rg.Dot(scale=1.0)), x[0].mT, x[1], x[2]).weights}
    >>> tokens = list(range(40))
    >>> found = roles(maps, tokens, null=maps, null_tokens=[tokens[n] for n in shuffle_order(tokens)])
    >>> [role.kind for role in found.labelled]
    ['previous']
    """
    _check(maps, null, tokens, null_tokens)
    found = []
    layers = layer_numbers(maps, numbers)
    for number, weights, shuffled in zip(layers, maps.values(), null.values(), strict=True):
        weights, shuffled = _one_text(weights, batch), _one_text(shuffled, batch)
        text, other = (Text.of(t, special, weights.device) for t in (tokens, null_tokens))
        score, held = _measure(weights, text, None), _measure(shuffled, text, other)
        for kind in KINDS:
            found += _roles_of(kind, number, score[kind], held[kind])
    return RoleTable(found)


def _check(
    maps: Mapping[str, AttentionMap],
    null: Mapping[str, AttentionMap],
    tokens: Sequence[str | int],
    null_tokens: Sequence[str | int],
) -> None:
    if not maps or list(maps) != list(null):
        raise RegardError(
            "roles: maps and null must be of the same layers, at least one. Watch the same model twice, "
            "on the tokens and on the shuffled tokens."
        )
    for name, weights in (*maps.items(), *null.items()):
        if weights.shape[2:] != (len(tokens), len(null_tokens)):
            raise RegardError(
                f"roles: the map of {name!r} has {weights.shape[2]} queries and {weights.shape[3]} keys, for "
                f"{len(tokens)} tokens and {len(null_tokens)} shuffled ones; all four must be the same. Roles are of "
                "self-attention over a whole text."
            )
    if list(tokens) == list(null_tokens):
        raise RegardError("roles: null_tokens are the tokens themselves. Shuffle them: shuffle_order(tokens).")


def _one_text(weights: AttentionMap, batch: int) -> AttentionMap:
    B, H, _, _ = weights.shape
    if not 0 <= batch < B:
        raise RegardError(f"roles: batch {batch} is out of range; the maps have {B} texts.")
    return weights.select(torch.tensor([batch]), torch.arange(H))


class _Measured(NamedTuple):
    """Score, chance and number of queries, (H,) each; (H, offsets) for the positional role."""

    score: Tensor
    chance: Tensor
    queries: Tensor


def _measure(weights: AttentionMap, text: Text, shuffled: Text | None) -> dict[str, _Measured]:
    """All roles of one map. On shuffled input, the links of `text` that `shuffled` has too are left out."""
    links = _links(text, shuffled)
    folds = [TargetMass(weights, where) for where in links.values()]
    allowed, entropy, diagonal, *rest = weights.summarize(
        Allowed(weights), Entropy(), Diagonals(weights, (-1, 1, *FIXED)), *folds
    )
    ordinary = ~text.special
    sums = dict(zip(links, rest, strict=True))
    found = {kind: _mean(sums[kind], sums.get(f"kept {kind}"), allowed, ordinary) for kind in KINDS if kind in sums}
    at = _mean(diagonal, None, allowed[:, :, None], ordinary)
    for kind, place in (("previous", 0), ("next", 1), ("positional", slice(2, None))):
        found[kind] = _Measured(at.score[:, place], at.chance[:, place], at.queries[:, place])
    found["broad"] = _evenness(entropy, allowed, sums["first"], ordinary)
    return found


def _evenness(entropy: Tensor, allowed: Tensor, at_first: tuple[Tensor, Tensor], ordinary: Tensor) -> _Measured:
    """The evenness of the weights outside the first key: 1 if all are equal. Arguments are (B, H, I)."""
    first, sees_first = at_first
    beside = allowed - sees_first
    even = beside / allowed.clamp_min(1) * beside.clamp_min(2).log()
    choice = (beside > 1) & ordinary
    share = (entropy_beside(entropy, first, -torch.xlogy(first, first)) / even.clamp_min(1e-6)).clamp_max(1.0) * choice
    count = choice.sum(-1)[0].cpu()
    score = (share.sum(-1) / choice.sum(-1))[0].cpu()  # NaN where no query has a choice
    return _Measured(score, torch.zeros_like(score), count)


def _links(text: Text, shuffled: Text | None) -> dict[str, Where]:
    """The pairs of every role that is no single offset, and those that the shuffle kept."""
    content = {"punctuation": Text.marks, "duplicate": Text.duplicate, "induction": Text.induction}
    found: dict[str, Where] = {"first": beginning, "special": (shuffled or text).resting}
    for kind, links in content.items():
        if shuffled is None:
            found[kind] = partial(links, text)
        else:
            found[kind] = lambda i, j, links=links: links(text, i, j) & ~links(shuffled, i, j)
            found[f"kept {kind}"] = lambda i, j, links=links: links(text, i, j) & links(shuffled, i, j)
    return found


def _mean(
    links: tuple[Tensor, Tensor], kept: tuple[Tensor, Tensor] | None, allowed: Tensor, ordinary: Tensor
) -> _Measured:
    """Means over the ordinary queries that have such a key, of (1, H, ..., I) weights and counts."""
    mass, count = links
    counts = (count > 0) & ordinary
    queries = counts.sum(-1)[0].cpu()
    rest = counts if kept is None else (1 - kept[0]) * counts
    score = ((mass * counts).sum(-1) / rest.sum(-1))[0].cpu()
    chance = (count / allowed.clamp_min(1) * counts).sum(-1)[0].cpu() / queries
    return _Measured(score, chance, queries)


def _roles_of(kind: str, layer: int, score: _Measured, null: _Measured) -> list[Role]:
    """One kind, of every head of a layer."""
    found = []
    for head in range(len(score.score)):
        value, chance, queries = (part[head] for part in score)
        held, offset = null.score[head], None
        if kind == "positional":
            best = int(value.nan_to_num(-1.0).argmax())
            value, chance, queries, held, offset = value[best], chance[best], queries[best], held[best], FIXED[best]
        numbers = float(value), float(held), float(chance)
        label = int(queries) >= QUERIES and _earns(kind, *numbers)
        found.append(Role(kind, layer, head, *numbers[:2], label, numbers[2], int(queries), offset))
    return found


def _earns(kind: str, score: float, null: float, chance: float) -> bool:
    """Whether a score is a name: see `roles`. A null that could not be measured (NaN) earns none."""
    if kind == "broad":
        return min(score, null) >= BROAD
    if kind in CONTENT:
        return score >= LABEL and score - null >= MARGIN and score - chance >= MARGIN
    return score >= LABEL and null >= LABEL and min(score, null) - chance >= MARGIN
