"""The engine `recurrent`, and `recur`: outputs and the last state of a recurrence, token by token or in chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.attention import Transported
from regard.base.shapes import at_least_float32, in_one_dtype
from regard.engine.kernel.recurrence import CompiledRecurrence, NextState, compiled_recurrence, run_recurrence
from regard.engine.problem import Cost, Engine, Problem, Result
from regard.engine.recurrent.chunked import CHUNK, RUN, Inputs, Kind, chunked
from regard.engine.transforms import differentiable_once, is_transformed
from regard.pieces.transition import Steps, with_heads

#: Up to this number of tokens a call without gradients runs token by token.
FEW = 4


class RecurrentEngine(Engine):
    """A memory that goes from token to token, or from chunk to chunk."""

    name = "recurrent"
    description = "carries a memory of fixed size over the tokens, in O(n) time and memory"
    families = (Transported,)
    continues_sums = True

    def run(self, problem: Problem) -> Result:
        steps, state, value, memory = problem.prepared.steps, problem.state, problem.value, problem.memory
        assert steps is not None
        if memory is not None:  # the tokens that it has read are not read again
            steps, value, state = steps.after(memory.num_tokens), value[:, :, memory.num_tokens :], memory.state
        output, last = recur(steps, with_heads(value, problem.sizes.H), state)
        return Result(output.to(problem.value.dtype), None, last)

    def cost(self, problem: Problem) -> Cost:
        """The pairs of tokens inside chunks, their products and those of states, and the factors of the chunks."""
        s, steps = problem.sizes, problem.prepared.steps
        assert steps is not None
        chunk = min(CHUNK, s.J) if s.J > FEW else 1
        products = 2 if steps.address is None else 4  # of pairs, and of states
        pairs = s.B * s.H * s.I * (chunk + 1) // 2
        flops = products * (pairs * (s.D + s.E) // 2 + 2 * s.B * s.H * s.J * s.D * s.E)
        # tokens whose factors are in memory at once: those of a run, at least one chunk of each head
        held = min(s.J, RUN * chunk // max(1, s.B * s.H) + chunk) * s.B * s.H
        return Cost(pairs, flops, 4 * held * (4 * (s.D + s.E) + 2 * chunk + s.D * s.E // chunk))


def recur(steps: Steps, value: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, I, E) of the last I of J tokens, and the state (B, H, D, E) after all.

    `value` is (B, H, J, E). `state` is that before the first token, or broadcasts to it; zeros by default. Gradients
    reach the tensors of `steps`, the values and the state. Inside torch.func torch's own operations go token by token,
    so there are derivatives of any order.
    """
    B, H, I, D = steps.query.shape
    J, E = value.shape[2:]
    if 0 in (B * H, J):
        last = value.new_zeros(B, H, D, E) if state is None else state.expand(B, H, D, E)
        return value.new_zeros(B, H, I, E), at_least_float32(last)
    compiled = None if is_transformed() else _compiled(steps, value, state)
    output, last = _in_torch(steps, value, state) if compiled is None else compiled
    if steps.own is not None:  # a weight of its own on the query's token, which no state holds
        output = output + steps.own[..., None] * value[:, :, J - I :]
    return output, last


def next_state(steps: Steps, value: Tensor, state: Tensor) -> NextState | None:
    """A function that computes `recur` for this token, and for later tokens of the same sizes, without gradients.

    None if the kernels cannot compute such tokens, or only from copies: of another dtype, or of an expanded state.
    """
    given = [*steps.tensors(), value, state]
    if not _is_compilable(steps) or steps.own is not None or any([t.dtype is not torch.float32 for t in given]):
        return None
    if state.shape != (*value.shape[:2], steps.key.shape[3], value.shape[3]):
        return None
    library = compiled_recurrence(*given)
    return None if library is None else NextState(library, steps.query, value, steps.address)


def _is_compilable(steps: Steps) -> bool:
    """Whether tokens have at most one decay for all channels, write before they are read, and erase by their keys."""
    is_plain = not (steps.reads_before or steps.erases_before) and steps.erase is None
    return is_plain and (steps.log_decay is None or steps.log_decay.shape[3] == 1)


