"""RoPE with a factor for each pair of channels."""

from collections.abc import Sequence

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.encodings import LongRoPEScaling, RoPE
from regard.masks import causal


@explained
def longrope(factors: Sequence[float], extension: float = 1.0, trained_length: int = 4096) -> Attention:
    """RoPE whose pairs of channels turn slower by a factor each, found by a search: Phi-3.

    `extension` is the longest length divided by `trained_length`, the length of the texts in training.
    """
    scaling = LongRoPEScaling(factors, extension, trained_length)
    return Attention(position=RoPE(2 * len(factors), scaling=scaling), mask=causal())


MECHANISM = CatalogEntry(
    build=longrope,
    formula="rope with frequencies f_m / factor_m, and queries and keys times "
    "sqrt(1 + log(extension) / log(trained_length))",
    paper="Ding et al. 2024, arXiv:2402.13753",
    year=2024,
    used_by=("phi3", "phi4_multimodal"),
    cost="the same as rope",
    tiny={"factors": (1.0, 1.5, 2.0, 4.0), "extension": 4.0, "trained_length": 64},
    sizes={"heads": 2, "queries": 16},
    disagree="transformers has factors for short and for long texts and chooses at each call; keys in a cache are not "
    "rotated again when a text becomes long. Here one list is given.",
    also_called=("long RoPE", "LongRoPE", "su scaling", "long_factor"),
)
