"""`scaled_dot_product_attention`: torch's function, with torch's arguments, rules and result, seen by `watch`."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.attention_output import attend
from regard.base.checks import explained
from regard.base.errors import RegardError, errors_named
from regard.base.positions import Positions


@explained
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q_i . k_j scale + mask) v, as `torch.nn.functional.scaled_dot_product_attention`: it returns a tensor.

    `query` is (..., H, I, D), `key` (..., G, J, D), `value` (..., G, J, E). `attn_mask` is boolean (True = may attend)
    or added to the scores, and broadcasts to (..., H, I, J). `is_causal` aligns the first query with the first key,
    also where I and J differ; `regard.attend` refuses this, because flash-attn aligns the last ones. Fewer key heads
    need `enable_gqa`. `dropout_p` drops in eval mode too. A row without a key is 0. `regard.watch` shows the weights,
    and `regard.attend` returns them. In a graph of torch.compile it is torch's function.

    >>> import torch, regard as rg
    >>> q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    >>> output = rg.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(output, expected, atol=1e-6)
    True
    """
    if torch.compiler.is_compiling():
        options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)
    name = "scaled_dot_product_attention"
    if not isinstance(is_causal, bool):
        raise RegardError(
            f"{name}: is_causal is True or False, got {type(is_causal).__name__}. A mask is attn_mask: a tensor that "
            "broadcasts to (..., heads, queries, keys)."
        )
    if attn_mask is not None and is_causal:
        raise RegardError(f"{name}: attn_mask and is_causal are both given. Give one: a boolean mask.tril() is both.")
    inputs, lead = _four_axes(name, (query, key, value), enable_gqa)
    sizes = inputs[0].shape[:3] + inputs[1].shape[2:3]
    mask = None if attn_mask is None else _mask(name, attn_mask, lead, sizes)
    positions = Positions.of(0, sizes[2], sizes[3]) if is_causal else None
    with errors_named("attend", name):
        output = attend(
            *inputs, mask=mask, is_causal=is_causal, scale=scale, dropout_p=dropout_p, positions=positions
        ).output
    return output.reshape(*lead, *output.shape[-2:])


def _four_axes(name: str, inputs: tuple[Tensor, ...], enable_gqa: bool) -> tuple[list[Tensor], torch.Size]:
    """Query, key and value as (batch, heads, length, width), and the axes of the queries before the length.

    `name` is the function that the user called, for errors, here and below. These axes broadcast, but for the number of
    heads with `enable_gqa`, which may be smaller for keys and values.
    """
    for tensor in inputs:
        if not isinstance(tensor, Tensor) or tensor.ndim < 2:
            got = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise RegardError(f"{name}: query, key and value are tensors (..., length, width), got {got}.")
    if inputs[0].ndim == 4 and enable_gqa:
        return [*inputs], inputs[0].shape[:2]
    num_last = 3 if enable_gqa and inputs[0].ndim > 2 else 2  # so many axes do not broadcast
    try:
        lead = torch.broadcast_shapes(*(tensor.shape[:-num_last] for tensor in inputs))
    except RuntimeError:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
        remedy = " Fewer key heads than query heads need enable_gqa=True." if num_last == 2 < inputs[0].ndim else ""
        raise RegardError(f"{name}: the axes before the length do not broadcast: {shapes}.{remedy}") from None
    whole = [tensor.expand(*lead, *tensor.shape[-num_last:]) for tensor in inputs]
    batch = math.prod(whole[0].shape[:-3])
    return [x.reshape(batch, *(x.shape[-3:-2] or (1,)), *x.shape[-2:]) for x in whole], whole[0].shape[:-2]


def _mask(name: str, mask: Tensor, lead: torch.Size, sizes: tuple[int, ...]) -> Tensor:
    """The mask with four axes that broadcast to `sizes`, (batch, heads, queries, keys).

    `lead` are the axes of the queries before the length. A mask of two axes, or of four in a call of four axes, keeps
    its axes of size 1, so it is not copied.
    """
    try:
        whole = mask.expand(*lead, *sizes[2:])
    except (RuntimeError, AttributeError):
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise RegardError(
            f"{name}: attn_mask has {got}, which does not broadcast to {(*lead, *sizes[2:])} (..., queries, keys)."
        ) from None
    if (mask.ndim == 4 and len(lead) == 2) or mask.ndim == 2:
        return mask if mask.ndim == 4 else mask[None, None]
    return whole.reshape(*sizes)
