"""Checks of the arguments and sizes of masks, and copies of their tensors.

The spans of a mask are computed once, but its predicate is called again in the backward pass and for each look at the
weights. If a tensor changed in between, spans and predicate would belong to different masks. So a mask copies its
tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from regard.base.checks import integer
from regard.base.errors import RegardError
from regard.base.shapes import Sizes
from regard.base.spans import Spans
from regard.pieces.grid import Grid, at


def check_batch(mask: str, batch: int, sizes: Sizes) -> None:
    """Refuse a batch size other than that of the mask."""
    if batch != sizes.B:
        raise RegardError(
            f"{mask}: made for a batch of {batch}, used with a batch of {sizes.B}. "
            "Masks never broadcast over the batch silently: give one row for each batch entry."
        )


def integers(owner: str, name: str, values: Sequence[int]) -> tuple[int, ...]:
    """The integers of a list, an array or a tensor, as Python integers. `owner` and `name` are the call and its
    argument, for errors.
    """
    try:
        listed = values.tolist() if hasattr(values, "tolist") else list(values)  # type: ignore[union-attr]
    except TypeError:
        raise RegardError(f"{owner}({name}={values!r}): expected a list of integers.") from None
    if not isinstance(listed, list):
        raise RegardError(f"{owner}({name}={values!r}): expected a list of integers.")
    return tuple(integer(owner, name, value) for value in listed)


def check_predicate(predicate: object) -> None:
    """Refuse a predicate that does not take (b, h, i, j). A predicate without a readable signature is accepted."""
    remedy = "It is called with integer tensors (b, h, i, j): batch entry, head, query and key position."
    if not callable(predicate):
        raise RegardError(f"mask_mod(predicate): expected a function, got {type(predicate).__name__}. {remedy}")
    try:
        signature = inspect.signature(predicate)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*range(4))
    except TypeError:
        raise RegardError(f"mask_mod(predicate): this one takes {signature}. {remedy}") from None


def answered(predicate: Callable[..., object], grid: Grid) -> object:
    """What a predicate returns for a tile. One that is written for single numbers raises an error with the remedy."""
    try:
        return predicate(grid.b, grid.h, grid.i, grid.j)
    except RuntimeError as error:
        if "Boolean value of Tensor" not in str(error):
            raise
        raise RegardError(
            "mask_mod(predicate): the predicate gets integer tensors (b, h, i, j) of all pairs of a tile, and asks for "
            "one answer. Write & for and, | for or, ~ for not, with brackets: (i >= j) & (j > 2); and "
            "torch.where(condition, a, b) for if."
        ) from error


def own_copy(tensor: Tensor) -> Tensor:
    """A copy of a tensor; expanded axes stay expanded and take no memory."""
    without_repeats = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    return tensor.detach()[without_repeats].clone().expand(tensor.shape)


def shortened(numbers: Sequence[int]) -> str:
    """A list of numbers as text; of a long list only the first numbers, the last and the count."""
    if len(numbers) <= 8:
        return str(list(numbers))
    first, last = ", ".join(map(str, numbers[:3])), numbers[-1]
    return f"[{first}, ..., {last}] ({len(numbers)} of them)"


def select_entries(mask: str, tensor: Tensor, index: Tensor) -> Tensor:
    """The rows of a tensor of a mask for the batch entries at `index`, in that order (`Mask.select`)."""
    check_index(mask, index)
    return at(mask, "batch entries", tensor, 0, index.to(tensor.device))


def check_index(mask: str, index: Tensor) -> None:
    """Refuse an index of `Mask.select` that is no vector of integers."""
    if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype not in (torch.int32, torch.int64):
        kind = f"{index.dtype} of shape {tuple(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
        raise RegardError(f"{mask}.select: the index must be a vector of integers, got {kind}.")


def check_covers(mask: str, axis: str, positions: Spans, size: int) -> None:
    """Refuse positions outside [0, size), the positions of the mask; `axis` is "queries" or "keys", for the error."""
    if not Spans(((0, size),)).covers(positions):
        ((first, stop),) = positions.hull()
        raise RegardError(
            f"{mask}: covers {axis} 0 to {size - 1}, this call has {axis} {first} to {stop - 1}. "
            "Make the mask for the whole length; a shorter mask never broadcasts. "
            "Queries and keys are aligned to the end: the last query has the position of the last key."
        )
