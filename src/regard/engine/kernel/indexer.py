"""The choices of selections by the compiled kernels: the k greatest scores of each row, and those of `TokenIndexer`.

torch writes the scores of all index heads and pairs, and reads them some ten times. Selections are in a lower layer and
cannot import this file, so this file hands its functions to them (`index_by`, `rank_by`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.base.positions import Positions
from regard.base.shapes import Sizes
from regard.engine.kernel.attention import CallSettings, Inputs, pack_keys
from regard.engine.kernel.library import load
from regard.engine.kernel.mask_layout import Layout
from regard.engine.kernel.running import run
from regard.engine.kernel.structures import DTYPES, Pointers, fields_of, has_address
from regard.engine.transforms import is_transformed
from regard.pieces import selection
from regard.pieces.chosen import NO_ID
from regard.pieces.grid import Grid
from regard.pieces.mask import Mask

#: Most bytes of the parts of a mask that need one byte a pair.
MASK_BYTES = 64 << 20
#: Multiply-adds of a pair that take as long as finding the greatest scores of a row.
PER_PAIR = 64


class Index(Pointers):
    """`Index` of kernels/index.c."""

    _fields_ = fields_of("Index")


class GreatestFields(Pointers):
    """`Greatest` of kernels/greatest.c."""

    _fields_ = fields_of("Greatest")


def greatest(scores: Tensor, k: int) -> Tensor | None:
    """The columns (..., k) of the k greatest scores of each row, as `best` of regard.pieces.selection gives them.

    None where the kernels cannot run. k is at most the length of a row.
    """
    library = load()
    if library is None or is_transformed() or torch.compiler.is_compiling():
        return None
    if scores.device.type != "cpu" or scores.dtype != torch.float32 or not has_address(scores) or not scores.numel():
        return None
    ids, scores = torch.empty(*scores.shape[:-1], k, dtype=torch.int32, device="cpu"), scores.detach().contiguous()
    length = scores.shape[-1]
    call = GreatestFields(num_rows=scores.numel() // length, length=length, k=k, no_id=NO_ID)
    call.point(numbers=scores, ids=ids)
    call.count(1)
    run(library, "greatest", call, PER_PAIR * scores.numel())
    return ids


def indexed(
    query: Tensor, key: Tensor, weights: Tensor, k: int, positions: Positions, mask: Mask | None, num_heads: int
) -> Tensor | None:
    """The indices of the k keys with the greatest index scores, (B, I, k), or None where the kernels cannot.

    `query` is (B, N, I, W), `key` (B, 1, J, W), `weights` (B, I, N). Behind the last key of a row stands `NO_ID`. The
    mask is that of `num_heads` query heads, which share the keys: the kernels read one that is the same for all.
    """
    library, tensors = load(), (query, key, weights)
    if library is None or is_transformed() or torch.compiler.is_compiling():
        return None
    if not all(t.device.type == "cpu" and t.dtype in DTYPES and has_address(t) for t in tensors):
        return None
    (B, N, I, W), J = query.shape, key.shape[2]
    k = min(k, J)
    if 0 in (B, N, I, J, W, k):
        return None
    sizes = Sizes(B, 1, 1, I, J, W, 0)
    if mask is not None and _differs_by_head(mask, Grid.whole(positions, B, num_heads, I)):
        return None
    layout = Layout.of(mask, positions, sizes)
    if layout.num_bytes > MASK_BYTES:
        return None
    ids = torch.empty(B, I, k, dtype=torch.int32, device="cpu")
    setting = CallSettings(library, layout, 1.0, 0.0, False)  # scale 1, no soft cap, no backward pass
    inputs = Inputs(query.detach(), key.detach(), key.detach()[..., :0], None, _distances(layout, positions), None)
    call, fields = inputs.call(setting), Index(k=k, no_id=NO_ID)
    pack_keys(call, setting)
    fields.point(weights=weights.detach().float().contiguous(), ids=ids)
    run(library, "index", call, layout.num_pairs * (N * W + PER_PAIR), fields)
    return ids


def _differs_by_head(mask: Mask, grid: Grid) -> bool:
    """Whether the mask may have different answers for the heads of a grid; one pair tells."""
    return mask.allowed(grid.first_pair()).shape[1] != 1


def _distances(layout: Layout, positions: Positions) -> Tensor | None:
    """Numbers (1, I + J - 1) that are added to scores: -inf at the distances that the mask forbids, else 0.

    None if the allowed distances are a range, which the layout has.
    """
    if layout.distances is None:
        return None
    line = layout.grid.line(positions.distances(layout.sizes.I))
    allowed = layout.distances.allowed(line)[:, :, 0].expand(1, 1, -1)[0]
    return torch.zeros_like(allowed, dtype=torch.float32).masked_fill(~allowed, -torch.inf)


selection.index_by(indexed)
selection.rank_by(greatest)
