"""The mask functions of transformers, read as masks: a rule with spans instead of an n x n tensor.

transformers composes a mask of small closures, `and_masks(sliding_window_overlay(256), causal_mask_function)`,
and leaves it to each backend to write them out. Here they are recognised by name and by what they
close over. One that is not known stays a predicate: exact, but nothing is known of its spans.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any

import torch
from torch import Tensor

from regard.hf.masks.packed_sequences import SameGroup, groups_mask
from regard.pieces.mask import Mask, block_local, causal, window
from regard.pieces.mask_data import mask_mod

MaskFunction = Callable[..., Tensor]
THEIRS = "transformers.masking_utils"


class _Unknown(Exception):
    """A function that is not one of those known here."""


@dataclass(frozen=True)
class Rules:
    """Reads mask functions over positions below `length`.

    `use_vmap`: unknown ones take single numbers, so they are mapped over the pairs. `places` (B, n), of packed
    sequences, stand in for positions: they restart with each sequence, and what is read is only ever used together
    with "the same sequence".
    """

    length: int
    use_vmap: bool = False
    places: Tensor | None = None

    def read(self, function: MaskFunction) -> Mask | None:
        """The mask of a function of (batch, head, query position, key position); None: everything is allowed."""
        try:
            return self._known(function)
        except _Unknown:
            if self.places is not None:
                raise
        name = f"{function.__module__}.{function.__qualname__}"
        warnings.warn(
            f"regard: the mask function {name} is not known, so nothing is known of its spans: every pair that other "
            "rules leave is looked at, in quadratic time.",
            stacklevel=2,
        )
        return mask_mod(_mapped(function) if self.use_vmap else function)

    def _known(self, function: MaskFunction) -> Mask | None:
        name = function.__qualname__.split(".")[0] if function.__module__ == THEIRS else ""
        reader = getattr(self, f"_{name}", None)
        if not name or reader is None:
            raise _Unknown
        closed_over = _closed_over(function)
        if set(closed_over) != set(inspect.signature(reader).parameters):  # another version of transformers
            raise _Unknown
        return reader(**closed_over)

    def _causal_mask_function(self) -> Mask:
        return causal()

    def _bidirectional_mask_function(self) -> None:
        return None

    def _and_masks(self, mask_functions: tuple[MaskFunction, ...]) -> Mask | None:
        names = {function.__qualname__ for function in mask_functions if function.__module__ == THEIRS}
        inside = _Causally(self.length, self.use_vmap, self.places) if "causal_mask_function" in names else self
        masks = [mask for mask in map(inside.read, mask_functions) if mask is not None]
        masks.sort(key=lambda mask: not isinstance(mask, causal))
        return reduce(and_, masks) if masks else None

    def _or_masks(self, mask_functions: tuple[MaskFunction, ...]) -> Mask | None:
        inside = Rules(self.length, self.use_vmap, self.places)
        masks = [inside.read(function) for function in mask_functions]
        return None if None in masks else reduce(or_, masks)  # type: ignore[arg-type]

    def _sliding_window_overlay(self, sliding_window: int) -> Mask:
        return window(sliding_window) | ~causal()

    def _sliding_window_bidirectional_overlay(self, sliding_window: int) -> Mask:
        return window(sliding_window + 1)

    def _chunked_overlay(self, chunk_size: int, left_padding: Tensor) -> Mask:
        if self.places is None and not bool(left_padding.any()):
            return block_local(chunk_size)
        places = torch.arange(self.length, device=left_padding.device) if self.places is None else self.places
        chunks = (places - left_padding[:, None]).div(chunk_size, rounding_mode="floor")
        return groups_mask((chunks.diff(prepend=chunks[:, :1]) != 0).cumsum(1))

    def _blockwise_overlay(self, block_sequence_ids: Tensor) -> Mask:
        if self.places is not None:
            raise _Unknown
        return SameGroup(block_sequence_ids.clamp_min(-1))

    def _packed_sequence_mask_function(self, packed_sequence_mask: Tensor) -> Mask:
        return groups_mask(packed_sequence_mask)

    def _remap_positions_for_packed_sequence(self, mask_function: MaskFunction, position_ids: Tensor) -> Mask | None:
        return Rules(self.length, self.use_vmap, position_ids)._known(mask_function)


class _Causally(Rules):
    """Rules that stand beside a causal one, where a window that is open ahead is a window."""

    def _sliding_window_overlay(self, sliding_window: int) -> Mask:
        return window(sliding_window)


def _closed_over(function: MaskFunction) -> dict[str, Any]:
    """The variables of a closure, by name."""
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }


def _mapped(function: MaskFunction) -> MaskFunction:
    """A function of four numbers, for every pair of a tile."""
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=axes)
    mapped = function

    def predicate(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        with TransformGetItemToIndex():  # such functions index tensors with the numbers they are given
            return mapped(b.flatten(), h.flatten(), i.flatten(), j.flatten())

    return predicate
