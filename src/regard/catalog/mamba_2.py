"""State-space duality, of Mamba-2."""

import torch

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.scores import Dot
from regard.transitions import StateSpace


@explained
def mamba_2(num_heads: int, skip: bool = True) -> Attention:
    """Linear attention whose memory decays by a step that each token chooses: long steps forget and write more.

    Queries are C, keys B, values x; the call has `step` (B, H, J), the positive steps. One key head may serve many
    heads. The rates are the initial ones, -1, -2, ...; a trained layer has rg.transitions.StateSpace(-A_log.exp(), D).
    """
    rate = -torch.arange(1, num_heads + 1, dtype=torch.float64)
    return Attention(Dot(scale=1.0), transition=StateSpace(rate, torch.ones(num_heads) if skip else None))


MECHANISM = CatalogEntry(
    build=mamba_2,
    formula="w_ij = d_j exp(a_h (d_{j+1} + ... + d_i)) C_i . B_j for j <= i, with a rate a_h < 0 and steps d; "
    "plus the skip for j = i",
    paper="Dao & Gu 2024, Transformers are SSMs, arXiv:2405.21060",
    family="transported",
    year=2024,
    used_by=("mamba2", "bamba", "falcon_h1"),
    cost="O(n D E) time, O(n) memory; a state of D x E numbers for generation, at any length",
    tiny={"num_heads": 4},
    disagree="transformers and mamba_ssm call the state's width N and the value's width P. The convolution over 4 "
    "tokens comes before, the gated norm after.",
    also_called=("state-space duality", "SSD", "Mamba-2", "Mamba2"),
)
