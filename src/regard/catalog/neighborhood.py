"""Neighborhood Attention: the nearest keys of a line, an image or a video."""

from collections.abc import Sequence

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import neighborhood as neighborhood_mask


@explained
def neighborhood(
    shape: Sequence[int],
    size: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    stride: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] = False,
) -> Attention:
    """The `size` nearest keys along each axis of a grid of `shape`; at a border the window is shifted inside.

    `dilation` puts gaps into the window, and `stride` queries side by side share one. On an axis with `is_causal` the
    window ends at the query. Each argument is one number for all axes, or one for each.
    """
    return Attention(mask=neighborhood_mask(shape, size, dilation, stride, is_causal))


MECHANISM = CatalogEntry(
    build=neighborhood,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over j with |j_a - c_a(i)| <= size / 2 along each axis a, where "
    "c_a(i) is i_a, moved inside so that the window fits",
    paper="Hassani et al. 2023, arXiv:2204.07143, section 3; dilation: arXiv:2209.15001; stride: arXiv:2504.16922",
    year=2023,
    used_by=("dinat",),
    cost="O(n size^axes D) time if a block of queries has few rows, O(n) memory",
    tiny={"shape": (6, 7), "size": (3, 4), "dilation": (2, 1), "is_causal": (False, True)},
    disagree="a window of SAM and Swin is a tile of the image, which does not move with the query.",
    also_called=("neighborhood attention", "NATTEN", "NAT", "DiNAT", "generalized neighborhood attention"),
)
