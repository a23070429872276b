"""The linear engine: attention in linear time, for feature scores and the `SumNormalizer`.

sum_j phi(q_i).phi(k_j) v_j = phi(q_i) (sum_j phi(k_j) v_j^T). The sum in brackets, the state, is one W x E matrix.
Causal attention runs over chunks: it scores the pairs inside a chunk, and adds the state of all earlier chunks.
The backward pass runs over the chunks in both directions, so it stores no state but the last. Recurrent decoding
carries the state from call to call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.base.shapes import at_least_float32, group, in_one_dtype, without_zeros
from regard.engine.kernel.sums import CompiledAverages, compiled_sums, sum_gradients
from regard.engine.problem import Cost, Engine, Problem, Result, empty_result
from regard.engine.transforms import differentiable_once, own_backward
from regard.pieces.mask import Mask, conjuncts
from regard.pieces.score import dot_scale

#: Tokens of a chunk, whose pairs are scored. With twice as many, a call takes 10 % longer (64 and 256 features).
CHUNK = 64
#: Chunks of one matrix product: small products take twice as long, and much larger ones do not fit into the caches.
TOGETHER = 64
#: Values, with their channel of ones, are padded to a multiple of this width: there products are fastest.
LANES = 8


class LinearEngine(Engine):
    """Sums over keys, for feature scores."""

    name = "linear"
    description = "sums over keys, once for all queries, in O(n) time and memory"
    continues_sums = True

    def _refusal(self, problem: Problem) -> str | None:
        attention = problem.attention
        is_average = attention.normalizer.is_linear and attention.normalizer.row_sum == 1.0
        if not is_average or dot_scale(attention.score, problem.prepared.query.shape[-1]) != 1.0:
            return "it needs a FeatureScore with the SumNormalizer"
        if attention.bias:
            return "a bias acts on single scores, which this engine does not compute"
        if problem.dropout:
            return "dropout acts on single weights, which this engine does not compute"
        parts = split(attention.mask)
        if parts is None:
            return "its mask does more than forbid later keys and certain keys, so queries cannot share sums over keys"
        is_causal, key_mask = parts
        if is_causal and not _ends_aligned(problem):
            return "a causal sum needs consecutive keys that end where the queries end"
        if key_mask is not None and problem.sizes.R > 1 and _shown_keys(key_mask, problem).shape[1] > 1:
            return "its mask differs between query heads that share a key head, so they cannot share sums over keys"
        return None

    def run(self, problem: Problem) -> Result:
        """Averages by sums over keys, after those of earlier keys (`problem.state`); keys that are hidden count 0."""
        is_causal, key_mask = split(problem.attention.mask) or (False, None)
        prepared = problem.prepared
        query, key, value = in_one_dtype(*map(at_least_float32, (prepared.query, prepared.key, problem.value)))
        if key_mask is not None:
            key = key * _shown_keys(key_mask, problem)[..., None].to(key.dtype)
        past = key.new_zeros(*key.shape[:2], key.shape[-1], problem.sizes.E + 1)
        if problem.state is not None:
            past = past + problem.state
        if 0 in (problem.sizes.B, problem.sizes.I):
            return Result(empty_result(problem).output, None, past + _sum_of(key, value))
        if is_causal:
            query, key, value, past = differentiable_once(self.name, query, key, value, past)
        averages = causal_averages if is_causal else _all_averages
        output, row_statistic, state = averages(query, key, value, past)
        return Result(output.to(problem.value.dtype), (row_statistic.detach(),), state)

    def cost(self, problem: Problem) -> Cost:
        s, W = problem.sizes, problem.prepared.query.shape[-1]
        is_causal = (split(problem.attention.mask) or (False,))[0]
        pairs = s.B * s.H * s.I * CHUNK if is_causal else 0  # those of a chunk
        states = s.B * s.G * W * (s.E + 1) * (s.I // CHUNK + 1 if is_causal else 1)
        flops = 2 * s.B * (s.H * s.I + s.G * s.J) * W * (s.E + 1) + pairs * 2 * (W + s.E + 1)
        return Cost(pairs, flops, 4 * (states + pairs))


def _shown_keys(key_mask: Mask, problem: Problem) -> Tensor:
    """The keys that a mask of keys allows, (B or 1, H or 1, J): its answer for the first query is that for all."""
    return key_mask.allowed(problem.grid.tile(slice(0, 1), slice(None)))[:, :, 0]


def _in_lanes(x: Tensor) -> Tensor:
    """Zeros up to a multiple of LANES channels."""
    return F.pad(x, (0, -x.shape[-1] % LANES))


def _with_ones(value: Tensor) -> Tensor:
    """Values with a channel of ones: the weighted sum of the ones is the denominator."""
    return _in_lanes(F.pad(value, (0, 1), value=1.0))


def _averages(total: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Sums of values, with the sums of ones at channel `width` -> averages and denominators; 0 for an empty sum."""
    row_statistic = total[..., width]
    return total[..., :width] / without_zeros(row_statistic)[..., None], row_statistic


