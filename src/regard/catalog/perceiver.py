"""Attention through latents: the cross-attentions of a Perceiver."""

from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.composites import ThroughLatents


@explained
def perceiver(head_dim: int, num_heads: int, num_latents: int = 64) -> ThroughLatents:
    """A few learned latents read all tokens, and the queries read the latents: a product of two maps.

    A Perceiver has layers between the two, which are not linear. `regard.maps.ProductMap` multiplies any two of its
    maps.
    """
    return ThroughLatents(num_latents, head_dim, num_heads)


MECHANISM = CatalogEntry(
    build=perceiver,
    formula="W = softmax(q L^T / sqrt(D)) softmax(L k^T / sqrt(D)), with L of size (num_latents, D) for each head",
    paper="Jaegle et al. 2021, arXiv:2103.03206; Jaegle et al. 2021, Perceiver IO, arXiv:2107.14795",
    family="key groups",
    year=2021,
    used_by=("perceiver",),
    cost="O(n num_latents D) time, O(n num_latents) memory",
    tiny={"num_latents": 3, "head_dim": 8, "num_heads": 4},
    disagree="induced set attention (arXiv:1810.00825) and Luna (arXiv:2106.01540) are the same product with layers "
    "between; agent attention (arXiv:2312.08874) pools the queries to latents.",
    also_called=("latent bottleneck attention", "Perceiver", "ISAB", "agent attention", "PerceiverResampler"),
)
