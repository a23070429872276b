"""RoPE by row and column."""

import torch

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.encodings import AxialRoPE


@explained
def axial_rope(
    coordinates: torch.Tensor | None, head_dim: int, base: float = 10_000.0, alternate: bool = False
) -> Attention:
    """Positions are vectors, such as row and column of a patch; each axis rotates its share of the channels.

    `coordinates` is (axes, n) or (batch, axes, n), or None if each call gets its own. With `alternate` the axes take
    turns in the frequencies of one RoPE; else each axis has a RoPE of its own.
    """
    return Attention(position=AxialRoPE.grid(coordinates, head_dim, base, alternate=alternate))


MECHANISM = CatalogEntry(
    build=axial_rope,
    formula="w_ij = softmax_j((R_i q_i) . (R_j k_j) / sqrt(D)); "
    "R_p rotates pair m of axis a by coordinate[p, a] base^(-2 A m / D)",
    paper="Heo et al. 2024, arXiv:2403.13298",
    year=2024,
    used_by=("qwen2_vl", "pixtral", "llama4", "qwen3_vl"),
    cost="the same as multi_head, and O(n D) for rotations",
    tiny={"coordinates": torch.stack((torch.arange(16) // 4, torch.arange(16) % 4)), "head_dim": 8},
    sizes={"heads": 2, "queries": 16},
    disagree="in Qwen2-VL both axes have the same frequencies; in Pixtral they take turns in one list "
    "(alternate=True).",
    also_called=("2-D RoPE", "axial RoPE", "VisionRotaryEmbedding", "rope 2d"),
)
