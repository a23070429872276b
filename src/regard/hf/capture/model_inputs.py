"""What a watched model read: the ids of its texts (`ReadTexts`), and its images or sounds (`ModelInputs`)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.printing import folded_repr
from regard.hf.names import cache_in, cached_length

#: Inputs that a picture of the attention shows, and the inputs that say where their tokens are.
PICTURED = ("pixel_values", "pixel_values_videos", "input_features")
BESIDE = ("input_ids", "image_grid_thw", "video_grid_thw")
#: Tensors of whole numbers that are no ids.
NO_IDS = ("attention_mask", "token_type_ids", "position_ids", "labels", "decoder_attention_mask")
NO_TEXT = torch.empty(1, 0)


@dataclass(frozen=True, eq=False)
class ReadTexts:
    """The ids (B, n) of the text that a model read, and of that of its decoder if it has one; None if unknown.

    With a cache they are all ids so far. In an encoder-decoder `ids` are those of the encoder.
    """

    ids: Tensor | None = None
    target_ids: Tensor | None = None

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ReadTexts:
        """The ids after one more call of the whole model, or of the encoder of an encoder-decoder.

        If no argument is called `input_ids`, the first tensor that may be ids is taken. A call with ids of the decoder
        keeps the text of the encoder if it has none of its own: `generate` runs the encoder only once.
        """
        given = dict(zip(_parameters(type(module)), args, strict=False)) | dict(kwargs)
        length = cached_length(cache_in(given)) or 0
        ids, targets = (given.get(name) for name in ("input_ids", "decoder_input_ids"))
        if not _are_ids(ids):
            ids = next((x for name, x in given.items() if _are_ids(x) and name not in NO_IDS), None)
        if targets is None:
            targets = _read_of_labels(module, given.get("labels"))
        if "decoder_input_ids" in given or targets is not None:
            source = ids if _are_ids(given.get("input_ids")) else self.ids
            return ReadTexts(source, _continued(self.target_ids, targets, length))
        return ReadTexts(_continued(self.ids, ids, length), self.target_ids)


def encoder_of(model: nn.Module) -> nn.Module | None:
    """The encoder of a translator of transformers, which `generate` calls before the model."""
    is_pair = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return model.get_encoder() if is_pair and hasattr(model, "get_encoder") else None  # type: ignore[operator]


def _read_of_labels(module: nn.Module, labels: object) -> Tensor | None:
    """The ids that a decoder of transformers reads if labels are given: the labels, shifted right by one token."""
    shift = getattr(module, "prepare_decoder_input_ids_from_labels", None)
    if shift is None or not _are_ids(labels):
        return None
    try:
        return shift(labels=labels)
    except Exception:  # any error of the model's own code: the decoder's tokens are unknown
        return None


def _are_ids(tensor: object) -> bool:
    """Whether a tensor may be ids: whole numbers (B, n)."""
    return isinstance(tensor, Tensor) and tensor.ndim == 2 and tensor.dtype in (torch.int32, torch.int64)


def _continued(before: Tensor | None, ids: Tensor | None, length: int) -> Tensor | None:
    """The ids (B, length) of the tokens in a cache, of which the last, `ids`, are those of this call.

    `before` has the others. If it does not, as in the first call, these are only the ids of this call. If this call had
    embeddings in place of ids, `before` is returned.
    """
    if not _are_ids(ids):
        return before
    assert ids is not None
    earlier = length - ids.shape[1]
    if before is None or earlier <= 0 or before.shape[1] < earlier or len(before) != len(ids):
        return ids.detach().clone()
    return torch.cat([before[:, :earlier], ids.detach()], 1)


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
    __repr__ = folded_repr

    @property
    def is_pictured(self) -> bool:
        """Whether there is an image, a video or a sound."""
        return any(name in self.values for name in PICTURED)

    def get(self, name: str) -> Tensor | None:
        """An input by its name; None if the call did not have it."""
        return self.values.get(name)


def pictured_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], before: Mapping[str, Tensor], is_root: bool
) -> dict[str, Tensor]:
    """The pictured inputs of a model after a call of one of its modules, by name; nothing if the call changes none.

    A call of the whole model with an image tells all. `generate` calls the vision tower before the model, and the model
    without the image, so the tower tells the image, and the next call of a whole text tells its ids. `is_root`: the
    module is the whole model. `before` are the inputs before this call.
    """
    parameters = _parameters(type(module))
    if not is_root and {*parameters, *kwargs}.isdisjoint((*PICTURED, "grid_thw")):
        return {}
    given = dict(zip(parameters, args, strict=False)) | dict(kwargs)
    text = {"input_ids": before["input_ids"]} if "input_ids" in before else {}
    inputs = {name: given[name].detach() for name in PICTURED + BESIDE if isinstance(given.get(name), Tensor)}
    if any(name in inputs for name in PICTURED):
        return inputs if is_root else inputs | text
    patches, sizes = given.get("hidden_states"), given.get("grid_thw")
    if isinstance(patches, Tensor) and isinstance(sizes, Tensor) and patches.ndim == 2:  # the tower of Qwen-VL
        return {"pixel_values": patches.detach(), "image_grid_thw": sizes.detach()} | text
    if is_root and any(name in before for name in PICTURED) and inputs.get("input_ids", NO_TEXT).shape[-1] > 1:
        return {**before, "input_ids": inputs["input_ids"]}
    return {}


@cache
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """The parameters of a module's forward; none if they cannot be read."""
    try:
        return tuple(inspect.signature(kind.forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()
