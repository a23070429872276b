"""Roles of heads: each role is a set of pairs of query and key, and heads are scored by their weight on these pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from regard.base.checks import Count, Size, checked
from regard.base.errors import RegardError, nearest
from regard.base.html_table import html_table
from regard.base.shapes import to_device
from regard.maps import AttentionMap, Entropy, Reduction, Tile
from regard.maps.changed_map import QuerySample
from regard.maps.reductions import Shape, State, zeros
from regard.stats.numbering import head_name, layer_numbers
from regard.stats.profile import SPECIAL_TOKEN, one_text
from regard.stats.statistics import Allowed, entropy_of_rest, is_punctuation, numbers

# Inputs for finding roles of heads: random sequences that repeat, and shuffled texts.


@checked
def probe_tokens(vocabulary: Size | Sequence[int], length: Size, seed: int = 0) -> Tensor:
    """A random sequence of `length` different tokens, repeated once; (2 length,).

    Duplicate and induction heads are found with it, because in random tokens only the repetition predicts the next
    token (Olsson et al. 2022, arXiv:2209.11895).
    `vocabulary` is the number of tokens, or a list of token numbers to draw from (leave out special tokens).

    >>> probe = probe_tokens(30_000, 50)
    >>> len(probe), torch.equal(probe[:50], probe[50:])
    (100, True)
    """
    numbers = torch.arange(vocabulary) if isinstance(vocabulary, int) else torch.as_tensor(list(vocabulary))
    if not 0 < length <= len(numbers):
        raise RegardError(
            f"probe_tokens: length is {length}, but the vocabulary has {len(numbers)} tokens. "
            f"Give a length from 1 to {len(numbers)}."
        )
    sequence = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))[:length]]
    return sequence.repeat(2)


@checked
def shuffle_order(tokens: Sequence[str | int], special: Sequence[int] | None = None, seed: int = 0) -> list[int]:
    """A random order of the tokens in which special tokens keep their positions.

    `special` are indices; by default special tokens are recognized by their names. Run the model on `ids[order]`
    to get the maps `null` of `roles`.

    >>> order = shuffle_order(["[CLS]", "a", "b", "c", "[SEP]"])
    >>> order[0], sorted(order[1:4]), order[4]
    (0, [1, 2, 3], 4)
    """
    fixed = set(special_positions(tokens) if special is None else special)
    free = torch.tensor([position for position in range(len(tokens)) if position not in fixed], dtype=torch.long)
    shuffled = free[torch.randperm(len(free), generator=torch.Generator().manual_seed(seed))]
    order = list(range(len(tokens)))
    for position, source in zip(free.tolist(), shuffled.tolist(), strict=True):
        order[position] = source
    return order


def special_positions(tokens: Sequence[str | int]) -> list[int]:
    """Indices of the tokens whose names are those of special tokens, such as [CLS] or </s>."""
    return [index for index, token in enumerate(tokens) if SPECIAL_TOKEN.fullmatch(str(token))]


# Which pairs of query and key are links of a role, and the weight that heads put on them.


#: Takes indices of queries (a column) and of keys (a row); returns which pairs are links of a role.
IsLink = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Text:
    """The tokens of a text as numbers, and flags for special tokens and for punctuation; (n,) each."""

    numbers: Tensor
    special: Tensor
    punctuation: Tensor

    @staticmethod
    def of(tokens: Sequence[str | int], special: Sequence[int] | None, device: torch.device) -> Text:
        """The text of these tokens; `special` are indices, by default of the tokens with names of special tokens."""
        positions = special_positions(tokens) if special is None else list(special)
        flags = torch.zeros(len(tokens), dtype=torch.bool)
        flags[torch.tensor(positions, dtype=torch.long)] = True
        punctuation = torch.tensor([isinstance(token, str) and is_punctuation(token) for token in tokens])
        token_numbers = numbers([str(token) for token in tokens])
        return Text(token_numbers.to(device), flags.to(device), (punctuation & ~flags).to(device))

    def duplicate(self, i: Tensor, j: Tensor) -> Tensor:
        """t_j = t_i and j != i, neither token is special, and j is not the first key."""
        return (self.numbers[i] == self.numbers[j]) & (i != j) & (j > 0) & ~self.special[i] & ~self.special[j]

    def induction(self, i: Tensor, j: Tensor) -> Tensor:
        """t_(j-1) = t_i with j < i: j follows an earlier occurrence of the query's token."""
        before = (j - 1).clamp_min(0)
        return (self.numbers[i] == self.numbers[before]) & (j > 0) & (j < i) & ~self.special[i] & ~self.special[before]

    def punctuation_mark(self, i: Tensor, j: Tensor) -> Tensor:
        """t_j is punctuation, j != i, and j is not the first key."""
        return self.punctuation[j] & (i != j) & (j > 0)

    def special_token(self, i: Tensor, j: Tensor) -> Tensor:
        """t_j is special, j != i, and j is not the first key, which has a role of its own."""
        return self.special[j] & (j > 0) & (i != j)


