"""RWKV-7, Goose."""

import torch

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.scores import Dot
from regard.transitions import RWKV7


@explained
def rwkv_7(num_heads: int, head_dim: int) -> Attention:
    """A delta rule where decay, what is erased, how much, and what is written are all chosen apart, channel by channel.

    The call has `log_decay`, `address` and `rate`, (B, H, J, D) each; see rg.transitions.RWKV7. The bonus of a trained
    layer is its r_k.
    """
    return Attention(Dot(scale=1.0), transition=RWKV7(bonus=torch.full((num_heads, head_dim), 0.5)))


MECHANISM = CatalogEntry(
    build=rwkv_7,
    formula="w_ij = r_i . A_i ... A_{j+1} k_j for j <= i, with A_t = diag(exp g_t) - (a_t * c_t) c_t^T; w_ii has "
    "r_i . (u * k_i) more",
    paper="Peng et al. 2025, RWKV-7 Goose, arXiv:2503.14456",
    family="transported",
    year=2025,
    cost="O(n D E) time, O(n) memory; a state of D x E numbers for generation, at any length",
    tiny={"num_heads": 4, "head_dim": 8},
    disagree="flash-linear-attention's operator takes a = -c and b = a * c and has no bonus, which its layer adds.",
    also_called=("expressive dynamic state evolution", "RWKV-7", "Goose"),
)
