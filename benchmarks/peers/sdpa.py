"""Peers from torch: the fused kernel with flags, dense masks and dense biases; FlexAttention; the plain formula."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import regard as rg
from benchmarks.case import Computes


def sdpa(*inputs: Tensor, **options: Any) -> Callable[..., Tensor]:
    """One call of the kernel."""
    return partial(F.scaled_dot_product_attention, **options)


def causal(*inputs: Tensor) -> Callable[..., Tensor]:
    """The causal flag of the kernel."""
    return sdpa(is_causal=True)


def dense(mask: rg.masks.Mask, *inputs: Tensor) -> Callable[..., Tensor]:
    """The mask as a boolean tensor (I, J), or (B, 1, I, J) if it depends on the batch."""
    return sdpa(attn_mask=dense_mask(mask, *inputs))


def dense_mask(mask: rg.masks.Mask, query: Tensor, key: Tensor, *others: Tensor) -> Tensor:
    """The mask of all pairs: True = may attend, as in torch."""
    (B, _, I, _), J = query.shape, key.shape[2]
    positions = rg.types.Positions.aligned_to_end(I, J)
    grid, parts = rg.types.Grid.whole(positions, B, 1, I, query.device), []
    for start in range(0, I, 1024):
        tile = mask.allowed(grid.tile(slice(start, start + 1024), slice(None)))
        parts.append(tile.expand(tile.shape[0], 1, min(1024, I - start), J))
    found = torch.cat(parts, 2)
    return found[0, 0] if len(found) == 1 else found


def one_call_each(lengths: tuple[int, ...], *inputs: Tensor, is_causal: bool = True) -> Callable[..., Tensor]:
    """One call per document of the packed sequence."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*part, is_causal=is_causal) for part in parts], 2)

    return run


def one_call_an_entry(lengths: tuple[int, ...], *inputs: Tensor) -> Callable[..., Tensor]:
    """One call per batch entry, with all its queries and only its real keys."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(x.split(1) for x in (q, k, v)), lengths, strict=True)
        return torch.cat([F.scaled_dot_product_attention(a, b[:, :, :n], c[:, :, :n]) for a, b, c, n in parts])

    return run


def flex(mask: rg.masks.Mask | None, query: Tensor, key: Tensor, value: Tensor) -> Callable[..., Tensor]:
    """FlexAttention, compiled, with a block mask made before, as in its tutorial."""
    return partial(_flex(), block_mask=None if mask is None else block_mask(mask, query.shape[2], query.device.type))


@cache
def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def block_mask(mask: rg.masks.Mask, length: int, device: str) -> Any:
    """`create_block_mask` of the mask, with a mask_mod written by hand for each kind of mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(pair_rule(mask, device), None, None, length, length, device=device)


def pair_rule(mask: rg.masks.Mask, device: str) -> Callable[..., Tensor]:
    """The mask_mod of FlexAttention for a mask. Its constants are tensors, so it is compiled once."""
    rules: dict[type, Callable[[Any], Callable[..., Tensor]]] = {
        rg.causal: lambda m: lambda b, h, i, j: j <= i,
        rg.window: lambda m: _within(m.size, device),
        rg.masks.prefix: lambda m: _below(m.length, device),
        rg.masks.block_local: lambda m: _near_blocks(m, device),
        rg.masks.random_blocks: lambda m: _drawn_blocks(m, device),
        rg.masks.dilated: lambda m: _with_gaps(m, device),
        rg.documents: lambda m: _same(_numbers(m.lengths, device)),
        rg.masks.global_tokens: lambda m: _either(_marked(m.positions, device)),
        rg.masks.tree: lambda m: _ancestors(m, device),
        rg.masks.neighborhood: lambda m: _near_points(m.shape, m.size, 1, device),
        rg.masks.sliding_tiles: lambda m: _near_points(m.near.shape, m.size, m.area, device),
    }
    if type(mask) in rules:
        return rules[type(mask)](mask)
    parts = [pair_rule(part, device) for part in (mask.left, mask.right)]  # type: ignore[attr-defined]
    both = type(mask).__name__ == "Both"
    return lambda b, h, i, j: (
        parts[0](b, h, i, j) & parts[1](b, h, i, j) if both else parts[0](b, h, i, j) | parts[1](b, h, i, j)
    )


def _within(size: int, device: str) -> Callable[..., Tensor]:
    limit = torch.tensor(size, device=device)
    return lambda b, h, i, j: (i - j).abs() < limit


def _below(length: int, device: str) -> Callable[..., Tensor]:
    limit = torch.tensor(length, device=device)
    return lambda b, h, i, j: j < limit


