"""Dynamic time warping of an attention map: the monotone path of most weight, and the times of tokens in a sound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.base.checks import Count, Size, checked
from regard.base.errors import RegardError, first_few
from regard.maps import AttentionMap
from regard.stats.numbering import layer_numbers
from regard.stats.profile import one_text

#: The steps of a path to a cell: from the cell before both, from the query before, from the key before.
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
    costs -gains. Equal steps are resolved as Whisper does: the next key first, then the next query.

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
    cells = [(query, key)]
    while query or key:
        step = KEY if not query else QUERY if not key else int(steps[query + key, 0, query])
        query, key = query - (step != KEY), key - (step != QUERY)
        cells.append((query, key))
    return TimeAlignment(*torch.tensor(cells[::-1]).unbind(1))


def path_sums(gains: Tensor) -> Tensor:
    """The sum along the best monotone path of each of several maps (N, I, J); (N,), in float64."""
    return _warp(gains.double())[0]


def _warp(gains: Tensor) -> tuple[Tensor, Tensor]:
    """Largest sums (N,), and the step to each cell (I + J - 1, N, I) by i + j and i.

    All cells with the same i + j depend on the two diagonals before only, so each diagonal is one operation.
    """
    N, I, J = gains.shape
    least = gains.new_full((N, I + 1), -torch.inf)  # the best sums of a diagonal, by i + 1
    before, last = least.clone(), least.clone()
    steps = torch.zeros(I + J - 1, N, I, dtype=torch.int8, device=gains.device)
    for diagonal in range(I + J - 1):
        low, high = max(0, diagonal - J + 1), min(diagonal, I - 1) + 1
        i = torch.arange(low, high, device=gains.device)
        both, query, key = before[:, low:high], last[:, low:high], last[:, low + 1 : high + 1]
        step = torch.where((both > query) & (both > key), BOTH, torch.where((query > both) & (query > key), QUERY, KEY))
        steps[diagonal, :, low:high] = step
        best = torch.maximum(both, torch.maximum(query, key)) if diagonal else torch.zeros_like(both)
        before, last = last, least.clone()
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
    ends. `first` is the first query that counts. The step that predicts a token attends to its beginning, so this is
    the last token of the prompt, as in OpenAI's Whisper. transformers begins one step later, at the first token of the
    text; its times are those of the ends. If all tokens give a key the same weight, its z is 0.

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
    begins = torch.cat([path.queries.new_ones(1), path.queries.diff()]).bool()
    return path.keys[begins].double() * seconds


def _head(maps: Mapping[int, AttentionMap], layer: int, head: int) -> AttentionMap:
    """The map of one head."""
    if layer not in maps or not 0 <= head < maps[layer].shape[1]:
        known = ", ".join(f"layer {number}: heads 0 to {one.shape[1] - 1}" for number, one in list(maps.items())[:3])
        raise RegardError(f"token_times: there is no head {head} in a layer {layer}. The maps have {known}.")
    return maps[layer].select(torch.arange(maps[layer].shape[0]), torch.tensor([head]))


def _check_sizes(chosen: Sequence[AttentionMap], num_keys: int | None, first: int) -> None:
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
