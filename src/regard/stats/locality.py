"""How far the heads of each layer look: mean distance, and the weight within a few tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from regard.base.checks import Count, Size, checked
from regard.base.errors import RegardError
from regard.maps import AttentionMap, Distance, MassWhere
from regard.pieces.mask import window
from regard.stats.numbering import layer_numbers
from regard.stats.patterns import WithEqualWeights
from regard.stats.profile import one_text
from regard.stats.statistics import Allowed

#: Least weight of a local head within the distance.
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
    """How local the heads of each layer are, in one pass over each map.

    Of every head the mean distance, and the share of the weight at most `within` positions away, beside that of equal
    weights on the keys that the mask allows. Lower layers of a model tend to be local (Clark et al. 2019,
    arXiv:1906.04341, for BERT). Queries without a key are left out. Of signed weights these are the shares of
    |weight|.

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
    (allowed,) = weights.summarize(Allowed(weights))
    distance, (near, equal) = weights.summarize(
        Distance(), WithEqualWeights(MassWhere(window(within + 1)), weights, allowed)
    )
    rows = (allowed > 0).sum(-1).clamp_min(1)
    return LayerLocality(number, within, *((part.sum(-1) / rows)[0].cpu() for part in (distance, near, equal)))
