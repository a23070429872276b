"""Native sparse attention: compressed, selected and near keys, with gates."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.composites import GateFactors, Grouped, Sum
from regard.masks import causal, window
from regard.pieces.key_groups import MeanGroups
from regard.selections import CompressedBlocks


@explained
def nsa(size: int = 64, k: int = 16, near: int = 512, initial: int = 1, local: int = 2) -> Sum:
    """Three attentions, mixed by gates of each query: to block means, to the blocks chosen by them, and to near keys.

    Blocks have `size` keys. `k` of them are selected: the `initial` first, the `local` last, and the best others. The
    window has `near` keys. A call gives `gates` (B, H, I, 3), for the three in this order.
    """
    selection = CompressedBlocks(size, k, initial, local)
    parts = [
        Grouped(Attention(mask=causal()), MeanGroups(size)),
        Attention(mask=causal(), selection=selection),
        Attention(mask=causal() & window(near)),
    ]
    return Sum(parts, GateFactors(3))


MECHANISM = CatalogEntry(
    build=nsa,
    formula="w_ij = g_1i softmax_m(q_i . mean(k of block m) / sqrt(D)) / size over blocks that have ended, + g_2i "
    "softmax_j(q_i . k_j / sqrt(D)) over selected blocks, + g_3i softmax_j(q_i . k_j / sqrt(D)) over i - near < j <= i",
    paper="Yuan et al. 2025, Native Sparse Attention, arXiv:2502.11089",
    family="sum",
    year=2025,
    cost="O(n (n / size + k size + near) D) time, O(n k) memory",
    tiny={"size": 4, "k": 3, "near": 5, "local": 1},
    sizes={"key_heads": 2},
    disagree="the paper learns the compression (a network over each block, with positions) and gives each branch keys "
    "and values of its own; here a block is its mean, as in flash-linear-attention, and the branches share keys. Gates "
    "are sigmoids in the paper, and need not sum to 1.",
    also_called=("native sparse attention", "NSA", "NativeSparseAttention", "SparseAttention"),
)
