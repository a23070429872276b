"""Bahdanau's additive attention."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.scores import Additive


@explained
def bahdanau(query_dim: int, key_dim: int, hidden: int = 256, bias: bool = False) -> Attention:
    """A small network scores each decoder state against each encoder state: the first neural attention.

    `hidden` is the width of the network. With `bias` it has a bias inside the tanh.
    """
    return Attention(Additive(query_dim, key_dim, hidden, bias))


MECHANISM = CatalogEntry(
    build=bahdanau,
    formula="w_ij = softmax_j(v . tanh(W q_i + U k_j)), with q the decoder state before the step (s_{t-1})",
    paper="Bahdanau, Cho & Bengio 2015, arXiv:1409.0473",
    year=2015,
    cost="O(I J hidden) time, O(I + J) memory by blocks",
    tiny={"query_dim": 8, "key_dim": 6, "hidden": 5},
    sizes={"heads": 1, "queries": 7, "keys": 11, "key_dim": 6},
    disagree="keras' AdditiveAttention has no W and U; code with nn.Linear adds a bias inside the tanh (bias=True).",
    also_called=("additive attention", "AdditiveAttention", "BahdanauAttention", "MLP attention"),
)
