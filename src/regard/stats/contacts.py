"""Contact maps: which residues of a protein an attention head couples."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from regard.base.checks import Count, checked
from regard.base.errors import RegardError
from regard.maps import AttentionMap
from regard.stats.profile import one_text


@checked
def contact_maps(weights: AttentionMap, special: Sequence[int] = (), batch: Count = 0) -> Tensor:
    """The contact map of every head, (H, L, L): its weights, symmetrized and corrected by their mean.

        S = W + W^T,    C_ij = S_ij - (sum_k S_ik) (sum_k S_kj) / sum_kl S_kl

    The correction (APC, average product correction) subtracts what residues receive from all others, so that a column
    that every residue attends to is no contact. These are the inputs of the contact regression of Rao et al. 2021,
    "Transformer protein language models are unsupervised structure learners". `special` are the indices of tokens that
    are no residues (`<cls>`, `<eos>`); they are left out, and L residues remain. The maps are dense: L^2 numbers each.

    >>> import torch, regard as rg
    >>> from regard.stats import contact_maps
    >>> weights = rg.Attention()(*torch.randn(3, 1, 2, 6, 4)).weights
    >>> contacts = contact_maps(weights, special=[0, 5])
    >>> contacts.shape, bool(contacts.sum(-1).abs().max() < 1e-5)  # each row sums to 0
    (torch.Size([2, 4, 4]), True)
    """
    _, _, I, J = weights.shape
    if I != J:
        raise RegardError(
            f"contact_maps: the map has {I} queries and {J} keys. Contacts need self-attention over a whole sequence, "
            "where both are equal."
        )
    wrong = [index for index in special if not 0 <= index < J]
    if wrong:
        raise RegardError(f"contact_maps: special={list(special)}: {wrong[0]} is not the index of one of {J} tokens.")
    residues = [index for index in range(J) if index not in set(special)]
    dense = one_text("contact_maps", weights, batch).dense()[0][:, residues][:, :, residues]
    symmetric = dense + dense.mT
    product = symmetric.sum(-1, keepdim=True) * symmetric.sum(-2, keepdim=True)
    return symmetric - product / symmetric.sum((-2, -1), keepdim=True)
