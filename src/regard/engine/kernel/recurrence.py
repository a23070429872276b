"""Recurrent layers with one decay a token, by the compiled kernels: outputs and states, without gradients."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from regard.engine.kernel.library import Library, load
from regard.engine.kernel.running import counters, run
from regard.engine.kernel.structures import Pointers, TensorFields, fields_of, has_address
from regard.engine.transforms import is_transformed

#: Threads for each head from which torch is faster: a head is computed by one thread.
MOST_THREADS_PER_HEAD = 2


class Recurrence(Pointers):
    """`Recurrence` of kernels/recurrence.c."""

    _fields_ = (
        *fields_of(c_int64, "B H n W E"),
        *fields_of(TensorFields, "query key value address decay output"),
        *fields_of(c_void_p, "state counters"),
    )


def compiled_recurrence(*tensors: Tensor | None) -> Library | None:
    """The library, if it computes a recurrence of these tensors (B, H, n, ...) faster than torch; else None."""
    known = [t for t in tensors if t is not None]
    heads = known[0].shape[0] * known[0].shape[1]
    if is_transformed() or torch.get_num_threads() > MOST_THREADS_PER_HEAD * heads:
        return None
    if not all(t.dtype == torch.float32 and t.device.type == "cpu" and has_address(t) for t in known):
        return None
    library = load()
    return library if library is not None and library.has("recurrence") else None


def run_recurrence(
    library: Library,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    address: Tensor | None,
    state: Tensor,
) -> tuple[Tensor | None, Tensor]:
    """Outputs (B, H, n, E), None without queries, and the state (B, H, D, E) after all tokens.

    S_t = (I - k_t w_t^T) exp(g_t) S_{t-1} + k_t v_t^T, with `log_decay` (B, H, n, 1) and `address` w, or None.
    """
    (B, H, n, W), E = key.shape, value.shape[3]
    output = None if query is None else value.new_empty(B, H, n, E)
    state = state.clone(memory_format=torch.contiguous_format)
    call = Recurrence(B, H, n, W, E)
    call.point(query=query, key=key, value=value, address=address, decay=log_decay.exp(), output=output)
    call.point(state=state, counters=counters(1))
    products = (query is not None) + 2 * (address is not None) + 1
    run(library, "recurrence", call, products * B * H * n * W * E)
    return output, state
