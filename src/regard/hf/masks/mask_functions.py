"""`MaskFunctionReader` turns mask functions of transformers into masks with spans, instead of n x n tensors.

transformers composes a mask from small closures, `and_masks(sliding_window_overlay(256), causal_mask_function)`, and
each backend evaluates them. The reader recognizes them by their names and closed-over variables. An unknown function
stays a predicate: it is exact, but has no spans, so no pair can be skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any

import torch
from torch import Tensor

from regard.pieces.data_masks import mask_mod
from regard.pieces.mask import Mask, block_local, causal, window
from regard.pieces.same_group import SameGroup, groups_mask

MaskFunction = Callable[..., Tensor]
MASKING_UTILS = "transformers.masking_utils"
#: The masks of functions that close over nothing but integers, by the code and the integers (`_numbers`).
_rules: dict[tuple[type, tuple[Any, ...]], Mask] = {}
MOST_RULES = 64


class _Unknown(Exception):
    """The reader does not know a mask function, or not with these variables."""


@dataclass(frozen=True)
class MaskFunctionReader:
    """Reads mask functions over positions below `length`.

    With `use_vmap` unknown functions take single numbers and are mapped over the pairs. `places` (B, n) replaces the
    positions in packed sequences: it restarts at 0 in each sequence, and the resulting mask is only used together with
    a mask that allows pairs of the same sequence.
    """

    length: int
    use_vmap: bool = False
    places: Tensor | None = None

    def read(self, function: MaskFunction) -> Mask | None:
        """The mask of a function of (batch, head, query position, key position); None: everything is allowed.

        Rules of the same numbers are one mask, so that the calls of later forwards are found again by it.
        """
        is_read_anew = self.places is not None or torch.compiler.is_compiling()  # no graph depends on earlier rules
        numbers = None if is_read_anew else _numbers(function)
        if numbers is not None and (known := _rules.get((type(self), numbers))) is not None:
            return known
        try:
            mask = self._known(function)
            if mask is not None and numbers is not None and len(_rules) < MOST_RULES:
                _rules[type(self), numbers] = mask
            return mask
        except _Unknown:
            if self.places is not None:
                raise
        name = f"{function.__module__}.{function.__qualname__}"
        warnings.warn(
            f"regard: the mask function {name} is not known, so Regard cannot skip blocks for it: every pair that the "
            "other rules allow is tested, in quadratic time.",
            stacklevel=2,
        )
        return mask_mod(_mapped(function) if self.use_vmap else function)

    def _known(self, function: MaskFunction) -> Mask | None:
        """The mask of a function that transformers defines, None if it allows all pairs; `_Unknown` for any other.

        The name of the function that returned the closure is that of the method that reads it, after an underscore. The
        method gets what the function closes over, by name.
        """
        name = function.__qualname__.split(".")[0] if function.__module__ == MASKING_UTILS else ""
        reader = getattr(self, f"_{name}", None)
        if not name or reader is None:
            raise _Unknown
        closed_over, code = _closed_over(function), reader.__func__.__code__
        if {*closed_over} != {*code.co_varnames[1 : code.co_argcount]}:  # another version of transformers
            raise _Unknown
        return reader(**closed_over)

    def _causal_mask_function(self) -> Mask:
        return causal()

    def _bidirectional_mask_function(self) -> None:
        return None

    def _and_masks(self, mask_functions: tuple[MaskFunction, ...]) -> Mask | None:
        """Pairs that all functions allow; None if these are all pairs.

        Causal masks come first, as in the rules of `recognize` (mask_tensors.py).
        """
        names = {function.__qualname__ for function in mask_functions if function.__module__ == MASKING_UTILS}
        inside = _BesideCausal(self.length, self.use_vmap, self.places) if "causal_mask_function" in names else self
        masks = [mask for mask in map(inside.read, mask_functions) if mask is not None]
        masks.sort(key=lambda mask: not mask.is_lower_triangular)
        return reduce(and_, masks) if masks else None

    def _or_masks(self, mask_functions: tuple[MaskFunction, ...]) -> Mask | None:
        masks = [self.read(function) for function in mask_functions]
        return None if None in masks else reduce(or_, masks)  # type: ignore[arg-type]  # None: one allows every pair

    def _sliding_window_overlay(self, sliding_window: int) -> Mask:
        # Theirs limits the keys before a query only, and `window` those after it, too.
        return window(sliding_window) | ~causal()

    def _sliding_window_bidirectional_overlay(self, sliding_window: int) -> Mask:
        return window(sliding_window + 1)

    def _chunked_overlay(self, chunk_size: int, left_padding: Tensor) -> Mask:
        """Pairs of one chunk, where chunks count from the first token that is no padding (`left_padding` (B,) tokens).

        Each chunk becomes one group of neighbors. Short packed sequences may share a group: the mask of sequences
        separates them.
        """
        if self.places is None and not bool(left_padding.any()):
            return block_local(chunk_size)
        places = torch.arange(self.length, device=left_padding.device) if self.places is None else self.places
        chunks = (places - left_padding[:, None]).div(chunk_size, rounding_mode="floor")
        return groups_mask((chunks.diff(prepend=chunks[:, :1]) != 0).cumsum(1))

    def _blockwise_overlay(self, block_sequence_ids: Tensor) -> Mask:
        """Pairs of one block; tokens with a negative number are in no block."""
        if self.places is not None:
            raise _Unknown
        return SameGroup(block_sequence_ids.clamp_min(-1))

    def _packed_sequence_mask_function(self, packed_sequence_mask: Tensor) -> Mask:
        return groups_mask(packed_sequence_mask)

    def _remap_positions_for_packed_sequence(self, mask_function: MaskFunction, position_ids: Tensor) -> Mask | None:
        return MaskFunctionReader(self.length, self.use_vmap, position_ids)._known(mask_function)


class _BesideCausal(MaskFunctionReader):
    """Reads functions that are combined with a causal one: there it does not matter which later keys they allow."""

    def _sliding_window_overlay(self, sliding_window: int) -> Mask:
        return window(sliding_window)


def _numbers(function: MaskFunction) -> tuple[Any, ...] | None:
    """The code of a function of transformers and the integers it closes over; None if it closes over anything else."""
    if getattr(function, "__module__", None) != MASKING_UTILS:
        return None
    read: list[Any] = [function.__code__]
    for cell in function.__closure__ or ():
        content = cell.cell_contents
        if type(content) is tuple:
            content = (*map(_numbers, content),)
        if type(content) not in (int, tuple) or (type(content) is tuple and None in content):
            return None
        read.append(content)
    return tuple(read)


def _closed_over(function: MaskFunction) -> dict[str, Any]:
    """The variables of a closure, by name."""
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }


def _mapped(function: MaskFunction) -> MaskFunction:
    """A function of four numbers as a function of four index tensors, whose result has an axis for each of them."""
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=axes)
    mapped = function

    def predicate(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        with TransformGetItemToIndex():  # these functions index tensors with their arguments
            return mapped(b.flatten(), h.flatten(), i.flatten(), j.flatten())

    return predicate
