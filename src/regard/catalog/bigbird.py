"""BigBird: a window, global tokens and random blocks."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import bigbird as bigbird_mask


@explained
def bigbird(
    length: int,
    block: int = 64,
    window_blocks: int = 3,
    global_blocks: int = 1,
    num_random: int = 3,
    seed: int = 0,
) -> Attention:
    """Each block of queries attends to neighboring blocks, the first blocks, and random blocks drawn from `seed`.

    The `window_blocks` are around the block of the query, and it is one of them. Queries of the first `global_blocks`
    blocks attend to all keys.
    """
    return Attention(mask=bigbird_mask(length, block, window_blocks, global_blocks, num_random, seed))


MECHANISM = CatalogEntry(
    build=bigbird,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over blocks that are neighbors, global or random",
    paper="Zaheer et al. 2020, arXiv:2007.14062, section 2",
    year=2020,
    used_by=("big_bird", "bigbird_pegasus"),
    cost="O(n block (window_blocks + global_blocks + num_random) D) time, O(n) memory",
    tiny={"length": 40, "block": 4, "num_random": 1},
    disagree="in Hugging Face the last block is global, too, and each head has its own random blocks. In eval mode "
    "all its random blocks are block 0, which is counted twice, so weights do not sum to 1.",
    also_called=("block sparse attention",),
)
