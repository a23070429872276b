"""Hooks on torch: `module_calls` reports calls of modules and of their functions, `function_calls` attention functions.

The hooks of `module_calls` are torch's global ones. A hook on a single module would make `nn.TransformerEncoderLayer`
leave its fused path, which changes the last bits of its output. For the same reason each function mode is off while
torch's own attention modules run. `function_calls` serves a watch without a model: its mode is also off while `attend`
runs, and compiled code, which calls no function of Python, runs eagerly while a block is open.

Edits of functions and modules happen here too: `edited_function`, `edited_module`, and of softmaxes `softmax_edit`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils.hooks import RemovableHandle

from regard.attention_output import attend_listeners
from regard.base.context import ContextItems
from regard.base.errors import RegardError
from regard.engine.transforms import uncompiled
from regard.hf.adapters import is_adapted
from regard.hf.attention_modules import names_called
from regard.hf.calls import CallObserver, measuring
from regard.hf.capture.kept_calls import check
from regard.hf.capture.softmax_edits import EditedProbe, measured_edit, softmax_edit
from regard.hf.capture.torch_calls import (
    ObservedCall,
    multihead_arguments,
    multihead_function,
    observed_module,
    sdpa_arguments,
    sdpa_call,
)
from regard.hf.capture.transformers_interface import backend_calls
from regard.hf.edited_calls import (
    EAGER,
    all_rows,
    as_mistakes,
    computed,
    edited_call,
    editors,
    patched_output,
    run_edited,
    translated,
)


@dataclass(frozen=True, eq=False)
class EditedResult:
    """What a function or a module returns after an edit, and the edited call as watches see it.

    If an edit patched outputs of heads, `observed` has the output before the patch, which its weights reproduce.
    """

    observed: ObservedCall | EditedProbe
    returned: Any


def edited_function(
    module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> EditedResult | None:
    """A call of one of torch's attention functions as the open edits change it; None if none does."""
    if function not in (F.scaled_dot_product_attention, F.multi_head_attention_forward) or not _is_selected(module):
        return None
    if backend_calls.inside or attend_listeners.busy:
        return None
    if function is F.multi_head_attention_forward:
        with attend_listeners.computing():
            output = function(*args, **kwargs)
        with as_mistakes(module):
            observed = multihead_function(module, args, kwargs, output)
        return _edited(observed, output, multihead_arguments(None, args, kwargs))
    return _edited_sdpa(module, args, kwargs)


