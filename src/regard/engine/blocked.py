"""The blocked engine: exact attention for any pieces in O(n) memory, forward and backward.

Queries are cut into blocks. For each block the mask gives the keys that it needs. The block computes its rows and
keeps no scores. The backward pass computes the scores again. On a CPU torch's fused kernel computes the blocks of a
softmax of scaled dot products, unless `FlashRows.refusal` gives a reason. `attend_rows` computes all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.attention import Prepared
from regard.base.shapes import known_none
from regard.engine.blocks import Block, blocks, cheapest_size
from regard.engine.dense import flops_per_pair
from regard.engine.flash import FlashRows
from regard.engine.gradients import Gradients, GradientSums, block_gradients
from regard.engine.problem import Cost, Engine, Problem, Result
from regard.engine.rows import StatisticBuffer, attend_rows
from regard.engine.strided_blocks import CALL_BYTES, BlockRun, runs
from regard.engine.transforms import HIDDEN_GRADIENTS, differentiable_once, own_backward
from regard.pieces.contents import tensor_snapshot
from regard.pieces.mask import Mask
from regard.pieces.normalizer import RowStatistic, is_coarse

#: Bytes that one block may hold: its scores, and the temporary tensors of the same size.
BLOCK_BYTES = 48 << 20
#: Cost of one call besides its pairs, in pairs of one head (measured: 0.18 ms a call, 15 ns for 8 pairs).
CALL_PAIRS = 100_000
#: Cost of one more block in the same call, in pairs of one head.
SHARED_PAIRS = 10_000
#: Most queries in one block, unless the block has no mask or only the kernel's causal flag.
LARGEST_BLOCK = 1024
#: Fewest queries in a block of the fused kernel: with fewer, its products are slow.
SMALLEST_FUSED_BLOCK = 64


class Blocked(Engine):
    """Exact attention for any pieces in O(n) memory."""

    name = "blocked"
    description = "computes block by block over the spans of the mask, in O(n) memory"

    def _refusal(self, problem: Problem) -> str | None:
        return HIDDEN_GRADIENTS if problem.hides_gradients else None

    def run(self, problem: Problem) -> Result:
        tensors = differentiable_once(self.name, *problem.tensors())
        output, *row_statistic = _Blocked.apply(Work.of(problem), *tensors)  # type: ignore[misc]
        return Result(output, tuple(row_statistic))

    def cost(self, problem: Problem) -> Cost:
        work, s = Work.of(problem), problem.sizes
        pairs = sum(work.scored(block) * (s.B if block.batch is None else 1) for block in work.blocks) * s.H
        num_bytes = max((block.pairs * work.bytes_per_pair(block) for block in work.blocks), default=0)
        return Cost(pairs, pairs * flops_per_pair(problem), num_bytes + s.B * s.H * s.I * 4)


@dataclass(eq=False)
class Work:
    """The blocks of one problem, and the computation of one block."""

    problem: Problem

    @cached_property
    def flash(self) -> FlashRows | None:
        """The fused kernel that computes the blocks; None if it cannot run or, as on a GPU, returns no log-sum-exp."""
        rows = FlashRows(self.problem)
        return rows if rows.refusal is None and rows.returns_row_statistic else None

    @staticmethod
    def of(problem: Problem) -> Work:
        """The work of a problem, created at the first call and then reused."""
        return problem.planned("blocked", Work)

    @staticmethod
    def with_blocks(problem: Problem, blocks: list[Block]) -> Work:
        """The work of a problem whose blocks are known from the forward pass."""
        work = Work(problem)
        work.blocks = blocks
        return work

    def bytes_per_pair(self, block: Block) -> int:
        """Bytes that one pair of a block needs, over all batch entries and heads, forward and backward.

        An estimate: the numbers are how many tensors of the size of the scores are in memory at once.
        """
        p, s = self.problem, self.problem.sizes
        if self.flash is not None:
            return 3 * 4 * self.flash.floats_per_pair(block)
        floats = 2 * p.attention.score.floats_per_score + 4 + 2 * len(p.attention.bias) + (12 if p.dropout else 0)
        return s.B * s.H * 4 * floats

    def scored(self, block: Block) -> int:
        """Pairs of a block that are scored: the causal flag of the kernel skips those of later keys."""
        return block.causal_pairs if self.flash is not None and self.flash.is_causal(block) else block.pairs

    @cached_property
    def block_size(self) -> int:
        """The number of queries of a block, for the mask of all batch entries."""
        return self._size_for(self.problem.attention.mask)

    def _size_for(self, mask: Mask | None) -> int:
        """The power of 2 that is predicted to be the fastest block size for a mask.

        A block costs its pairs times a pace, and `call`, the cost of one more block. Pairs are counted in one head of
        one batch entry, so `call` is divided by the number of these. `call` is small if several blocks share one call.
        They can if the answers of the mask move with the queries, and if there is no backward pass, which calls the
        kernel for each block.
        """
        s, positions = self.problem.sizes, self.problem.positions
        smallest = SMALLEST_FUSED_BLOCK if self.flash is not None else 1
        sizes = [size for size in (1 << n for n in range(11)) if smallest <= size <= LARGEST_BLOCK]
        shares_calls = self._can_share_calls and mask is not None and mask.relative and not self.problem.learns
        call = (SHARED_PAIRS if shares_calls else CALL_PAIRS) / (s.B * s.H)
        pace = _pace if self.flash is not None else lambda size: 1.0
        return cheapest_size(mask, positions, s.I, sizes or [LARGEST_BLOCK], call, pace)

    @property
    def _can_share_calls(self) -> bool:
        """Whether one call for each batch entry can compute several blocks that differ by a shift.

        If the positions of the keys have a gap, a shift of indices is no shift of positions.
        """
        one_interval = len(self.problem.positions.keys.intervals) == 1
        return self.flash is not None and one_interval and all(bias.relative for bias in self.problem.attention.bias)

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks of all queries. Batch entries whose masks differ get blocks of their own with the fused kernel.

        Without it, a block computes all batch entries at once: their scores are one tensor.
        """
        s, mask = self.problem.sizes, self.problem.attention.mask
        entry_masks = [] if mask is None or self.flash is None or s.B == 1 else [mask.of_entry(b) for b in range(s.B)]
        if all(entry_mask is mask for entry_mask in entry_masks):
            return self._cut(mask, self.block_size)
        return [
            replace(block, batch=b)
            for b, entry_mask in enumerate(entry_masks)
            for block in self._cut(entry_mask, self._size_for(entry_mask))
        ]

    def _cut(self, mask: Mask | None, size: int) -> list[Block]:
        """The blocks of one mask, about `size` queries each, none with more than BLOCK_BYTES unless it is one row."""
        p = self.problem
        keep_large = self.flash is not None and not p.attention.bias

        def too_large(block: Block) -> bool:
            return block.pairs * self.bytes_per_pair(block) > BLOCK_BYTES

        return list(blocks(mask, p.positions, p.sizes.I, size, too_large, keep_large))

    @cached_property
    def runs(self) -> list[BlockRun]:
        """The blocks, grouped. The blocks of one run share one call of the kernel for each batch entry."""
        s = self.problem.sizes
        row_bytes = s.H * s.E * self.problem.value.element_size()
        size = max((block.stop - block.start for block in self.blocks), default=1)
        return list(runs(self.blocks, max(1, CALL_BYTES // (row_bytes * size)) if self._can_share_calls else 1))

    @property
    def saves_output(self) -> bool:
        """Whether forward saves the output and log-sum-exp for backward: the kernel ran, and there is no sink."""
        return self.flash is not None and self.flash.has_gradients

    def attend_run(self, run: BlockRun, prepared: Prepared, value: Tensor) -> tuple[Tensor, RowStatistic]:
        """Output (B or 1, H, rows, E) and statistic of all rows of a run, from all queries, keys and values."""
        if run.count > 1:
            assert self.flash is not None, "only the fused kernel computes several blocks of an entry in one call"
            return self.flash.attend_run(run, prepared, value)
        block = run.first
        columns = block.index(value.device)
        return self.attend_block(
            block, prepared.tile(block.rows, columns).entries(block.entries), value[block.entries, :, columns]
        )

    def attend_block(self, block: Block, tile: Prepared, value: Tensor) -> tuple[Tensor, RowStatistic]:
        """Output and statistic of a block, from its own queries, keys and values."""
        if self.flash is not None:
            output, row_statistic = self.flash.attend_block(block, tile, value)
            assert row_statistic is not None, "the kernel of the blocks returns the row statistic"
            return output, row_statistic
        p = self.problem
        columns = block.columns.tensor(value.device)
        grid = p.grid.tile(block.rows, block.columns)
        return attend_rows(
            p.attention, tile, value, grid, columns, masked=not block.full, dropout=p.dropout, seed=p.seed or 0
        )


class UnfusedWork(Work):
    """Blocks that compute all their scores, without the fused kernel."""

    flash = None  # type: ignore[assignment]


def _pace(size: int) -> float:
    """Relative time of a pair in the fused kernel, which processes 32, 64 or 256 queries at once, by block size."""
    return 1.3 if size < 192 else 1.15 if size < 768 else 1.0


class _Blocked(torch.autograd.Function):
    """Blocks forward and backward.

    Backward adds gradients to slices. If forward saved the output, only blocks with coarse rows are computed again.
    """

    @staticmethod
    def forward(ctx: Any, work: Work, *tensors: Tensor) -> tuple[Tensor, ...]:
        problem, outline = work.problem, work.problem.outline()
        # the tensors of the pieces follow: they are arguments only so that autograd asks for their gradients
        inputs = tensors[: len(outline.on_rows)]
        value, *prepared_tensors = inputs
        sizes, prepared = problem.sizes, problem.prepared.with_tensors(prepared_tensors)
        output = value.new_empty(sizes.B, sizes.H, sizes.I, sizes.E)
        buffer = StatisticBuffer(sizes.B, sizes.I)
        for run in work.runs:
            entries = run.first.entries
            output[entries, :, run.rows], row_statistic = work.attend_run(run, prepared, value)
            buffer.write(run.rows, row_statistic, entries)
        statistics = buffer.tensors()
        saved_output = (output, *statistics) if work.saves_output else ()
        ctx.outline, ctx.blocks, ctx.count = outline, work.blocks, len(tensors)
        # pieces may change before backward: small tensors are copied, large ones only checked (see `tensor_snapshot`)
        ctx.save_for_backward(
            *(t.detach() for t in inputs), *map(tensor_snapshot, problem.piece_tensors), *saved_output
        )
        ctx.mark_non_differentiable(*statistics)
        return output, *statistics

    @staticmethod
    @own_backward
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: checkpointing refuses a second reading
        tensors, saved_output = saved[: ctx.count], saved[ctx.count :]
        wanted, on_rows = ctx.needs_input_grad[1:], ctx.outline.on_rows
        leaves = [t.detach().requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)][len(on_rows) :]
        problem = ctx.outline.around([*tensors[: len(on_rows)], *leaves])
        work = Work.with_blocks(problem, ctx.blocks)
        sums = GradientSums.zeros(tensors, wanted, on_rows)
        for block, gradients in _gradients(work, saved_output, grad, wanted):
            sums.add(gradients, block.rows, block.index(grad.device), block.entries)
        return None, *(g if g is None else g.to(t.dtype) for g, t in zip(sums.sums, tensors, strict=True))


def _gradients(
    work: Work, saved_output: Sequence[Tensor], grad: Tensor, wanted: Sequence[bool]
) -> Iterator[tuple[Block, Gradients]]:
    """The gradients of every block, from the saved output and log-sum-exp if they are precise enough.

    The kernel computes weights as exp(score - log-sum-exp). The rounding of a coarse log-sum-exp would scale the
    gradients of its row. So such rows get the log-sum-exp inf, which makes their weights 0, and their blocks are
    computed again. A block may come twice: with the gradients of its precise rows, then with those of its coarse rows.
    `grad` (B, H, I, E) is the gradient of the output. `wanted` says of each input whether it needs its gradient.
    """
    if not saved_output:
        for block in work.blocks:
            yield block, _recomputed_gradients(work, block, grad, wanted)
        return
    output, logsumexp = saved_output
    coarse = is_coarse(logsumexp)
    if known_none(coarse):
        for block in work.blocks:
            yield block, _kernel_gradients(work, block, saved_output, grad)
        return
    precise = output, logsumexp.masked_fill(coarse, torch.inf)
    for block in work.blocks:
        yield block, _kernel_gradients(work, block, precise, grad.masked_fill(coarse[..., None], 0.0))
    unfused, coarse_grad = UnfusedWork(work.problem), grad.masked_fill(~coarse[..., None], 0.0)
    for block in unfused.blocks:
        if coarse[:, :, block.rows].any():
            yield block, _recomputed_gradients(unfused, block, coarse_grad, wanted)


def _kernel_gradients(work: Work, block: Block, saved_output: Sequence[Tensor], grad: Tensor) -> Gradients:
    """Gradients of one block's value, query and key, from the saved output and log-sum-exp.

    `grad` (B, H, I, E) is the gradient of the whole output.
    """
    assert work.flash is not None
    columns, value = block.index(grad.device), work.problem.value
    tile = work.problem.prepared.tile(block.rows, columns).entries(block.entries)
    output, logsumexp, grad = (x[block.entries, :, block.rows] for x in (*saved_output, grad))
    return list(work.flash.gradients(block, tile, value[block.entries, :, columns], output, logsumexp, grad))


def _recomputed_gradients(work: Work, block: Block, grad: Tensor, wanted: Sequence[bool]) -> Gradients:
    """Gradients of one block, whose output is computed again in the graph of autograd."""

    def forward(tile: Prepared, value: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(work.attend_block(block, tile, value)[0], grad[block.entries, :, block.rows])]

    return block_gradients(work.problem, block, work.problem.piece_tensors, wanted, forward)
