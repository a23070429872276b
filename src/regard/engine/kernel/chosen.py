"""The chosen engine: softmax attention to the keys that a mask chose for each query, by compiled kernels.

The kernel engine computes, for a tile of queries, every key that one of them chose. Queries choose different keys, so
these are nearly all keys. This engine computes the pairs of each query alone: see kernels/chosen.h.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.engine.blocked import Blocked
from regard.engine.dense import flops_per_pair
from regard.engine.kernel.attention import PARTS, CallSettings, Inputs, sink_gradient, sum_of_parts
from regard.engine.kernel.engine import FEWEST_QUERIES, KernelProblem
from regard.engine.kernel.layouts import MOST_ROWS, SPARE_KEYS
from regard.engine.kernel.library import load_fast
from regard.engine.kernel.mask_layout import Layout
from regard.engine.kernel.running import empty, run, zeros
from regard.engine.kernel.structures import Pointers, fields_of
from regard.engine.problem import Cost, Engine, Problem, Result
from regard.engine.transforms import gradients_once
from regard.pieces.chosen import chosen_and_rest, chosen_keys
from regard.pieces.mask import Mask
from regard.pieces.normalizer import any_coarse

#: Fewest keys of a block that many rows read together; the keys of smaller blocks are gathered.
FEWEST_TOGETHER = 24
#: Rows of a tile. More rows choose the same block, and all rows of a tile stay in the processor's cache.
BLOCK_ROWS, GATHERING_ROWS = 256, 512
#: Share of the pairs of the rest of the mask up to which the engine is chosen.
WORTH_CHOOSING = 0.5


class Choice(Pointers):
    """`Choice` of kernels/chosen.h."""

    _fields_ = fields_of("Choice")


class Chosen(Engine):
    """Softmax of scaled dot products over chosen keys."""

    name = "chosen"
    description = "computes only the pairs of each query and the keys that were chosen for it"

    def _refusal(self, problem: Problem) -> str | None:
        return ChosenProblem.of(problem).refusal

    def run(self, problem: Problem) -> Result:
        terms = ChosenProblem.of(problem)
        inputs, setting, choice = terms.inputs(), terms.setting(), terms.choice
        if not problem.learns:
            output, logsumexp = forward(setting, choice, inputs)
            return Result(output, (logsumexp,))
        output, logsumexp = ChosenAttention.apply(setting, choice, *inputs)  # type: ignore[misc]
        if any_coarse(logsumexp):
            return Blocked().run(problem)  # backward would divide by exp of the coarse log-sum-exp
        return Result(output, (logsumexp,))

    def cost(self, problem: Problem) -> Cost:
        s, terms = problem.sizes, ChosenProblem.of(problem)
        pairs, width = s.B * s.H * terms.pairs_of_head, problem.prepared.key.shape[-1]
        # packed keys and values, the log-sum-exp, and the flags of the rest of the mask
        num_bytes = 4 * s.B * (s.G * s.J * (width + s.E) + s.H * s.I) + terms.layout.num_bytes
        return Cost(pairs, pairs * flops_per_pair(problem), num_bytes)


def pays(problem: Problem) -> bool:
    """Whether the engine is faster than those that compute all pairs of a block of queries."""
    s, mask = problem.sizes, problem.attention.mask
    if load_fast() is None or mask is None or s.I < FEWEST_QUERIES:
        return False
    terms = ChosenProblem.of(problem)
    if terms.refusal is not None:
        return False
    return s.B * terms.pairs_of_head <= WORTH_CHOOSING * terms.layout.num_pairs


@dataclass(frozen=True, eq=False)
class ChosenKeys:
    """The ids of each query (B or 1, heads, I, K), and the first key of each block (B or 1, blocks + 1).

    An id is the number of a block, which is one key if its size is 1. `gathers`: each query reads its keys one by one.
    `shared` query heads have the same keys and ids. `ids_are_keys`: id n is the key with the index n.
    """

    ids: Tensor
    starts: Tensor
    gathers: bool
    shared: int
    ids_are_keys: bool

    def num_pairs(self, inputs: Inputs) -> int:
        """About as many pairs as a call computes: K blocks of the average length for each query."""
        (B, H, I, _), J = inputs.query.shape, inputs.key.shape[2]
        return B * H * I * min(J, self.ids.shape[3] * J // max(1, self.starts.shape[1] - 1))

    def fields(self) -> Choice:
        """The structure of the kernels, in whose memory the ids are rows."""
        ids, starts = self.ids, self.starts
        fields = Choice(K=ids.shape[3], num_heads=ids.shape[1], num_blocks=starts.shape[1] - 1)
        fields.ids_head_stride, fields.shared, fields.gathers = ids.stride(1), self.shared, self.gathers
        fields.ids_entry_stride = ids.stride(0) if len(ids) > 1 else 0
        fields.starts_entry_stride = starts.stride(0) if len(starts) > 1 else 0
        fields.point(ids=ids, starts=None if self.ids_are_keys else starts)
        return fields


class ChosenProblem(KernelProblem):
    """A problem whose mask is a choice and a rest, which has the layout of the other kernels."""

    @staticmethod
    def of(problem: Problem) -> ChosenProblem:
        """The terms of a problem, created at the first call and then reused."""
        return problem.planned("chosen", ChosenProblem)

    @cached_property
    def _parts(self) -> tuple[chosen_keys | None, Mask | None]:
        """The choice, and the rest of the mask."""
        return chosen_and_rest(self.problem.attention.mask)

    @property
    def chosen(self) -> chosen_keys:
        """The mask of the chosen keys."""
        chosen = self._parts[0]
        assert chosen is not None, "the refusal is None"
        return chosen

    @property
    def mask(self) -> Mask | None:
        """The rest of the mask, which the layout describes."""
        return self._parts[1]

    @cached_property
    def refusal(self) -> str | None:
        problem = self.problem
        if self._parts[0] is None:
            return "its mask is no chosen keys, nor chosen keys & another mask"
        if problem.attention.bias:
            return "it adds no biases to scores"
        if problem.dropout:
            return "it drops no weights"
        if self.direction is not None:
            return "its scores are no dot products"
        return super().refusal

    @property
    def gathers(self) -> bool:
        """Whether each query reads its keys one by one."""
        return self.chosen.size < FEWEST_TOGETHER

    @property
    def pairs_of_head(self) -> int:
        """Most pairs of one head and batch entry."""
        chosen, sizes = self.chosen, self.problem.sizes
        return sizes.I * min(sizes.J, chosen.ids.shape[3] * chosen.size)

    @cached_property
    def shared(self) -> int:
        """Query heads that have the same keys and ids, and are computed together: rows of one tile.

        The greatest divisor of their number that fits into a tile.
        """
        sizes, num_id_heads = self.problem.sizes, self.chosen.ids.shape[1]
        alike = math.gcd(sizes.R, sizes.H // num_id_heads)
        return max(n for n in range(1, alike + 1) if alike % n == 0 and n <= BLOCK_ROWS)

    @cached_property
    def layout(self) -> Layout:
        """The rest of the mask. A tile has as many queries as fit with `shared` rows each."""
        p, rows = self.problem, min(MOST_ROWS, GATHERING_ROWS if self.gathers else BLOCK_ROWS)
        return Layout.of(self.mask, p.positions, p.sizes, max(1, rows // self.shared))

    def setting(self) -> CallSettings:
        """The settings without dropout and statistics, which this engine does not compute."""
        return self._setting()

    def inputs(self) -> Inputs:
        """The tensors of the call. There are no biases; distances that the mask forbids may be -inf in `after`."""
        prepared, (_, after, sink) = self.problem.prepared, self._vectors()
        return Inputs(prepared.query, prepared.key, self.problem.value, None, after, sink)

    @cached_property
    def choice(self) -> ChosenKeys:
        """The ids of the queries of this call, and where blocks begin among its keys."""
        chosen, positions = self.chosen, self.problem.positions
        first = positions.start - chosen.start
        ids = chosen.ids[:, :, first : first + self.problem.sizes.I]
        keys = positions.keys.tensor("cpu")
        # the block of each key, which ascends with the key; then the index of the first key of each block, and the end
        blocks = keys[None] // chosen.size if chosen.blocks is None else chosen.blocks[:, keys]
        numbers = torch.arange(int(blocks[:, -1].max()) + 2, device="cpu").expand(len(blocks), -1).contiguous()
        starts = torch.searchsorted(blocks.contiguous(), numbers, out_int32=True)
        indices_are_positions = len(positions.keys.intervals) == 1 and positions.keys.intervals[0][0] == 0
        ids_are_keys = self.gathers and indices_are_positions and chosen.size == 1 and chosen.blocks is None
        return ChosenKeys(ids, starts, self.gathers, self.shared, ids_are_keys)


class ChosenAttention(torch.autograd.Function):
    """softmax(scale q.k) v over chosen keys, and its log-sum-exp. The last arguments are the fields of `Inputs`."""

    @staticmethod
    def forward(ctx: Any, setting: CallSettings, choice: ChosenKeys, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        inputs = Inputs(*(None if t is None else t.detach() for t in tensors))  # type: ignore[arg-type]
        output, logsumexp = forward(setting, choice, inputs)
        ctx.setting, ctx.choice = setting, choice
        ctx.save_for_backward(*tensors, output, logsumexp)
        ctx.mark_non_differentiable(logsumexp)
        return output, logsumexp

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, output, logsumexp = ctx.saved_tensors
        inputs, delta = Inputs(*tensors), (grad.float() * output.float()).sum(-1)
        with torch.no_grad():
            grads = [*backward(ctx.setting, ctx.choice, inputs, grad, delta, logsumexp), *[None] * 5]
            if ctx.needs_input_grad[7] and inputs.sink is not None:  # field 5, after two arguments
                grads[5] = sink_gradient(inputs.sink, logsumexp, delta)
            cast = [None if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)]
        return None, None, *gradients_once("chosen", cast, grad, *tensors)


def forward(setting: CallSettings, choice: ChosenKeys, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The output (B, H, I, E) and the log-sum-exp (B, H, I). No gradients."""
    (B, H, I, _), E = inputs.query.shape, inputs.value.shape[3]
    output, logsumexp = torch.empty((B, H, I, E), dtype=inputs.value.dtype, device="cpu"), empty(B, H, I)
    call, (keys, values) = inputs.call(setting), _packed_sizes(setting, inputs)
    call.point(output=output, logsumexp=logsumexp, packed_keys=empty(keys), packed_values=empty(values))
    call.count(3)
    run(setting.library, "chosen", call, choice.num_pairs(inputs) * (inputs.query.shape[3] + E), choice.fields())
    return output, logsumexp


