"""The fused engine: one call of torch's fused kernel for the whole problem."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from regard.engine.blocked import Blocked
from regard.engine.blocks import Block, whole
from regard.engine.dense import flops_per_pair
from regard.engine.flash import FlashRows, flash
from regard.engine.problem import Cost, Engine, Problem, Result
from regard.engine.transforms import differentiable_once
from regard.pieces.normalizer import any_coarse

#: Bytes of the largest additive mask: with a larger one, blocks are faster.
MASK_BYTES = 16 << 20


class Fused(Engine):
    """One call of torch's fused kernel."""

    name = "fused"
    description = "is one call of torch's fused kernel"

    def _refusal(self, problem: Problem) -> str | None:
        refusal = FlashRows(problem).refusal
        if refusal is not None:
            return refusal
        s = problem.sizes
        most_bytes = s.B * s.H * s.I * s.J * max(problem.query.element_size(), 4)
        # only large problems read their mask, to count the heads and entries for which it differs
        if most_bytes > MASK_BYTES and (num_bytes := mask_bytes(problem, block_of(problem))) > MASK_BYTES:
            return f"its mask and biases would take {num_bytes / 2**20:,.0f} MiB as one tensor"
        return None

    def run(self, problem: Problem) -> Result:
        value, *prepared = differentiable_once(self.name, problem.value, *problem.prepared.tensors())
        tile = problem.prepared.with_tensors(prepared)
        output, row_statistic = FlashRows(problem).attend_block(block_of(problem), tile, value)
        if row_statistic is not None and problem.learns and any_coarse(row_statistic[0]):
            return Blocked().run(problem)  # backward in the kernel would divide by exp of the coarse log-sum-exp
        return Result(output, row_statistic)

    def repeated(self, problem: Problem) -> Callable[[Tensor, Tensor, Tensor], Result] | None:
        """The call of the kernel alone, for calls without biases, sink and gradients whose mask is its causal flag.

        None for other calls.
        """
        rows, block = FlashRows(problem), block_of(problem)
        causal, scale = rows.is_causal(block), problem.scale
        softmax = problem.attention.normalizer.as_softmax
        assert softmax is not None, "the kernel computes no other normalizer"
        # such a call is the kernel alone: nothing before it makes a mask, and nothing after it adds a sink or looks for
        # coarse rows
        is_plain = not problem.attention.bias and softmax.sink is None and not problem.learns
        if not (is_plain and rows.returns_row_statistic and (causal or block.full)) or scale is None:
            return None

        def repeat(query: Tensor, key: Tensor, value: Tensor) -> Result:
            output, logsumexp = flash(query, key, value, scale=scale, causal=causal)
            assert logsumexp is not None
            return Result(output, (logsumexp,))

        return repeat

    def cost(self, problem: Problem) -> Cost:
        s = problem.sizes
        block = block_of(problem)
        pairs = s.B * s.H * (block.causal_pairs if is_top_left(problem) else s.I * s.J)
        return Cost(pairs, pairs * flops_per_pair(problem), mask_bytes(problem, block) + s.B * s.H * s.I * 4)


def block_of(problem: Problem) -> Block:
    """All queries and all keys as one block; full if the mask allows every pair."""
    return problem.planned("whole", lambda p: whole(p.attention.mask, p.positions, p.sizes.I))


def is_top_left(problem: Problem) -> bool:
    """Whether mask and positions are those of the causal flag of the kernel."""
    return FlashRows(problem).is_causal(block_of(problem))


def mask_bytes(problem: Problem, block: Block) -> int:
    """Bytes of mask and biases as one additive tensor."""
    if is_top_left(problem):
        return 0
    size = max(problem.query.element_size(), 4)
    return FlashRows(problem).floats_per_pair(block) * problem.sizes.I * problem.sizes.J * size
