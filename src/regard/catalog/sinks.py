"""Learned attention sinks."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import causal
from regard.normalizers import LearnedSink


@explained
def sinks(num_heads: int) -> Attention:
    """A learned number per head in the denominator, so a head can attend to nothing: rows sum to less than 1."""
    return Attention(mask=causal(), normalizer=LearnedSink(num_heads))


MECHANISM = CatalogEntry(
    build=sinks,
    formula="w_hij = exp(s_hij) / (exp(sink_h) + sum_j exp(s_hij)) over j <= i, with s = q . k / sqrt(D)",
    paper="OpenAI 2025, gpt-oss, arXiv:2508.10925",
    year=2025,
    used_by=("gpt_oss", "deepseek_v4", "mimo_v2_flash", "granite_swa"),
    cost="the same as masked; H parameters",
    tiny={"num_heads": 4},
    disagree="the sinks of StreamingLLM (arXiv:2309.17453) are the first tokens, which stay in the cache and get "
    "weight like other keys. regard.caches.RingCache has them.",
    also_called=("attention sinks", "StreamingLLM"),
)
