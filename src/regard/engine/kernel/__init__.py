"""The kernel engine: compiled kernels of our own."""

from regard.engine.kernel import rotation as rotation
from regard.engine.kernel.engine import Kernel, Terms, logsumexp_of, pays

__all__ = ["Kernel", "Terms", "logsumexp_of", "pays"]