def backward(
    setting: CallSettings, choice: ChosenKeys, inputs: Inputs, grad: Tensor, delta: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in float32; `delta` (B, H, I) is grad . output.

    `grad` (B, H, I, E) is the gradient of the output, and `logsumexp` (B, H, I) that of the forward pass.
    """
    (B, H, I, D), (_, G, J, E) = inputs.query.shape, inputs.value.shape
    call, (keys, values) = inputs.call(setting), _packed_sizes(setting, inputs)
    call.num_parts = -(-PARTS // (B * G))
    length = setting.padded(J) + SPARE_KEYS
    grad_query = empty(B, H, I, D)
    grad_key, grad_value = (zeros(B, G, call.num_parts, length, setting.whole(width)) for width in (D, E))
    call.point(grad_output=grad, delta=delta.contiguous(), logsumexp=logsumexp.contiguous())
    call.point(packed_keys=empty(keys), packed_key_rows=empty(keys), packed_value_panels=empty(values))
    call.point(grad_query=grad_query, grad_key=grad_key, grad_value=grad_value)
    call.count(3)
    run(setting.library, "chosen_backward", call, choice.num_pairs(inputs) * (3 * D + 2 * E), choice.fields())
    return grad_query, sum_of_parts(grad_key)[:, :, :J, :D], sum_of_parts(grad_value)[:, :, :J, :E]


def _packed_sizes(setting: CallSettings, inputs: Inputs) -> tuple[int, int]:
    """Floats of packed keys and of packed values, whole registers wide."""
    B, G, J, E = inputs.value.shape
    num_keys = B * G * setting.padded(J)
    return num_keys * setting.whole(inputs.query.shape[3]), num_keys * setting.whole(E)
