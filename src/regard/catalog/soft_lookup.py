"""Attention as a soft dictionary."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.normalizers import Hardmax, Softmax
from regard.scores import Dot


@explained
def soft_lookup(temperature: float = 1.0) -> Attention:
    """A dictionary that returns a weighted mean: a key that matches the query better gives its value more weight.

    At temperature 0 only the best key counts, as in a dictionary. Temperature sqrt(D) is scaled dot-product attention.
    """
    return Attention(Dot(scale=1.0), normalizer=Softmax(temperature) if temperature else Hardmax())


MECHANISM = CatalogEntry(
    build=soft_lookup,
    formula="w_ij = softmax_j(q_i . k_j / T); 1 for the greatest q_i . k_j and 0 for others when T = 0",
    paper="Graves, Wayne & Danihelka 2014, arXiv:1410.5401, section 3.3.1 (key strength 1 / T); "
    "Miller et al. 2016, arXiv:1606.03126",
    year=2014,
    cost="O(I J D) time, O(I + J) memory by blocks",
    tiny={"temperature": 0.5},
    sizes={"heads": 1, "queries": 7, "keys": 11, "value_dim": 5},
    disagree="the first of these papers uses the cosine: the mechanism `cosine` with factor 1 / T.",
    also_called=("key-value memory", "content-based addressing", "attention pooling"),
)
