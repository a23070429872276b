"""Normalized queries and keys."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.encodings import Chain, QKNorm, RoPE
from regard.masks import causal


@explained
def qk_norm(
    head_dim: int, num_heads: int = 1, num_key_value_heads: int | None = None, joint: bool = False
) -> Attention:
    """Queries and keys are divided by their root mean square and multiplied by a learned scale, before RoPE.

    With `num_heads` each head has a scale of its own; with `joint` the mean is over the channels of all heads.
    """
    norm = QKNorm(head_dim, num_heads, num_key_value_heads, joint=joint)
    return Attention(position=Chain(norm, RoPE(head_dim)), mask=causal())


MECHANISM = CatalogEntry(
    build=qk_norm,
    formula="w_ij = softmax_j((R_i g q_i / rms(q_i)) . (R_j g' k_j / rms(k_j)) / sqrt(D)) over j <= i",
    paper="Henry et al. 2020, arXiv:2010.04245; with the root mean square: Team OLMo 2025, arXiv:2501.00656",
    year=2020,
    used_by=("qwen3", "gemma3", "olmo2", "glm4_moe", "minimax_m2", "cohere"),
    cost="the same as rope; 2 D parameters",
    tiny={"head_dim": 8},
    sizes={"heads": 2, "key_heads": 1, "queries": 16},
    disagree="Qwen 3 and Gemma 3 normalize each head and share the scale; OLMo 2 normalizes all heads together and has "
    "one scale for each channel (joint=True). Gemma 3 stores g - 1. Llama 4 normalizes after RoPE, without a scale. "
    "The paper divides by the length of the vector, as the mechanism cosine.",
    also_called=("QK norm", "query-key normalization", "q_norm", "k_norm", "QKNorm"),
)