def first_token(i: Tensor, j: Tensor) -> Tensor:
    """j is the first key and i is not the first query."""
    return (j == 0) & (i > 0)


@dataclass(frozen=True, eq=False)
class TargetMass(Reduction):
    """For every query, the weight on links of a role, and the number of links that the mask allows; (B, H, I) each.

    `queries` are the indices in the text of the queries of the map, if it has not all of them.
    """

    weights: AttentionMap
    is_link: IsLink
    queries: Tensor | None = None

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:3]), zeros(device, *shape[:3])]

    def add(self, state: State, tile: Tile) -> None:
        i = torch.arange(tile.rows.start, tile.rows.stop, device=tile.weights.device)
        j = torch.arange(tile.cols.start, tile.cols.stop, device=tile.weights.device)
        targets = self.is_link((i if self.queries is None else self.queries[i])[:, None], j[None])
        if targets.any():
            i, j = targets.nonzero(as_tuple=True)  # few pairs of a long text are links
            allowed = may_attend(self.weights, tile).expand(tile.weights.shape)
            for total, values in zip(state, (tile.weights, allowed), strict=True):
                total.index_add_(2, tile.rows.start + i, values[:, :, i, j].to(total.dtype))

    def finish(self, state: State) -> tuple[Tensor, Tensor]:
        return state[0], state[1]


@dataclass(frozen=True, eq=False)
class Diagonals(Reduction):
    """For every query, the weight at offsets j - i, and 1 where the mask allows it; (B, H, offsets, I) each.

    The first key is left out, because weight on it has a role of its own.
    """

    weights: AttentionMap
    offsets: tuple[int, ...]

    def init(self, shape: Shape, device: torch.device) -> State:
        B, H, I, _ = shape
        return [zeros(device, B, H, len(self.offsets), I) for _ in range(2)]

    def add(self, state: State, tile: Tile) -> None:
        keys = tile.grid.key  # positions, in ascending order
        allowed = may_attend(self.weights, tile).expand(tile.weights.shape)
        for number, offset in enumerate(self.offsets):
            wanted = tile.grid.query + offset
            j = torch.searchsorted(keys, wanted).clamp_max(len(keys) - 1)  # the key at this offset, if the tile has it
            i = ((keys[j] == wanted) & (tile.cols.start + j > 0)).nonzero()[:, 0]
            for total, values in zip(state, (tile.weights, allowed), strict=True):
                total[:, :, number, tile.rows.start + i] = values[:, :, i, j[i]].to(total.dtype)

    def finish(self, state: State) -> tuple[Tensor, Tensor]:
        return state[0], state[1]


def may_attend(weights: AttentionMap, tile: Tile) -> Tensor:
    """Which pairs of a tile of the map `weights` the mask allows; the shape broadcasts against that of the tile.

    The mask decides only about the keys in `tile.undecided`. Without such keys every pair is allowed.
    """
    mask = weights.attention.mask if len(tile.undecided) else None
    return tile.weights.new_ones((1, 1, 1, 1), dtype=torch.bool) if mask is None else mask.allowed(tile.grid)


# Finds roles of heads, such as previous-token or induction heads, and compares each with a run on shuffled text.


#: Least score of a head that has a role: two fifths of its weight. With a smaller share, the role would leave most of
#: what the head does unnamed.
LABEL = 0.4
#: Least difference between a score and the value that it is compared with. The mean of `QUERIES` numbers between 0 and
#: 1 has a standard error of at most 0.5 / sqrt(25) = 0.1; the margin is two standard errors.
MARGIN = 0.2
#: Least number of queries that the score of a labeled role averages.
QUERIES = 25
#: Least evenness of a broad head. Random scores with standard deviation 1 give log n - 1/2 nats, which is 0.9 of the
#: largest entropy for n = 150.
BROAD = 0.9
#: Offsets of positional heads, without -1 and 1, which are roles of their own, and 0, which is none.
FIXED = (*range(-8, -1), *range(2, 9))
#: Of a longer text, so many random queries are read. A mean over them has a standard error of at most
#: 0.5 / sqrt(4096) = 0.008, far below `MARGIN`.
SAMPLE = 4096
#: Printed once with any table of roles.
ROLE_CAVEAT = (
    "A role says what a head attends to in this input, compared with the same input shuffled. It does not say that "
    "the model uses the output of the head, nor that the head does nothing else on other inputs."
)

