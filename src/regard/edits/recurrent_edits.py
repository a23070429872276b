"""Edits of recurrent layers. The weight of a link is what one token wrote, as one query reads it.

For given queries, keys, decays and erasures the output o_i = sum_j w_ij v_j is linear in the values. So the rows whose
weights are scaled are those of the same recurrence with scaled values. The state of the layer does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from regard.edits.layer_edits import LayerEdit, LayerEdits
from regard.edits.values import KnockOut, ScaleWeights

#: The edits that a weight of a recurrent layer can have: it has no score and no softmax.
LINKS = (KnockOut, ScaleWeights)


def without_softmax(edits: LayerEdits) -> LayerEdits:
    """The same edits where no softmax follows: a knock-out is a weight of 0, and the others stay."""
    return LayerEdits(
        tuple(
            replace(part, edit=replace(part.edit, renormalize=False)) if isinstance(part.edit, KnockOut) else part
            for part in edits.edits
        )
    )


def edited_recurrence(
    edits: LayerEdits, value: Tensor, num_queries: int, read: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, I, E) of the last I tokens with edited weights, and whether an edit selects a row, (B, H, I, 1).

    `read` computes W . values for values (B, H, J, E). It runs once for all queries that the same edits select.
    """
    B, H, J, _ = value.shape
    entries, heads, keys = (torch.arange(size, device=value.device) for size in (B, H, J))
    # [e, i]: whether edit e selects query i, one of the last tokens
    selecting = torch.stack([part.pairs.queries.contain(keys[J - num_queries :]) for part in edits.edits])
    output = value.new_zeros(B, H, num_queries, value.shape[3])
    changed = torch.zeros(B, H, num_queries, 1, dtype=torch.bool, device=value.device)
    for chosen in selecting.unique(dim=1).unbind(1):  # each set of edits that some queries share
        rows = (selecting == chosen[:, None]).all(0)[:, None]
        factors, is_head = torch.ones_like(value[..., :1]), torch.zeros_like(changed[:, :, :1])
        for part in (part for part, is_chosen in zip(edits.edits, chosen.tolist(), strict=True) if is_chosen):
            pairs = part.pairs
            here = pairs.batch.contain(entries)[:, None, None, None] & pairs.heads.contain(heads)[:, None, None]
            factors = torch.where(here & pairs.keys.contain(keys)[:, None], factors * _factor(part), factors)
            is_head = is_head | here
        if bool(is_head.any()):
            output = torch.where(rows & is_head, read(value * factors), output)
            changed = changed | (rows & is_head)
    return output, changed


def _factor(part: LayerEdit) -> float:
    """The factor of the selected weights; 0 for a knock-out."""
    assert isinstance(part.edit, KnockOut | ScaleWeights), "LINKS are checked before"
    return part.edit.factor if isinstance(part.edit, ScaleWeights) else 0.0
