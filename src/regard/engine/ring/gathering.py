"""Gathering: a whole tensor from the shares of all ranks, and its gradients back to their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.base.shapes import at_least_float32
from regard.base.spans import Spans
from regard.engine.ring.exchange import Exchange


class Gathered(torch.autograd.Function):
    """The tokens of all ranks in order. Backward sends each rank the gradients of its tokens, which it adds up.

    `x` (B, H, n, ...) has the tokens of this rank, `held` those of each rank by their numbers. `number` is that of the
    operation, so that the backward passes of two operations cannot be mistaken for each other. Both are collective.
    """

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, number: int, held: Sequence[Spans], x: Tensor) -> Tensor:
        ctx.exchange, ctx.number, ctx.held, ctx.dtype = exchange, number, held, x.dtype
        places = torch.cat([share.tensor(x.device) for share in held])
        return exchange.gathered(x, [len(share) for share in held]).index_select(2, places.argsort())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, Tensor]:
        exchange: Exchange = ctx.exchange
        exchange.agree("backward", {"gather": f"number {ctx.number}"})
        parts = [grad.index_select(2, share.tensor(grad.device)) for share in ctx.held]
        own = parts[exchange.rank]
        total = at_least_float32(own).clone()
        for step in range(1, exchange.ranks):
            target, source = (exchange.rank + step) % exchange.ranks, (exchange.rank - step) % exchange.ranks
            sent = [parts[target]] if parts[target].numel() else []
            received = [torch.empty_like(own)] if own.numel() else []
            for part in exchange.swap(target, sent, source, received).wait():
                total += part
        return None, None, None, total.to(ctx.dtype)
