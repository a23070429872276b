"""The linear engine: attention without pairs, for kernel scores and the `SumNormalizer`.

sum_j phi(q_i).phi(k_j) v_j = phi(q_i) (sum_j phi(k_j) v_j^T): the bracket is one W x E matrix.
Causal attention runs over chunks: pairs inside a chunk, the bracket of all chunks before it.
The backward pass runs over them the other way round, so that no bracket but the last is kept.
The same bracket, carried from call to call, is the state of recurrent decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from regard.engine.problem import Cost, Engine, Problem, Result, empty_result
from regard.engine.transforms import differentiable_once
from regard.pieces.grid import Grid
from regard.pieces.kernel import KernelScore
from regard.pieces.mask import Both, Mask, causal
from regard.pieces.normalizer import SumNormalizer
from regard.shapes import at_least_float32, group, in_one_dtype

#: Tokens whose pairs are formed. Twice as many take a tenth longer, with 64 features as with 256.
CHUNK = 64
#: Chunks whose products are one call: small calls take twice as long, and much larger ones leave the caches.
TOGETHER = 64
#: Values and the ones beside them are filled up to a multiple of so many channels, for which products are fastest.
LANES = 8


class LinearEngine(Engine):
    """Sums over keys, for kernel scores."""

    name = "linear"
    description = "sums over keys before looking at queries, in O(n) time and memory"

    def refusal(self, problem: Problem) -> str | None:
        attention = problem.attention
        if not isinstance(attention.score, KernelScore) or not isinstance(attention.normalizer, SumNormalizer):
            return "it needs a KernelScore with the SumNormalizer"
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
        prepared = problem.prepared
        query, key, value = in_one_dtype(*map(at_least_float32, (prepared.query, prepared.key, problem.value)))
        if key_mask is not None:
            key = key * _chosen(key_mask, problem.grid)[..., None].to(key.dtype)
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
        pairs = s.B * s.H * s.I * CHUNK if is_causal else 0
        states = s.B * s.G * W * (s.E + 1) * (s.I // CHUNK + 1 if is_causal else 1)
        flops = 2 * s.B * (s.H * s.I + s.G * s.J) * W * (s.E + 1) + pairs * 2 * (W + s.E + 1)
        return Cost(pairs, flops, 4 * (states + pairs))


def _in_lanes(x: Tensor) -> Tensor:
    """Zeros up to a multiple of LANES channels."""
    return F.pad(x, (0, -x.shape[-1] % LANES))


def _with_ones(value: Tensor) -> Tensor:
    """Values and a channel of ones, whose weighted sum is the denominator."""
    return _in_lanes(F.pad(value, (0, 1), value=1.0))


def _averages(total: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Sums of values and of ones as averages and their denominators; 0 where nothing was summed."""
    row_statistic = total[..., width]
    return total[..., :width] / row_statistic.masked_fill(row_statistic == 0, 1.0)[..., None], row_statistic


def _sum_of(key: Tensor, value: Tensor) -> Tensor:
    """What keys add to the state: sum_j k_j v_j^T, and sum_j k_j last; (B, G, W, E + 1)."""
    return torch.cat((key.transpose(-1, -2) @ value, key.sum(2)[..., None]), -1)


