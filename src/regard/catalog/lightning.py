"""Lightning attention, of MiniMax."""

import torch

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.scores import Dot
from regard.transitions import Decay


@explained
def lightning(num_heads: int, layer: int = 0, num_layers: int = 2) -> Attention:
    """Linear attention whose heads forget at constant rates, the slopes of ALiBi; later layers forget more slowly."""
    slopes = 2.0 ** (-8 / num_heads * torch.arange(1, num_heads + 1, dtype=torch.float64))
    # 1e-5 as in MiniMax: one layer does not divide by 0, and the last layer forgets too
    in_layer = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return Attention(Dot(scale=1.0), transition=Decay(-slopes * in_layer))


MECHANISM = CatalogEntry(
    build=lightning,
    formula="w_ij = q_i . k_j exp(-s_h (i - j)) for j <= i, with s_h = 2^(-8 (h + 1) / H) (1 - layer / "
    "(num_layers - 1))",
    paper="Qin et al. 2024, Lightning Attention-2, arXiv:2401.04658; MiniMax-01, arXiv:2501.08313",
    family="transported",
    year=2024,
    used_by=("minimax",),
    cost="O(n D E) time, O(n) memory; a state of D x E numbers for generation, at any length",
    tiny={"num_heads": 4},
    disagree="MiniMax applies SiLU to queries, keys and values before, and a norm and a gate after. Here H slopes "
    "follow one formula; for head numbers that are no power of 2, some code takes every second slope, as "
    "ALiBi does.",
    also_called=("lightning attention", "TransNormerLLM", "MiniMaxLightningAttention"),
)
