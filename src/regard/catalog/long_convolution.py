"""Gated long convolutions, of Hyena."""

import torch

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import causal
from regard.normalizers import Unnormalized
from regard.scores import Dot
from regard.transitions import Taps


@explained
def long_convolution(num_heads: int, length: int = 2048) -> Attention:
    """Each channel sums all earlier tokens with a filter as long as the text, between two gates.

    A head is a channel, with queries, keys and values of width 1. The filter is learned number by number, and begins as
    noise that decays, at another rate for each head. Hyena computes it by a small network of the distance: write a
    `ConvolutionFilter` of your own for that.
    """
    taps = Taps.random(num_heads, length)
    reach = length * torch.linspace(0.1, 1.0, num_heads)[:, None]  # tokens, one number a head
    taps.numbers.data *= (-3 * torch.arange(length) / reach).exp()
    return Attention(Dot(1.0), bias=taps, mask=causal(), normalizer=Unnormalized())


MECHANISM = CatalogEntry(
    build=long_convolution,
    formula="w_ij = q_i k_j h_(i - j) over j <= i, with a filter h of each head",
    paper="Poli et al. 2023, Hyena Hierarchy, arXiv:2302.10866",
    year=2023,
    cost="O(n log n) time a channel by Fourier transforms, O(n) memory; a generated token takes O(n)",
    tiny={"num_heads": 4, "length": 40},
    sizes={"head_dim": 1, "value_dim": 3},
    disagree="Hyena of order 2 is this with q = x_2 and k = x_1, and its skip is added to h_0. Higher orders repeat "
    "it, which is no linear map of one value. H3 has it with filters of a state space.",
    also_called=("long convolution", "Hyena", "H3", "FFT convolution"),
)
