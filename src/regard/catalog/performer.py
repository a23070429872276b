"""Performer: softmax attention by random features."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import causal
from regard.normalizers import SumNormalizer
from regard.scores import FeatureScore, RandomFeatures


@explained
def performer(head_dim: int, num_features: int = 256, seed: int = 0, is_causal: bool = False) -> Attention:
    """Random positive features whose mean dot product is exp(q . k / sqrt(D)): approximate softmax in linear time."""
    score = FeatureScore(RandomFeatures(head_dim, num_features, seed))
    return Attention(score, mask=causal() if is_causal else None, normalizer=SumNormalizer())


MECHANISM = CatalogEntry(
    build=performer,
    formula="w_ij = phi(q_i) . phi(k_j) / sum_j phi(q_i) . phi(k_j); phi(x) = exp(W x' - |x'|^2 / 2) / sqrt(m), "
    "x' = x / D^(1/4), the m rows of W random and orthogonal in blocks of D",
    paper="Choromanski et al. 2021, arXiv:2009.14794",
    year=2021,
    cost="O(n m (D + E)) time, O(n m) memory",
    tiny={"head_dim": 8, "num_features": 16},
    disagree="performer-pytorch subtracts the greatest key score of the whole sequence, also of later keys, and adds "
    "1e-4 to the features. This mechanism does neither.",
    also_called=("random feature attention", "FAVOR+"),
)
