"""Roles of cross-attention heads: those that read the source in order, and those that give a known word alignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from regard.base.checks import Count, checked
from regard.base.errors import RegardError
from regard.maps import AttentionMap
from regard.stats.numbering import layer_numbers
from regard.stats.profile import one_text
from regard.stats.roles import Measured, RoleTable, roles_of_kind
from regard.stats.time_warping import path_sums

#: Number of random orders of the rows that the null of "monotonic" averages.
ORDERS = 4
#: Links (source token, target token) of one sentence, counted from 0.
Links = AbstractSet[tuple[int, int]]


@checked
@torch.no_grad()
def alignment_roles(
    maps: Mapping[str, AttentionMap],
    *,
    gold: Sequence[Links] | None = None,
    lengths: Sequence[tuple[int, int]] | None = None,
    first: Count = 0,
    numbers: Sequence[int] | None = None,
) -> RoleTable:
    """Score every head of the cross-attention by how monotonic its map is, and by a gold alignment if there is one.

    monotonic: the share of the weight on the best monotone path,
    max over paths P of (1/I) sum_(i,j in P) w_ij, where a path goes from the first cell to the last and steps to the
    next query, the next key, or both (dynamic time warping, Sakoe & Chiba 1978). A head that reads the source from
    left to right has 1, however long its stops are. The null is the same score with the rows in random order (the mean
    over 4 orders), and chance that of equal weights, (I + J - 1) / (I J). A head that always attends to the same
    token has 1 on both, so it has no role.

    alignment: the mean over target tokens t with links of sum_(s in gold(t)) w_ts, the weight on the gold source
    tokens. The null is the mean of this weight for the links of the other target tokens of its sentence, and chance
    the number of links over the number of keys. Where the gold alignment is monotone, a head that goes by position
    alone has this role too. Chen et al. 2020, arXiv:2004.14837, read the alignment error of heads in this way.

    Both kinds need a score of at least 0.4, and of 0.2 more than null and chance, over at least 25 target tokens.

    All sentences of the batch are averaged, weighted by their target tokens. `lengths` are (target tokens, source
    tokens) of each sentence, without padding; by default the whole map. `first` is the number of leading queries that
    are left out: the prompt of Whisper, or 1 for a translator whose words are read at the step that takes them as
    input. `gold` are links (source token, target token) of each sentence, as `read_pharaoh` returns them; target
    token 0 is the query `first`. Special tokens of the source are keys like all others: leave those at the end out by
    `lengths`.

    Tried on the published Whisper tiny.en, which reads 28 words of synthetic speech: its 8 known alignment heads
    (`alignment_heads` of its configuration) are among the first 12 of 24 heads for the words that a step predicts.
    L2.H1 and L1.H5, which are not on the list, are among them too. Heads for the words that a step reads are others
    (L1.H2, L0.H4). Natural speech and larger Whispers were not tried.

    >>> import torch, regard as rg
    >>> there = torch.eye(40).repeat_interleave(2, 0) * 9    # 80 queries; query i attends to key i // 2
    >>> x = rg.Attention(score=rg.Dot(scale=1.0))(there[None, None], *[torch.eye(40)[None, None]] * 2)
    >>> [(role.kind, round(role.score, 2)) for role in alignment_roles({"layers.0": x.weights}).labeled]
    [('monotonic', 1.0)]
    """
    sizes = _sizes(maps, lengths, gold, first)
    head_roles = []
    for number, weights in zip(layer_numbers(maps, numbers), maps.values(), strict=True):
        texts = [_sentence(weights, n, first, *size) for n, size in enumerate(sizes)]
        head_roles += roles_of_kind("monotonic", number, *_monotonic(texts))
        if gold is not None:
            head_roles += roles_of_kind("alignment", number, *_aligned(texts, gold))
    return RoleTable(head_roles)


def _sizes(
    maps: Mapping[str, AttentionMap],
    lengths: Sequence[tuple[int, int]] | None,
    gold: Sequence[Links] | None,
    first: int,
) -> list[tuple[int, int]]:
    """(target tokens, source tokens) of each sentence, after checks."""
    shapes = {(weights.shape[0], *weights.shape[2:]) for weights in maps.values()}
    if len(shapes) != 1:
        raise RegardError(
            "alignment_roles: maps must be of the cross-attention of one run, at least one; got "
            f"{len(maps)} maps of {len(shapes)} sizes. A watched encoder-decoder has them in seen.cross.maps; a model "
            "without a decoder has no cross-attention."
        )
    sentences, queries, keys = shapes.pop()
    given = [(queries - first, keys)] * sentences if lengths is None else [(int(t), int(s)) for t, s in lengths]
    if len(given) != sentences or any(t < 1 or t > queries - first or s < 1 or s > keys for t, s in given):
        raise RegardError(
            f"alignment_roles: the maps have {sentences} sentences of {queries} queries and {keys} keys, and "
            f"first={first} leaves {max(0, queries - first)} queries. lengths are (target tokens, source tokens) of "
            "each sentence, at least 1 of each."
        )
    for sentence, links in enumerate(gold or ()):
        targets, sources = given[min(sentence, sentences - 1)]
        outside = [link for link in links if not (0 <= link[0] < sources and 0 <= link[1] < targets)]
        if outside:
            raise RegardError(
                f"alignment_roles: the gold link {outside[0]} of sentence {sentence} is outside its {sources} source "
                f"and {targets} target tokens. Links are (source token, target token), counted from 0."
            )
    if gold is not None and len(gold) != sentences:
        raise RegardError(f"alignment_roles: {len(gold)} sets of gold links for {sentences} sentences. Give one each.")
    return given


def _sentence(weights: AttentionMap, sentence: int, first: int, targets: int, sources: int) -> Tensor:
    """The weights of one sentence, (H, targets, sources)."""
    text = one_text("alignment_roles", weights, sentence)
    return text.tile(rows=slice(first, first + targets), cols=slice(0, sources))[0].double()


def _monotonic(texts: Sequence[Tensor]) -> tuple[Measured, Measured]:
    num_rows = torch.tensor([text.shape[1] for text in texts])
    order = torch.Generator().manual_seed(0)
    scores = torch.stack([path_sums(text) for text in texts])
    nulls = torch.stack([_shuffled_sums(text, order) for text in texts])
    chances = torch.tensor([(t.shape[1] + t.shape[2] - 1) / t.shape[2] for t in texts], dtype=torch.float64)
    total, heads = num_rows.sum(), len(texts[0])
    counts = total.expand(heads)
    score = Measured(scores.sum(0).cpu() / total, (chances.sum() / total).clamp_max(1.0).expand(heads), counts)
    return score, Measured(nulls.sum(0).cpu() / total, score.chance, counts)


def _shuffled_sums(text: Tensor, order: torch.Generator) -> Tensor:
    orders = [torch.randperm(text.shape[1], generator=order) for _ in range(ORDERS)]
    return torch.stack([path_sums(text[:, rows]) for rows in orders]).mean(0)


def _aligned(texts: Sequence[Tensor], gold: Sequence[Links]) -> tuple[Measured, Measured]:
    on_gold, on_others, shares = [], [], []
    for text, links in zip(texts, gold, strict=True):
        is_gold = text.new_zeros(text.shape[1:])
        if links:
            source, target = torch.tensor(sorted(links)).unbind(1)
            is_gold[target, source] = 1.0
        linked = is_gold.sum(-1) > 0
        mass = text[:, linked] @ is_gold[linked].T  # (H, row, row whose links are asked)
        own, count = mass.diagonal(dim1=1, dim2=2), mass.shape[1]
        on_gold.append(own)
        on_others.append((mass.sum(-1) - own) / max(1, count - 1))
        shares.append(is_gold[linked].sum(-1) / text.shape[2])
    score, null, chance = (torch.cat(parts, -1).cpu() for parts in (on_gold, on_others, shares))
    heads, queries = len(score), torch.tensor(score.shape[1])
    counts, by_chance = queries.expand(heads), chance.mean().expand(heads)
    return Measured(score.mean(-1), by_chance, counts), Measured(null.mean(-1), by_chance, counts)
