"""Products of the maps of every two heads by the compiled kernels: sums over queries and keys of w_a w_b."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.engine.kernel.attention import PARTS, CallSettings, Inputs
from regard.engine.kernel.running import run, zeros
from regard.engine.kernel.statistics import statistics_call
from regard.engine.kernel.structures import Pointers, fields_of

#: SPECIAL and ORDINARY of kernels/similarity.c; 0 is a query that is left out.
SPECIAL, ORDINARY = 1, 2
#: Kinds of products in kernels/similarity.c.
NUM_PRODUCTS = 3


class SimilarityFields(Pointers):
    """`Similarity` of kernels/similarity.c, field by field."""

    _fields_ = fields_of("Similarity")


@dataclass(eq=False)
class HeadProducts:
    """Sums over chosen queries and keys that a pass fills; they hold 0 before it. `keys` None: all keys.

    `products` are sum_ij w_aij w_bij for every two heads a and b.
    """

    queries: Tensor  # (I,), boolean
    keys: Tensor | None  # (J,), boolean
    products: Tensor  # (B, H, H)
    received: Tensor | None = None  # (B, H, J): the weight of the chosen queries on the chosen keys

    def contains(self, other: HeadProducts) -> bool:
        """Whether this one has all keys and the queries of the other, so that one pass computes both."""
        return self.keys is None and bool((self.queries | ~other.queries).all())


def add_products(
    setting: CallSettings, inputs: Inputs, logsumexp: Tensor, whole: HeadProducts | None, part: HeadProducts
) -> None:
    """Add the products of `part`, and of `whole`, which contains it; None: of `part` alone.

    `logsumexp` (B, H, I) is the row statistic of the weights. A query of both is ordinary, one of `whole` alone
    special, and a key of `part` is ordinary. The pass sums three kinds of products, of heads a <= b: of blocks where
    everything is ordinary, which count for both; of all weights of the other blocks; and of their ordinary weights.
    """
    call = statistics_call(setting, inputs, logsumexp)
    num_parts, length = -(-PARTS // call.B), setting.padded(call.J)
    queries = part.queries.to(torch.uint8) * ORDINARY
    if whole is not None:
        queries = torch.where(part.queries, ORDINARY, whole.queries.to(torch.uint8) * SPECIAL).to(torch.uint8)
    # keys that fill the last panel have weights of 0; as ordinary ones they leave its block ordinary
    keys = None if part.keys is None else F.pad(part.keys.float(), (0, length - call.J), value=1.0).contiguous()
    products = torch.zeros(call.B, num_parts, NUM_PRODUCTS, call.H, call.H, dtype=torch.float64, device="cpu")
    received = None if part.received is None else zeros(call.B, call.H, num_parts, length)
    fields = SimilarityFields(num_parts=num_parts)
    fields.point(queries=queries.contiguous(), ordinary=keys, products=products, received=received)
    share_of_queries = float((queries > 0).float().mean())
    work = setting.layout.num_pairs * call.H * (call.D + call.H) * share_of_queries
    run(setting.library, "similarity", call, int(work), fields)
    # the other half of each matrix is its transpose
    shared, in_all, in_ordinary = (products + products.triu(1).mT).sum(1).unbind(1)
    part.products += (shared + in_ordinary).float()
    if whole is not None:
        whole.products += (shared + in_all).float()
    if part.received is not None and received is not None:
        part.received += received.sum(2)[..., : call.J]
