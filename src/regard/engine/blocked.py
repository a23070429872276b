"""The blocked engine: exact attention for any pieces in O(n) memory, forward and backward.

Queries are cut into blocks; a block asks the mask which keys it needs, computes its rows and
forgets the scores. The backward pass computes each block again. Where a block is a scaled dot
product under softmax, torch's fused kernel runs inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.attention import Prepared
from regard.engine.blocks import Block, blocks, cheapest_size, whole
from regard.engine.dense import flops_per_pair
from regard.engine.flash import FlashRows
from regard.engine.problem import Cost, Engine, Problem, Result
from regard.engine.rows import Collected, solve_rows
from regard.pieces.normalizer import Statistic

#: Bytes of scores and what goes with them that one block may hold.
BLOCK_BYTES = 48 << 20
#: What one block costs beside its pairs, in pairs of one head (measured: 0.18 ms a call, 15 ns for 8 pairs).
CALL_PAIRS = 100_000
#: Longest block of queries.
LARGEST_BLOCK = 512
#: Shortest block of queries that keeps the fused kernel busy.
SMALLEST_FUSED_BLOCK = 64


class Blocked(Engine):
    """Exact attention for any pieces in O(n) memory."""

    name = "blocked"
    does = "computes block by block over the spans of the mask, in O(n) memory"

    def refusal(self, problem: Problem) -> str | None:
        return None

    def run(self, problem: Problem) -> Result:
        work = Work.of(problem)
        parameters = [p for p in problem.attention.parameters() if p.requires_grad]
        output, *statistic = _Blocked.apply(work, problem.value, *problem.prepared.tensors(), *parameters)  # type: ignore[misc]
        return Result(output, tuple(statistic))

    def cost(self, problem: Problem) -> Cost:
        work, s = Work.of(problem), problem.sizes
        pairs = sum(block.pairs for block in work.blocks) * s.B * s.H
        held = max((block.pairs * work.bytes_per_pair(block) for block in work.blocks), default=0)
        return Cost(pairs, pairs * flops_per_pair(problem), held + s.B * s.H * s.I * 4)


@dataclass(eq=False)
class Work:
    """How one problem is cut, and how one block of it is computed."""

    problem: Problem

    @cached_property
    def flash(self) -> FlashRows | None:
        """The fused kernel for the inside of the blocks, where it can run there."""
        rows = FlashRows(self.problem)
        return rows if rows.refusal is None and rows.tells_statistic else None

    @staticmethod
    def of(problem: Problem) -> Work:
        """The one plan of a problem, made at the first question."""
        if "blocked" not in problem.notes:
            problem.notes["blocked"] = Work(problem)
        return problem.notes["blocked"]

    def bytes_per_pair(self, block: Block) -> int:
        """Bytes that one pair of a block holds while it is computed, all batch entries and heads, backward included."""
        p, s = self.problem, self.problem.sizes
        if self.flash is not None:
            return 3 * 4 * self.flash.floats_per_pair(block)
        floats = 2 * p.attention.score.floats_per_score + 4 + 2 * len(p.attention.bias) + (12 if p.dropout else 0)
        return s.B * s.H * 4 * floats

    @cached_property
    def block_size(self) -> int:
        p, s = self.problem, self.problem.sizes
        smallest = SMALLEST_FUSED_BLOCK if self.flash is not None else 1
        sizes = [size for size in (1 << n for n in range(10)) if smallest <= size <= LARGEST_BLOCK]
        call = CALL_PAIRS / (s.B * s.H)
        return cheapest_size(p.attention.mask, p.positions, s.I, sizes or [LARGEST_BLOCK], call)

    @cached_property
    def blocks(self) -> list[Block]:
        p = self.problem
        everything = whole(p.attention.mask, p.positions, p.sizes.I)
        each = self.bytes_per_pair(replace(everything, full=False))
        most = max(BLOCK_BYTES // each, 1) if each else None
        return list(blocks(p.attention.mask, p.positions, p.sizes.I, self.block_size, most))

    def solve(self, block: Block, tile: Prepared, value: Tensor) -> tuple[Tensor, Statistic]:
        if self.flash is not None:
            output, statistic = self.flash.solve(block, tile, value)
            assert statistic is not None, "the kernel inside the blocks tells its statistic"
            return output, statistic
        p = self.problem
        columns = block.columns.tensor(value.device)
        grid = p.grid.tile(block.rows, columns)
        return solve_rows(
            p.attention, tile, value, grid, columns, masked=not block.full, dropout=p.dropout, seed=p.seed or 0
        )


class _Blocked(torch.autograd.Function):
    """Blocks forward; in backward each is computed again, and its gradients land in its slices."""

    @staticmethod
    def forward(ctx: Any, work: Work, value: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        sizes, structure = work.problem.sizes, work.problem.prepared
        prepared = structure.with_tensors(tensors[: len(structure.tensors())])
        output = value.new_empty(sizes.B, sizes.H, sizes.I, sizes.E)
        collected = Collected(sizes.I)
        for block in work.blocks:
            columns = block.index(value.device)
            output[:, :, block.rows], statistic = work.solve(
                block, prepared.tile(block.rows, columns), value[:, :, columns]
            )
            collected.write(block.rows, statistic)
        ctx.work = work
        ctx.save_for_backward(value, *tensors)
        statistics = collected.tensors()
        ctx.mark_non_differentiable(*statistics)
        return output, *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        value, *tensors = ctx.saved_tensors
        structure = ctx.work.problem.prepared
        count = len(structure.tensors())
        prepared, parameters = structure.with_tensors(tensors[:count]), tensors[count:]
        wanted = ctx.needs_input_grad[1:]
        grads = [_sum_of(t) if w else None for t, w in zip((value, *tensors), wanted, strict=True)]
        on_rows = [False, *structure.on_rows()]
        for block in ctx.work.blocks:
            columns = block.index(value.device)
            found = _block_gradients(ctx.work, block, prepared, value, columns, parameters, grad, wanted)
            places = [block.rows if rows else columns for rows in on_rows]
            for total, part, place in zip(grads[: count + 1], found[: count + 1], places, strict=True):
                _accumulate(total, part, place)
            for total, part in zip(grads[count + 1 :], found[count + 1 :], strict=True):
                if total is not None and part is not None:
                    total += part
        return None, *(g if g is None else g.to(t.dtype) for g, t in zip(grads, (value, *tensors), strict=True))


def _block_gradients(
    work: Work,
    block: Block,
    prepared: Prepared,
    value: Tensor,
    columns: slice | Tensor,
    parameters: Sequence[Tensor],
    grad: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of one block with respect to its slices of the value and prepared tensors, and the parameters."""
    with torch.enable_grad():
        sliced = prepared.tile(block.rows, columns)
        leaves = [t.detach() for t in (value[:, :, columns], *sliced.tensors())]
        inputs = [*leaves, *parameters]
        for leaf, want in zip(leaves, wanted, strict=False):
            leaf.requires_grad_(want)
        output, _ = work.solve(block, sliced.with_tensors(leaves[1:]), leaves[0])
        chosen = [t for t, want in zip(inputs, wanted, strict=True) if want]
        if not output.requires_grad:
            return [None] * len(inputs)
        found = iter(torch.autograd.grad(output, chosen, grad[:, :, block.rows], allow_unused=True))
    return [next(found) if want else None for want in wanted]


def _sum_of(tensor: Tensor) -> Tensor:
    """Zeros to add gradients to: in half precision the sum over many blocks would stop growing."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _accumulate(total: Tensor | None, part: Tensor | None, place: slice | Tensor) -> None:
    if total is None or part is None:
        return
    if isinstance(place, slice):
        total[:, :, place] += part
    else:
        total.index_add_(2, place, part.to(total.dtype))
