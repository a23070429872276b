"""BigBird: a window, global tokens and random blocks."""

from regard.attention import Attention
from regard.catalog.mechanism import Mechanism
from regard.checks import explained
from regard.pieces import bigbird as bigbird_mask


@explained
def bigbird(
    length: int,
    block: int = 64,
    window_blocks: int = 3,
    global_blocks: int = 1,
    num_random: int = 3,
    seed: int = 0,
) -> Attention:
    """Blocks of queries see their neighbours, the first blocks, and a few blocks drawn once from `seed`."""
    return Attention(mask=bigbird_mask(length, block, window_blocks, global_blocks, num_random, seed))


MECHANISM = Mechanism(
    build=bigbird,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over blocks that are near, global or drawn for the block of i",
    paper="Zaheer et al. 2020, arXiv:2007.14062, section 2",
    cost="O(n block (window_blocks + global_blocks + num_random) D) time, O(n) memory",
    tiny={"length": 40, "block": 4, "num_random": 1},
    disagree="Hugging Face makes the last block global as well and draws blocks for each head; in eval mode all of "
    "its random blocks are block 0, counted again, so that its weights no longer sum to 1.",
)
