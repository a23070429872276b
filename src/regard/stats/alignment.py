"""Alignments of two sequences: roles of cross-attention, and the times of tokens in audio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.base.checks import Count, Size, checked
from regard.base.errors import RegardError, first_few
from regard.maps import AttentionMap
from regard.stats.numbering import layer_numbers
from regard.stats.profile import one_text
from regard.stats.roles import Measured, RoleTable, roles_of_kind

# Dynamic time warping of an attention map: the monotone path with the largest weight, and the times of tokens in audio.


#: The step of a path to the cell (i, j): from (i - 1, j - 1), from (i - 1, j), or from (i, j - 1).
BOTH, QUERY, KEY = 0, 1, 2


class TimeAlignment(NamedTuple):
    """The cells of a path, first to last: the index of the query and of the key of each, (cells,).

    >>> import torch
    >>> from regard.stats import warping_path
    >>> warping_path(2 * torch.eye(2) - 1).keys
    tensor([0, 1])
    """

    queries: Tensor
    keys: Tensor


@checked
def warping_path(gains: Tensor) -> TimeAlignment:
    """The monotone path of largest sum through `gains` (I, J), from the first cell to the last.

    A path steps to the next query, to the next key, or to both: dynamic time warping (Sakoe & Chiba 1978) with the
    costs -gains. If steps to a cell are equally good, the path takes that from the key before, else that from the
    query before, as in Whisper.

    >>> import torch
    >>> from regard.stats import warping_path
    >>> path = warping_path(torch.tensor([[0.9, 0.8, -1.0], [0.1, -1.0, 0.9]]))
    >>> list(zip(path.queries.tolist(), path.keys.tolist()))
    [(0, 0), (0, 1), (1, 2)]
    """
    if gains.ndim != 2 or 0 in gains.shape or gains.is_complex() or not bool(gains.isfinite().all()):
        raise RegardError(
            f"warping_path: gains are finite numbers (queries, keys), at least one of each; got {gains.dtype} of shape "
            f"{tuple(gains.shape)}."
        )
    _, steps = _warp(gains[None].double().cpu())
    query, key = (size - 1 for size in gains.shape)
    cells = [(query, key)]  # from the last cell back to the first
    while query or key:
        # in the first row and the first column there is one way back
        step = KEY if not query else QUERY if not key else int(steps[query + key, 0, query])
        query, key = query - (step != KEY), key - (step != QUERY)
        cells.append((query, key))
    return TimeAlignment(*torch.tensor(cells[::-1]).unbind(1))


def path_sums(gains: Tensor) -> Tensor:
    """The sum along the best monotone path of each of several maps (N, I, J); (N,), in float64."""
    return _warp(gains.double())[0]


def _warp(gains: Tensor) -> tuple[Tensor, Tensor]:
    """The largest sums (N,) of paths through `gains` (N, I, J), and the step to cell (i, j) at `steps[i + j, n, i]`.

    Cells with the same i + j form a diagonal. They depend on the two diagonals before only, so each diagonal is one
    operation. The sums of a diagonal have the index i + 1: index 0 stays -inf, for steps from before the first query.
    """
    N, I, J = gains.shape
    no_sums = gains.new_full((N, I + 1), -torch.inf)
    second_last, last = no_sums.clone(), no_sums.clone()
    steps = torch.zeros(I + J - 1, N, I, dtype=torch.int8, device=gains.device)
    for diagonal in range(I + J - 1):
        low, high = max(0, diagonal - J + 1), min(diagonal, I - 1) + 1  # the queries of its cells
        i = torch.arange(low, high, device=gains.device)
        both, query, key = second_last[:, low:high], last[:, low:high], last[:, low + 1 : high + 1]
        step = torch.where((both > query) & (both > key), BOTH, torch.where((query > both) & (query > key), QUERY, KEY))
        steps[diagonal, :, low:high] = step
        # a path begins in the first cell, which no step leads to
        best = torch.maximum(both, torch.maximum(query, key)) if diagonal else torch.zeros_like(both)
        second_last, last = last, no_sums.clone()
        last[:, low + 1 : high + 1] = best + gains[:, i, diagonal - i]
    return last[:, I], steps


@checked
def token_times(
    maps: Mapping[str, AttentionMap],
    heads: Sequence[tuple[int, int]],
    *,
    seconds: float = 0.02,
    num_keys: Size | None = None,
    first: Count = 0,
    filter_width: Size = 7,
    batch: Count = 0,
    numbers: Sequence[int] | None = None,
) -> Tensor:
    """When each token begins in the sound, in seconds, from alignment heads of cross-attention; (tokens,).

    As in Whisper (Radford et al. 2022, arXiv:2212.04356): the weights of each head are standardized over the tokens,
    z_ij = (w_ij - mean_i w_ij) / std_i w_ij, smoothed by a median filter along the sound, and averaged over the heads.
    Dynamic time warping (`warping_path`) finds the monotone path, and a token begins where the path enters its row.

    `heads` are (layer, head): `model.generation_config.alignment_heads` of a Whisper, or the heads that
    `alignment_roles` finds. `seconds` is the length of one key, and `num_keys` the number of keys before the sound
    ends. `first` is the first query that counts. The step that predicts a token attends to the beginning of this token,
    so `first` is the last token of the prompt, as in OpenAI's Whisper. transformers counts from the next query, the
    first token of the text, so its times are the ends of the tokens. If all tokens give a key the same weight, its z
    is 0.

    `batch` is the entry of each map that is read. `numbers` are the numbers of the layers; by default they are read
    from the module paths (`layer_numbers`).

    >>> import torch, regard as rg
    >>> keys = torch.tensor([1.0, 4.0, 5.0])                 # three tokens that attend around the keys 1, 4 and 5
    >>> near = -4.0 * (keys[:, None] - torch.arange(8)).abs()
    >>> attention = rg.Attention(score=rg.Dot(scale=1.0))
    >>> x = attention(near[None, None], torch.eye(8)[None, None], torch.eye(8)[None, None])
    >>> token_times({"layers.0": x.weights}, [(0, 0)], seconds=1.0, filter_width=1)
    tensor([0., 3., 5.], dtype=torch.float64)
    """
    if filter_width % 2 == 0:
        raise RegardError(f"token_times(filter_width={filter_width}): a median needs an odd width, such as 7.")
    by_number = dict(zip(layer_numbers(maps, numbers), maps.values(), strict=True))
    chosen = [_head(by_number, layer, head) for layer, head in heads]
    if not chosen:
        raise RegardError("token_times: there are no heads. Give at least one (layer, head): see alignment_roles.")
    _check_sizes(chosen, num_keys, first)
    rows = [one_text("token_times", one, batch).tile(rows=slice(first, None))[0, 0] for one in chosen]
    weights = torch.stack(rows).double()[..., :num_keys]
    path = warping_path(median_filter(_standardized(weights), filter_width).mean(0))
    begins = torch.cat([path.queries.new_ones(1), path.queries.diff()]).bool()  # the first cell of each query
    return path.keys[begins].double() * seconds


def _head(maps: Mapping[int, AttentionMap], layer: int, head: int) -> AttentionMap:
    """The map of one head of a layer, (B, 1, I, J); `maps` are by number of the layer."""
    if layer not in maps or not 0 <= head < maps[layer].shape[1]:
        known = ", ".join(f"layer {number}: heads 0 to {one.shape[1] - 1}" for number, one in list(maps.items())[:3])
        raise RegardError(f"token_times: there is no head {head} in a layer {layer}. The maps have {known}.")
    return maps[layer].select(torch.arange(maps[layer].shape[0]), torch.tensor([head]))


def _check_sizes(chosen: Sequence[AttentionMap], num_keys: int | None, first: int) -> None:
    """Refuse maps of different sizes, and maps that have no query from `first` on, or fewer than `num_keys` keys."""
    sizes = {one.shape[2:] for one in chosen}
    if len(sizes) > 1:
        raise RegardError(
            f"token_times: the heads have maps of different sizes: {first_few(sorted(sizes))}. Give heads of the "
            "attention of one decoder to one encoder."
        )
    queries, keys = next(iter(sizes))
    if first >= queries or (num_keys or keys) > keys:
        raise RegardError(
            f"token_times(first={first}, num_keys={num_keys}): the maps have {queries} queries and {keys} keys. Leave "
            "at least one query, and give at most the keys that there are."
        )


def _standardized(weights: Tensor) -> Tensor:
    """(w - mean) / std over the queries; 0 where all queries give a key the same weight."""
    deviation = weights.std(-2, unbiased=False, keepdim=True)
    centered = weights - weights.mean(-2, keepdim=True)
    return torch.where(deviation > 0, centered / deviation.clamp_min(torch.finfo(weights.dtype).tiny), 0.0)


def median_filter(values: Tensor, width: int) -> Tensor:
    """The median of the `width` values around each, along the last axis; the ends are reflected.

    An axis that is not longer than half the width stays as it is, as in Whisper.

    >>> import torch
    >>> median_filter(torch.tensor([[1.0, 9.0, 2.0, 3.0]]), 3)
    tensor([[9., 2., 3., 2.]])
    """
    beside = width // 2
    if values.shape[-1] <= beside:
        return values
    flat = F.pad(values.flatten(0, -2)[None], (beside, beside), mode="reflect")[0]
    return flat.unfold(-1, width, 1).median(-1).values.view(values.shape)


# Roles of cross-attention heads: those that read the source in order, and those that give a known word alignment.


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
    """(target tokens, source tokens) of each sentence: `lengths`, or those of whole maps; errors if they do not fit."""
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
    if gold is not None and len(gold) != sentences:
        raise RegardError(f"alignment_roles: {len(gold)} sets of gold links for {sentences} sentences. Give one each.")
    for sentence, (links, (targets, sources)) in enumerate(zip(gold or (), given, strict=False)):
        outside = [link for link in links if not (0 <= link[0] < sources and 0 <= link[1] < targets)]
        if outside:
            raise RegardError(
                f"alignment_roles: the gold link {outside[0]} of sentence {sentence} is outside its {sources} source "
                f"and {targets} target tokens. Links are (source token, target token), counted from 0."
            )
    return given


def _sentence(weights: AttentionMap, sentence: int, first: int, targets: int, sources: int) -> Tensor:
    """The weights of one sentence, (H, targets, sources)."""
    text = one_text("alignment_roles", weights, sentence)
    return text.tile(rows=slice(first, first + targets), cols=slice(0, sources))[0].double()


def _monotonic(texts: Sequence[Tensor]) -> tuple[Measured, Measured]:
    """The score and the null of "monotonic", from the weights of each sentence, (H, targets, sources)."""
    num_queries = torch.tensor([text.shape[1] for text in texts]).sum()
    draw = torch.Generator().manual_seed(0)
    # sums over the queries of a sentence, so that dividing by all queries weights sentences by their length
    scores = torch.stack([path_sums(text) for text in texts])
    nulls = torch.stack([_shuffled_sums(text, draw) for text in texts])
    chances = torch.tensor([(I + J - 1) / J for _, I, J in (text.shape for text in texts)], dtype=torch.float64)
    counts = num_queries.expand(len(texts[0]))
    by_chance = (chances.sum() / num_queries).expand(len(texts[0]))
    score, null = (sums.sum(0).cpu() / num_queries for sums in (scores, nulls))
    return Measured(score, by_chance, counts), Measured(null, by_chance, counts)


def _shuffled_sums(text: Tensor, draw: torch.Generator) -> Tensor:
    """The mean of the path sums (H,) over random orders of the queries of `text` (H, I, J)."""
    orders = [torch.randperm(text.shape[1], generator=draw) for _ in range(ORDERS)]
    return torch.stack([path_sums(text[:, rows]) for rows in orders]).mean(0)


def _aligned(texts: Sequence[Tensor], gold: Sequence[Links]) -> tuple[Measured, Measured]:
    """The score and the null of "alignment", from the weights of each sentence, (H, targets, sources)."""
    on_gold, on_others, shares = [], [], []
    for text, links in zip(texts, gold, strict=True):
        is_gold = text.new_zeros(text.shape[1:])
        if links:
            source, target = torch.tensor(sorted(links)).unbind(1)
            is_gold[target, source] = 1.0
        linked = is_gold.sum(-1) > 0
        mass = text[:, linked] @ is_gold[linked].T  # [h, t, u]: the weight of target token t on the links of u
        own, count = mass.diagonal(dim1=1, dim2=2), mass.shape[1]
        on_gold.append(own)
        on_others.append((mass.sum(-1) - own) / max(1, count - 1))
        shares.append(is_gold[linked].sum(-1) / text.shape[2])
    score, null, chance = (torch.cat(parts, -1).cpu() for parts in (on_gold, on_others, shares))
    heads, queries = len(score), torch.tensor(score.shape[1])
    counts, by_chance = queries.expand(heads), chance.mean().expand(heads)
    return Measured(score.mean(-1), by_chance, counts), Measured(null.mean(-1), by_chance, counts)
