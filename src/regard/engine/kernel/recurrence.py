"""Recurrent layers with one decay a token, by the compiled kernels: outputs, states and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.engine.kernel.layouts import CHUNK, FEW
from regard.engine.kernel.library import Library, load
from regard.engine.kernel.running import empty, run
from regard.engine.kernel.structures import Pointers, fields_of, have_addresses
from regard.engine.transforms import is_transformed
from regard.pieces.transition import Steps

#: Threads for each head from which torch is faster in chunks: a head is computed by one thread.
MOST_THREADS_PER_HEAD = 2


class Recurrence(Pointers):
    """`Recurrence` of kernels/recurrence.h."""

    _fields_ = fields_of("Recurrence")


def compiled_recurrence(value: Tensor, *tensors: Tensor | None) -> Library | None:
    """The library, if it computes a recurrence of these tensors (B, H, n, ...) faster than torch; else None.

    One thread computes a head, so with few heads for many threads torch is faster, but not up to FEW tokens.
    """
    known, (B, H, n, _) = [value, *(t for t in tensors if t is not None)], value.shape
    if is_transformed() or (n > FEW and torch.get_num_threads() > MOST_THREADS_PER_HEAD * B * H):
        return None
    if not (all([t.dtype is torch.float32 and t.is_cpu for t in known]) and have_addresses(known)):
        return None
    library = load()
    return library if library is not None and library.has("recurrence_forward") else None


def run_recurrence(
    library: Library,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    address: Tensor | None,
    before: Tensor,
) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, n, E), empty without queries, and the state (B, H, D, E) after all tokens, without gradients.

    S_t = (I - k_t w_t^T) exp(g_t) S_{t-1} + k_t v_t^T, with g in `log_decay` (B, H, n, 1) and w in `address`, or None.
    `before` (B, H, D, E) is the state before the first token.
    """
    return _run_forward(library, query, key, value, log_decay.exp(), address, before)


def _run_forward(
    library: Library,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    address: Tensor | None,
    before: Tensor,
    **kept: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs and the last state, as `run_recurrence`. `kept` has `written` and `states` of kernels/recurrence.h, which
    are filled for the backward pass.
    """
    (B, H, n, W), E = key.shape, value.shape[3]
    output, state = empty(B, H, 0 if query is None else n, E), empty(B, H, W, E)
    call = Recurrence(B, H, n, W, E)
    call.point(query=query, key=key, value=value, address=address, decay=decay, output=output, **kept)
    call.point(before=before.contiguous(), state=state)
    call.count(1)
    run(library, "recurrence_forward", call, _products(query, address) * B * H * n * W * E)
    return output, state


class NextState:
    """`run_recurrence` for one token at a time: a later token of the same sizes differs in addresses only."""

    def __init__(self, library: Library, query: Tensor, value: Tensor, address: Tensor | None) -> None:
        """`query` (B, H, 1, D), `value` (B, H, 1, E) and the address of a token like the later ones."""
        (B, H, n, W), E = query.shape, value.shape[3]
        self._library, self._call = library, Recurrence(B, H, n, W, E)
        self._work = _products(query, address) * B * H * n * W * E
        self._no_decay = torch.ones((), dtype=torch.float32, device="cpu").expand(B, H, n, 1)

    def __call__(self, steps: Steps, value: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """The output (B, H, 1, E) and the state (B, H, D, E) after the token."""
        call, value, before = self._call.copy(), value.resolve_neg(), before.resolve_neg().contiguous()
        output, state = torch.empty_like(value), torch.empty_like(before)
        decay = self._no_decay if steps.log_decay is None else steps.log_decay.exp()
        address = None if steps.address is None else steps.address.resolve_neg()
        call.point_in_order("query", steps.query, steps.key.resolve_neg(), value, address, decay, output)
        call.before, call.state = before.data_ptr(), state.data_ptr()
        call.tensors += before, state
        call.count(1)
        run(self._library, "recurrence_forward", call, self._work)
        return output, state


def _products(query: Tensor | None, address: Tensor | None) -> int:
    """Multiply-adds of a token for each number of the state: of reading, of erasing (two), of writing."""
    return (query is not None) + 2 * (address is not None) + 1


class CompiledRecurrence(torch.autograd.Function):
    """As `run_recurrence`, with gradients.

    What tokens wrote and the states before chunks are kept: E and D E / CHUNK numbers a token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        library: Library,
        query: Tensor | None,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        address: Tensor | None,
        before: Tensor,
    ) -> tuple[Tensor, Tensor]:
        B, H, n, E = value.shape
        # if nothing is erased, the values are what tokens write
        decay, written = log_decay.exp(), value if address is None else empty(B, H, n, E)
        states = empty(B, H, -(-n // CHUNK), key.shape[3], E)
        output, state = _run_forward(
            *(library, query, key, value, decay, address, before), written=written, states=states
        )
        ctx.library = library
        ctx.save_for_backward(query, key, decay, address, written, states, state)
        return output, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        query, key, decay, address, written, states, state = ctx.saved_tensors
        (B, H, n, W), E = key.shape, written.shape[3]
        call = Recurrence(B, H, n, W, E)
        call.point(query=query, key=key, address=address, decay=decay, written=written, states=states, state=state)
        like = (query, key, written, decay, address)  # the shapes of the gradients, in the order of the arguments
        names = ("grad_query", "grad_key", "grad_value", "grad_decay", "grad_address")
        needed = ctx.needs_input_grad[1:6]
        grads = [empty(*t.shape) if needs else None for t, needs in zip(like, needed, strict=True)]
        later = grad_state.clone(memory_format=torch.contiguous_format)
        call.point(**dict(zip(names, grads, strict=True)), grad_state=later)
        call.count(1)
        call.point(grad_output=None if query is None else grad_output)
        run(ctx.library, "recurrence_backward", call, 2 * _products(query, address) * B * H * n * W * E)
        return None, *grads, later
