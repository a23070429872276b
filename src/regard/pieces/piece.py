"""`Piece`, the base of everything that a slot of an attention may hold."""

from abc import ABC


class Piece(ABC):  # noqa: B024 - each kind of piece has abstract methods of its own
    """The base of scores, encodings, biases, masks, normalizers, selections, transitions, and of their parts."""
