"""What the definitions share: arrays, the place of a tile, and the error for a piece without a definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from regard.base.errors import RegardError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Place:
    """Batch entry, query head, and the positions of queries (I, 1) and keys (1, J)."""

    b: int
    h: int
    i: Array
    j: Array


def undefined(slot: str, piece: object) -> RegardError:
    """The error for a piece without a definition in NumPy."""
    return RegardError(
        f"reference: no definition of the {slot} {type(piece).__name__} in NumPy. Register one with "
        f"@regard.reference.{slot}.register, or use engine='dense'."
    )


def array(x: Any) -> Array:
    """Any tensor or sequence as float64."""
    return np.asarray(x.detach().cpu().double() if isinstance(x, torch.Tensor) else x, dtype=np.float64)


def of_head(numbers: Any, h: int) -> Array:
    """The number, or the channels, of head `h`: of one for all heads, or of a tensor that holds those of each head."""
    numbers = array(numbers)
    return numbers if numbers.ndim == 0 else np.atleast_1d(numbers[h % len(numbers)])
