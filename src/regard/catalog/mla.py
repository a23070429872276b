"""Multi-head latent attention."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.encodings import RoPE
from regard.masks import causal
from regard.scores import LatentDot


@explained
def mla(num_heads: int, query_dim: int, key_dim: int, rotary_dim: int = 0, base: float = 10_000.0) -> Attention:
    """All heads read one latent vector per token, which is key and value, so a cache does not grow with the heads.

    The first `rotary_dim` channels of queries (B, H, I, query_dim) and keys (B, 1, J, key_dim) are rotated. The
    other channels of a key are the latent, which is also the value. `regard.nn.MultiHeadLatentAttention` has the
    projections, and `regard.caches.LatentCache` the cache.
    """
    score = LatentDot(num_heads, query_dim - rotary_dim, key_dim - rotary_dim, rotary_dim)
    return Attention(score, position=RoPE(rotary_dim, base) if rotary_dim else None, mask=causal())


MECHANISM = CatalogEntry(
    build=mla,
    formula="w_hij = softmax_j((q_hi W_h c_j + r_hi . r_j) / sqrt(D + R)) over j <= i, with c the latent and r the "
    "rotated channels; output_hi = (sum_j w_hij c_j) V_h",
    paper="DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1",
    year=2024,
    used_by=("deepseek_v2", "deepseek_v3", "kimi_linear"),
    cost="O(H I J key_dim) time in this absorbed form; a cache of key_dim numbers per token",
    tiny={"num_heads": 4, "query_dim": 6, "key_dim": 10, "rotary_dim": 2},
    sizes={"key_heads": 1, "head_dim": 6, "key_dim": 10, "value_dim": 8},
    disagree="most code caches latents but computes keys and values of all heads (the expanded form), which is cheaper "
    "for many queries. The weights are the same. DeepSeek puts the rotated channels last; here they are first.",
    also_called=("multi-head latent attention", "MLA", "DeepseekV3Attention", "absorbed attention"),
)