def _edited_sdpa(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EditedResult | None:
    """A call of `F.scaled_dot_product_attention` as the open edits change it; None if none does.

    Here outputs of heads are (B, I, H, E), as those of backends. The returned one is (B, H, I, E), as torch returns it.
    """
    with as_mistakes(module):
        call = sdpa_call(module, args, kwargs)
    edited = edited_call(call)
    if edited is call:
        return None
    given: dict[str, Any] = sdpa_arguments(args, kwargs)
    given |= {"query": edited.query, "key": edited.key, "value": edited.value}

    def compute() -> tuple[Tensor, None]:
        with attend_listeners.computing():  # the edited call is reported, and this is part of it
            return F.scaled_dot_product_attention(**given).transpose(1, 2), None

    output = run_edited(edited, compute)[0]
    edited, (patched, _) = patched_output(edited, (output, None))
    return EditedResult(ObservedCall(edited, output), patched.transpose(1, 2))


def edited_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> EditedResult | None:
    """The result of a call of a module after the open edits, if they act after its run; None if none changes it.

    These are modules whose weights are measured, those that an adapter reads, and `nn.MultiheadAttention`. Functions of
    torch, softmaxes and backends are edited when they are called.
    """
    if output is None or not _is_selected(module):
        return None
    if not is_adapted(module):
        measured = measured_edit(module, output)
        return None if measured is None else EditedResult(*measured)
    with as_mistakes(module):
        observed = observed_module(module, args, kwargs, output)
    if not isinstance(module, nn.MultiheadAttention):
        return _edited_adapted(observed, output)
    # An edited call drops weights whenever it has a dropout, so in eval mode it must have none.
    dropout = module.dropout if module.training else 0.0
    call = replace(observed.call, options=observed.call.options | {"dropout": dropout})
    given = multihead_arguments(module, args, kwargs)
    return _edited(replace(observed, call=call), output, given, module.batch_first)


def _edited_adapted(observed: ObservedCall, output: Any) -> EditedResult | None:
    """The result of a call that an adapter reads, after the open edits; None if none of them changes it.

    Before that, its own weights must reproduce the output of the module: else the adapter is wrong. Its `finish` takes
    all rows at once and reads only its first argument.
    """
    call, others = observed.call, () if isinstance(output, Tensor) else output[1:]
    if any(isinstance(other, Tensor) for other in others):
        raise RegardError(
            f"edit: {type(call.module).__name__} returns more tensors than its output, and its adapter does not tell "
            "how an edit changes them."
        )
    edited = edited_call(call)
    if edited is call:
        return None
    finish, verified = observed.finish, check(type(call.module).__name__, observed, translated(call))
    if verified.ok is False:
        raise RegardError(f"edit: the adapter of {verified.name} does not read what the module computes: {verified}.")
    assert finish is not None
    heads, _ = computed(edited, translated(edited), all_rows(edited))
    result = finish(heads, heads, heads)
    edited, (patched, _) = patched_output(edited, (heads.transpose(1, 2), None))
    returned = finish(patched.transpose(1, 2), heads, heads)
    whole = returned if isinstance(output, Tensor) else type(output)((returned, *others))
    return EditedResult(replace(observed, call=edited, output=result), whole)


def _edited(
    observed: ObservedCall, output: Any, given: dict[str, Any], batch_first: bool = False
) -> EditedResult | None:
    """A call that torch projects, as the open edits change it; None if none does.

    `output` is what torch returned, outputs and weights, and `given` the arguments of the call. The result has the axes
    of this output, whose first is the batch if `batch_first`. As a call of eager code, `computed` returns the weights
    too.
    """
    call = observed.call
    edited = edited_call(call)
    if edited is call:
        return None
    heads, weights = computed(replace(edited, backend=EAGER), translated(edited), all_rows(edited))
    finish = observed.finish
    assert finish is not None and weights is not None
    result = finish(heads, heads, heads)
    edited, (patched, _) = patched_output(edited, (heads.transpose(1, 2), None))
    patched = patched.transpose(1, 2)
    returned = finish(patched, patched, patched)
    if output[0].ndim == 2:
        returned = returned[0]
    elif not batch_first:
        returned = returned.transpose(0, 1)
    return EditedResult(replace(observed, call=edited, output=result), (returned, _weights(given, output, weights)))


def _is_selected(module: nn.Module) -> bool:
    """Whether an open edit selects heads of a module."""
    return any(editor.selects(module) for editor in editors)


def _weights(given: dict[str, Any], output: Any, weights: Tensor) -> Tensor | None:
    """The weights that torch returns: of each head, or their mean; None if torch was to return none."""
    if output[1] is None:
        return None
    weights = weights.mean(1) if given["average_attn_weights"] else weights
    return weights[0] if output[0].ndim == 2 else weights


#: Torch's table of the global hooks that take named arguments, by number.
_with_kwargs: dict[int, bool] = getattr(nn.modules.module, "_global_forward_hooks_with_kwargs", {})


class _OpenModules(threading.local):
    """The modules with observed functions that run in this thread. Torch's function modes belong to a thread, too."""

    def __init__(self) -> None:
        self.stack: list[nn.Module] = []


class _FunctionMode(TorchFunctionMode):
    """Runs every torch function, as the open edits change it, and then reports it to the observers."""

    def __init__(self, observers: Iterable[CallObserver], open_modules: _OpenModules) -> None:
        super().__init__()
        self.observers, self.open_modules = observers, open_modules

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch calls this in place of each function `func`. Edits are reported before the call that they change."""
        kwargs = kwargs or {}
        if measuring:
            return func(*args, **kwargs)
        if editors and (edited := edited_function(self.open_modules.stack[-1], func, args, kwargs)) is not None:
            for observer in self.observers:
                observer.call_edited(edited.observed)
            return edited.returned
        edit = softmax_edit(self.open_modules.stack[-1], func, args, kwargs) if editors else None
        output = func(*args, **kwargs) if edit is None else edit.weights(func, args, kwargs)
        for observer in self.observers:
            if edit is not None:
                observer.softmax_edited(edit.weights)
            observer.function_called(func, args, kwargs, output)
        return output


class _ModuleCalls:
    """The observers of this thread, and a function mode, which is on while a module with observed functions runs.

    The hooks belong to the process, and are registered while any thread watches.
    """

    def __init__(self) -> None:
        self.observers: ContextItems[CallObserver] = ContextItems("observers")
        self._open_modules = _OpenModules()
        self._function_calls = _FunctionMode(self.observers, self._open_modules)
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._num_open, self._lock = 0, threading.Lock()

    @contextmanager
    def observed_by(self, observer: CallObserver) -> Iterator[None]:
        """A block whose modules are reported to an observer.

        It may end while a module still runs: in an error, or inside the module. Then the last observer leaves the mode.
        """
        self._open()
        try:
            with self.observers.adding(observer):
                yield
        finally:
            if self._open_modules.stack and not self.observers:
                self._open_modules.stack.clear()
                self._function_calls.__exit__(None, None, None)
            self._close()

    def _open(self) -> None:
        """Register the hooks, if no other block has."""
        with self._lock:
            self._num_open += 1
            if self._num_open == 1:
                self._hooks = (
                    register_module_forward_pre_hook(self._start),
                    register_module_forward_hook(self._end, with_kwargs=True, always_call=True),
                )

    def _close(self) -> None:
        """Remove the hooks, if no other block needs them."""
        with self._lock:
            self._num_open -= 1
            if not self._num_open:
                for hook in self._hooks:
                    hook.remove()
                    _with_kwargs.pop(hook.id, None)  # torch keeps this entry, and compiled models then warn of hooks

    def _start(self, module: nn.Module, _: Any) -> None:
        """The hook before every module: report its start, and enter the function mode at the first module whose
        functions are observed.
        """
        if measuring:
            return
        for observer in self.observers:
            observer.module_started(module)
        if any(observer.observes_functions(module) for observer in self.observers):
            self._open_modules.stack.append(module)
            if len(self._open_modules.stack) == 1:
                self._function_calls.__enter__()

    def _end(self, module: nn.Module, args: tuple[Any, ...], *more: Any) -> Any:
        """The hook after every module: report its end. It returns the output that an edit changed, else None."""
        if measuring:
            return None
        kwargs, output = more if len(more) == 2 else ({}, None)  # after an exception torch does not pass the kwargs
        if self._open_modules.stack and self._open_modules.stack[-1] is module:
            self._open_modules.stack.pop()
            if not self._open_modules.stack:
                self._function_calls.__exit__(None, None, None)
        edited = edited_module(module, args, kwargs, output) if editors else None
        if edited is not None:
            output = edited.returned
            for observer in self.observers:
                observer.call_edited(edited.observed)
        for observer in self.observers:
            observer.module_ended(module, args, kwargs, output)
        return None if edited is None else output


module_calls = _ModuleCalls()


def inside_backward() -> bool:
    """Whether a backward pass runs in this thread. Activation checkpointing runs modules again inside it."""
    return torch._C._current_graph_task_id() != -1


#: Attention as Python calls it, and as the graphs of torch.export do.
SDPA = (
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)
#: Modules that leave their fused path if a function mode is open.
FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
COMPILED = (
    "regard.watch() does not see attention inside of a graph of torch.compile. Leave fullgraph=True out, or call the "
    "function before torch.compile"
)


def may_fuse(module: nn.Module) -> bool:
    """Whether torch's own forward may run in this module, by itself or called by the forward of a subclass."""
    kind = next((kind for kind in FUSED if isinstance(module, kind)), None)
    if kind is None or type(module).forward is kind.forward or "forward" in vars(module):
        return kind is not None
    return bool({"super", kind.__name__} & names_called(type(module)))


class _Mode(TorchFunctionMode):
    """Reports each call of torch's attention functions to the observers of its thread."""

    def __init__(self, observers: ContextItems[CallObserver]) -> None:
        super().__init__()
        self.observers = observers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch calls this in place of each function `func`."""
        output = func(*args, **kwargs or {})
        if func is F.multi_head_attention_forward or any(func is known for known in SDPA):
            self._report(func, args, kwargs or {}, output)
        return output

    @partial(uncompiled, reason=COMPILED)  # code that is compiled while the block is open
    def _report(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Report a call; code that torch compiles cannot, and says so."""
        for observer in self.observers:
            observer.function_called(func, args, kwargs, output)

    def remove(self) -> bool:
        """Take the mode off the stack; returns whether it was there. torch itself removes a mode that runs."""
        above, was_there = [], False
        while not was_there and _len_torch_function_stack():
            above.append(_pop_mode())
            was_there = above[-1] is self
        for other in reversed(above[:-1] if was_there else above):
            _push_mode(other)
        return was_there


class _EagerCode:
    """Lets compiled functions and modules of the process run eagerly while a block is open in any thread."""

    def __init__(self) -> None:
        self._stance: Any = None
        self._num_open, self._lock = 0, threading.Lock()

    @contextmanager
    def on(self) -> Iterator[None]:
        """A block in which compiled code runs eagerly."""
        with self._lock:
            self._num_open += 1
        self.set()
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1
                if not self._num_open and self._stance is not None:
                    self._stance.__exit__(None, None, None)
                    self._stance = None

    def set(self) -> None:
        """Set the stance of torch's compiler, once it is loaded: that takes seconds."""
        if self._stance is not None or "torch._dynamo" not in sys.modules or torch.compiler.is_dynamo_compiling():
            return
        with self._lock:
            try:
                self._stance = self._stance or torch.compiler.set_stance("force_eager")
            except RuntimeError:  # inside of compiled code, which began before
                return

    @contextmanager
    def off(self) -> Iterator[None]:
        """A block inside of it in which compiled code runs as compiled."""
        stance = self._stance
        if stance is not None:
            stance.__exit__(None, None, None)
        try:
            yield
        finally:
            if stance is not None:
                stance.__enter__()


class _ThreadState(threading.local):
    """The open blocks of a thread, its running modules, and whether the mode is removed."""

    def __init__(self) -> None:
        self.num_open = 0
        #: Each running module, and whether the mode was removed before; None if the module changed nothing.
        self.modules: list[tuple[nn.Module, bool | None]] = []
        self.is_removed = False


class FunctionCalls:
    """The observers of this thread, and the mode that reports attention functions to them all.

    While a module with a fused path of torch runs, the mode is off: torch would leave that path.
    """

    def __init__(self) -> None:
        self.observers: ContextItems[CallObserver] = ContextItems("function calls")
        self._mode, self._eager, self._here = _Mode(self.observers), _EagerCode(), _ThreadState()

    @contextmanager
    def observed_by(self, observer: CallObserver) -> Iterator[None]:
        """A block whose attention functions are reported to an observer."""
        here = self._here
        here.num_open += 1
        if here.num_open == 1:
            _push_mode(self._mode)
        try:
            with self.observers.adding(observer), self._eager.on():
                yield
        finally:
            here.num_open -= 1
            if not here.num_open:
                self._mode.remove()
                here.modules.clear()
                here.is_removed = False

    def is_first(self, observer: CallObserver) -> bool:
        """Whether this is the observer that reports modules: one of all is enough."""
        return next(iter(self.observers), None) is observer

    def module_started(self, module: nn.Module) -> None:
        """Remove the mode for a module with a fused path; restore it for a module of the user inside of that."""
        here, before = self._here, None
        self._eager.set()
        if may_fuse(module):
            if self._mode.remove():
                before, here.is_removed = False, True
        elif here.is_removed and not (getattr(module.forward, "__module__", None) or "").startswith("torch."):
            before, here.is_removed = True, False
            _push_mode(self._mode)
        here.modules.append((module, before))

    def module_ended(self, module: nn.Module) -> None:
        """Undo what `module_started` did for a module, and for those inside of it that an error ended."""
        here = self._here
        if not any(running is module for running, _ in here.modules):
            return
        ended = None
        while ended is not module:
            ended, before = here.modules.pop()
            if before is not None:
                here.is_removed = before
                _ = self._mode.remove() if before else _push_mode(self._mode)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block of Regard's own computations: without the mode, and compiled code runs as compiled."""
        was_there = self._mode.remove()
        try:
            with self._eager.off():
                yield
        finally:
            if was_there:
                _push_mode(self._mode)


function_calls = FunctionCalls()