def _all_averages(query: Tensor, key: Tensor, value: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `causal_averages`, with every query looking at all keys."""
    state = past + _sum_of(key, value)
    total = (group(query, key.shape[1]) @ _in_lanes(state)).reshape(*query.shape[:3], -1)
    return *_averages(total, value.shape[-1]), state


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


def causal_averages(query: Tensor, key: Tensor, value: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """sum_{j <= i} (q_i . k_j) v_j over its denominator for the last I of J keys, and the state after all of them.

    query (B, H, I, W), key (B, G, J, W), value (B, G, J, E), past (B, G, W, E + 1) with the sum of keys last.
    Returns (B, H, I, E), the denominators (B, H, I) and (B, G, W, E + 1).
    """
    before = key.shape[2] - query.shape[2]
    if before:
        past = past + _sum_of(key[:, :, :before], value[:, :, :before])
    return _CausalAverages.apply(query, key[:, :, before:], value[:, :, before:], past)  # type: ignore[return-value]


@dataclass(frozen=True)
class _Stretch:
    """Chunks that are computed together, of one key head or of several short ones: large products of few calls.

    Args:
        heads: Key heads, those of all batch entries counted through.
        first: Token they begin at.
        chunks: How many of each head.
        size: Tokens of each chunk.
    """

    heads: slice
    first: int
    chunks: int
    size: int

    @staticmethod
    def all_of(heads: int, length: int) -> list[_Stretch]:
        """Of a sequence, head after head; what is left at the end is a chunk of its own, of all heads."""
        chunks, left = divmod(length, CHUNK)
        some = max(1, TOGETHER // max(chunks, 1))
        found = [
            _Stretch(slice(head, min(head + some, heads)), first * CHUNK, min(TOGETHER, chunks - first), CHUNK)
            for head in range(0, heads, some)
            for first in range(0, chunks, TOGETHER)
        ]
        return found + [_Stretch(slice(0, heads), length - left, 1, left)] * bool(left)

    def cut(self, x: Tensor) -> Tensor:
        """(B * G, R, n, W) -> (heads * chunks, R * size, W), the query heads of a group one after the other."""
        part = x[self.heads, :, self.first : self.first + self.chunks * self.size]
        part = part.reshape(*part.shape[:2], self.chunks, self.size, x.shape[-1])
        return part.transpose(1, 2).reshape(-1, x.shape[1] * self.size, x.shape[-1])

    def put(self, x: Tensor, part: Tensor) -> None:
        """What `cut` gives, back to where it was; channels that `x` has not are left out."""
        parts = part[..., : x.shape[-1]].unflatten(1, (x.shape[1], self.size)).unflatten(0, (-1, self.chunks))
        rows = slice(self.first, self.first + self.chunks * self.size)
        x[self.heads, :, rows].unflatten(2, (self.chunks, self.size)).copy_(parts.transpose(1, 2))

    def triangle(self, part: Tensor) -> Tensor:
        """Ones where j <= i, for each of the query heads of a group: (R * size, size)."""
        ones = torch.ones(self.size, self.size, dtype=part.dtype, device=part.device)
        return ones.tril().repeat(part.shape[1] // self.size, 1)

    def running(self, state: Tensor, made: Tensor, backwards: bool = False) -> Tensor:
        """The sum of `state` and all chunks before each, or after it; `state` becomes that of all."""
        each = made.unflatten(0, (-1, self.chunks)).flatten(2)
        earlier = torch.ones(self.chunks, self.chunks, dtype=made.dtype, device=made.device).tril_(-1)
        earlier = (earlier.T if backwards else earlier).expand(each.shape[0], -1, -1)
        before = torch.baddbmm(state[self.heads].flatten(1)[:, None], earlier, each)
        last = 0 if backwards else -1
        state[self.heads] = (before[:, last] + each[:, last]).view_as(state[self.heads])
        return before.view_as(made)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(B, H, n, W) -> (B * G, R, n, W)."""
    return x.reshape(-1, x.shape[1] // groups, *x.shape[2:])


class _CausalAverages(torch.autograd.Function):
    """Stretch by stretch, the state carried on; in backward the same sums, from the last stretch to the first."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (B, H, I, _), (G, E) = query.shape, value.shape[1::2]
        output, row_statistic = query.new_empty(B, H, I, E), query.new_empty(B, H, I, 1)
        into, denominators = _by_group(output, G), _by_group(row_statistic, G)
        flat, state = [_by_group(x, G) for x in (query, key, value)], _in_lanes(past).flatten(0, 1)
        for stretch in _Stretch.all_of(B * G, I):
            q, k, v = (stretch.cut(x) for x in flat)
            v = _with_ones(v)
            before = stretch.running(state, torch.bmm(k.transpose(1, 2), v))
            pairs = torch.bmm(q, k.transpose(1, 2)).mul_(stretch.triangle(q))
            averages, sums = _averages(torch.bmm(q, before).baddbmm_(pairs, v), E)
            stretch.put(into, averages)
            stretch.put(denominators, sums[..., None])
        ctx.save_for_backward(query, key, value, past, output, row_statistic)
        ctx.mark_non_differentiable(row_statistic := row_statistic[..., 0])
        return output, row_statistic, state[..., : E + 1].view(past.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, past, *averages = ctx.saved_tensors
        G = key.shape[1]
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
        into, inputs = ([_by_group(x, G) for x in some] for some in (found, (query, key, value)))
        of = [_by_group(x, G) for x in (grad, *averages)]
        state, later = (_in_lanes(x).flatten(0, 1) for x in (past, grad_state))
        stretches = _Stretch.all_of(state.shape[0], query.shape[2])
        for stretch in stretches:
            stretch.put(into[0], _for_queries(stretch, of, inputs, state))
        for stretch in reversed(stretches):
            for x, part in zip(into[1:], _for_keys(stretch, of, inputs, later), strict=True):
                stretch.put(x, part)
        return *found, later[..., : past.shape[-1]].view(past.shape)


def _of_sums(stretch: _Stretch, of: list[Tensor]) -> Tensor:
    """From the gradient of averages to that of the sums they are made of, ones included."""
    grad, output, row_statistic = (stretch.cut(x) for x in of)
    empty = row_statistic == 0
    over = grad / row_statistic.masked_fill(empty, 1.0)
    ones = -(over * output).sum(-1, keepdim=True).masked_fill(empty, 0.0)
    return _in_lanes(torch.cat((over, ones), -1))


def _for_queries(stretch: _Stretch, of: list[Tensor], inputs: list[Tensor], state: Tensor) -> Tensor:
    g, k, v = _of_sums(stretch, of), stretch.cut(inputs[1]), _with_ones(stretch.cut(inputs[2]))
    before = stretch.running(state, torch.bmm(k.transpose(1, 2), v))
    pairs = torch.bmm(g, v.transpose(1, 2)).mul_(stretch.triangle(g))
    return torch.bmm(g, before.transpose(1, 2)).baddbmm_(pairs, k)


def _for_keys(stretch: _Stretch, of: list[Tensor], inputs: list[Tensor], later: Tensor) -> tuple[Tensor, Tensor]:
    """Of keys and values: `later` sums up what all later chunks ask of the state."""
    q, k, v = (stretch.cut(x) for x in inputs)
    g, v, triangle = _of_sums(stretch, of), _with_ones(v), stretch.triangle(q)
    after = stretch.running(later, torch.bmm(q.transpose(1, 2), g), backwards=True)
    pairs = torch.bmm(g, v.transpose(1, 2)).mul_(triangle)
    weights = torch.bmm(q, k.transpose(1, 2)).mul_(triangle)
    of_keys = torch.bmm(v, after.transpose(1, 2)).baddbmm_(pairs.transpose(1, 2), q)
    return of_keys, torch.bmm(k, after).baddbmm_(weights.transpose(1, 2), g)
