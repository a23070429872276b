"""The flex engine: the pieces in one call of torch's FlexAttention (Dong et al. 2024, arXiv:2412.05496).

On CUDA one compiled kernel computes the scores in registers, applies biases and mask, and skips the blocks that the
mask forbids. The spans of the mask give these blocks with one question for 128 queries; torch's `create_block_mask`
evaluates every pair. On CPU FlexAttention has no backward pass, and holds all scores unless it is compiled. It runs
there only on request, to test the code that runs on CUDA.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from regard.base.shapes import at_least_float32, to_device
from regard.base.versions import flex_with_logsumexp
from regard.engine.dense import Dense, flops_per_pair
from regard.engine.lowering import NoLowering, PairMask, PairScore, change_of, number, pairs_of
from regard.engine.problem import Cost, Engine, Problem, Result
from regard.engine.rows import finished_rows
from regard.engine.transforms import HIDDEN_GRADIENTS

#: Queries, and keys, of a block: it is skipped, masked, or computed without a mask.
BLOCK = 128


class Flex(Engine):
    """One call of FlexAttention."""

    name = "flex"
    description = "is one call of FlexAttention over the blocks that the mask allows"

    def _refusal(self, problem: Problem) -> str | None:
        if problem.scale is None:
            return "its weights are no softmax of scaled dot products, the only weights that FlexAttention computes"
        if problem.dropout:
            return "dropout acts on weights after the softmax, which FlexAttention does not let a caller change"
        if problem.hides_gradients:
            return HIDDEN_GRADIENTS
        device = problem.query.device.type
        if device == "cpu" and (problem.learns or problem.learns_bias):
            return "FlexAttention has no backward pass on CPU"
        if device != "cpu" and problem.query.dtype == torch.float64:
            return "the kernels of FlexAttention have no float64"
        lowered = _lowered(problem)
        return lowered if isinstance(lowered, str) else None

    def run(self, problem: Problem) -> Result:
        lowered = _lowered(problem)
        assert isinstance(lowered, Lowered), lowered
        output, logsumexp = flex_with_logsumexp(call(problem.query.device), *lowered.tensors, **lowered.options)
        output, row_statistic = finished_rows(problem.attention.normalizer, output, (logsumexp,))
        return Result(output.to(problem.value.dtype), tuple(t.detach() for t in row_statistic))

    def cost(self, problem: Problem) -> Cost:
        if problem.query.device.type == "cpu":
            return Dense().cost(problem)
        s, lowered = problem.sizes, _lowered(problem)
        blocks = lowered.blocks if isinstance(lowered, Lowered) else None
        pairs = s.B * s.H * (s.I * s.J if blocks is None else min(_count(blocks) * BLOCK * BLOCK, s.I * s.J))
        return Cost(pairs, pairs * flops_per_pair(problem), s.B * s.H * s.I * 4)


@dataclass(frozen=True, eq=False)
class Lowered:
    """A problem as the arguments of `flex_attention`. `change` applies the biases to a score; None: there are none."""

    tensors: tuple[Tensor, Tensor, Tensor]
    change: PairScore | None
    blocks: BlockMask | None
    scale: float
    enable_gqa: bool

    @property
    def options(self) -> dict[str, Any]:
        return {
            "score_mod": self.change,
            "block_mask": self.blocks,
            "scale": self.scale,
            "enable_gqa": self.enable_gqa,
        }


def _lowered(problem: Problem) -> Lowered | str:
    """The arguments, computed once for each problem; or the reason why the problem cannot be lowered."""
    if "flex" not in problem.plan_cache:
        try:
            problem.plan_cache["flex"] = lower(problem)
        except NoLowering as reason:
            problem.plan_cache["flex"] = str(reason)
    return problem.plan_cache["flex"]


def lower(problem: Problem) -> Lowered:
    """The pieces as functions of one pair, and the blocks of the mask; `NoLowering` names the piece that has none.

    `Problem.scale` is divided by the temperature. Biases act on scores before this division, so with biases the scores
    are divided in a last change instead.
    """
    attention, prepared = problem.attention, problem.prepared
    query, key, value = prepared.query, prepared.key, problem.value
    if not query.dtype == key.dtype == value.dtype:
        query, key, value = (at_least_float32(x) for x in (query, key, value))
    changes = [
        change_of(bias, problem, rows, cols)
        for bias, rows, cols in zip(attention.bias, prepared.rows, prepared.cols, strict=True)
    ]
    scale = problem.scale
    assert scale is not None
    temperature = getattr(attention.normalizer, "temperature", 1.0)
    if changes and temperature != 1:
        scale *= temperature
        inverse = number(1 / temperature, problem, torch.promote_types(query.dtype, torch.float32))
        changes.append(lambda score, b, h, q, k: score * inverse)
    blocks = None if attention.mask is None else block_mask(problem, pairs_of(attention.mask, problem))
    return Lowered((query, key, value), _in_turn(changes), blocks, scale, problem.sizes.G != problem.sizes.H)


def _in_turn(changes: list[PairScore]) -> PairScore | None:
    """One function that applies all of them in order; None without any."""
    if not changes:
        return None

    def change(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        for change_score in changes:
            score = change_score(score, b, h, q, k)
        return score

    return change


def block_mask(problem: Problem, allowed: PairMask) -> BlockMask:
    """The blocks of keys that each block of queries needs, with and without a mask, from the spans of the mask.

    A block that ends beyond the last query or key is always masked.
    """
    mask, positions, s = problem.attention.mask, problem.positions, problem.sizes
    assert mask is not None
    num_rows, num_columns = -(-s.I // BLOCK), -(-s.J // BLOCK)  # of blocks
    needed, unmasked = (torch.zeros(num_rows, num_columns, dtype=torch.bool, device="cpu") for _ in range(2))
    for row in range(num_rows):
        ends = positions.start + row * BLOCK, positions.start + min((row + 1) * BLOCK, s.I)
        for start, stop in positions.columns(mask.any_allowed(*ends)):
            needed[row, start // BLOCK : -(-stop // BLOCK)] = True
        if (row + 1) * BLOCK <= s.I:
            for start, stop in positions.columns(mask.all_allowed(*ends)):
                unmasked[row, -(-start // BLOCK) : stop // BLOCK] = True
    device = problem.query.device
    return BlockMask.from_kv_blocks(
        *_table(needed & ~unmasked, device),
        *_table(needed & unmasked, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=allowed,
        seq_lengths=(s.I, s.J),
    )


def _table(flags: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Flags (rows, columns) as FlexAttention reads them: the count of each row, and its columns, those set first."""
    order = torch.argsort(flags.int(), dim=1, descending=True, stable=True)
    counts, order = flags.sum(1).int()[None, None], order.int()[None, None].contiguous()
    return to_device(counts, device), to_device(order, device)


def _count(blocks: BlockMask) -> int:
    """Number of blocks that one head computes."""
    unmasked = blocks.full_kv_num_blocks
    return int(blocks.kv_num_blocks.sum()) + (0 if unmasked is None else int(unmasked.sum()))


def call(device: torch.device) -> Callable[..., Any]:
    """FlexAttention for this device: compiled, except on CPU, where compiled code does not return the log-sum-exp."""
    return _plain if device.type == "cpu" else _compiled()


@cache
def _compiled() -> Callable[..., Any]:
    """One function for all calls, which torch compiles once for each kind of arguments."""
    return torch.compile(flex_attention)


def _plain(*args: Any, **options: Any) -> Any:
    """FlexAttention by torch's own operations, also inside torch.compile, without its warning that this is slow."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        return flex_attention(*args, **options)