#: Kind -> what such a head attends to.
KINDS: dict[str, str] = {
    "previous": "the previous token",
    "next": "the next token",
    "positional": "one fixed offset",
    "first": "the first token (a sink)",
    "special": "special tokens other than the first, such as [SEP]",
    "broad": "all tokens nearly equally",
    "punctuation": "punctuation",
    "duplicate": "other occurrences of the same token",
    "induction": "the token after an earlier occurrence of the current one",
}
#: The same for patches of an image, by their places on the grid (`patch_roles`).
PATCH_KINDS: dict[str, str] = {
    "row": "patches of the same row, beyond its neighbors",
    "column": "patches of the same column, beyond its neighbors",
    "left": "the patch to its left",
    "right": "the patch to its right",
    "above": "the patch above it",
    "below": "the patch below it",
}
#: The same for cross-attention (`alignment_roles`), for needles (`retrieval_roles`) and for grammar (`syntax_roles`).
ALIGNMENT_KINDS: dict[str, str] = {
    "monotonic": "the source from its beginning to its end",
    "alignment": "the source tokens that the gold alignment gives",
}
RETRIEVAL_KINDS: dict[str, str] = {"retrieval": "the token of the needle that comes next"}
SYNTAX_KINDS: dict[str, str] = {
    "subject": "the subject, from its verb",
    "object": "the verb, from its object",
    "pronoun": "the noun that a pronoun stands for",
}
MEANINGS = KINDS | PATCH_KINDS | ALIGNMENT_KINDS | RETRIEVAL_KINDS | SYNTAX_KINDS
#: Kinds that depend on what the tokens are: shuffling must lower the score. For the other kinds it must not.
CONTENT = frozenset({"punctuation", "duplicate", "induction", *ALIGNMENT_KINDS, *RETRIEVAL_KINDS, *SYNTAX_KINDS})
#: Kind -> what `null` and `chance` are, where they are not shuffled text and equal weights.
COMPARISONS: dict[str, tuple[str, str]] = {
    "monotonic": ("with its rows shuffled", "by chance"),
    "alignment": ("for the links of other tokens", "by chance"),
    "retrieval": ("with the needle elsewhere", "by chance"),
    **dict.fromkeys(SYNTAX_KINDS, ("on shuffled words", "at the best fixed offset")),
}


