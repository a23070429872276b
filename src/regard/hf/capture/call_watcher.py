"""`CallWatcher` keeps every call of attention in a with-block, without a model; `WatchedCalls` has the maps by number.

It sees what a watch of a model sees: torch's functions and modules, `regard`, and the attention interface of
transformers. Modules that compute softmax themselves are seen only with their model, `watch(model)`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F

from regard.attention_output import attend_listeners
from regard.base.upper_layers import upper_layer
from regard.hf.attention_modules import OF_TORCH, ChosenLayers, is_called_attention, names_called
from regard.hf.calls import DIRECT, MULTIHEAD, TRANSFORMED, AttentionCall, Untranslatable
from regard.hf.capture.captured_calls import ModuleCalls, NotCaptured
from regard.hf.capture.generation_steps import StepOptions
from regard.hf.capture.kept_calls import Check, KeptCall
from regard.hf.capture.model_maps import WatchedAttention
from regard.hf.capture.module_hooks import FUSED, SDPA, function_calls, inside_backward, may_fuse, module_calls
from regard.hf.capture.torch_calls import (
    ObservedCall,
    encoder_layer,
    multihead,
    multihead_function,
    observed_backend,
    sdpa,
)
from regard.hf.capture.transformers_interface import backend_calls
from regard.hf.capture.watcher import Watcher
from regard.maps import AttentionMap, Reduction
from regard.maps.listener import Values
from regard.nn import Attends, listeners
from regard.stats.numbering import LayerPath, layer_number

#: The module of a call that has none.
NO_MODULE = nn.Module()
#: Folders whose lines of code are no place of a call, and the code that torch generates.
INSIDE = (
    *(f"{Path(sys.modules[name].__file__ or '').parent}{os.sep}" for name in ("torch", "regard")),
    "<eval_with_key>",
)
SCRIPTED = "it is TorchScript, which runs without Python; call the module that was scripted or traced"
REPLACED = (
    "it changes this module of torch, in which no function is observed, since that would change its outputs; put the "
    "call of attention into an nn.Module of its own"
)


class WatchedCalls(WatchedAttention):
    """The maps of the calls of a block, by their numbers: `seen[0]` is that of the first call.

    `names` has the number and the line of each call, and `missing` the calls without a map. With `keep_calls` only the
    newest calls are kept, under their numbers; `num_calls` counts all. The other arguments are those of
    `WatchedAttention`.
    """

    def __init__(
        self,
        parts: dict[str, ModuleCalls],
        missing: dict[str, str],
        order: list[str],
        verified: bool,
        keep_calls: int | None,
    ) -> None:
        super().__init__(parts, missing, order, verified)
        self._keep_calls, self._wrong = keep_calls, {}
        self.num_calls = 0

    def new_name(self) -> LayerPath:
        """The name of the next call; the oldest call is dropped if too many are kept."""
        name = LayerPath(f"{self.num_calls} {_place()}")
        name.number = self.num_calls
        self.num_calls += 1
        self._order.append(name)
        if self._keep_calls is not None and len(self._order) > self._keep_calls:
            old = self._order.pop(0)
            dropped, _ = self._parts.pop(old, None), self._missing.pop(old, None)
            if dropped is not None and dropped.check.ok is False:
                self._wrong[old] = dropped.check
        return name

    @property
    def mismatched(self) -> dict[str, Check]:
        """The checks that failed, also those of calls that were dropped."""
        return self._wrong | super().mismatched

    def _title_of(self, layer: str | int) -> str:
        return f"call {layer}"

    def figure(self, *, layer: int | None = None, **options: Any) -> Any:
        """A figure for a paper of the calls with the sizes of call `layer` (by default the first that is kept)."""
        name = self._name(layer) if layer is not None else next(iter(self.names), "0")
        alike = self._alike(self._part(name))
        return upper_layer("drawing").figure(alike, layer=layer, **options)

    def _texts(self, widget: Any, tokens: Any, targets: Any, batch: int, image: Any, grid: Any) -> Any:
        """The calls of one size each are a text of the page."""
        sizes = {part.calls[-1].shape[2:]: part for part in self._parts.values()}
        views = [self._alike(part) for part in sizes.values()]
        return [text for view in views for text in widget.watched_texts(view, tokens, targets, batch, image, grid)]

    def _alike(self, part: ModuleCalls) -> WatchedAttention:
        """The calls with as many queries and keys as this one."""
        size = part.calls[-1].shape[2:]
        parts = {name: other for name, other in self._parts.items() if other.calls[-1].shape[2:] == size}
        return WatchedAttention(parts, {}, self._order, self._verified)

    def _name(self, number: int) -> str:
        """The name of a call by its number; negative numbers count from the end."""
        first = self.num_calls - len(self._order)
        place = (number + self.num_calls if number < 0 else number) - first
        if 0 <= place < len(self._order):
            return self._order[place]
        kept = f"calls {first} to {self.num_calls - 1} are kept" if self._order else "no attention was called"
        reason = f"only the newest of {self.num_calls}, by keep_calls={self._keep_calls}" if first else "from 0"
        raise NotCaptured(f"seen[{number}]: {kept} ({reason}). Call attention inside the with-block of watch.")

    def _sliced(self, part: slice) -> list[str]:
        """The names of the calls of a slice of all numbers, without calls that have no map."""
        by_number = {layer_number(name): name for name in self.names}
        return [by_number[number] for number in range(self.num_calls)[part] if number in by_number]

    def __repr__(self) -> str:
        kept = f"the newest {len(self._order)} of " if len(self._order) < self.num_calls else ""
        lines = [f"WatchedCalls({kept}{self.num_calls} calls)"]
        for name in self._order:
            part = self._parts.get(name)
            shape = "" if part is None else "({} x {} heads x {} x {})".format(*part.calls[-1].shape)
            lines.append(f"  {name} {part.part} {shape}" if part else f"  {name} missing: {self._missing.get(name)}")
        return "\n".join(lines)


class CallWatcher(Watcher):
    """Observes all calls of the thread that opened the block, and keeps each as a capture or as a reason.

    Each call counts as a module of its own, by the name that `WatchedCalls.new_name` gives it. `torch_parts` has the
    kind of a call, such as "nn.MultiheadAttention", where the watch of a model has the part of the model. `keep_calls`
    is the number of the newest calls that are kept, None for all. The other arguments are those of `Watcher`: `verify`
    is True (a few rows are verified), "all" (every row) or False.
    """

    def __init__(
        self,
        keep_calls: int | None,
        verify: bool | str,
        reductions: tuple[Reduction, ...],
        keeps_values: bool,
        keeps_graphs: bool = False,
    ) -> None:
        super().__init__(NO_MODULE, ChosenLayers(None), verify, reductions, keeps_values, StepOptions(), keeps_graphs)
        self.order.clear()
        kept, self.thread = self.seen.kept, threading.get_ident()
        self.seen = self.watched = WatchedCalls(self.calls, self.missing, self.order, bool(verify), keep_calls)
        self.seen.kept = kept
        #: Encoder layers that run, with the number of calls at their start, and the module whose edited call was kept.
        self.layers: list[tuple[nn.Module, int]] = []
        self.edited: nn.Module | None = None

    @contextmanager
    def observing(self) -> Iterator[None]:
        """A block in which all calls of this thread are kept."""
        with ExitStack() as stack:
            stack.enter_context(module_calls.observed_by(self))
            stack.enter_context(backend_calls.observed_by(self))
            stack.enter_context(listeners.to(self))
            stack.enter_context(attend_listeners.to(self))
            stack.enter_context(function_calls.observed_by(self))
            yield

    def paused(self) -> AbstractContextManager[None]:
        """A block in which no function is reported: `regard.attend` computes, and reports its own map."""
        return function_calls.paused()

    def conclude(self) -> None:
        """Raise an error if a map does not match the kernel's output."""
        self._refuse_mismatches(f"{self.watched.num_calls} calls")

    # Events

    def observes_functions(self, module: nn.Module) -> bool:
        """No: `function_calls` reports the functions of the whole block, not those of single modules."""
        return False

    def module_started(self, module: nn.Module) -> None:
        """Note a module that runs; TorchScript has no map, because it runs without Python.

        The first of several open blocks tells `function_calls`, which is shared by them, that a module runs.
        """
        if not self._is_own():
            return
        if not is_called_attention(module):  # its caller has the attention
            self.running.modules.append(module)
        if function_calls.is_first(self):
            function_calls.module_started(module)
        if isinstance(module, FUSED):
            self.layers.append((module, self.watched.num_calls))
        elif isinstance(module, torch.jit.ScriptModule) and DIRECT[2:] in str(module.inlined_graph):
            self._keep_missing(module, SCRIPTED)

    def module_ended(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep the attention of a fused module of torch that ended, if no call inside of it was seen.

        A call was seen if its edited form was kept (`call_edited`), or if the number of calls grew while it ran. The
        output is None after an error: then nothing is kept.
        """
        if not self._is_own():
            return
        if function_calls.is_first(self):
            function_calls.module_ended(module)
        running = self.running.modules
        # it may be missing (`module_started`); modules above it, here and in `layers`, began inside and never ended
        while module in running and running.pop() is not module:
            pass
        if not any(layer is module for layer, _ in self.layers):
            return
        while (started := self.layers.pop())[0] is not module:
            pass
        is_seen, self.edited = self.edited is module or self.watched.num_calls > started[1], None
        if output is not None:
            self._keep_fused(module, args, kwargs, output, is_seen)

    def _keep_fused(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, is_seen: bool
    ) -> None:
        """Keep the attention of a module of torch, if no call was seen inside.

        `is_plain`: the module has the code of torch. Other code may compute something else, so its map must be proved.
        """
        is_plain = type(module) in FUSED and "forward" not in vars(module)
        if not is_plain and OF_TORCH & names_called(type(module)) and may_fuse(module):
            self._keep_missing(module, REPLACED)
        elif isinstance(module, nn.MultiheadAttention) and not is_seen:
            self._keep_new("nn.MultiheadAttention", lambda: multihead(module, args, kwargs, output), is_plain)
        elif isinstance(module, nn.TransformerEncoderLayer) and not is_seen:
            kind = "nn.TransformerEncoderLayer"
            self._keep_new(kind, lambda: encoder_layer(module, args, kwargs, output), is_plain)

    def function_called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Keep a call of a function of torch, unless a backend or `attend` made it, which are reported themselves."""
        if backend_calls.inside or attend_listeners.busy:
            return
        if function is F.multi_head_attention_forward:
            self._keep_new(MULTIHEAD, lambda: multihead_function(NO_MODULE, args, kwargs, output))
        elif any(function is known for known in SDPA):
            self._keep_new(DIRECT, lambda: sdpa(NO_MODULE, args, kwargs, output))

    def call_edited(self, observed: ObservedCall) -> None:
        """Keep an edited call; if it is that of a fused module, the end of this module must not keep it again."""
        self.edited = observed.call.module
        self._keep_new(observed.call.backend, lambda: observed)

    def backend_called(self, call: AttentionCall, output: Any) -> None:
        """Keep a call of a backend of transformers."""
        self._keep_new(type(call.module).__name__, lambda: observed_backend(call, output))

    def on_attention_with_values(self, module: nn.Module | None, weights: AttentionMap, values: Values) -> None:
        """Keep a map that a module of `regard.nn` reports, or `attend` (no module).

        `values` computes the values (B, G, J, E); it is None if no rank has all of them. A report of `attend` is left
        out if the same attention is reported otherwise: by the backend of transformers or the module that called it.
        """
        running = self.running.modules
        if module is None and (backend_calls.inside or (running and isinstance(running[-1], Attends))):
            return
        kind = "regard.attend" if module is None else type(module).__name__
        if (name := self._new_name(kind)) is not None:
            with function_calls.paused():  # to detach a map may score a pair
                self._keep_reported(name, module is None, weights, values)

    # Captures

    def _is_own(self) -> bool:
        """Whether this thread opened the block."""
        return threading.get_ident() == self.thread

    def _new_name(self, kind: str) -> str | None:
        """The name of a new call; None if it is none of this block's. `kind` is what `torch_parts` has for the call."""
        if not self._is_own() or inside_backward():
            return None
        name = self.watched.new_name()
        self.torch_parts[name] = kind
        return name

    def _keep_new(self, kind: str, observe: Callable[[], ObservedCall], is_known: bool = True) -> None:
        """Keep a new call. If the code that made it is not known, its map is kept only if it was verified."""
        if (name := self._new_name(kind)) is not None:
            self._keep(name, self._with_graph(lambda: self._proved(self._capture(name, observe()), is_known)))

    def _proved(self, capture: KeptCall, is_known: bool) -> KeptCall:
        """A call whose code is known, or whose map was verified; `Untranslatable` for any other."""
        if not is_known and not capture.check.ok:
            raise Untranslatable(REPLACED)
        return capture

    def _keep_missing(self, module: nn.Module, reason: str) -> None:
        """Count a call of a module that has no map, with the reason."""
        if (name := self._new_name(type(module).__name__)) is not None:
            self.missing[name] = f"{type(module).__name__}: {reason}"

    def _keep(self, name: str | None, capture: Callable[[], KeptCall]) -> None:
        """Keep a call. A reason why it has no map begins with the kind of the call."""
        super()._keep(name, capture)
        kind = self.torch_parts.pop(name or "", "")
        if name in self.missing:
            self.missing[name] = f"{kind}: {self.missing[name]}"

    def _capture(self, name: str, observed: ObservedCall) -> KeptCall:
        """A capture with tensors of its own: a user may change them in place, as the next step of a cache does."""
        output = observed.output
        if is_functorch_wrapped_tensor(output):
            raise Untranslatable(TRANSFORMED)
        capture = super()._capture(name, observed)
        capture.own_tensors()
        return capture


def _place() -> str:
    """The file and the line of the innermost code outside of torch and of Regard."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
