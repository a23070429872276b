"""A temperature by position, for layers without positions."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.encodings import PositionTemperature
from regard.masks import causal


@explained
def position_temperature(floor: int = 8192, factor: float = 0.1) -> Attention:
    """A layer without position encoding, whose scores grow step by step with the position of the query: Llama 4.

    Scores are multiplied by 1 + `factor` log(1 + m), where m grows by 1 every `floor` positions.
    """
    return Attention(position=PositionTemperature(floor, factor), mask=causal())


MECHANISM = CatalogEntry(
    build=position_temperature,
    formula="w_ij = softmax_j((1 + factor log(1 + floor((i + 1) / floor))) q_i . k_j / sqrt(D)) over j <= i",
    paper="Meta 2025, Llama 4; the idea: Nakanishi 2025, arXiv:2501.19399; no positions: Kazemnejad et al. 2023, "
    "arXiv:2305.19466",
    year=2025,
    used_by=("llama4", "ministral3", "mistral4"),
    cost="the same as masked; no parameters",
    tiny={"floor": 4, "factor": 0.5},
    sizes={"heads": 2, "queries": 16},
    disagree="Llama 4 counts from position 1 and has no RoPE in these layers. Ministral 3 counts from position 0 and "
    "keeps RoPE: Chain(RoPE(head_dim), PositionTemperature(floor, factor, first=0)). SmolLM 3 has layers without "
    "positions and without a temperature: that is masked.",
    also_called=("temperature by position", "NoPE", "attn_temperature_tuning", "iRoPE"),
)