@dataclass(frozen=True)
class Role:
    """The score of one head for one role, on this input and on shuffled input, and whether the head has the role.

    `score` is a share of the weight, averaged over the `queries` that have a key of this role (NaN if there are
    none); for "broad" it is the evenness. Weight on the first token counts for the role "first" only. `null` is the
    score on shuffled input, `chance` the score of a head with equal weights, `offset` the offset of "positional".
    `label` is whether the head has the role. Of a long text `queries` counts those of the sample (`RoleTable.sampled`).

    >>> from regard.types import Role
    >>> Role("previous", layer=2, head=4, score=0.93, null=0.91, label=True, chance=0.05).sentence
    'L2.H4 attends to the previous token (0.93; 0.91 on shuffled text, 0.05 by chance).'
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
        """`L2.H4 attends to the previous token (0.93; 0.91 on shuffled text, 0.05 by chance).`."""
        target = MEANINGS[self.kind] if self.offset is None else f"the token at offset {self.offset:+d}"
        compared = COMPARISONS.get(self.kind, ("on shuffled text", "by chance"))
        numbers = f"{self.score:.2f}; {self.null:.2f} {compared[0]}, {self.chance:.2f} {compared[1]}"
        return f"{head_name(self.layer, self.head)} attends to {target} ({numbers})."


@dataclass(frozen=True, eq=False)
class RoleTable:
    """The scores of every head for every role. `print(table.table())` lists the roles that heads have (`labeled`).

    `sampled` is (number of queries that were read, number of all queries) if a random sample was read, otherwise None.

    >>> from regard.types import Role, RoleTable
    >>> roles = [Role("previous", 0, head, score, null=0.9, label=score > 0.5) for head, score in enumerate((0.1, 0.9))]
    >>> table = RoleTable(roles)
    >>> [role.head for role in table.labeled], [role.score for role in table.of("previous")]
    ([1], [0.9, 0.1])
    """

    roles: list[Role]
    sampled: tuple[int, int] | None = None

    @property
    def note(self) -> str:
        """How many queries were read, in a sentence; "" if all were."""
        return (
            ""
            if self.sampled is None
            else "Roles are means over {} of {} queries, drawn at random.".format(*self.sampled)
        )

    @property
    def caveat(self) -> str:
        """What a role does not say, and how many queries were read if not all were."""
        return f"{self.note} {ROLE_CAVEAT}".lstrip()

    @property
    def labeled(self) -> list[Role]:
        """The roles that heads have: those with a `label`."""
        return [role for role in self.roles if role.label]

    def of(self, kind: str) -> list[Role]:
        """The roles of one kind, highest score first; roles without a score come last."""
        if kind not in MEANINGS:
            raise RegardError(f"roles: there is no role {kind!r}. {nearest(kind, MEANINGS)}")
        same_kind = [role for role in self.roles if role.kind == kind]
        return sorted(same_kind, key=lambda role: -role.score if role.score == role.score else 1.0)

    def head(self, layer: int, head: int) -> list[Role]:
        """All roles of one head."""
        return [role for role in self.roles if (role.layer, role.head) == (layer, head)]

    def __repr__(self) -> str:
        heads, labeled = len({(role.layer, role.head) for role in self.roles}), self.labeled
        best = sorted(labeled, key=lambda role: -role.score)[:5]
        return "\n".join(
            [f"RoleTable({len(labeled)} roles of {heads} heads)", *(f"  {role.sentence}" for role in best)]
        )

    def _repr_html_(self) -> str:
        header = ("layer", "head", "role", "score", "on shuffled words", "by chance")
        rows = [(role.layer, role.head, role.kind, role.score, role.null, role.chance) for role in self.labeled]
        return html_table(f"{len(rows)} roles of heads", header, rows, self.caveat)

    def table(self) -> str:
        """The labeled heads, one line each, under the caveat."""
        lines = [self.caveat, "layer head  score   null chance  role"]
        for role in self.labeled:
            numbers = f"{role.score:6.3f} {role.null:6.3f} {role.chance:6.3f}"
            target = MEANINGS[role.kind] if role.offset is None else f"{MEANINGS[role.kind]} ({role.offset:+d})"
            lines.append(f"{role.layer:5d} {role.head:4d} {numbers}  {role.kind}: {target}")
        return "\n".join(lines if self.labeled else [self.caveat, "No head has a role."])


@checked
@torch.no_grad()
def roles(
    maps: Mapping[str, AttentionMap],
    tokens: Sequence[str] | Sequence[int],
    *,
    null: Mapping[str, AttentionMap],
    null_tokens: Sequence[str] | Sequence[int],
    special: Sequence[int] | None = None,
    batch: Count = 0,
    numbers: Sequence[int] | None = None,
    sample: Size = SAMPLE,
) -> RoleTable:
    """Score every head for every role, on this input and on shuffled input.

    A score is the mean of sum_j w_ij over the keys of the role, for all queries that are not special and have such a
    key. For induction this is the prefix-matching score of Olsson et al. 2022, arXiv:2209.11895.
    The first key counts for the role "first" only, whatever its token is. Many heads put most weight on it, and would
    be called punctuation heads if the text began with a quotation mark. For "broad" the score is
    (1 - f) H' / ((1 - 1/n) log(n - 1)), at most 1, with f the weight on the first key, H' the entropy of the rest, and
    n the number of keys that the query may attend to. It is 1 if all weights are equal.
    `null` are the maps of a run on the shuffled tokens `null_tokens` (`shuffle_order`; for duplicate
    and induction heads shuffle `probe_tokens`).

    Roles of content (punctuation, duplicate, induction) depend on the words. Their null is the weight of the shuffled
    run on the same positions, divided by 1 - its weight on links that the shuffle happened to keep; a head that
    depends on positions only has the same score there. Such a role needs a score of at least `LABEL`, and of
    `MARGIN` more than both null and chance. Roles of position (previous, next, positional, first, special, broad) do
    not depend on the words. They need scores of at least `LABEL` on both inputs, and the lower of the two must be
    `MARGIN` above chance; "broad" needs at least `BROAD` on both.
    No role is given for fewer than `QUERIES` queries. `numbers` are the numbers of the layers; by default they are
    read from the module paths (`layer_numbers`). Of a text with more than `sample` queries, so many are drawn at
    random, the same for all maps, and scores are means over them. Then the time of most maps grows with the length,
    not with its square.

    >>> import torch, regard as rg
    >>> from regard.stats import shuffle_order
    >>> before = 20.0 * torch.eye(40).roll(1, -1)  # the score is large for the previous key
    >>> x = [t.expand(1, 1, 40, 40) for t in (before, torch.eye(40), before)]
    >>> maps = {"layer": rg.Attention(score=rg.Dot(scale=1.0))(x[0].mT, x[1], x[2]).weights}
    >>> tokens = list(range(40))
    >>> table = roles(maps, tokens, null=maps, null_tokens=[tokens[n] for n in shuffle_order(tokens)])
    >>> [role.kind for role in table.labeled]
    ['previous']
    """
    _check(maps, null, tokens, null_tokens)
    head_roles = []
    layers, queries = layer_numbers(maps, numbers), _drawn(maps.values(), len(tokens), sample)
    for number, weights, shuffled in zip(layers, maps.values(), null.values(), strict=True):
        weights, shuffled = one_text("roles", weights, batch), one_text("roles", shuffled, batch)
        text, shuffled_text = (Text.of(t, special, weights.device) for t in (tokens, null_tokens))
        scores, nulls = _measure(weights, text, None, queries), _measure(shuffled, text, shuffled_text, queries)
        for kind in KINDS:
            head_roles += roles_of_kind(kind, number, scores[kind], nulls[kind])
    return RoleTable(head_roles, None if len(queries) == len(tokens) else (len(queries), len(tokens)))


def _check(
    maps: Mapping[str, AttentionMap],
    null: Mapping[str, AttentionMap],
    tokens: Sequence[str | int],
    null_tokens: Sequence[str | int],
) -> None:
    """Refuse maps of other layers or lengths than those of the null and the tokens, and a null that is not shuffled."""
    if not maps or list(maps) != list(null):
        raise RegardError(
            "roles: maps and null must be of the same layers, at least one. Run the same model on the tokens and on "
            "the shuffled tokens."
        )
    for name, weights in (*maps.items(), *null.items()):
        if weights.shape[2:] != (len(tokens), len(null_tokens)):
            raise RegardError(
                f"roles: the map of {name!r} has {weights.shape[2]} queries and {weights.shape[3]} keys, for "
                f"{len(tokens)} tokens and {len(null_tokens)} shuffled tokens; all four must be equal. Roles need "
                "self-attention over a whole text."
            )
    if list(tokens) == list(null_tokens):
        raise RegardError("roles: null_tokens are the tokens themselves. Shuffle them: shuffle_order(tokens).")


def _drawn(maps: Iterable[AttentionMap], num_queries: int, sample: int) -> Tensor:
    """The queries that are read, ascending: all, or `sample` at random, the same at each call.

    All, if ranks of a group share a map: its grid has the queries of this rank only, so fewer than the text has.
    """
    is_shared = any(len(weights.grid.query) < num_queries for weights in maps)
    if num_queries <= sample or is_shared:
        return torch.arange(num_queries)
    return torch.randperm(num_queries, generator=torch.Generator().manual_seed(0))[:sample].sort().values


class Measured(NamedTuple):
    """Score, chance and number of queries of every head, (H,) each; (H, offsets) for the positional role."""

    score: Tensor
    chance: Tensor
    queries: Tensor


def _measure(weights: AttentionMap, text: Text, shuffled: Text | None, queries: Tensor) -> dict[str, Measured]:
    """The scores of one map for all roles.

    `text` is the text with the links of content. For the null, `shuffled` is the text that the run read, and links that
    both texts have are left out. `queries` are the indices of the queries that are read.
    """
    links = _links(text, shuffled)
    weights = weights if len(queries) == weights.shape[2] else QuerySample(weights, queries)
    queries = to_device(queries, weights.device)
    reductions = [TargetMass(weights, is_link, queries) for is_link in links.values()]
    allowed, entropy, diagonal, *rest = weights.summarize(
        Allowed(weights), Entropy(), Diagonals(weights, (-1, 1, *FIXED)), *reductions
    )
    ordinary = ~text.special[queries]
    sums = dict(zip(links, rest, strict=True))
    measured = {
        kind: mean_score(sums[kind], sums.get(f"kept {kind}"), allowed, ordinary) for kind in KINDS if kind in sums
    }
    offsets = mean_score(diagonal, None, allowed[:, :, None], ordinary)
    for kind, index in (("previous", 0), ("next", 1), ("positional", slice(2, None))):
        measured[kind] = Measured(offsets.score[:, index], offsets.chance[:, index], offsets.queries[:, index])
    measured["broad"] = _evenness(entropy, allowed, sums["first"], ordinary)
    return measured


def _evenness(entropy: Tensor, allowed: Tensor, at_first: tuple[Tensor, Tensor], ordinary: Tensor) -> Measured:
    """The score for "broad": the evenness of the weights outside the first key, 1 if all are equal (see `roles`).

    `at_first` is the weight on the first key and 1 where a query may attend to it, and `ordinary` (I,) the queries that
    are not special tokens. The others are (B, H, I).
    """
    first, first_allowed = at_first
    others = allowed - first_allowed
    largest = others / allowed.clamp_min(1) * others.clamp_min(2).log()
    has_choice = (others > 1) & ordinary
    rest = entropy_of_rest(entropy, first, -torch.xlogy(first, first))
    share = (rest / largest.clamp_min(1e-6)).clamp_max(1.0) * has_choice
    count = has_choice.sum(-1)[0].cpu()
    score = (share.sum(-1) / has_choice.sum(-1))[0].cpu()  # NaN where no query has a choice
    return Measured(score, torch.zeros_like(score), count)


def _links(text: Text, shuffled: Text | None) -> dict[str, IsLink]:
    """The links of every role that is not an offset: of the words of `text` or, for the null, at the same positions.

    For the null a link of content that `shuffled` has too is not under its role, but under "kept ...": there the words
    explain the weight. Special tokens are those that the run read.
    """
    content = {"punctuation": Text.punctuation_mark, "duplicate": Text.duplicate, "induction": Text.induction}
    links: dict[str, IsLink] = {"first": first_token, "special": (shuffled or text).special_token}
    for kind, of_text in content.items():
        if shuffled is None:
            links[kind] = partial(of_text, text)
        else:
            links[kind] = lambda i, j, of_text=of_text: of_text(text, i, j) & ~of_text(shuffled, i, j)
            links[f"kept {kind}"] = lambda i, j, of_text=of_text: of_text(text, i, j) & of_text(shuffled, i, j)
    return links


def mean_score(
    links: tuple[Tensor, Tensor], kept: tuple[Tensor, Tensor] | None, allowed: Tensor, ordinary: Tensor
) -> Measured:
    """The mean weight on links over the queries that are `ordinary` (I,) and have a link, with chance and their number.

    `links` are a result of `TargetMass` or `Diagonals`, (1, H, ..., I) each, and `allowed` is the number of keys.
    `kept` are the links that the shuffle kept: the score is the share of the weight that is not on them.
    """
    mass, num_links = links
    included = (num_links > 0) & ordinary
    num_queries = included.sum(-1)[0].cpu()
    other_weight = included if kept is None else (1 - kept[0]) * included
    score = ((mass * included).sum(-1) / other_weight.sum(-1))[0].cpu()
    chance = (num_links / allowed.clamp_min(1) * included).sum(-1)[0].cpu() / num_queries
    return Measured(score, chance, num_queries)


def roles_of_kind(kind: str, layer: int, score: Measured, null: Measured) -> list[Role]:
    """The roles of one kind for every head of a layer. A positional role has the offset with the highest score."""
    head_roles = []
    for head in range(len(score.score)):
        value, chance, queries = (part[head] for part in score)
        shuffled, offset = null.score[head], None
        if kind == "positional":  # each part is one number for each offset
            best = int(value.nan_to_num(-1.0).argmax())
            value, chance, queries, shuffled = (part[best] for part in (value, chance, queries, shuffled))
            offset = FIXED[best]
        numbers = float(value), float(shuffled), float(chance)
        label = int(queries) >= QUERIES and _has_role(kind, *numbers)
        head_roles.append(Role(kind, layer, head, *numbers[:2], label, numbers[2], int(queries), offset))
    return head_roles


def _has_role(kind: str, score: float, null: float, chance: float) -> bool:
    """Whether these scores give a head the role: see `roles`. They do not if the null is NaN."""
    if kind == "broad":
        return score >= BROAD and null >= BROAD  # min would leave a NaN out
    if kind in CONTENT:
        return score >= LABEL and score - null >= MARGIN and score - chance >= MARGIN
    return score >= LABEL and null >= LABEL and min(score, null) - chance >= MARGIN