def _compiled(steps: Steps, value: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Outputs and the last state by the compiled kernels, as `recur`; None where they cannot run."""
    if not _is_compilable(steps):
        return None
    (B, H, I, D), (J, E) = steps.query.shape, value.shape[2:]
    log_decay = value.new_zeros(()).expand(B, H, J, 1) if steps.log_decay is None else steps.log_decay
    state = value.new_zeros(B, H, D, E) if state is None else state.expand(B, H, D, E)
    inputs = [steps.query, steps.key, value, log_decay, state, *(() if steps.address is None else (steps.address,))]
    inputs = [at_least_float32(x) for x in inputs]
    library = compiled_recurrence(*inputs)
    if library is None:
        return None
    learns = torch.is_grad_enabled() and any([x.requires_grad for x in inputs])
    run: Any = CompiledRecurrence.apply if learns else run_recurrence
    query, key, value, log_decay, last, *address = differentiable_once("recurrent", *inputs)
    of_tokens = key, value, log_decay, address[0] if address else None
    if J == I:
        return run(library, query, *of_tokens, last)
    parts = slice(0, J - I), slice(J - I, None)  # tokens without a query, and those with one
    early, late = ([None if x is None else x[:, :, part] for x in of_tokens] for part in parts)
    _, last = run(library, None, *early, last)
    return run(library, query, *late, last) if I else (value.new_empty(B, H, 0, E), last)


def _in_torch(steps: Steps, value: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs and the last state by torch's operations, as `recur`, on one axis Z of batch entries and heads."""
    B, H, I, D = steps.query.shape
    J, E = value.shape[2:]
    flat = {name: _flat(getattr(steps, name)) for name in ("query", *Steps.ON_COLS)}
    values, first = value.flatten(0, 1), value.new_zeros(B, H, D, E) if state is None else state.expand(B, H, D, E)
    first = at_least_float32(first.flatten(0, 1))  # the state before the first token
    if flat["log_decay"] is None:
        flat["log_decay"] = values.new_zeros(B * H, J, 1)
    names = [name for name, x in flat.items() if x is not None]
    *tensors, values, first = in_one_dtype(*(flat[name] for name in names), values, first)  # type: ignore[arg-type]
    tensors = tensors if is_transformed() else differentiable_once("recurrent", *tensors)
    flat.update(zip(names, tensors, strict=True))
    output, last = _in_parts(flat, values, first, Kind(steps.reads_before, steps.erases_before))
    return output.view(B, H, I, E), last.view(B, H, D, E)


def _flat(x: Tensor | None) -> Tensor | None:
    """(B, H, n, W) -> (B * H, n, W)."""
    return None if x is None else x.flatten(0, 1)


def _in_parts(flat: dict[str, Tensor | None], value: Tensor, state: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Earlier tokens without a query, then those with one: outputs (Z, I, E) and the last state (Z, D, E).

    `flat` has the tensors of `Steps` by name, (Z, n, ...).
    """
    query = flat["query"]
    assert query is not None
    num_earlier = value.shape[1] - query.shape[1]
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*flat.values(), value, state))
    run = stepwise if is_transformed() or (value.shape[1] <= FEW and not learns) else chunked
    if num_earlier:
        state = run(_inputs(flat, value, slice(0, num_earlier), None), state, kind)[1]
    output, state = run(_inputs(flat, value, slice(num_earlier, None), query), state, kind)
    assert output is not None
    return output, state


def _inputs(flat: dict[str, Tensor | None], value: Tensor, part: slice, query: Tensor | None) -> Inputs:
    """`Inputs` of some tokens, with their queries or without."""
    key, log_decay, address, erase = (None if (x := flat[name]) is None else x[:, part] for name in Steps.ON_COLS)
    assert key is not None and log_decay is not None
    return query, key, value[:, part], log_decay, address, erase


def stepwise(inputs: Inputs, state: Tensor, kind: Kind) -> tuple[Tensor | None, Tensor]:
    """Outputs (Z, n, E), None without queries, and the state (Z, D, E), token by token.

    The state is read once a token, for query and address together, and written once.
    """
    query, _, value, *_ = inputs
    outputs = []
    for t in range(value.shape[1]):
        output, state = _step(tuple(None if x is None else x[:, t, None] for x in inputs), state, kind)
        outputs.append(output)
    if query is None:
        return None, state
    return torch.cat(outputs, 1) if outputs else torch.zeros_like(value), state


def _step(token: tuple[Tensor | None, ...], state: Tensor, kind: Kind) -> tuple[Tensor | None, Tensor]:
    """The output (Z, 1, E) of one token, and the state after it; `token` has `Inputs` of this token alone.

    One product reads the state for address and query. A query that reads after its token gets what the token writes
    besides.
    """
    query, key, value, log_decay, address, erase = token
    assert key is not None and value is not None and log_decay is not None
    decay = log_decay.exp()
    readers = [
        x if before else x * decay
        for x, before in ((address, kind.erases_before), (query, kind.reads_before))
        if x is not None
    ]
    reads = torch.bmm(torch.cat(readers, 1) if len(readers) > 1 else readers[0], state) if readers else value[:, :0]
    keys, values = key, value
    if address is not None and erase is None:
        values = value - reads[:, :1]
    elif address is not None and erase is not None:
        keys, values = torch.cat((key, erase), 1), torch.cat((value, -reads[:, :1]), 1)
    output = None if query is None else reads[:, -1:]
    if output is not None and query is not None and not kind.reads_before:
        output = output + torch.bmm(torch.bmm(query, keys.mT), values)
    return output, (state * decay.mT).baddbmm_(keys.mT, values)
