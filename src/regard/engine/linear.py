"""The linear engine: attention without pairs, for kernel scores and the `Sum` normaliser.

sum_j phi(q_i).phi(k_j) v_j = phi(q_i) (sum_j phi(k_j) v_j^T): the bracket is one W x E matrix.
Causal attention runs over chunks: pairs inside a chunk, the bracket of all chunks before it.
The same bracket, carried from call to call, is the state of recurrent decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.engine.problem import Cost, Engine, Problem, Result
from regard.pieces.grid import Grid
from regard.pieces.kernel import Kernel
from regard.pieces.mask import Both, Mask, causal
from regard.pieces.normalizer import Sum
from regard.shapes import at_least_float32, group

CHUNK = 128


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
        past = key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1])
        if problem.state is not None:
            past = past + problem.state
        if is_causal:
            total, state = causal_sums(query, key, value, past)
        else:
            state = past + key.transpose(-1, -2) @ value
            total = (group(query, key.shape[1]) @ state).reshape(*query.shape[:3], -1)
        output, statistic = total[..., :-1], total[..., -1]
        output = output / statistic.masked_fill(statistic == 0, 1.0)[..., None]
        return Result(output.to(problem.value.dtype), (statistic.detach(),), state)

    def cost(self, problem: Problem) -> Cost:
        s, W = problem.sizes, problem.prepared.query.shape[-1]
        is_causal = (split(problem.attention.mask) or (False,))[0]
        pairs = s.B * s.H * s.I * CHUNK if is_causal else 0
        states = s.B * s.G * W * (s.E + 1) * (s.I // CHUNK + 1 if is_causal else 1)
        flops = 2 * s.B * (s.H * s.I + s.G * s.J) * W * (s.E + 1) + pairs * 2 * (W + s.E + 1)
        return Cost(pairs, flops, 4 * (states + pairs))


def with_ones(value: Tensor) -> Tensor:
    """A last channel of ones, whose weighted sum is the denominator."""
    return F.pad(value, (0, 1), value=1.0)


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


def causal_sums(query: Tensor, key: Tensor, value: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """sum_{j <= i} (q_i . k_j) v_j for the last I of J keys, and the state after all of them.

    query (B, H, I, W), key (B, G, J, W), value (B, G, J, E), past (B, G, W, E).
    """
    I, before = query.shape[2], key.shape[2] - query.shape[2]
    past = past + key[:, :, :before].transpose(-1, -2) @ value[:, :, :before]
    key, value = (_chunks(x[:, :, before:]) for x in (key, value))
    states = torch.cat((past[:, :, None], key.transpose(-1, -2) @ value), 2).cumsum(2)
    query = _chunks(query).unflatten(1, (key.shape[1], -1))
    inside = (query @ key[:, :, None].transpose(-1, -2)).tril() @ value[:, :, None]
    total = inside + query @ states[:, :, None, :-1]
    return total.flatten(3, 4)[..., :I, :].flatten(1, 2), states[:, :, -1]


def _chunks(x: Tensor) -> Tensor:
    """(B, heads, n, W) -> (B, heads, chunks, CHUNK, W), filled up with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % CHUNK)).unflatten(2, (-1, CHUNK))
