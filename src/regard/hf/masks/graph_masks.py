"""`GraphMask`: the mask of a model inside a graph of torch.compile, where it is numbers and tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from regard.hf.masks.mask_tensors import Recognised
from regard.hf.masks.packed_sequences import groups_mask
from regard.pieces.mask import Mask, causal, window
from regard.pieces.mask_data import padding

WHOLE = slice(None)


@dataclass(frozen=True, eq=False)
class GraphMask:
    """The mask of a graph: the fields of `regard.engine.kernel.operator.Terms` that masks have.

    `start` is a tensor in graphs that use a static cache.
    """

    start: int | Tensor
    first: int
    is_causal: bool
    window: int
    real: Tensor | None
    groups: Tensor | None

    def __getitem__(self, index: Any) -> GraphMask:
        """The mask of consecutive queries or keys, as models slice a mask (B, 1, I, J)."""
        _, _, queries, keys = index if isinstance(index, tuple) else (index, WHOLE, WHOLE, WHOLE)
        return replace(self, start=self.start + (queries.start or 0), first=self.first + (keys.start or 0))

    def recognised(self) -> Recognised:
        """The same mask for a call that runs outside of the graph."""
        masks: list[Mask] = [causal()] if self.is_causal else []
        masks += [window(self.window)] if self.window else []
        masks += [groups_mask(self.groups)] if self.groups is not None else []
        if self.real is not None and not bool(self.real.all()):
            masks.append(padding(self.real))
        mask = None
        for part in masks:
            mask = part if mask is None else mask & part
        return Recognised(mask, int(self.start), self.first)
