"""The kernel engine: compiled kernels of our own."""

from regard.engine.kernel import indexer as indexer
from regard.engine.kernel import rotation as rotation
from regard.engine.kernel.engine import Kernel, KernelProblem, can_run, few_rows_pay, logsumexp_of, pays
from regard.engine.kernel.operator import decode

__all__ = ["Kernel", "KernelProblem", "can_run", "decode", "few_rows_pay", "logsumexp_of", "pays"]
