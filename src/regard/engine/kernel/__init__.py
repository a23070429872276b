"""The compiled kernels of kernels/: their library, loaded if it is there."""

from regard.engine.kernel.library import Library, load, reason

__all__ = ["Library", "load", "reason"]
