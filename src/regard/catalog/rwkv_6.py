"""RWKV-6, Finch."""

import torch

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.scores import Dot
from regard.transitions import ChannelDecay


@explained
def rwkv_6(num_heads: int, head_dim: int) -> Attention:
    """A memory with a decay a channel that the query reads before its own token enters; that one gets a bonus instead.

    The call has `log_decay` (B, H, J, D). The bonus of a trained layer (its u, or time_faaaa) is
    rg.transitions.ChannelDecay(bonus=u).
    """
    return Attention(Dot(scale=1.0), transition=ChannelDecay(bonus=torch.full((num_heads, head_dim), 0.5)))


MECHANISM = CatalogEntry(
    build=rwkv_6,
    formula="w_ij = r_i . (k_j exp(g_{j+1} + ... + g_{i-1})) for j < i, and w_ii = r_i . (u * k_i), with a "
    "learned bonus u",
    paper="Peng et al. 2024, Eagle and Finch, arXiv:2404.05892",
    family="transported",
    year=2024,
    cost="O(n D E) time, O(n) memory; a state of D x E numbers for generation, at any length",
    tiny={"num_heads": 4, "head_dim": 8},
    disagree="RWKV's code calls queries r (receptance) and log-decays -exp(w).",
    also_called=("receptance weighted key value", "RWKV-6", "Finch"),
)
