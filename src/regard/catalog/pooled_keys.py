"""Pooled keys: means of blocks of tokens."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.composites import Grouped
from regard.masks import causal
from regard.pieces.key_groups import MeanGroups


@explained
def pooled_keys(size: int = 16, stride: int | None = None, is_causal: bool = True) -> Grouped:
    """A key is the mean of a block of tokens, so a long text has few keys.

    A block has the position of its last token: a causal query attends to blocks that have ended. A block of `size`
    tokens begins every `stride` tokens, by default one after the other.
    """
    return Grouped(Attention(mask=causal() if is_causal else None), MeanGroups(size, stride))


MECHANISM = CatalogEntry(
    build=pooled_keys,
    formula="w_ij = sum_m softmax_m(q_i . mean(k of block m) / sqrt(D)) [j in block m] / size, over blocks that end "
    "at or before i",
    paper="Liu et al. 2018, arXiv:1801.10198, section 4.2.3; Yuan et al. 2025, arXiv:2502.11089, section 3.3.1",
    family="key groups",
    year=2018,
    cost="O(n^2 D / stride) time, O(n) memory by blocks",
    tiny={"size": 4},
    disagree="most models learn the pooling: a strided convolution (PVT, memory-compressed attention) or a small "
    "network with positions inside the block (NSA), which is not linear and has no weights of tokens.",
    also_called=(
        "pooled attention",
        "compressed attention",
        "memory-compressed attention",
        "spatial reduction attention",
    ),
)
