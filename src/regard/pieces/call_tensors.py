"""Tensors of one call that a piece needs beside queries, keys and values, such as the decay of each token.

A piece names them in `needs`, each with its axes: `needs = {"log_forget": "B H J"}`. The caller passes them by name:
`attention(query, key, value, log_forget=...)`. A letter is the size of the call that has it (B batch, H query
heads, G key heads, I queries, J keys, D query and key width, E value width), 1 is a single entry, and any other letter
is a size that the piece itself checks. An axis B or H may have one entry for all, and H one entry for each key head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from regard.base.errors import RegardError
from regard.base.names import explanation
from regard.base.shapes import Sizes

#: The arguments of `attend` that are not tensors of a piece.
ARGUMENTS = (
    *("query", "key", "value", "attention", "mask", "is_causal", "scale", "dropout_p", "layout"),
    *("positions", "cache", "engine", "check"),
)
#: Tensors by name.
CallTensors = Mapping[str, Tensor]


def needs_of(piece: object) -> Mapping[str, str]:
    """The names of the tensors that a piece needs, each with its axes."""
    return getattr(piece, "needs", {})


def tensors_for(piece: object, given: CallTensors) -> dict[str, Tensor]:
    """Those of the given tensors that a piece needs."""
    return {name: given[name] for name in needs_of(piece)}


def check_call_tensors(
    operation: str, pieces: Iterable[object], sizes: Sizes, given: Mapping[str, Any], known: Iterable[str] = ()
) -> dict[str, Tensor]:
    """The tensors with all axes of the call, after checks. `known`: the other arguments of the operation.

    >>> import torch, regard as rg
    >>> class Forget(rg.biases.Bias):
    ...     needs = {"log_forget": "B H J"}
    ...     def transform(self, score, grid, rows, cols):
    ...         return score
    >>> check_call_tensors("attend", [Forget()], Sizes(2, 4, 2, 5, 5, 8, 8), {"log_forget": torch.zeros(1, 2, 5)})[
    ...     "log_forget"
    ... ].shape
    torch.Size([2, 4, 5])
    """
    axes = {name: (piece, words) for piece in pieces for name, words in needs_of(piece).items()}
    for name in given:
        if name not in axes:
            raise RegardError(unexpected(operation, name, axes, known))
    for name, (piece, words) in axes.items():
        if name not in given:
            raise RegardError(
                f"{operation}: {type(piece).__name__} needs a tensor for each call: {operation}(..., {name}=...) of "
                f"shape {_shape(words, sizes)}."
            )
    return {name: _fitted(operation, name, given[name], *axes[name], sizes) for name in given}


def unexpected(operation: str, name: str, needed: Iterable[str], known: Iterable[str]) -> str:
    """What to say of an argument that neither the operation nor a piece has."""
    needed = list(needed)
    remedy = explanation([name], [*known, *needed])
    others = f"The pieces need {', '.join(needed)}. " if needed else ""
    return (
        f"{operation}: got an unexpected keyword argument {name!r}. {remedy}{others}{operation} has {', '.join(known)}."
    )


def _shape(words: str, sizes: Sizes) -> str:
    """A shape in words: `(B, H, J) = (2, 4, 10)`."""
    letters = words.split()
    return f"({', '.join(letters)}) = ({', '.join(str(_size(letter, sizes) or letter) for letter in letters)})"


def _size(letter: str, sizes: Sizes) -> int | None:
    """The size of an axis; None if the piece itself checks it."""
    return int(letter) if letter.isdigit() else getattr(sizes, letter, None)


def _fitted(operation: str, name: str, tensor: Any, piece: object, words: str, sizes: Sizes) -> Tensor:
    """The tensor `name` of a piece, after checks, with all batch entries and heads of the call.

    `words` are its axes, such as "B H J". One entry or head is expanded, a head of keys repeated for its query heads.
    """
    letters = words.split()
    if not isinstance(tensor, Tensor):
        raise RegardError(f"{operation}({name}=...): {name} must be a torch.Tensor, got {type(tensor).__name__}.")
    fits = tensor.ndim == len(letters) and all(
        have in _allowed(letter, sizes, have) for have, letter in zip(tensor.shape, letters, strict=True)
    )
    if not fits:
        raise RegardError(
            f"{operation}({name}=...): {type(piece).__name__} needs {name} of shape {_shape(words, sizes)}, got "
            f"{tuple(tensor.shape)}."
        )
    for axis, letter in enumerate(letters):
        size = _size(letter, sizes)
        if letter == "H" and tensor.shape[axis] not in (1, sizes.H):
            tensor = tensor.repeat_interleave(sizes.R, axis)
        elif letter in "BH" and size is not None and tensor.shape[axis] != size:
            tensor = tensor.expand(*tensor.shape[:axis], size, *tensor.shape[axis + 1 :])
    return tensor


def _allowed(letter: str, sizes: Sizes, have: int) -> tuple[int, ...]:
    """The sizes that an axis may have; its own size `have`, if the piece itself checks it.

    B may be 1 for all batch entries; H may be 1 for all heads, or the number of key heads.
    """
    size = _size(letter, sizes)
    if size is None:
        return (have,)
    return {"B": (size, 1), "H": (size, sizes.G, 1)}.get(letter, (size,))


def refuse_needs(operation: str, pieces: Iterable[object], reason: str) -> None:
    """Refuse pieces that need tensors of the call, where none can be passed."""
    for piece in pieces:
        if needs := needs_of(piece):
            raise RegardError(
                f"{operation}: {type(piece).__name__} needs {', '.join(needs)} for each call, and {reason}."
            )
