"""RoPE by time, row and column."""

from collections.abc import Sequence

import torch

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.encodings import AxialRoPE
from regard.masks import causal


@explained
def multimodal_rope(
    coordinates: torch.Tensor | None, sections: Sequence[int], base: float = 10_000.0, alternate: bool = False
) -> Attention:
    """Positions are vectors (time, row, column), and each axis rotates some pairs of channels: texts with images.

    `coordinates` is (axes, n) or (batch, axes, n), or None if each call gets its own. A word has the same number on all
    axes.
    """
    return Attention(position=AxialRoPE.sections(coordinates, sections, base, alternate=alternate), mask=causal())


#: Time, row and column of four words, a picture of 2 x 4 patches, and four words.
TINY = torch.tensor(
    [
        [0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 8, 9, 10, 11],
        [0, 1, 2, 3, 4, 4, 4, 4, 5, 5, 5, 5, 8, 9, 10, 11],
        [0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 8, 9, 10, 11],
    ]
)

MECHANISM = CatalogEntry(
    build=multimodal_rope,
    formula="w_ij = softmax_j((R_i q_i) . (R_j k_j) / sqrt(D)) over j <= i; R_p rotates pair m by "
    "coordinate[p, axis(m)] base^(-2m / D)",
    paper="Wang et al. 2024, Qwen2-VL, arXiv:2409.12191",
    year=2024,
    used_by=("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "ernie4_5_vl_moe"),
    cost="the same as rope",
    tiny={"coordinates": TINY, "sections": (2, 1, 1)},
    sizes={"heads": 2, "queries": 16},
    disagree="Qwen2-VL gives each axis a run of pairs; in Qwen3-VL the axes take turns (alternate=True).",
    also_called=("multimodal RoPE", "M-RoPE", "mrope_section", "apply_multimodal_rotary_pos_emb"),
)
