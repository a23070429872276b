"""Weights of a few queries of recurrent layers with one decay a token, by the compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.engine.kernel.library import Library, load
from regard.engine.kernel.running import run, zeros
from regard.engine.kernel.structures import Pointers, fields_of, have_addresses

#: Rows from which chunks are faster: the kernel passes every token once for each row.
MOST_ROWS = 16


class Transport(Pointers):
    """`Transport` of kernels/transport.c."""

    _fields_ = fields_of("Transport")


def compiled_weights(
    query: Tensor, key: Tensor, decay: Tensor, address: Tensor | None, tokens: Tensor, until: int
) -> Tensor | None:
    """Weights (B, H, R, n) of queries (B, H, R, D) that stand at these tokens; None where the kernel cannot run.

    `tokens` (R,) ascend. `key` and `address` (None: nothing is erased) are (B, H, n, D), `decay` is (B, H, n, 1).
    Weights on tokens before `until` are not computed: they are 0.
    """
    library: Library | None = load()
    tensors = [t for t in (query, key, decay, address) if t is not None]
    if library is None or not library.has("transport") or not 0 < len(tokens) <= MOST_ROWS:
        return None
    if not (all([t.dtype is torch.float32 and t.is_cpu for t in tensors]) and have_addresses(tensors)):
        return None
    B, H, n, W = key.shape
    weights = zeros(B, H, len(tokens), n)
    call = Transport(B, H, n, W, len(tokens), until)
    call.point(query=query, key=key, address=address, decay=decay)
    call.point(tokens=tokens.contiguous(), weights=weights)
    call.count(1)
    run(library, "transport", call, 2 * weights.numel() * W)
    return weights
