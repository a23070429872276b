"""Gradients of one block of a problem, and the sums of these gradients over all blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.attention import Prepared
from regard.engine.blocks import Block
from regard.engine.problem import Problem

#: One gradient for each input: the value, the prepared tensors, then the tensors of the pieces. None: not wanted.
Gradients = list[Tensor | None]
#: Computes a block from its slices of the prepared tensors and the value: results, each with the gradient of the loss.
Forward = Callable[[Prepared, Tensor], Sequence[tuple[Tensor, Tensor]]]


def block_gradients(
    problem: Problem, block: Block, piece_tensors: Sequence[Tensor], wanted: Sequence[bool], forward: Forward
) -> Gradients:
    """Gradients of one block with respect to its slices of the value and prepared tensors, and to `piece_tensors`.

    `problem.attention` is made of `piece_tensors`. `wanted` says of each input whether its gradient is needed.
    """
    columns = block.index(problem.value.device)
    with torch.enable_grad():
        tile = problem.prepared.tile(block.rows, columns).entries(block.entries)
        leaves = [t.detach() for t in (problem.value[block.entries, :, columns], *tile.tensors())]
        for leaf, want in zip(leaves, wanted, strict=False):
            leaf.requires_grad_(want)
        results = [pair for pair in forward(tile.with_tensors(leaves[1:]), leaves[0]) if pair[0].requires_grad]
        if not results:
            return [None] * len(wanted)
        inputs = [t for t, want in zip((*leaves, *piece_tensors), wanted, strict=True) if want]
        outputs, output_grads = zip(*results, strict=True)
        # keep the graph: a piece may reuse what it computed for an earlier block
        grads = iter(torch.autograd.grad(outputs, inputs, output_grads, retain_graph=True, allow_unused=True))
    return [next(grads) if want else None for want in wanted]


@dataclass(frozen=True, eq=False)
class GradientSums:
    """Sums of gradients over blocks, one for each input, in float32 at least.

    `on_rows` says for each sliced input whether it has a vector for each query (True) or each key (False). The inputs
    after these belong to the pieces, and every block adds to all of them.
    """

    sums: Gradients
    on_rows: Sequence[bool]

    @staticmethod
    def zeros(inputs: Sequence[Tensor], wanted: Sequence[bool], on_rows: Sequence[bool]) -> GradientSums:
        """Sums of 0; None for inputs whose gradient is not wanted."""
        return GradientSums([zeros_like(t) if want else None for t, want in zip(inputs, wanted, strict=True)], on_rows)

    def add(self, gradients: Gradients, rows: slice, columns: slice | Tensor, entries: slice = slice(None)) -> None:
        """Add the gradients of a block of these rows, columns and batch entries, in the order of `sums`.

        `gradients` may leave out the last ones.
        """
        for number, (total, gradient) in enumerate(zip(self.sums, gradients, strict=False)):
            if total is None or gradient is None:
                continue
            if number < len(self.on_rows):
                _add_at(total[entries], gradient, rows if self.on_rows[number] else columns)
            else:
                total += gradient


def zeros_like(tensor: Tensor) -> Tensor:
    """Zeros to add gradients to, in float32 at least: in half precision a sum over many blocks stops growing."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _add_at(total: Tensor, gradient: Tensor, place: slice | Tensor) -> None:
    """Add to the given places of axis 2, in place."""
    if isinstance(place, slice):
        total[:, :, place] += gradient
    else:
        total.index_add_(2, place, gradient.to(total.dtype))
