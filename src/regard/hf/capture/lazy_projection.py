"""`DeferredCall`: a captured call of torch's own layers whose queries and keys are projected when its map is read.

These layers project inside one fused kernel, which does not return queries and keys. Projecting again while the model
runs would take a fifth of its time. So the inputs are kept, and projected later. This is only done for layers with
torch's own forward, which never changes its inputs in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.attention import Attention, Prepared
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.hf.capture.projection_inputs import ProjectionInputs
from regard.hf.capture.verification import Check
from regard.maps.attention_map import AttentionMap
from regard.maps.scored_map import ScoredMap
from regard.pieces.grid import Grid


@dataclass(eq=False)
class DeferredCall:
    """One call of a torch layer: its pieces, and its inputs before the projections."""

    name: str
    attention: Attention
    positions: Positions
    inputs: ProjectionInputs
    check: Check
    keeps_values: bool = False

    def __post_init__(self) -> None:
        self._versions, self._sample = self._state()

    def _state(self) -> tuple[list[int], list[Tensor]]:
        return self.inputs.versions(self.keeps_values), self.inputs.sample(self.keeps_values)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        query, key, _ = self.inputs.shaped()
        B, H, I, _ = query.shape
        return B, H, I, key.shape[2]

    @cached_property
    @torch.no_grad()
    def map(self) -> AttentionMap:
        """The weights; the first access projects queries and keys."""
        self._check_unchanged()
        B, H, I, _ = self.shape
        device = self.inputs.tensors[0].device
        with torch.autocast(device.type, enabled=False):
            query, key = (self.inputs.projected(number, self.inputs.tensors[number]) for number in (0, 1))
        prepared = Prepared.of(self.attention, query, key, self.positions)
        grid = Grid.whole(self.positions, B, H, I, device)
        return ScoredMap(self.attention, prepared, self.positions, grid, None)

    @torch.no_grad()
    def read_values(self) -> Tensor:
        """The values (B, H, J, E), projected again."""
        self._check_unchanged()
        with torch.autocast(self.inputs.tensors[2].device.type, enabled=False):
            return self.inputs.projected(2, self.inputs.tensors[2])

    def _check_unchanged(self) -> None:
        versions, sample = self._state()
        same = all(torch.equal(now, then) for now, then in zip(sample, self._sample, strict=True))
        if not same or versions != self._versions:
            raise RegardError(
                f"seen[{self.name!r}]: the inputs or parameters of this layer were changed in place after it was "
                "watched (by an optimizer step, perhaps), so its queries and keys are lost. Read the map before the "
                "change, or compute statistics while the model runs: watch(model, keep='statistics')."
            )
