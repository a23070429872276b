"""Learned attention sinks."""

from regard.attention import Attention
from regard.catalog.mechanism import Mechanism
from regard.checks import explained
from regard.pieces import LearnedSink, causal


@explained
def sinks(num_heads: int) -> Attention:
    """A learned number for each head joins the denominator, so a head can look nowhere: rows sum to less than 1."""
    return Attention(mask=causal(), normalizer=LearnedSink(num_heads))


MECHANISM = Mechanism(
    build=sinks,
    formula="w_hij = exp(s_hij) / (exp(sink_h) + sum_j exp(s_hij)) over j <= i, with s = q . k / sqrt(D)",
    paper="OpenAI 2025, gpt-oss, arXiv:2508.10925",
    cost="that of masked; H parameters",
    tiny={"num_heads": 4},
    disagree="the sinks of StreamingLLM (arXiv:2309.17453) are the first tokens, kept in the cache; they get weight "
    "like any key. See regard.RingCache for those.",
)
