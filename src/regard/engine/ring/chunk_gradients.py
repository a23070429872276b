"""Gradients of one chunk, from the row statistic and the output of whole rows.

With r the statistic of a whole row, d out_i / d s_ij = w_ij (v_j - out_i). So a chunk needs nothing of other chunks but
r and grad_i . out_i. The compiled kernels and torch's fused kernel take both; other chunks compute their scores again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from regard.attention import Prepared, scores
from regard.base.shapes import at_least_float32, grouped_values
from regard.engine.blocked import UnfusedWork, Work
from regard.engine.blocks import Block
from regard.engine.gradients import Gradients, GradientSums, block_gradients
from regard.engine.kernel import KernelProblem
from regard.engine.kernel.attention import Inputs, backward
from regard.engine.ring.kv_chunk import KVChunk
from regard.pieces.contents import tensors_of
from regard.pieces.dropout import kept
from regard.pieces.normalizer import Normalizer, RowStatistic, any_coarse


@dataclass(frozen=True, eq=False)
class OutputGrads:
    """Finished rows: `grad` of the output, the output, `dot` = rowsum(grad * output), and the row statistic.

    The first two are (B, H, I, E), `dot` is (B, H, I).
    """

    grad: Tensor
    output: Tensor
    dot: Tensor
    row_statistic: RowStatistic

    @staticmethod
    def of(output: Tensor, grad: Tensor, row_statistic: RowStatistic) -> OutputGrads:
        grad = at_least_float32(grad)
        return OutputGrads(grad, output, (grad * output).sum(-1), row_statistic)

    def rows(self, rows: slice, entries: slice = slice(None)) -> OutputGrads:
        """Those of some rows and batch entries."""
        tensors = self.grad, self.output, self.dot, *self.row_statistic
        grad, output, dot, *row_statistic = (t[entries, :, rows] for t in tensors)
        return OutputGrads(grad, output, dot, tuple(row_statistic))


@dataclass(frozen=True, eq=False)
class ChunkGradients:
    """The gradients of a chunk. `whole` is the normalizer of whole rows, `parameters` are the tensors of the pieces.

    `wanted` says of the value, each prepared tensor and each parameter whether it needs a gradient. Gradients are in
    float32 at least.
    """

    chunk: KVChunk
    whole: Normalizer
    output_grads: OutputGrads
    wanted: Sequence[bool]
    parameters: Sequence[Tensor]

    def compute(self) -> Gradients:
        """The gradients, by the fastest way that can compute them."""
        learns_states = any(self.wanted[3 : 1 + len(self.chunk.prepared.tensors())])  # those that biases prepared
        if learns_states or self._needs_scores:
            grads = self._from_scores()
        elif self.chunk.runs_kernel:
            grads = self._of_kernel()
        else:
            grads = self._of_fused()
        self.chunk.plan_cache.clear()  # its entries refer to the chunk, and a cycle would keep the tensors alive
        return grads

    @property
    def _needs_scores(self) -> bool:
        """Whether neither the compiled kernels nor torch's fused kernel can compute the gradients."""
        if not self.chunk.runs_kernel:
            fused = Work.of(self.chunk).flash
            learns = any(t.requires_grad for t in tensors_of(self.chunk.attention))
            if learns or fused is None or not fused.has_gradients:
                return True
        return any_coarse(self.output_grads.row_statistic[0])  # its rounding would scale the weights of a row

    def _of_kernel(self) -> Gradients:
        """By the compiled kernels, which also sum the gradients of biases along the diagonals."""
        terms, rows = KernelProblem.of(self.chunk), self.output_grads
        with torch.enable_grad():  # biases compute their numbers from parameters: autograd continues there
            inputs = terms.inputs()
        wants = Inputs(*(t is not None and t.requires_grad for t in inputs))  # type: ignore[arg-type]
        detached = Inputs(*(None if t is None else t.detach() for t in inputs))  # type: ignore[arg-type]
        grads = backward(terms.setting(), detached, wants, rows.grad, rows.dot, rows.row_statistic[0])
        of_vectors = self._if_wanted(grads.value, grads.query, grads.key)
        states = [None] * (len(self.wanted) - len(self.parameters) - 3)  # that biases prepared; `compute` has looked
        return [*of_vectors, *states, *self._of_parameters(inputs[3:], grads[3:])]

    def _of_parameters(self, numbers: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> Gradients:
        """The gradients of the tensors of the pieces, one for each of `parameters`; None where it is not wanted.

        `numbers` are the inputs of the kernel after query, key and value, such as biases by distance and a direction.
        The pieces computed them with gradients, and the kernel returned `grads` for them: autograd continues from there
        to the parameters. Keep the graph, because a piece may reuse what it computed for an earlier chunk. A parameter
        that no number depends on is unused, and gets None.
        """
        wanted = self.wanted[len(self.wanted) - len(self.parameters) :]
        pairs = [(n, g) for n, g in zip(numbers, grads, strict=True) if n is not None and g is not None]
        if not pairs:
            return [None] * len(wanted)
        leaves = [t for t, want in zip(self.parameters, wanted, strict=True) if want]
        outputs, output_grads = zip(*pairs, strict=True)
        leaf_gradients = iter(torch.autograd.grad(outputs, leaves, output_grads, retain_graph=True, allow_unused=True))
        return [next(leaf_gradients) if want else None for want in wanted]

    def _of_fused(self) -> Gradients:
        """By the backward pass of torch's fused kernel, block by block."""
        chunk, prepared, work = self.chunk, self.chunk.prepared, Work.of(self.chunk)
        sums = GradientSums.zeros((chunk.value, prepared.query, prepared.key), [True] * 3, [False, True, False])
        assert work.flash is not None, "_needs_scores is False"
        for block in work.blocks:
            rows, columns = self.output_grads.rows(block.rows, block.entries), block.index(chunk.value.device)
            tile, value = prepared.tile(block.rows, columns), chunk.value[block.entries, :, columns]
            tile, logsumexp = tile.entries(block.entries), rows.row_statistic[0]
            grads = work.flash.gradients(block, tile, value, rows.output, logsumexp, rows.grad)
            sums.add([*grads], block.rows, columns, block.entries)
        return [*self._if_wanted(*sums.sums), *(None for _ in self.wanted[3:])]

    def _if_wanted(self, *grads: Tensor | None) -> Gradients:
        """Gradients of the value, query and key; None for those that are not wanted."""
        return [grad if want else None for grad, want in zip(grads, self.wanted, strict=False)]

    def _from_scores(self) -> Gradients:
        """From the scores of each block, for every score, bias and normalizer."""
        chunk, parameters = self.chunk, self.parameters
        inputs, on_rows = (chunk.value, *chunk.prepared.tensors(), *parameters), [False, *chunk.prepared.on_rows()]
        sums = GradientSums.zeros(inputs, self.wanted, on_rows)
        for block in UnfusedWork(chunk).blocks:
            grads = block_gradients(chunk, block, parameters, self.wanted, partial(self._weighted_sums, block))
            sums.add(grads, block.rows, block.index(chunk.value.device), block.entries)
        return sums.sums

    def _weighted_sums(self, block: Block, tile: Prepared, value: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Weights times values of a block, and the sum of its weights, each with the gradient of the loss.

        The weights of a row are divided by the sum over all keys, also those of other chunks. So a greater sum here
        makes the whole output smaller: d loss / d sum = -dot. If weights are independent, nothing is divided.
        """
        chunk, rows = self.chunk, self.output_grads.rows(block.rows, block.entries)
        columns = block.columns.tensor(value.device)
        grid = chunk.grid.tile(block.rows, block.columns).entries(block.entries)
        s = scores(chunk.attention, tile, grid, masked=not block.full)
        weights = self.whole.weights(s, rows.row_statistic, columns)
        row_sums = weights.sum(-1)  # of all weights, also of those that are dropped
        if chunk.dropout:
            weights = weights * kept(grid, chunk.dropout, chunk.seed or 0) / (1 - chunk.dropout)
        output = grouped_values(weights, at_least_float32(value).to(weights.dtype))
        if self.whole.independent:
            return [(output, rows.grad.to(output.dtype))]
        return [(output, rows.grad.to(output.dtype)), (row_sums, -rows.dot.to(output.dtype))]
