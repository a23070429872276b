"""RoPE with YaRN scaling."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.encodings import RoPE, YaRNScaling
from regard.masks import causal


@explained
def yarn(head_dim: int, factor: float, trained_length: int, base: float = 10_000.0) -> Attention:
    """RoPE whose slow pairs of channels turn `factor` times slower, for texts longer than those of training."""
    return Attention(position=RoPE(head_dim, base, scaling=YaRNScaling(factor, trained_length)), mask=causal())


MECHANISM = CatalogEntry(
    build=yarn,
    formula="rope with frequencies (1 - ramp_m) f_m + ramp_m f_m / factor, and queries and keys times "
    "0.1 log(factor) + 1; ramp_m goes from 0 for pairs of 32 turns in the trained length to 1 for pairs of one turn",
    paper="Peng et al. 2023, arXiv:2309.00071",
    year=2023,
    used_by=("gpt_oss", "deepseek_v3", "ministral3", "mistral4"),
    cost="the same as rope",
    tiny={"head_dim": 8, "factor": 4.0, "trained_length": 64},
    sizes={"heads": 2, "queries": 16},
    disagree="gpt-oss does not round the ends of the ramp to whole pairs (YaRNScaling(is_rounded=False)). DeepSeek V3 "
    "multiplies the scores instead of queries and keys.",
    also_called=("RoPE scaling by parts", "YaRN", "NTK-by-parts", "context extension"),
)
