"""Rotary position embedding."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.encodings import RoPE, Scaling
from regard.masks import causal


@explained
def rope(head_dim: int, base: float = 10_000.0, interleaved: bool = False, scaling: Scaling | None = None) -> Attention:
    """Queries and keys are rotated by angles that grow with their position, so scores depend only on i - j."""
    return Attention(position=RoPE(head_dim, base, interleaved, scaling), mask=causal())


MECHANISM = CatalogEntry(
    build=rope,
    formula="w_ij = softmax_j((R_i q_i) . (R_j k_j) / sqrt(D)) over j <= i; R_p rotates pair m by p base^(-2m / D)",
    paper="Su et al. 2021, RoFormer, arXiv:2104.09864",
    year=2021,
    used_by=("llama", "mistral", "qwen3", "gemma3", "gpt_neox", "gptj"),
    cost="the same as masked, and O(n D) for rotations",
    tiny={"head_dim": 8},
    disagree="Llama and GPT-NeoX pair channel m with m + D/2, as here; the paper and GPT-J pair 2m with 2m + 1 "
    "(interleaved=True). Weights trained with one pairing are wrong with the other.",
    also_called=("rotary position embedding", "RotaryEmbedding", "apply_rotary_pos_emb"),
)
