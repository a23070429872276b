"""The linear engine: attention without pairs, for kernel scores and the `Sum` normaliser.

sum_j phi(q_i).phi(k_j) v_j = phi(q_i) (sum_j phi(k_j) v_j^T): the bracket is one W x E matrix.
Causal attention runs over chunks: pairs inside a chunk, the bracket of all chunks before it.
The backward pass runs over them the other way round, so that no bracket but the last is kept.
The same bracket, carried from call to call, is the state of recurrent decoding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from regard.engine.problem import Cost, Engine, Problem, Result
from regard.pieces.grid import Grid
from regard.pieces.kernel import Kernel
from regard.pieces.mask import Both, Mask, causal
from regard.pieces.normalizer import Sum
from regard.shapes import at_least_float32, group

#: Tokens whose pairs are formed. Twice as many take a tenth longer, with 64 features as with 256.
CHUNK = 64
#: Values and the ones beside them are filled up to a multiple of so many channels, for which products are fastest.
LANES = 8


class LinearEngine(Engine):
    """Sums over keys, for kernel scores."""

    name = "linear"
    does = "sums over keys before looking at queries, in O(n) time and memory"

    def refusal(self, problem: Problem) -> str | None:
        attention = problem.attention
        if not isinstance(attention.score, Kernel) or not isinstance(attention.normalizer, Sum):
            return "it needs a Kernel score with the Sum normaliser"
        if attention.bias:
            return "a bias acts on single scores, which this engine never forms"
        if problem.dropout:
            return "dropout acts on single weights, which this engine never forms"
        parts = split(attention.mask)
        if parts is None:
            return "its mask is more than causal and a choice of keys, so sums over keys cannot be shared"
        if parts[0] and not _ends_aligned(problem):
            return "a causal sum needs consecutive keys that end where the queries end"
        return None

    def run(self, problem: Problem) -> Result:
        is_causal, key_mask = split(problem.attention.mask) or (False, None)
        query, key = (at_least_float32(x) for x in (problem.prepared.query, problem.prepared.key))
        value = with_ones(at_least_float32(problem.value))
        if key_mask is not None:
            key = key * _chosen(key_mask, problem.grid)[..., None].to(key.dtype)
        past = key.new_zeros(*key.shape[:2], key.shape[-1], problem.sizes.E + 1)
        if problem.state is not None:
            past = past + problem.state
        past = F.pad(past, (0, value.shape[-1] - past.shape[-1]))
        if is_causal:
            output, statistic, state = causal_averages(query, key, value, past, problem.sizes.E)
        else:
            state = past + key.transpose(-1, -2) @ value
            total = (group(query, key.shape[1]) @ state).reshape(*query.shape[:3], -1)
            output, statistic = _averages(total, problem.sizes.E)
        state = state[..., : problem.sizes.E + 1]
        return Result(output.to(problem.value.dtype), (statistic.detach(),), state)

    def cost(self, problem: Problem) -> Cost:
        s, W = problem.sizes, problem.prepared.query.shape[-1]
        is_causal = (split(problem.attention.mask) or (False,))[0]
        pairs = s.B * s.H * s.I * CHUNK if is_causal else 0
        states = s.B * s.G * W * (s.E + 1) * (s.I // CHUNK + 1 if is_causal else 1)
        flops = 2 * s.B * (s.H * s.I + s.G * s.J) * W * (s.E + 1) + pairs * 2 * (W + s.E + 1)
        return Cost(pairs, flops, 4 * (states + pairs))


def with_ones(value: Tensor) -> Tensor:
    """Values, a channel of ones, whose weighted sum is the denominator, and zeros up to a multiple of LANES."""
    return F.pad(F.pad(value, (0, 1), value=1.0), (0, -(value.shape[-1] + 1) % LANES))


def _averages(total: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Sums of values and of ones as averages and their denominators; 0 where nothing was summed."""
    statistic = total[..., width]
    return total[..., :width] / statistic.masked_fill(statistic == 0, 1.0)[..., None], statistic


def split(mask: Mask | None) -> tuple[bool, Mask | None] | None:
    """A mask as (is it causal, which keys it leaves out for everyone), or None if it is more than that."""
    if mask is None or isinstance(mask, causal):
        return mask is not None, None
    if mask.keys_only:
        return False, mask
    if not isinstance(mask, Both):
        return None
    left, right = split(mask.left), split(mask.right)
    if left is None or right is None:
        return None
    masks = [m for m in (left[1], right[1]) if m is not None]
    both = Both(*masks) if len(masks) == 2 else (masks[0] if masks else None)
    return left[0] or right[0], both


def _chosen(mask: Mask, grid: Grid) -> Tensor:
    """A mask of keys alone, read at one query: (B or 1, 1, J)."""
    return mask.allowed(grid.tile(slice(0, 1), slice(None)))[:, :, 0]


def _ends_aligned(problem: Problem) -> bool:
    positions, s = problem.positions, problem.sizes
    ends = [stop for _, stop in positions.keys]
    return ends == [positions.start + s.I] and s.J >= s.I


