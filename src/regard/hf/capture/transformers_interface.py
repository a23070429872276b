"""Calls of an attention backend of transformers: of the interface (`backend_calls`), and in graphs (`CompiledCalls`).

Attention modules of transformers get their backend from a method of `AttentionInterface` at every call. While a model
is watched, this method returns a wrapper, which calls the same backend and reports the call. The configuration and the
masks stay the same, and outputs are bit-identical. torch's fused kernel computes the log-sum-exp of every row, which
its function drops; `KernelStatistic` keeps it, so a map needs no pass of its own over all keys.

A model that torch compiled is watched where its attention is the operator `regard::attention`, and else refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from regard.attention import Prepared, scores
from regard.attention_output import attend_listeners
from regard.base.context import ContextFlag, ContextItems
from regard.base.errors import RegardError
from regard.base.shapes import has_numbers
from regard.base.versions import backend_lookup, check_model
from regard.engine.kernel.attention import Inputs
from regard.engine.kernel.library import load_fast
from regard.engine.kernel.operator import OperatorTerms
from regard.engine.ring import Ring
from regard.hf.calls import AttentionCall, CallObserver, Translation
from regard.hf.capture.torch_calls import ObservedCall
from regard.hf.edited_calls import edited_call, editors, patched_output, run_edited
from regard.hf.masks.graph_masks import GraphMask
from regard.hf.masks.span_masks import OURS
from regard.hf.operator_calls import owner_of
from regard.maps import AttentionMap, Reduction
from regard.maps.reductions import State
from regard.maps.scored_map import ScoredMap
from regard.pieces.grid import Grid

#: Fewest queries for which a kernel is observed: every operation inside its backend then passes through Python.
FEWEST_QUERIES = 128
#: Rows that are compared with the definition.
ROWS = 3
#: Largest difference that is rounding, relative to the log-sum-exp or to 1: in half precision, and otherwise.
HALF_TOLERANCE, TOLERANCE = 3e-2, 1e-4


class KernelStatistic(TorchDispatchMode):
    """Keeps the log-sum-exp of each call of torch's fused CPU kernel while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.logsumexps: list[Tensor] = []
        self.states: Mapping[Reduction, State] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch calls this in place of each operation `func`; the kernel returns its output and the log-sum-exp."""
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.logsumexps.append(output[1].detach())
        return output


class OwnStatistic:
    """Keeps the log-sum-exp of each call of `attend` while it listens, and states of reductions of the same call."""

    def __init__(self) -> None:
        self.logsumexps: list[Tensor] = []
        self.states: Mapping[Reduction, State] = {}

    def on_attention(self, module: nn.Module | None, weights: AttentionMap) -> None:
        """Keep what the kernel computed beside the output, if it computed states of reductions."""
        if type(weights) is ScoredMap and weights.known_states:
            self.logsumexps.append(weights.row_statistic[0])
            self.states = weights.known_states

    @contextmanager
    def listening(self) -> Iterator[OwnStatistic]:
        """A block in which it listens."""
        with attend_listeners.to(self):
            yield self


def observing(call: AttentionCall) -> AbstractContextManager[KernelStatistic | OwnStatistic | None]:
    """A block in which the kernel of this call is observed, if its log-sum-exp is that of every row: torch's kernel
    without a mask, and Regard's where reductions are watched.
    """
    query = call.query
    if call.edits is not None or not isinstance(query, Tensor) or query.ndim != 4 or query.shape[2] < FEWEST_QUERIES:
        return nullcontext()
    if call.backend == OURS and attend_listeners.reductions and Ring.default() is None:
        return OwnStatistic().listening()
    if call.backend == "sdpa" and call.mask is None and query.device.type == "cpu" and has_numbers(query):
        return KernelStatistic()
    return nullcontext()


@torch.no_grad()
def row_logsumexp(call: AttentionCall, translation: Translation) -> Tensor | None:
    """The log-sum-exp (B, H, I) that the kernel of this call returned, if a few rows equal their definition.

    A map then need not compute it. None if the kernel returned none, or another one.
    """
    attention, logsumexp, (B, H, I, _) = translation.attention, call.logsumexp, call.query.shape
    if logsumexp is None or logsumexp.shape != (B, H, I) or attention.bias:
        return None
    softmax = attention.normalizer.as_softmax
    if softmax is None or softmax.sink is not None:
        return None
    rows = torch.linspace(0, I - 1, ROWS).round().long()
    prepared = Prepared.of(attention, translation.query, call.key, translation.positions)
    grid = Grid.whole(translation.positions, B, H, I, call.query.device)
    grid = Grid(grid.batch, grid.head, grid.query[rows], grid.key)
    exact = scores(attention, prepared.tile(rows, slice(None)), grid).logsumexp(-1)
    error = ((logsumexp[:, :, rows] - exact) / exact.abs().clamp_min(1)).abs().max()
    is_half = call.query.dtype in (torch.bfloat16, torch.float16)
    return logsumexp if error <= (HALF_TOLERANCE if is_half else TOLERANCE) else None


class BackendCalls:
    """Replaces the lookup of a backend while any thread observes; `inside` is True while a backend runs.

    The method belongs to the process. Observers and `inside` belong to a thread.
    """

    def __init__(self) -> None:
        self.observers: ContextItems[CallObserver] = ContextItems("interface")
        self._inside = ContextFlag("inside")
        self._num_open, self._lock = 0, threading.Lock()
        self.replacement: Callable[..., Any] | None = None
        self._original: Callable[..., Any] | None = None

    @contextmanager
    def observed_by(self, observer: CallObserver) -> Iterator[None]:
        """A block whose calls are reported to an observer."""
        with self.replaced(), self.observers.adding(observer):
            yield

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """A block in which calls are reported to observers, and changed by the open edits."""
        lookup = backend_lookup()
        if lookup is None:
            yield
            return
        with self._lock:
            self._num_open += 1
            if self.replacement is None:
                self._open(*lookup)
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1
                if not self._num_open:
                    self._close(*lookup)

    @property
    def inside(self) -> bool:
        """Whether a backend runs in this thread: the functions of torch that it calls are not reported again."""
        return bool(self._inside)

    def _open(self, interface: Any, method: str) -> None:
        """Replace the method by which modules find the function of their backend.

        If another package keeps the replacement after the last block, it finds the original functions.
        """
        original = getattr(interface, method)

        @wraps(original)
        def find(this: Any, attn_implementation: str, *default: Any, **options: Any) -> Callable[..., Any]:
            function = original(this, attn_implementation, *default, **options)
            observed = self.replacement is find and (self.observers or editors)
            return self._reporting(function, attn_implementation) if observed else function

        self._original, self.replacement = original, find
        setattr(interface, method, find)

    def _close(self, interface: Any, method: str) -> None:
        """Restore the method. If another package has wrapped the replacement, it stays and only passes calls on."""
        if getattr(interface, method) is self.replacement:
            setattr(interface, method, self._original)
        self.replacement = self._original = None

    def _reporting(self, function: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
        """A function that computes a call as the open edits change it, and reports it to the observers.

        They get the output before patches of heads, which the weights reproduce, and a call that knows the patch.
        """

        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            call = _call(backend or "eager", function, args, options)
            edited = edited_call(call)
            with self._inside.on(), observing(edited) as statistic:
                output = function(*args, **options) if edited is call else run_edited(edited, edited.run)
            call = edited
            if statistic is not None and len(statistic.logsumexps) == 1:
                call = replace(call, logsumexp=statistic.logsumexps[0], states=statistic.states)
            call, patched = patched_output(call, output)
            for observer in self.observers:
                observer.backend_called(call, output)
            return patched

        return run


backend_calls = BackendCalls()


def _call(backend: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> AttentionCall:
    """The call with its arguments by name, whether they were passed by position or by name."""
    names = ("module", "query", "key", "value", "attention_mask")
    given = {**dict(zip(names, args, strict=False)), **options}
    if len(args) > len(names):
        given["a sixth positional argument"] = args[len(names) :]
    module, query, key, value, mask = (given.pop(name, None) for name in names)
    return AttentionCall(module, backend, function, query, key, value, mask, given)


def _compiled_part(model: nn.Module) -> str:
    """The compiled part of a model, in words; "" if no part is compiled."""
    for name, module in model.named_modules():
        forward = module.forward
        compiled = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
        if compiled or hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            return f"its part {name!r}" if name else "the model"
    return ""


def refuse_compiled(model: nn.Module, operation: str, remedy: str = "") -> None:
    """Raise an error if a part of the model is compiled, or if it is of a version that cannot be observed.

    `operation` is the call that the error names, and `remedy` a further sentence.
    """
    check_model(model, operation)
    if where := _compiled_part(model):
        raise RegardError(
            f"{operation}: {where} is compiled, and compiled code does not look up its backend again. {remedy}Use the "
            "original model: model._orig_mod after torch.compile(model); after model.compile(), or if its forward was "
            "compiled, load the model again."
        )


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of a model is compiled. Raises an error if its attention cannot be watched then."""
    check_model(model, "watch")
    is_ours = getattr(getattr(model, "config", None), "_attn_implementation", None) == OURS
    if is_ours and load_fast() is not None:
        return bool(_compiled_part(model))
    remedy = (
        "Load it with attn_implementation='regard' (after regard.register()), whose attention is an operator of the "
        "graph, and compile it then. "
    )
    refuse_compiled(model, "watch", remedy)
    return False


