"""Attention of torch's own layers, kept before its inputs are projected to queries and keys.

Those layers project inside one fused kernel, which gives neither out. Projecting again while the model
runs would cost a fifth of its time, so it waits until a map is asked for. Only layers whose forward is
torch's own are kept like this: they are known never to change their inputs in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from regard.attention import Attention, Prepared
from regard.errors import RegardError
from regard.hf.capture.projection_inputs import Inputs
from regard.hf.capture.verification import Check
from regard.maps.attention_map import AttentionMap
from regard.pieces.grid import Grid
from regard.positions import Positions


@dataclass(eq=False)
class Unprojected:
    """One call of a torch layer: its pieces and its inputs, which are projected at the first look."""

    name: str
    attention: Attention
    positions: Positions
    inputs: Inputs
    check: Check

    def __post_init__(self) -> None:
        self._versions, self._sample = self.inputs.versions(), self.inputs.sample()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        query, key, _ = self.inputs.shaped()
        B, H, I, _ = query.shape
        return B, H, I, key.shape[2]

    @cached_property
    @torch.no_grad()
    def map(self) -> AttentionMap:
        """The weights; queries and keys are projected at the first look."""
        self._check_unchanged()
        B, H, I, _ = self.shape
        device = self.inputs.tensors[0].device
        with torch.autocast(device.type, enabled=False):
            query, key = (self.inputs.projected(number, self.inputs.tensors[number]) for number in (0, 1))
        prepared = Prepared.of(self.attention, query, key, self.positions)
        grid = Grid.whole(self.positions, B, H, I, device)
        return AttentionMap(self.attention, prepared, self.positions, grid, None)

    def _check_unchanged(self) -> None:
        same = all(torch.equal(now, then) for now, then in zip(self.inputs.sample(), self._sample, strict=True))
        if not same or self.inputs.versions() != self._versions:
            raise RegardError(
                f"seen[{self.name!r}]: the inputs or parameters of this layer were changed in place since it was "
                "watched (an optimizer step, perhaps), so its queries and keys cannot be had. Look at its map before, "
                "or fold while the model runs: watch(model, keep='statistics')."
            )