def causal_averages(
    query: Tensor, key: Tensor, value: Tensor, past: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """sum_{j <= i} (q_i . k_j) v_j over its denominator for the last I of J keys, and the state after all of them.

    query (B, H, I, W), key (B, G, J, W), value (B, G, J, E) with ones at channel `width`, past (B, G, W, E).
    Returns (B, H, I, width), the denominators (B, H, I) and (B, G, W, E).
    """
    before = key.shape[2] - query.shape[2]
    if before:
        past = past + key[:, :, :before].transpose(-1, -2) @ value[:, :, :before]
    return _CausalAverages.apply(query, key[:, :, before:], value[:, :, before:], past, width)  # type: ignore[return-value]


def _part(x: Tensor, first: int, groups: int) -> Tensor:
    """One chunk, query heads of a group one after the other: (B, H, n, W) -> (B * G, R * CHUNK, W)."""
    part = x[:, :, first : first + CHUNK]
    return part.reshape(x.shape[0] * groups, -1, x.shape[3])


def _triangle(query: Tensor, key: Tensor) -> Tensor:
    """Ones where j <= i, for each of the query heads of a group: (R * n, n)."""
    n = key.shape[1]
    return torch.ones(n, n, dtype=query.dtype, device=query.device).tril().repeat(query.shape[1] // n, 1)


class _CausalAverages(torch.autograd.Function):
    """Chunk by chunk, the state in place; in backward the same sums, from the last chunk to the first."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, past: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        (B, H, I, _), G = query.shape, key.shape[1]
        output, statistic = query.new_empty(B, H, I, width), query.new_empty(B, H, I)
        state = past.flatten(0, 1).clone()
        for first in range(0, I, CHUNK):
            q, k, v = (_part(x, first, G) for x in (query, key, value))
            pairs = (q @ k.transpose(1, 2)).mul_(_triangle(q, k))
            total = torch.bmm(q, state).baddbmm_(pairs, v).view(B, H, k.shape[1], -1)
            rows = slice(first, first + CHUNK)
            output[:, :, rows], statistic[:, :, rows] = _averages(total, width)
            state.baddbmm_(k.transpose(1, 2), v)
        ctx.save_for_backward(query, key, value, past, output, statistic)
        ctx.mark_non_differentiable(statistic)
        return output, statistic, state.view_as(past)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, past, output, statistic = ctx.saved_tensors
        sums = _gradient_of_sums(grad, output, statistic, value.shape[-1])
        for_query = _for_queries(sums, query, key, value, past)
        return for_query, *_for_keys(sums, query, key, value, grad_state), None


def _gradient_of_sums(grad: Tensor, output: Tensor, statistic: Tensor, width: int) -> Tensor:
    """From the gradient of averages to that of the sums they are made of, ones included: (B, H, I, width)."""
    empty = statistic == 0
    over = grad / statistic.masked_fill(empty, 1.0)[..., None]
    ones = -(over * output).sum(-1, keepdim=True).masked_fill(empty[..., None], 0.0)
    return F.pad(torch.cat((over, ones), -1), (0, width - over.shape[-1] - 1))


def _for_queries(sums: Tensor, query: Tensor, key: Tensor, value: Tensor, past: Tensor) -> Tensor:
    G, found, state = key.shape[1], torch.empty_like(query), past.flatten(0, 1).clone()
    for first in range(0, query.shape[2], CHUNK):
        g, k, v = (_part(x, first, G) for x in (sums, key, value))
        pairs = (g @ v.transpose(1, 2)).mul_(_triangle(g, k))
        part = torch.bmm(g, state.transpose(1, 2)).baddbmm_(pairs, k)
        found[:, :, first : first + CHUNK] = part.view(*query.shape[:2], k.shape[1], -1)
        state.baddbmm_(k.transpose(1, 2), v)
    return found


def _for_keys(
    sums: Tensor, query: Tensor, key: Tensor, value: Tensor, grad_state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of keys, values and past: `later` sums up what all later chunks ask of the state."""
    G, for_key, for_value = key.shape[1], torch.empty_like(key), torch.empty_like(value)
    later = grad_state.flatten(0, 1).clone()
    for first in reversed(range(0, query.shape[2], CHUNK)):
        g, q, k, v = (_part(x, first, G) for x in (sums, query, key, value))
        triangle, rows = _triangle(q, k), slice(first, first + CHUNK)
        pairs, weights = (g @ v.transpose(1, 2)).mul_(triangle), (q @ k.transpose(1, 2)).mul_(triangle)
        of_key = torch.bmm(v, later.transpose(1, 2)).baddbmm_(pairs.transpose(1, 2), q)
        of_value = torch.bmm(k, later).baddbmm_(weights.transpose(1, 2), g)
        for_key[:, :, rows] = of_key.view(*key.shape[:2], k.shape[1], -1)
        for_value[:, :, rows] = of_value.view(*key.shape[:2], k.shape[1], -1)
        later.baddbmm_(q.transpose(1, 2), g)
    return for_key, for_value, later.view(grad_state.shape)
