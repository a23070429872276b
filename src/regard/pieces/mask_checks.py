"""Checks of the arguments and sizes of masks, and copies of their tensors."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import Tensor

from regard.checks import integer
from regard.errors import RegardError
from regard.shapes import Sizes
from regard.spans import Spans


def check_batch(what: str, made_for: int, sizes: Sizes) -> None:
    """Refuse another batch than the one a mask was made for."""
    if made_for != sizes.B:
        raise RegardError(
            f"{what}: made for a batch of {made_for}, used with a batch of {sizes.B}. "
            "Masks never broadcast over the batch silently: give one row to each entry."
        )


def integers(owner: str, name: str, values: Sequence[int]) -> tuple[int, ...]:
    """The integers of a list, an array or a tensor as Python's own."""
    try:
        listed = values.tolist() if hasattr(values, "tolist") else list(values)  # type: ignore[union-attr]
    except TypeError:
        raise RegardError(f"{owner}({name}={values!r}): expected a list of integers.") from None
    if not isinstance(listed, list):
        raise RegardError(f"{owner}({name}={values!r}): expected a list of integers.")
    return tuple(integer(owner, name, value) for value in listed)


def check_predicate(predicate: object) -> None:
    """Refuse a predicate that does not take (b, h, i, j). One without a signature is accepted."""
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


def own_copy(tensor: Tensor) -> Tensor:
    """A copy of a tensor; expanded axes stay expanded and take no memory."""
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    return tensor.detach()[once].clone().expand(tensor.shape)


def shortened(numbers: Sequence[int]) -> str:
    """A list of numbers in one line; a long one is shortened."""
    if len(numbers) <= 8:
        return str(list(numbers))
    first, last = ", ".join(map(str, numbers[:3])), numbers[-1]
    return f"[{first}, ..., {last}] ({len(numbers)} of them)"


def check_covers(what: str, axis: str, asked: Spans, size: int) -> None:
    """Refuse positions beyond those that a mask was made for."""
    if not Spans(((0, size),)).covers(asked):
        ((first, last),) = asked.hull()
        raise RegardError(
            f"{what}: covers {axis} 0 to {size - 1}, asked for {first} to {last - 1}. "
            "Make the mask for the whole length; a shorter one never broadcasts. "
            "Rows and columns are counted so that the last query stands at the last key."
        )