def _sum_of(key: Tensor, value: Tensor) -> Tensor:
    """The state of these keys: sum_j k_j v_j^T, and sum_j k_j as the last channel; (B, G, W, E + 1)."""
    return torch.cat((key.mT @ value, key.sum(2)[..., None]), -1)


def _all_averages(query: Tensor, key: Tensor, value: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `causal_averages`, but every query attends to all keys."""
    state = past + _sum_of(key, value)
    # padded to fast widths: the averages read the first channels alone
    total = (group(query, key.shape[1]) @ _in_lanes(state)).reshape(*query.shape[:3], -1)
    return *_averages(total, value.shape[-1]), state


def split(mask: Mask | None) -> tuple[bool, Mask | None] | None:
    """A mask as (whether it is causal, its sub-mask that depends on keys alone); None if it is more than these two."""
    is_causal, of_keys = False, None
    for part in () if mask is None else conjuncts(mask):
        if part.keys_only:
            of_keys = part if of_keys is None else of_keys & part
        elif part.is_lower_triangular:
            is_causal = True
        else:
            return None
    return is_causal, of_keys


def _ends_aligned(problem: Problem) -> bool:
    """Whether the keys have consecutive positions and end where the queries end, and are no fewer."""
    positions, s = problem.positions, problem.sizes
    stops = [stop for _, stop in positions.keys]
    return stops == [positions.start + s.I] and s.J >= s.I


def causal_averages(query: Tensor, key: Tensor, value: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """sum_{j <= i} (q_i . k_j) v_j / sum_{j <= i} q_i . k_j for the last I of J tokens, and the state after all keys.

    query (B, H, I, W), key (B, G, J, W), value (B, G, J, E). `past` (B, G, W, E + 1) is the state of earlier calls; its
    last channel is the sum of keys. Returns the averages (B, H, I, E), 0 where the denominator is 0; the denominators
    (B, H, I); and the new state (B, G, W, E + 1).
    """
    before = key.shape[2] - query.shape[2]  # keys before the first query: every query sums them, so they join the state
    if before:
        past = past + _sum_of(key[:, :, :before], value[:, :, :before])
    inputs = query, key[:, :, before:], value[:, :, before:], past
    library = compiled_sums(*inputs)  # the compiled kernels; None where torch is faster, or they cannot run
    averages = _CausalAverages.apply(*inputs) if library is None else CompiledAverages.apply(library, *inputs)
    return averages  # type: ignore[return-value]


@dataclass(frozen=True)
class _Block:
    """Chunks that one matrix product computes: of one key head, or of several key heads if the sequence is short.

    Args:
        heads: Key heads, numbered over all batch entries.
        first: First token of the first chunk.
        chunks: Number of chunks of each head.
        size: Tokens of each chunk.
    """

    heads: slice
    first: int
    chunks: int
    size: int

    @staticmethod
    def all_of(heads: int, length: int) -> list[_Block]:
        """The blocks of `length` tokens, head after head. The last tokens are a shorter chunk of all heads."""
        chunks, rest = divmod(length, CHUNK)
        num_heads = max(1, TOGETHER // max(chunks, 1))
        blocks = [
            _Block(slice(head, min(head + num_heads, heads)), first * CHUNK, min(TOGETHER, chunks - first), CHUNK)
            for head in range(0, heads, num_heads)
            for first in range(0, chunks, TOGETHER)
        ]
        return blocks + [_Block(slice(0, heads), length - rest, 1, rest)] * bool(rest)

    def cut(self, x: Tensor) -> Tensor:
        """The part of this block: (B * G, R, n, W) -> (heads * chunks, R * size, W), query heads one by one."""
        part = x[self.heads, :, self.first : self.first + self.chunks * self.size]
        part = part.reshape(*part.shape[:2], self.chunks, self.size, x.shape[-1])
        return part.transpose(1, 2).reshape(-1, x.shape[1] * self.size, x.shape[-1])

    def put(self, x: Tensor, part: Tensor) -> None:
        """Inverse of `cut`: write the part into `x`; drops padding channels."""
        parts = part[..., : x.shape[-1]].unflatten(1, (x.shape[1], self.size)).unflatten(0, (-1, self.chunks))
        rows = slice(self.first, self.first + self.chunks * self.size)
        x[self.heads, :, rows].unflatten(2, (self.chunks, self.size)).copy_(parts.transpose(1, 2))

    def triangle(self, part: Tensor) -> Tensor:
        """Ones where j <= i, repeated for each query head of a group: (R * size, size)."""
        ones = torch.ones(self.size, self.size, dtype=part.dtype, device=part.device)
        return ones.tril().repeat(part.shape[1] // self.size, 1)

    def running(self, state: Tensor, chunk_states: Tensor, backwards: bool = False) -> Tensor:
        """For each chunk `state` plus the states of the chunks before it (backwards: after it).

        `state` (B * G, W, E) is overwritten: all chunks of this block are added to it. So blocks are visited in order.
        `chunk_states` and the result are (heads * chunks, W, E).
        """
        by_chunk = chunk_states.unflatten(0, (-1, self.chunks)).flatten(2)
        earlier = torch.ones(self.chunks, self.chunks, dtype=by_chunk.dtype, device=by_chunk.device).tril_(-1)
        earlier = (earlier.T if backwards else earlier).expand(by_chunk.shape[0], -1, -1)
        before = torch.baddbmm(state[self.heads].flatten(1)[:, None], earlier, by_chunk)
        last = 0 if backwards else -1
        # the last of these sums, with its own chunk, has all chunks
        state[self.heads] = (before[:, last] + by_chunk[:, last]).view_as(state[self.heads])
        return before.view_as(chunk_states)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(B, H, n, W) -> (B * G, R, n, W)."""
    return x.reshape(-1, x.shape[1] // groups, *x.shape[2:])


class _CausalAverages(torch.autograd.Function):
    """Block by block with a running state. Backward recomputes it for queries, and runs in reverse for keys."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (B, H, I, _), (G, E) = query.shape, value.shape[1::2]
        output, row_statistic = query.new_empty(B, H, I, E), query.new_empty(B, H, I, 1)
        grouped_output, denominators = _by_group(output, G), _by_group(row_statistic, G)
        inputs, state = [_by_group(x, G) for x in (query, key, value)], _in_lanes(past).flatten(0, 1)
        for block in _Block.all_of(B * G, I):
            q, k, v = (block.cut(x) for x in inputs)
            v = _with_ones(v)
            before = block.running(state, torch.bmm(k.transpose(1, 2), v))
            pairs = torch.bmm(q, k.transpose(1, 2)).mul_(block.triangle(q))
            averages, sums = _averages(torch.bmm(q, before).baddbmm_(pairs, v), E)
            block.put(grouped_output, averages)
            block.put(denominators, sums[..., None])
        ctx.save_for_backward(query, key, value, past, output, row_statistic)
        ctx.mark_non_differentiable(row_statistic := row_statistic[..., 0])
        return output, row_statistic, state[..., : E + 1].view(past.shape)

    @staticmethod
    @own_backward
    def backward(ctx: Any, grad: Tensor, _: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, past, *averages = ctx.saved_tensors
        G = key.shape[1]
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
        grouped_grads, inputs = ([_by_group(x, G) for x in tensors] for tensors in (grads, (query, key, value)))
        outputs = [_by_group(x, G) for x in (grad, *averages)]
        state, later = (_in_lanes(x).flatten(0, 1) for x in (past, grad_state))
        blocks = _Block.all_of(state.shape[0], query.shape[2])
        for block in blocks:
            block.put(grouped_grads[0], _query_gradients(block, outputs, inputs, state))
        for block in reversed(blocks):
            for x, part in zip(grouped_grads[1:], _key_gradients(block, outputs, inputs, later), strict=True):
                block.put(x, part)
        return *grads, later[..., : past.shape[-1]].view(past.shape)


def _query_gradients(block: _Block, outputs: list[Tensor], inputs: list[Tensor], state: Tensor) -> Tensor:
    """Gradients of the queries of a block; `state` is that before the block, and becomes that after it.

    `outputs` are the gradient of the averages, the averages and the denominators; `inputs` query, key and value; all of
    the whole sequence (B * G, R, n, ...). The gradient of the sums is g, and dq_i = sum_{j <= i} (g_i . v_j) k_j.
    """
    g, k, v = _in_lanes(sum_gradients(*map(block.cut, outputs))), block.cut(inputs[1]), _with_ones(block.cut(inputs[2]))
    before = block.running(state, torch.bmm(k.transpose(1, 2), v))
    pairs = torch.bmm(g, v.transpose(1, 2)).mul_(block.triangle(g))
    return torch.bmm(g, before.transpose(1, 2)).baddbmm_(pairs, k)


def _key_gradients(block: _Block, outputs: list[Tensor], inputs: list[Tensor], later: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the keys and values of a block, with `outputs` and `inputs` as in `_query_gradients`.

    `later` is the gradient of the state after the block, and becomes that before it. The gradient of the values has a
    channel of ones and padding beside them.
    """
    q, k, v = (block.cut(x) for x in inputs)
    g, v, triangle = _in_lanes(sum_gradients(*map(block.cut, outputs))), _with_ones(v), block.triangle(q)
    after = block.running(later, torch.bmm(q.transpose(1, 2), g), backwards=True)
    pairs = torch.bmm(g, v.transpose(1, 2)).mul_(triangle)
    weights = torch.bmm(q, k.transpose(1, 2)).mul_(triangle)
    key_grad = torch.bmm(v, after.transpose(1, 2)).baddbmm_(pairs.transpose(1, 2), q)
    return key_grad, torch.bmm(k, after).baddbmm_(weights.transpose(1, 2), g)