def _with_gaps(mask: Any, device: str) -> Callable[..., Tensor]:
    limit, gap = (torch.tensor(n, device=device) for n in ((mask.size - 1) * mask.dilation + 1, mask.dilation))
    return lambda b, h, i, j: ((i - j).abs() < limit) & ((i - j) % gap == 0)


def _near_blocks(mask: Any, device: str) -> Callable[..., Tensor]:
    size, before, after = (torch.tensor(n, device=device) for n in (mask.size, mask.before, mask.after))
    return lambda b, h, i, j: (j // size - i // size >= -before) & (j // size - i // size <= after)


def _drawn_blocks(mask: Any, device: str) -> Callable[..., Tensor]:
    table, size = mask.table, torch.tensor(mask.size, device=device)
    flags = torch.zeros(len(table), len(table), dtype=torch.bool).scatter_(1, table, True).to(device)
    return lambda b, h, i, j: flags[i // size, j // size]


def _ancestors(mask: Any, device: str) -> Callable[..., Tensor]:
    """A table of all pairs, row by row: the row of the parent, and the token itself."""
    size = mask.context + len(mask.parents)
    table = torch.ones(size, size, dtype=torch.bool).tril()
    for token, parent in enumerate(mask.parents, mask.context):
        above = mask.context - 1 if parent < 0 else mask.context + parent
        table[token] = table[above] if above >= 0 else False
        table[token, token] = True
    table = table.to(device)
    return lambda b, h, i, j: table[i, j]


def _near_points(shape: tuple[int, ...], size: tuple[int, ...], area: int, device: str) -> Callable[..., Tensor]:
    """Along each axis: the window of a point, without gaps, moved inside; `area` tokens are one point."""
    sides, widths = ([torch.tensor(n, device=device) for n in numbers] for numbers in (shape, size))
    tokens = torch.tensor(area, device=device)

    def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        i, j, allowed = i // tokens, j // tokens, (i >= 0) & (j >= 0)
        for side, width in zip(reversed(sides), reversed(widths), strict=True):
            first = torch.minimum((i % side - width // 2).clamp(min=0), side - width)
            allowed = allowed & (j % side >= first) & (j % side < first + width)
            i, j = i // side, j // side
        return allowed

    return near


def _numbers(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)


def _same(numbers: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, i, j: numbers[i] == numbers[j]


def _marked(positions: tuple[int, ...], device: str) -> Tensor:
    marks = torch.zeros(1 << 17, dtype=torch.bool, device=device)
    marks[list(positions)] = True
    return marks


def _either(marks: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, i, j: marks[i] | marks[j]


def with_bias(attention: rg.Attention, query: Tensor, key: Tensor, value: Tensor) -> Computes:
    """The kernel with all biases and the mask in one dense tensor (H, I, J), made before; only forward."""
    bias = bias_tensor(attention, query, key)
    return Computes(sdpa(attn_mask=bias, scale=attention.score.scale(query.shape[-1])))


def with_bias_each_time(attention: rg.Attention, *inputs: Tensor) -> Callable[..., Tensor]:
    """The same for a bias that depends on the queries, so every call makes the tensor."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias_tensor(attention, q, k))

    return run


def eager(attention: rg.Attention, *inputs: Tensor) -> Computes:
    """softmax(bias(q k' c)) v by the formula, all pairs at once."""
    scale = attention.score.scale(inputs[0].shape[-1])
    assert scale is not None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q * scale) @ k.transpose(-1, -2)
        return torch.softmax(_changed(attention, scores, q, k), -1) @ v

    return Computes(run, tuple(p for p in attention.parameters() if p.requires_grad))


def bias_tensor(attention: rg.Attention, query: Tensor, key: Tensor) -> Tensor:
    """All biases and the mask as one tensor that is added to the scores."""
    I, J = query.shape[2], key.shape[2]
    return _changed(attention, query.new_zeros(1, query.shape[1], I, J), query, key)


def _changed(attention: rg.Attention, scores: Tensor, query: Tensor, key: Tensor) -> Tensor:
    H, I, J = scores.shape[1:]
    positions = rg.types.Positions.aligned_to_end(I, J)
    grid = rg.types.Grid.whole(positions, query.shape[0], H, I, query.device)
    for piece in attention.bias:
        scores = piece.transform(scores, grid, *piece.prepare(query, key, positions)).to(query.dtype)
    if attention.mask is not None:
        scores = scores.masked_fill(~attention.mask.allowed(grid), -torch.inf)
    return scores
