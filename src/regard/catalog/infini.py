"""Infini-attention: local softmax and a linear memory of earlier segments."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.composites import HeadGate, SegmentMemory, Sum
from regard.masks import block_local, causal


@explained
def infini(num_heads: int, size: int = 2048) -> Sum:
    """Softmax inside a segment of `size` tokens, linear attention to earlier segments, and a gate between them.

    The memory of earlier segments is a sum over their keys, so a model needs constant memory for them.
    """
    return Sum([SegmentMemory(size), Attention(mask=causal() & block_local(size))], HeadGate(num_heads))


MECHANISM = CatalogEntry(
    build=infini,
    formula="w_ij = g phi(q_i) . phi(k_j) / sum_m phi(q_i) . phi(k_m) for j in earlier segments, and (1 - g) "
    "softmax_j(q_i . k_j / sqrt(D)) for j <= i in the segment of i; phi = elu + 1, g = sigmoid(b_h)",
    paper="Munkhdalai, Faruqui & Gopal 2024, Leave No Context Behind, arXiv:2404.07143",
    family="sum",
    year=2024,
    cost="O(n size D) time for the segments, O(n D E) for the memory; a state of D E numbers per head and segment",
    tiny={"num_heads": 4, "size": 5},
    disagree="the paper also has a memory that is updated by the delta rule, whose weights are transported. In the "
    "first segment the memory is empty, and its weights are 0, as in infini-transformer-pytorch.",
    also_called=("infini attention", "Infini-attention", "InfiniTransformer", "compressive memory"),
)
