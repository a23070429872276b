"""The compiled pass over a map, and the log-sum-exp of its rows: by C on a CPU, by Triton on a GPU.

The device of the tensors decides. Every other device, and every map that the kernels refuse, is computed by tiles.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from regard.attention import Attention, Prepared
from regard.base.positions import Positions
from regard.engine.kernel import KernelProblem, logsumexp_of
from regard.maps import compiled_reductions, gpu_reductions
from regard.maps.compiled_reductions import compiled_terms, fill_compiled, knows
from regard.maps.reductions import Reduction, State
from regard.pieces.grid import Grid

__all__ = ["differentiable", "fill", "knows", "logsumexp", "terms_of_map"]


def terms_of_map(attention: Attention, prepared: Prepared, positions: Positions, grid: Grid) -> KernelProblem | None:
    """The map of these pieces as kernels for its device compute it; None if they cannot, or if tiles are as fast."""
    make = gpu_reductions.gpu_terms if grid.device.type in gpu_reductions.DEVICES else compiled_terms
    return make(attention, prepared, positions, grid)


def logsumexp(terms: KernelProblem) -> Tensor | None:
    """The log-sum-exp of every row, (B, H, I); None if the kernel was wrong on a few rows."""
    return gpu_reductions.gpu_logsumexp(terms) if _is_on_gpu(terms) else logsumexp_of(terms)


def fill(terms: KernelProblem, row_logsumexp: Tensor, states: Mapping[Reduction, State]) -> set[Reduction]:
    """Add the whole map to the states of the reductions that the kernels know, and return these reductions."""
    return (gpu_reductions.fill_on_gpu if _is_on_gpu(terms) else fill_compiled)(terms, row_logsumexp, states)


def differentiable(
    terms: KernelProblem, row_logsumexp: Tensor, states: Mapping[Reduction, State]
) -> dict[Reduction, State]:
    """Those of the known states whose gradients the kernels compute, in the graph of the tensors of `terms`."""
    return {} if _is_on_gpu(terms) else compiled_reductions.differentiable(terms, row_logsumexp, states)


def _is_on_gpu(terms: KernelProblem) -> bool:
    return terms.problem.query.device.type in gpu_reductions.DEVICES
