"""Sliding Tile Attention: the nearest tiles of an image or a video."""

from collections.abc import Sequence

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import sliding_tiles as sliding_tiles_mask


@explained
def sliding_tiles(shape: Sequence[int], tile: int | Sequence[int], size: int | Sequence[int]) -> Attention:
    """The `size` nearest tiles along each axis of a grid of `shape`, whose tokens are in the order of the tiles.

    A tile has `tile` tokens along each axis. `tile` and `size` are one number for all axes, or one for each.
    """
    return Attention(mask=sliding_tiles_mask(shape, tile, size))


MECHANISM = CatalogEntry(
    build=sliding_tiles,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over j whose tile is in the window of size tiles around that of i",
    paper="Zhang et al. 2025, arXiv:2502.04507, section 3",
    year=2025,
    cost="O(n size^axes tile^axes D) time, O(n) memory",
    tiny={"shape": (2, 4, 6), "tile": (1, 2, 2), "size": (1, 2, 2)},
    disagree="an even size in FastVideo allows one more tile; here it is exactly size tiles, as in NATTEN.",
    also_called=("sliding tile attention", "STA"),
)
