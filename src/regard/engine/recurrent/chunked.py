"""The chunked form: S_t = (I - u_t w_t^T) diag(exp g_t) S_{t-1} + k_t v_t^T, o_t = q_t^T S_t, in O(n) time and memory.

The tokens are divided into chunks, and chunks into runs. `Chunks` computes the factors of a run at once; then the state
goes from chunk to chunk with two matrix products each. The backward pass visits the runs in reverse order. It computes
the factors of a run again, so only the state at the start of each run is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.base.shapes import at_least_float32
from regard.engine.recurrent.chunks import Chunks, Kind, Tokens, WriteGradients, gradients
from regard.engine.transforms import own_backward

#: Tokens of a chunk, a power of 2.
CHUNK = 64
#: Chunks of all heads in one run. Eight times as many take a third longer: their factors do not fit into the caches.
RUN = 64

#: query, key, value, log_decay (g), address (w), erase (u; None if it is the key): (Z, n, ...) each, or None.
#: Z: batch entries and heads.
Inputs = tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def chunked(inputs: Inputs, state: Tensor, kind: Kind) -> tuple[Tensor | None, Tensor]:
    """Outputs (Z, n, E), None without queries, and the state (Z, D, E) after all tokens; with gradients."""
    output, last = _Chunked.apply(kind, state, *inputs)  # type: ignore[misc]
    return (None if inputs[0] is None else output), last


class _Chunked(torch.autograd.Function):
    """Run after run. Backward goes through the runs in reverse, from the states that forward kept."""

    @staticmethod
    def forward(ctx: Any, kind: Kind, state: Tensor, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        value = inputs[2]
        assert value is not None
        ctx.kind, states = kind, []
        state = at_least_float32(state)
        output = state.new_empty(*value.shape) if inputs[0] is not None else state.new_empty(0)
        for part in _runs(value):
            states.append(state)
            state = _Run(inputs, part, kind).forward(state, None if inputs[0] is None else output[:, part])[0]
        ctx.save_for_backward(*inputs, *states)
        return output, state.clone() if not states else state  # without a token the state is an input still

    @staticmethod
    @own_backward
    def backward(ctx: Any, grad_output: Tensor, grad_state: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # read once: checkpointing refuses a second reading
        inputs, states = saved[:6], saved[6:]
        grads = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
        later = grad_state.clone()
        for part, state in zip(reversed(_runs(inputs[2])), reversed(states), strict=True):
            run = _Run(inputs, part, ctx.kind)
            later, parts = run.backward(state, grad_output[:, part] if inputs[0] is not None else None, later)
            for grad, of_part in zip(grads, parts, strict=True):
                if grad is not None and of_part is not None:
                    grad[:, part] = of_part
        return None, later, *grads


def _runs(value: Tensor) -> list[slice]:
    """The tokens of each run: whole chunks, but for the last."""
    Z, n = value.shape[:2]
    step = max(1, RUN // max(1, Z)) * CHUNK
    return [slice(first, min(first + step, n)) for first in range(0, n, step)]


class _Run:
    """Chunks of all heads: the tokens `part` of the inputs. Tensors of tokens are (Z * c, C, ...): c chunks of C."""

    def __init__(self, inputs: tuple[Tensor | None, ...], part: slice, kind: Kind) -> None:
        query, key, value, log_decay, address, erase = (None if x is None else _in_chunks(x[:, part]) for x in inputs)
        assert inputs[1] is not None and key is not None and value is not None and log_decay is not None
        self.Z, self.length = inputs[1].shape[0], part.stop - part.start
        self.value = value
        self.chunks = Chunks(Tokens(query, key, log_decay, address, erase), kind)
        #: X_v and X_w: a chunk that begins with the state S writes X_v - X_w S. X_w is None if nothing is erased.
        self.solved = self.chunks.solved(value)

    def _by_chunk(self, x: Tensor) -> Tensor:
        """(Z * c, ...) -> (c, Z, ...)."""
        return x.view(self.Z, -1, *x.shape[1:]).transpose(0, 1)

    def _by_token(self, x: Tensor) -> Tensor:
        """(Z * c, C, W) -> (Z, n, W), without the tokens that fill the last chunk."""
        return x.reshape(self.Z, -1, x.shape[2])[:, : self.length]

    def forward(self, state: Tensor, output: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The state after the run, what is written (N), and the states before each chunk (Z * c, D, E).

        `output` (Z, n, E) is filled; None: it is not needed.
        """
        of_value, of_state = self.solved
        written = of_value if of_state is None else torch.empty_like(of_value)
        states = state.new_empty(written.shape[0], *state.shape[1:])
        x_values, x_states = (None if x is None else self._by_chunk(x) for x in (of_value, of_state))
        # views: what is assigned to a chunk of `new` and `before` is in `written` and `states`
        writes, total, new, before = map(self._by_chunk, (self.chunks.writes, self.chunks.total, written, states))
        for c in range(len(new)):
            before[c] = state
            if x_states is not None:
                torch.baddbmm(x_values[c], x_states[c], state, alpha=-1, out=new[c])  # type: ignore[index]
            state = torch.baddbmm(total[c] * state, writes[c].mT, new[c])
        if output is not None:
            assert self.chunks.read is not None and self.chunks.queries is not None
            read_states = torch.bmm(self.chunks.read, written).baddbmm_(self.chunks.queries, states)
            output.copy_(self._by_token(read_states))
        return state, (written, states)

    def backward(
        self, state: Tensor, grad_output: Tensor | None, later: Tensor
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """The gradient of the state before the run, and the gradients of its tokens, in the order of `Inputs`.

        `state` is the state before the run, `grad_output` (Z, n, E) the gradient of its outputs, and `later` that of
        the state after it. The outputs give a part of the gradients of what is written and of the states; the loop from
        the last chunk to the first adds what later chunks give.
        """
        chunks, (_, of_state) = self.chunks, self.solved
        _, (written, states) = self.forward(state, None)
        grad = None if grad_output is None else _in_chunks(grad_output)
        if grad is None:
            grad_written, grad_states = torch.zeros_like(written), torch.zeros_like(states)
        else:
            assert chunks.read is not None and chunks.queries is not None
            grad_written = torch.bmm(chunks.read.mT, grad)
            grad_states = torch.bmm(chunks.queries.mT, grad)
        grad_ends = torch.empty_like(states)  # of the states after each chunk
        new, before, after = map(self._by_chunk, (grad_written, grad_states, grad_ends))
        writes, total = self._by_chunk(chunks.writes), self._by_chunk(chunks.total)
        x_states = None if of_state is None else self._by_chunk(of_state)
        for c in reversed(range(len(new))):
            after[c] = later
            new[c].baddbmm_(writes[c], later)
            later = before[c].addcmul_(total[c], later)
            if x_states is not None:
                later = later.baddbmm_(x_states[c].mT, new[c], alpha=-1)
        of_total = grad_ends * states
        grads = WriteGradients(
            written=grad_written,
            of_state=None if of_state is None else torch.bmm(grad_written, states.mT).neg_(),
            read=None if grad is None else torch.bmm(grad, written.mT),
            queries=None if grad is None else torch.bmm(grad, states.mT),
            writes=torch.bmm(written, grad_ends.mT),
            total=of_total.sum(2, keepdim=True) if chunks.total.shape[1] > 1 else of_total.sum((1, 2))[:, None, None],
        )
        token_gradients = gradients(chunks, self.value, self.solved, grads)
        return later.clone(), tuple(None if x is None else self._by_token(x) for x in token_gradients)


def _in_chunks(x: Tensor) -> Tensor:
    """(Z, n, W) -> (Z * c, C, W) in float32 at least; zeros fill the last chunk, and change no state."""
    _, n, W = x.shape
    C = min(CHUNK, 1 << max(0, n - 1).bit_length())
    x = at_least_float32(x)
    return (F.pad(x, (0, 0, 0, -n % C)) if n % C else x).reshape(-1, C, W).contiguous()
