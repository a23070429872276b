"""How local, global, distributed and block-like every head is; how far heads look; and maps of contacts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from regard.base.checks import Count, Size, checked
from regard.base.errors import RegardError
from regard.maps import AttentionMap, Distance, KeyTotals, MassWhere, Reduction, Tile
from regard.maps.reductions import Shape, State, zeros
from regard.pieces.data_masks import documents
from regard.pieces.mask import window
from regard.stats.numbering import layer_numbers
from regard.stats.profile import one_text
from regard.stats.roles import may_attend
from regard.stats.statistics import Allowed, Offsets, mean_of_rows

# `patterns` scores how local, global, distributed and block-like every head is, each from 0 to 1.


#: Positions to either side that count as local.
NEAR = 2
#: Share of all keys that a global head may attend to from everywhere (at least one key).
FEW = 0.05
#: Numbers of equal blocks that `patterns` tries if no segments are given.
BLOCKS = (2, 4, 8, 16)


@dataclass(frozen=True, eq=False)
class LayerPatterns:
    """Four scores and the participation of every head of one layer, (H,) each; all from 0 to 1.

    With w the weights, n_i the number of keys that query i may attend to, and u_ij = 1 / n_i equal weights.
    Scores with s and e are max(0, (s - e) / (1 - e)): 0 if s is as expected (e), 1 if s is 1.

    - `local`: s the mean weight on keys at most `NEAR` positions away, e that of u.
    - `global_keys`: s the share of all weight on the `FEW` keys that receive most weight, e that of u on these keys.
    - `distributed`: mean over queries of (p_i - 1) / (n_i - 1), with p_i = 1 / sum_j w_ij^2 the effective
      number of keys of a row (its participation ratio). Queries with one key are left out.
    - `block`: s the share of all weight within the query's own segment, e the share that a head with
      the same total weight at each offset j - i, but without regard to segments, puts there. So a head that is only
      local scores 0.
    - `participation`: mean over queries of p_i / n_i.

    >>> import torch, regard as rg
    >>> from regard.stats import patterns
    >>> x = 1000 * torch.eye(40).expand(1, 1, 40, 40)
    >>> scores = patterns(rg.Attention()(x, x, x).weights)  # every query attends to itself only
    >>> scores.local, scores.distributed, scores.participation
    (tensor([1.]), tensor([0.]), tensor([0.0250]))
    """

    local: Tensor
    global_keys: Tensor
    distributed: Tensor
    block: Tensor
    participation: Tensor

    def table(self) -> str:
        """One line of plain text for each head."""
        names = [field.name for field in fields(self)]
        lines = ["head " + " ".join(f"{name:>13}" for name in names)]
        for head in range(len(self.local)):
            lines.append(f"{head:4d} " + " ".join(f"{float(getattr(self, name)[head]):13.3f}" for name in names))
        return "\n".join(lines)


@checked
def patterns(weights: AttentionMap, segments: Sequence[int] | Tensor | None = None, batch: Count = 0) -> LayerPatterns:
    """The patterns of every head of one text of a self-attention map, in two passes and O(n) memory.

    `batch` is the index of the text in the map. `segments` are the lengths of the segments for `block`, such as
    sentences; they add up to the length of the text. By default `block` is the best score of 2, 4, 8 and 16 equal
    segments.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 40, 4)
    >>> scores = patterns(rg.Attention()(x, x, x).weights)
    >>> [round(float(score), 3) for score in (scores.local, scores.global_keys, scores.distributed, scores.block)]
    [0.0, 0.0, 1.0, 0.0]
    """
    I, J = weights.shape[2:]
    if I != J:
        raise RegardError(f"patterns: queries and keys must be the same text, got {I} queries and {J} keys.")
    text_map = one_text("patterns", weights, batch)
    divisions = _divisions(I, segments)
    (allowed,) = text_map.summarize(Allowed(text_map))  # n_i of each head and query
    (near, near_equal), (received, received_equal), squares, offsets, *inside = text_map.summarize(
        WithEqualWeights(MassWhere(window(NEAR + 1)), text_map, allowed),  # window(w) is |i - j| < w
        WithEqualWeights(KeyTotals(), text_map, allowed),
        Squares(),
        Offsets(1 - I, I - 1),
        *(MassWhere(documents(lengths)) for lengths in divisions),
    )
    # p_i is from 1 to n_i but for rounding; where a row has no key, 1 / squares would be infinite
    effective = (1 / squares.clamp_min(torch.finfo(torch.float32).tiny)).clamp(1.0).minimum(allowed.clamp_min(1))
    has_choice = allowed > 1
    distributed = ((effective - 1) / (allowed - 1).clamp_min(1) * has_choice).sum(-1) / has_choice.sum(-1).clamp_min(1)
    blocks = torch.stack([_block(mass, offsets, lengths) for mass, lengths in zip(inside, divisions, strict=True)])
    scores = (
        _above(mean_of_rows(near, allowed), mean_of_rows(near_equal, allowed)),
        _global_keys(received, received_equal),
        distributed,
        blocks.amax(0),
        mean_of_rows(effective / allowed.clamp_min(1), allowed),
    )
    return LayerPatterns(*(score[0].cpu() for score in scores))


def _divisions(n: int, segments: Sequence[int] | Tensor | None) -> list[list[int]]:
    """Lengths of segments for each division of `n` tokens to try: the given lengths, or equal lengths."""
    if segments is not None:
        lengths = _lengths(segments)
        if sum(lengths) != n or min(lengths, default=0) < 1:
            raise RegardError(f"patterns: segments are lengths of at least 1 that add up to {n}, got {lengths}.")
        return [lengths]
    divisions = [[(k + 1) * n // blocks - k * n // blocks for k in range(blocks)] for blocks in BLOCKS if blocks <= n]
    return divisions or [[n]]


def _lengths(segments: Sequence[int] | Tensor) -> list[int]:
    """`segments` as a list of integers; an error for a tensor that is no vector of integers."""
    if not isinstance(segments, Tensor):
        return [int(length) for length in segments]
    if segments.ndim != 1 or segments.dtype not in (torch.int32, torch.int64) or segments.is_meta:
        raise RegardError(f"patterns: segments are a vector of lengths, got {segments.dtype} {tuple(segments.shape)}.")
    return segments.tolist()


def _above(score: Tensor, expected: Tensor) -> Tensor:
    """(s - e) / (1 - e), from 0 to 1; 0 if the expected score is already 1."""
    room = 1 - expected
    return torch.where(room > 1e-6, (score - expected) / room.clamp_min(1e-6), 0.0).clamp(0.0, 1.0)


def _global_keys(received: Tensor, received_equal: Tensor) -> Tensor:
    """The score `global_keys` (B, H), from the weight that each key receives, (B, H, J), and that of equal weights."""
    count = max(1, round(FEW * received.shape[-1]))
    keys = received.topk(count, -1).indices  # the same keys for both shares
    share, expected = (
        part.gather(-1, keys).sum(-1) / part.sum(-1).clamp_min(1e-12) for part in (received, received_equal)
    )
    return _above(share, expected)


def _block(inside: Tensor, offsets: Tensor, lengths: list[int]) -> Tensor:
    """The score (B, H) of the weight within segments of these lengths, compared with what the offsets let expect.

    `inside` (B, H, I) is the weight of each query within its segment, `offsets` (B, H, 2 n - 1) that at each j - i.
    A head without regard to segments spreads the weight at an offset evenly over the n - |j - i| pairs of this offset.
    """
    n = sum(lengths)
    distances = torch.arange(1 - n, n).abs()
    num_inside = torch.zeros(2 * n - 1, dtype=torch.float64)  # how many of these pairs are within a segment
    for length in lengths:
        num_inside += (length - distances).clamp_min(0)
    expected = (offsets * (num_inside / (n - distances)).to(offsets)).sum(-1)
    total = offsets.sum(-1).clamp_min(1e-12)
    return _above(inside.sum(-1) / total, expected / total)


@dataclass(frozen=True, eq=False)
class WithEqualWeights(Reduction):
    """The pair of results of another reduction, for the weights of a map and for equal weights on its allowed keys.

    `weights` is the map, and `allowed` (B, H, I) the number of keys that each query may attend to. The state is that
    of the reduction twice: the first half for the weights, the second half for equal weights.
    """

    reduction: Reduction
    weights: AttentionMap
    allowed: Tensor

    def init(self, shape: Shape, device: torch.device) -> State:
        return [*self.reduction.init(shape, device), *self.reduction.init(shape, device)]

    def add(self, state: State, tile: Tile) -> None:
        half = len(state) // 2
        self.reduction.add(state[:half], tile)
        equal = may_attend(self.weights, tile) / self.allowed[:, :, tile.rows, None].clamp_min(1)
        equal = equal.expand(tile.weights.shape).to(tile.weights.dtype)
        self.reduction.add(state[half:], replace(tile, weights=equal, log_weights=None))

    def finish(self, state: State) -> tuple[Any, Any]:
        half = len(state) // 2
        return self.reduction.finish(state[:half]), self.reduction.finish(state[half:])


@dataclass(frozen=True)
class Squares(Reduction):
    """sum_j w_ij^2, the inverse of the participation ratio p_i of a row; (B, H, I)."""

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:3])]

    def add(self, state: State, tile: Tile) -> None:
        state[0][:, :, tile.rows] += torch.linalg.vecdot(tile.weights, tile.weights)


# How far the heads of each layer look: mean distance, and the weight within a few tokens.


#: Least share of the weight that a local head puts on near keys.
LOCAL = 0.9


@dataclass(frozen=True, eq=False)
class LayerLocality:
    """The locality of the heads of one layer, (H,) each.

    `distance` is the mean of sum_j w_ij |i - j| over the queries, in tokens; `near` that of the weight on keys at most
    `within` positions away, and `chance` the same for equal weights. `is_local` says which heads put at least 0.9
    there, and 0.2 more than equal weights do.

    >>> import torch
    >>> from regard.types import LayerLocality
    >>> near, chance = torch.tensor([0.95, 0.4]), torch.full((2,), 0.3)
    >>> print(LayerLocality(2, 8, torch.tensor([1.5, 9.0]), near, chance).sentence)
    Layer 2: 1 of 2 heads is local; mean distance 5.2 tokens, 68 % of the weight within 8 tokens (30 % by chance).
    """

    number: int
    within: int
    distance: Tensor
    near: Tensor
    chance: Tensor

    @property
    def is_local(self) -> Tensor:
        """Which heads are local; (H,)."""
        return (self.near >= LOCAL) & (self.near - self.chance >= 0.2)

    @property
    def sentence(self) -> str:
        """The layer in one sentence."""
        count, near, chance = int(self.is_local.sum()), float(self.near.mean()), float(self.chance.mean())
        return (
            f"Layer {self.number}: {count} of {len(self.near)} heads {'is' if count == 1 else 'are'} local; mean "
            f"distance {float(self.distance.mean()):.1f} tokens, {100 * near:.0f} % of the weight within {self.within} "
            f"tokens ({100 * chance:.0f} % by chance)."
        )


@dataclass(frozen=True, eq=False)
class ModelLocality:
    """The locality of every layer: `print(locality(seen.maps).table())`.

    >>> import torch
    >>> from regard.types import ModelLocality
    >>> from regard.types import LayerLocality
    >>> layer = LayerLocality(0, 8, torch.ones(2), torch.tensor([0.95, 0.4]), torch.full((2,), 0.3))
    >>> ModelLocality([layer]).local_heads
    [(0, 0)]
    """

    layers: list[LayerLocality]

    @property
    def local_heads(self) -> list[tuple[int, int]]:
        """(layer, head) of every local head."""
        return [(layer.number, int(head)) for layer in self.layers for head in layer.is_local.nonzero().flatten()]

    def table(self) -> str:
        """One sentence for each layer."""
        return "\n".join(layer.sentence for layer in self.layers)


@checked
def locality(
    maps: Mapping[str, AttentionMap],
    *,
    within: Size = 8,
    batch: Count = 0,
    numbers: Sequence[int] | None = None,
) -> ModelLocality:
    """How local the heads of each layer are, in one pass over the weights of each map.

    Of every head the mean distance, and the share of the weight at most `within` positions away, beside that of equal
    weights on the keys that the mask allows. Lower layers of a model tend to be local (Clark et al. 2019,
    arXiv:1906.04341, for BERT). Queries without a key are left out. Of signed weights these are the shares of
    |weight|.

    `batch` is the entry of each map that is read. `numbers` are the numbers of the layers; by default they are read
    from the module paths (`layer_numbers`).

    >>> import torch, regard as rg
    >>> x = 1000 * torch.eye(40).expand(1, 1, 40, 40)          # every query attends to itself
    >>> print(locality({"layers.0": rg.Attention()(x, x, x).weights}, within=2).table())
    Layer 0: 1 of 1 heads is local; mean distance 0.0 tokens, 100 % of the weight within 2 tokens (12 % by chance).
    """
    if not maps:
        raise RegardError("locality: there are no maps. Watch at least one attention layer.")
    layers = []
    for (name, weights), number in zip(maps.items(), layer_numbers(maps, numbers), strict=True):
        I, J = weights.shape[2:]
        if I != J:
            raise RegardError(
                f"locality: the map of {name!r} has {I} queries and {J} keys. Distances need self-attention over a "
                "whole text; alignment_roles scores cross-attention."
            )
        layers.append(_layer(one_text("locality", weights, batch), number, within))
    return ModelLocality(layers)


def _layer(weights: AttentionMap, number: int, within: int) -> LayerLocality:
    """The locality of one text of the layer `number`, as means over the queries that have a key."""
    (allowed,) = weights.summarize(Allowed(weights))
    near_keys = MassWhere(window(within + 1))  # window(w) is |i - j| < w
    distance, (near, equal) = weights.summarize(Distance(), WithEqualWeights(near_keys, weights, allowed))
    return LayerLocality(number, within, *(mean_of_rows(part, allowed)[0].cpu() for part in (distance, near, equal)))


# Contact maps: which residues of a protein an attention head couples.


@checked
def contact_maps(weights: AttentionMap, special: Sequence[int] = (), batch: Count = 0) -> Tensor:
    """The contact map of every head, (H, L, L): its weights, symmetrized and corrected by their mean.

        S = W + W^T,    C_ij = S_ij - (sum_k S_ik) (sum_k S_kj) / sum_kl S_kl

    The correction (APC, average product correction) subtracts what residues receive from all others, so that a column
    that every residue attends to is no contact. These are the inputs of the contact regression of Rao et al. 2021,
    "Transformer protein language models are unsupervised structure learners". `special` are the indices of tokens that
    are no residues (`<cls>`, `<eos>`); they are left out, and L residues remain. The maps are dense: L^2 numbers each.

    >>> import torch, regard as rg
    >>> from regard.stats import contact_maps
    >>> weights = rg.Attention()(*torch.randn(3, 1, 2, 6, 4)).weights
    >>> contacts = contact_maps(weights, special=[0, 5])
    >>> contacts.shape, bool(contacts.sum(-1).abs().max() < 1e-5)  # each row sums to 0
    (torch.Size([2, 4, 4]), True)
    """
    _, _, I, J = weights.shape
    if I != J:
        raise RegardError(
            f"contact_maps: the map has {I} queries and {J} keys. Contacts need self-attention over a whole sequence, "
            "where both are equal."
        )
    wrong = [index for index in special if not 0 <= index < J]
    if wrong:
        raise RegardError(f"contact_maps: special={list(special)}: {wrong[0]} is not the index of one of {J} tokens.")
    residues = [index for index in range(J) if index not in set(special)]
    dense = one_text("contact_maps", weights, batch).dense()[0][:, residues][:, :, residues]
    symmetric = dense + dense.mT
    product = symmetric.sum(-1, keepdim=True) * symmetric.sum(-2, keepdim=True)
    return symmetric - product / symmetric.sum((-2, -1), keepdim=True)
