"""The kernel engine: compiled kernels of our own."""

from regard.engine.kernel.engine import Kernel, pays

__all__ = ["Kernel", "pays"]
