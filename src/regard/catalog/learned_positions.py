"""Learned absolute positions."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.encodings import LearnedPositions


@explained
def learned_positions(length: int, head_dim: int) -> Attention:
    """A learned vector per position is added to queries and keys. Positions must be below `length`."""
    return Attention(position=LearnedPositions(length, head_dim))


MECHANISM = CatalogEntry(
    build=learned_positions,
    formula="w_ij = softmax_j((q_i + p_i) . (k_j + p_j) / sqrt(D)), with p learned",
    paper="Gehring et al. 2017, arXiv:1705.03122, section 3.1",
    year=2017,
    used_by=("bert", "gpt2", "bart", "opt", "clip", "vit"),
    cost="the same as multi_head; length x D parameters",
    tiny={"length": 40, "head_dim": 8},
    disagree="the paper, BERT and GPT-2 add them once, to the embeddings; here they are added to queries and keys.",
    also_called=("learned positional embedding", "LearnedPositionalEmbedding", "absolute position embedding"),
)