class CompiledCalls:
    """Observes the operator, and keeps each call under the module whose parameter it received.

    Inside compiled code no hook runs, and its buffers are used again: the tensors are copied. `keep(name, observe)`
    keeps the call that `observe` returns.
    """

    def __init__(self, modules: Mapping[str, nn.Module], keep: Callable[[str, Callable[[], Any]], None]) -> None:
        owners = ((name, module, owner_of(module)) for name, module in modules.items())
        self._owners = {owner.data_ptr(): (name, module) for name, module, owner in owners if owner is not None}
        self._keep = keep

    def operator_called(self, inputs: Inputs, terms: OperatorTerms, output: Tensor, logsumexp: Tensor) -> None:
        """Keep a call of the operator, if it was made by a watched module. `owner` is that module's first parameter."""
        if backend_calls.inside or terms.owner is None or terms.owner.data_ptr() not in self._owners:
            return
        name, module = self._owners[terms.owner.data_ptr()]
        self._keep(name, lambda: _observed(module, inputs, terms, output))


def _observed(module: nn.Module, inputs: Inputs, terms: OperatorTerms, output: Tensor) -> ObservedCall:
    """The call of the backend that became this call of the operator."""
    query, key, value = (t.detach().clone() for t in (inputs.query, inputs.key, inputs.value))
    start = terms.start + (0 if terms.offset is None else int(terms.offset))
    real = None if terms.real is None else terms.real.clone()
    groups = None if terms.groups is None else terms.groups.clone()
    mask = GraphMask(start, terms.first, terms.is_causal, terms.window, real, groups)
    sink = None if inputs.sink is None else inputs.sink.detach().clone()
    options = {"scaling": terms.scale, "softcap": terms.cap or None, "s_aux": sink, "dropout": terms.dropout}
    call = AttentionCall(module, OURS, torch.ops.regard.attention, query, key, value, mask, options)
    return ObservedCall(call, output.detach().transpose(1, 2))
