"""Reformer: each query attends to the keys that are hashed into its buckets."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import causal
from regard.selections import HashBuckets


@explained
def reformer(num_buckets: int = 64, rounds: int = 4, seed: int = 0, is_causal: bool = True) -> Attention:
    """Each query attends to the keys of its direction: those in its bucket in one of `rounds` random hashes.

    In the paper a token has one vector for its query and its key, and the key is divided by its length.
    """
    selection = HashBuckets(num_buckets, rounds, seed)
    return Attention(mask=causal() if is_causal else None, selection=selection)


MECHANISM = CatalogEntry(
    build=reformer,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over j with h_r(q_i) = h_r(k_j) in some round r, where "
    "h_r(x) = argmax([x R_r; -x R_r]); j = i only if there is no other",
    paper="Kitaev, Kaiser & Levskaya 2020, arXiv:2001.04451, section 2",
    family="selected",
    year=2020,
    cost="O(n^2) comparisons of buckets, O(n k D) time for k keys a query if engines skip the others, O(n k) memory",
    tiny={"num_buckets": 4, "rounds": 2},
    disagree="implementations, transformers' too, sort tokens by bucket, cut them into chunks and let each chunk see "
    "its neighbor, so they drop pairs of one bucket and may add pairs of others. Here the definition holds exactly.",
    also_called=("LSH attention", "locality-sensitive hashing", "Reformer"),
)
