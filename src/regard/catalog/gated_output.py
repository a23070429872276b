"""Gated attention: a gate on the output of each head."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import causal


@explained
def gated_output() -> Attention:
    """The output of each head is multiplied by sigmoid(x W), which can close a head. The weights do not change.

    The gate comes after the attention: `regard.nn.MultiHeadAttention(..., output_gate=True)` has it. So a map of
    weights does not show that a head is closed.
    """
    return Attention(mask=causal())


MECHANISM = CatalogEntry(
    build=gated_output,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over j <= i; output_i = sigmoid(x_i W) * sum_j w_ij v_j, channel "
    "by channel",
    paper="Qiu et al. 2025, Gated Attention for Large Language Models, arXiv:2505.06708",
    year=2025,
    used_by=("qwen3_next", "qwen3_5", "afmoe"),
    cost="the same as masked, and one projection",
    disagree="the paper also has one gate a head, and gates of queries, keys or values. Qwen3-Next computes the gate "
    "in the query projection.",
    also_called=("gated attention", "output gate", "head gate", "attn_output_gate"),
)
