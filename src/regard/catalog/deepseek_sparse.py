"""DeepSeek sparse attention: each query attends to the tokens that a small indexer chooses."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import causal
from regard.selections import TokenIndexer


@explained
def deepseek_sparse(k: int = 2048) -> Attention:
    """Each query attends to the `k` earlier tokens with the greatest scores of a small indexer.

    The call has `index_query` (B, N, I, W), `index_key` (B, 1, J, W) and `index_weights` (B, I, N), of N small heads.
    """
    return Attention(mask=causal(), selection=TokenIndexer(k))


MECHANISM = CatalogEntry(
    build=deepseek_sparse,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over the k greatest I_ij with j <= i, where "
    "I_ij = sum_n a_in relu(x_in . y_j) for index queries x, index keys y and index weights a",
    paper="DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, section 2.1",
    family="selected",
    year=2025,
    used_by=("deepseek_v32", "glm_moe_dsa"),
    cost="O(n^2 N W + n k D) time, O(n k) memory",
    tiny={"k": 6},
    disagree="of equal index scores torch's topk takes any; here the first keys are taken. DeepSeek-V3.2 combines it "
    "with latent attention (mla), which changes no weight.",
    also_called=("DeepSeek sparse attention", "DSA", "lightning indexer"),
)
