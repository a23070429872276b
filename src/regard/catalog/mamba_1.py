"""Mamba-1, the selective state space."""

import torch

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.scores import Dot
from regard.transitions import StateSpace


@explained
def mamba_1(num_heads: int, head_dim: int, skip: bool = True) -> Attention:
    """Each channel is a head with values of width 1, a memory of N numbers, and a step that the token chooses.

    `num_heads` are the channels, `head_dim` is N. Queries are C, keys B (the same for all channels), values x; the
    call has `step`, the positive steps of each channel. The rates are the initial ones, -1, -2, ..., -N; a trained
    layer has rg.transitions.StateSpace(-A_log.exp(), D).
    """
    rate = -torch.arange(1, head_dim + 1, dtype=torch.float64).expand(num_heads, head_dim)
    return Attention(Dot(scale=1.0), transition=StateSpace(rate, torch.ones(num_heads) if skip else None))


MECHANISM = CatalogEntry(
    build=mamba_1,
    formula="w_ij = d_j C_i . exp(a (d_{j+1} + ... + d_i)) B_j for j <= i, with a diagonal a = -(1, ..., N) and "
    "steps d; plus the skip for j = i",
    paper="Gu & Dao 2023, Mamba, arXiv:2312.00752",
    family="transported",
    year=2023,
    used_by=("mamba", "falcon_mamba", "jamba"),
    cost="O(n N) time and memory a channel; a state of N numbers a channel for generation",
    tiny={"num_heads": 4, "head_dim": 8},
    sizes={"value_dim": 1},
    disagree="Mamba's code keeps all channels in one tensor and calls none of them a head. Its convolution over 4 "
    "tokens comes before, its gate after.",
    also_called=("selective state space", "Mamba", "S6", "selective scan"),
)
