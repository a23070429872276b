"""Token shift, of RWKV."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import causal, window
from regard.normalizers import Unnormalized
from regard.scores import Dot
from regard.transitions import TokenShift


@explained
def token_shift(num_heads: int) -> Attention:
    """Each channel mixes a token with the token before it, in a learned share. RWKV has one before every projection.

    A head is a channel. RWKV has no queries and keys here: give ones of width 1, and the channels as values.
    """
    return Attention(Dot(1.0), bias=TokenShift(num_heads), mask=causal() & window(2), normalizer=Unnormalized())


MECHANISM = CatalogEntry(
    build=token_shift,
    formula="w_ii = m_h q_i k_i, w_i(i-1) = (1 - m_h) q_i k_(i-1), with q = k = 1 in RWKV",
    paper="Peng et al. 2023, RWKV, arXiv:2305.13048, eq. 11-13",
    year=2023,
    used_by=("rwkv",),
    cost="O(n) time and memory; RingCache(2) keeps the last two tokens for generation",
    tiny={"num_heads": 4},
    sizes={"head_dim": 1, "value_dim": 3},
    disagree="RWKV-6 computes the share from the token itself; RWKV-7 has a constant share again.",
    also_called=("token shift", "time shift", "time mix"),
)
