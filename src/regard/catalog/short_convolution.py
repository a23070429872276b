"""Gated short convolutions, of LFM2."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import causal, window
from regard.normalizers import Unnormalized
from regard.scores import Dot
from regard.transitions import Taps


@explained
def short_convolution(num_heads: int, size: int = 3) -> Attention:
    """Each channel takes a learned sum of its last few tokens, between two gates: no token is compared with another.

    A head is a channel, with queries, keys and values of width 1: the query is the gate of the output, the key that of
    the input. Without gates they are ones.
    """
    mask = causal() & window(size)
    return Attention(Dot(1.0), bias=Taps.random(num_heads, size), mask=mask, normalizer=Unnormalized())


MECHANISM = CatalogEntry(
    build=short_convolution,
    formula="w_ij = q_i k_j h_(i - j) over 0 <= i - j < K, with learned h_0, ..., h_(K-1) of each head",
    paper="Liquid AI 2025, LFM2 technical report, arXiv:2511.23404",
    year=2025,
    used_by=("lfm2", "lfm2_moe"),
    cost="O(n K) time a channel, O(n) memory; RingCache(K) keeps the last K tokens for generation",
    tiny={"num_heads": 4, "size": 3},
    sizes={"head_dim": 1, "value_dim": 3},
    disagree="torch's conv1d has the numbers in the other order. Mamba, Gated DeltaNet and Kimi Linear have such "
    "convolutions without gates before their recurrences, with an activation after it.",
    also_called=("short convolution", "LFM2", "ShortConv", "gated convolution", "causal conv1d"),
)
