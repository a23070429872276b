"""Nystrom attention: softmax through landmarks."""

from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.composites import Nystrom


@explained
def nystrom(num_landmarks: int = 64, iterations: int = 6) -> Nystrom:
    """An approximation of softmax attention through a few landmarks, the means of segments: a product of three maps.

    The inverse in the middle of the product is approximated in `iterations` steps.
    """
    return Nystrom(num_landmarks, iterations)


MECHANISM = CatalogEntry(
    build=nystrom,
    formula="W = softmax(q k~^T / sqrt(D)) A^+ softmax(q~ k^T / sqrt(D)), A = softmax(q~ k~^T / sqrt(D)), with "
    "landmarks q~ and k~ and an iterative pseudo-inverse",
    paper="Xiong et al. 2021, Nystromformer, arXiv:2102.03902",
    family="key groups",
    year=2021,
    used_by=("nystromformer",),
    cost="O(n num_landmarks D) time, O(n num_landmarks) memory",
    tiny={"num_landmarks": 4},
    disagree="the authors' code starts the inverse with the largest column sum of the whole batch, so entries of a "
    "batch depend on each other; here, as with its option inv_coeff_init_option, each head has its own. Nystromformer "
    "adds a convolution of the values, which is no attention.",
    also_called=("nystrom attention", "Nyströmformer", "NystromAttention"),
)
