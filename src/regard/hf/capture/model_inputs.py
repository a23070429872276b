"""`ModelInputs`: the images or sounds that a watched model read, and the ids of its text."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

#: Inputs that a picture of the attention shows, and the inputs that say where their tokens are.
PICTURED = ("pixel_values", "pixel_values_videos", "input_features")
BESIDE = ("input_ids", "image_grid_thw", "video_grid_thw")


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """The configuration of a model, and the inputs of its last call that had an image, a video or a sound.

    The tensors are those of the call, not copies. `values` is empty if there was no such call.

    >>> import torch
    >>> inputs = ModelInputs(None, {"pixel_values": torch.zeros(1, 3, 8, 12)})
    >>> inputs.is_pictured, inputs.get("input_ids")
    (True, None)
    """

    config: Any = None
    values: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def is_pictured(self) -> bool:
        return any(name in self.values for name in PICTURED)

    def get(self, name: str) -> Tensor | None:
        return self.values.get(name)


def pictured_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_root: bool
) -> dict[str, Tensor]:
    """The inputs of a call, by name, if one of them is an image, a video or a sound; else nothing.

    A part of the model counts if it has the input by name: `generate` calls an encoder by itself.
    """
    given = dict(kwargs)
    if is_root and args:
        given |= dict(zip(inspect.signature(module.forward).parameters, args, strict=False))
    if not any(isinstance(given.get(name), Tensor) for name in PICTURED):
        return {}
    return {name: given[name].detach() for name in PICTURED + BESIDE if isinstance(given.get(name), Tensor)}
