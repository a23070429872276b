"""A `Watcher` keeps the queries and keys of every attention call while a model runs on its own backend.

Calls are observed at five places: transformers' attention interface, torch's attention functions, torch's own attention
modules, the recurrent layers of transformers, and `regard.attend` with the modules of `regard.nn`. The model is not
changed, and its outputs are bit-identical. Patches belong to the process and watchers to a thread
(`regard.base.context`), so several threads may watch at once, even the same model.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention_output import attend_listeners
from regard.base.errors import RegardError
from regard.base.versions import hidden_eager
from regard.engine.kernel.operator import operator_observers
from regard.hf.adapters import is_adapted
from regard.hf.attention_modules import (
    ChosenLayers,
    attention_modules,
    inside_torch_layers,
    is_called_attention,
    may_compute_weights,
    part_of,
    parts_of_torch_layers,
    unnamed_softmaxes,
    with_numbers,
)
from regard.hf.calls import AttentionCall, CallObserver, MaskCache, Untranslatable, check_numbers, measuring, translate
from regard.hf.capture.captured_calls import (
    Capture,
    ModuleCalls,
    ModuleMap,
    SharedKeys,
    call_tensors,
    deferred_call,
    differential,
    is_differential,
)
from regard.hf.capture.generation_steps import GenerationRecorder, StepOptions, generation_calls
from regard.hf.capture.head_parts import KeptParts
from regard.hf.capture.kept_calls import Check, KeptCall, check
from regard.hf.capture.model_inputs import ModelInputs, encoder_of, pictured_inputs
from regard.hf.capture.model_maps import WatchedAttention
from regard.hf.capture.module_hooks import inside_backward, module_calls
from regard.hf.capture.module_rerun import LastWeights, RerunCall, returned_call, snapshot
from regard.hf.capture.module_statistics import ModuleStatistics
from regard.hf.capture.recurrent_calls import RecurrentCall, RecurrentLayers, dtype_of, is_recurrent
from regard.hf.capture.score_origins import ScoreOrigins
from regard.hf.capture.softmax_edits import EditedProbe
from regard.hf.capture.softmax_trace import Trace
from regard.hf.capture.torch_calls import (
    ObservedCall,
    encoder_layer,
    multihead_function,
    observed_backend,
    observed_module,
    sdpa,
)
from regard.hf.capture.transformers_interface import CompiledCalls, backend_calls, row_logsumexp
from regard.hf.capture.value_probe import GivenCall, ProbedCall, has_values
from regard.hf.models import model_name
from regard.hf.operator_calls import graph_breaks
from regard.hf.recurrent.core_calls import CoreCall
from regard.maps import AttentionMap, Reduction
from regard.maps.listener import Values
from regard.nn import Attends, listeners


@dataclass(eq=False)
class ModuleFrame:
    """An attention module or encoder layer that runs: its path `name`, and what was observed of it so far.

    The path is None for an encoder layer that is no attention module itself. `num_calls` counts the calls of a module,
    with this one; for an encoder layer those of its attention before: if there are more when it ends, it did not run
    fused. `inputs` are the arguments of a module that may compute softmax itself; None for others,
    and once a call inside the module was observed, whose weights are those of the module. `trace` follows its softmaxes
    to the product with the values. `random` is the state of the random numbers at its start, if its weights can be
    measured by running it again. `halves` are the backend calls of differential attention. `is_edited`: an edit ran its
    attention, and reported it; `patched` are its outputs (B, H, I, E) if an edit patched them.
    """

    module: nn.Module
    name: str | None
    num_calls: int
    inputs: tuple[Any, Any] | None = None
    random: Tensor | None = None
    output: Any = None
    trace: Trace = field(default_factory=Trace)
    halves: list[ObservedCall] = field(default_factory=list)
    is_edited: bool = False
    patched: Tensor | None = None


@dataclass(eq=False)
class ReturnedWeights:
    """A module that ended and returned its weights, and the `caller`, which may multiply values by them.

    It is followed until the caller ends, so that its values are known.
    """

    frame: ModuleFrame
    caller: nn.Module


class ThreadState(threading.local):
    """What runs in one thread: modules of the model, the innermost last, and a frame for each of them that attends.

    `returned` has modules that ended and whose weights are still followed, and `num_calls` the calls by path. A watch
    has several threads if they were given its context.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.frames: list[ModuleFrame] = []
        self.returned: list[ReturnedWeights] = []
        self.num_calls: Counter[str] = Counter()


UNCALLED = "was not called inside the with-block by the watching thread"
OUTSIDE = (
    "computes its weights itself, without the attention interface of transformers, F.scaled_dot_product_attention, "
    "nn.MultiheadAttention or regard.attend, and has no projection named v_proj or value to measure them by"
)
FUSED = (
    "computed this layer in one fused kernel, which does not return the tensors of its weights (use model.eval()), or "
    "in the code of another transformers than 5.23"
)
NO_GRAPH = (
    "its weights have no gradients, because it is recurrent, it subtracts two maps, or its module must run once more; "
    "watch it without grad=True, in a block of its own"
)
#: Ends the errors of models that cannot be watched.
SUPPORTED = (
    "Maps are recorded of attention that goes through transformers' attention interface (BERT, Llama, T5, ViT and some "
    "350 more), F.scaled_dot_product_attention, nn.MultiheadAttention or regard.attend; that computes softmax itself "
    "(known by a name such as attention, attn, qkv, or q, k and v; without one, where scores are a product of two "
    "tensors from the inputs, or an input is summed by the weights); or that is linear in the result of a projection "
    "named v_proj or value; of transformers' recurrent layers; and of modules with an adapter (regard.hf.adapter)"
)
#: Why a module of a compiled model has no map.
NOT_IN_GRAPH = (
    "did not run inside the with-block in the watching thread, or its compiled code is older than the registration of "
    "the backend"
)


def nothing_captured(model: nn.Module, reasons: Iterable[str]) -> str:
    """What to say of a model that ran and of which no module has a map."""
    reasons = list(reasons)
    listed = f" {len(reasons)} attention modules: {'; '.join(dict.fromkeys(reasons))}." if reasons else ""
    backend = getattr(getattr(model, "config", None), "_attn_implementation", "eager")
    listed += hidden_eager(model)
    remedy = "with attn_implementation='eager' " if backend != "eager" else ""
    return (
        f"watch: no attention of {type(model).__name__} was captured although it ran.{listed} {SUPPORTED}; "
        f"output_attentions=True {remedy}may still return its weights."
    )


ALL = "all"


class Watcher(CallObserver):
    """Observes one model, and keeps each attention call as a capture or as the reason why there is none.

    `chosen` are the layers that are kept. `verify` says which rows of the output are compared with recomputed weights
    @ values: True a few, "all" every row, False none. `reductions` are the statistics that are kept in place of queries
    and keys, and none keeps these. `keeps_values` is keep="qkv" of `watch`, `keeps_graphs` is grad=True, and `steps`
    says what is done after each forward pass. The result is `seen`, which shares `calls` and `missing`, both by module
    path.
    """

    def __init__(
        self,
        model: nn.Module,
        chosen: ChosenLayers,
        verify: bool | str,
        reductions: tuple[Reduction, ...],
        keeps_values: bool,
        steps: StepOptions,
        keeps_graphs: bool = False,
    ) -> None:
        self.model, self.chosen, self.verify, self.reductions = model, chosen, verify, reductions
        self.keeps_values, self.keeps_graphs = keeps_values, keeps_graphs
        self.readers = {model, encoder_of(model)}
        self.masks, self.last_weights, self.hooks = MaskCache(), LastWeights(), ExitStack()
        # Paths of all modules, and which of them attend, are chosen, or may compute softmax themselves.
        self.order: list[str] = []
        self.names: dict[nn.Module, str] = {}
        self.modules: dict[str, nn.Module] = {}
        self.attending: dict[nn.Module, str] = {}
        self.candidates: dict[str, nn.Module] = {}
        self.own_softmax: set[nn.Module] = set()
        #: Modules with a softmax that no name says to be attention. A run shows which of them are.
        self.unnamed: set[nn.Module] = set()
        #: Modules that call those in `own_softmax`, and may multiply values by the weights that these return.
        self.callers: set[nn.Module] = set()
        self.recurrent = RecurrentLayers(self._innermost, lambda: self in module_calls.observers, self._keep_recurrent)
        attending = self._read_names()
        chosen.check(self.names.values(), attending)
        self.torch_parts, self.deferred = parts_of_torch_layers(model), inside_torch_layers(model)
        self.running, self.keeping = ThreadState(), threading.RLock()
        self.called: set[str] = set()
        # The result.
        self.calls: dict[str, ModuleCalls] = {}
        self.missing: dict[str, str] = {}
        self.seen = WatchedAttention(self.calls, self.missing, self.order, bool(verify), model_name(model))
        self.seen.has_chosen_layers = chosen.layers is not None
        self.seen.inputs = ModelInputs(getattr(model, "config", None))
        self.seen.kept = KeptParts(model, attending) if keeps_values else None
        self.passes = GenerationRecorder(self.seen, lambda: self.names, model, steps)

    def _read_names(self) -> dict[str, nn.Module]:
        """Read module paths and attention modules. A model may replace its modules while it runs (BigBird)."""
        self.modules = dict(self.model.named_modules())
        attending, unnamed = attention_modules(self.model), unnamed_softmaxes(self.model)
        self.unnamed = {module for module in unnamed.values() if not is_recurrent(module)}
        attending = attending | unnamed
        attending = with_numbers({n: m for n, m in self.modules.items() if n in attending or is_recurrent(m)})
        self.attending = {module: name for name, module in attending.items()}
        self.names = {module: self.attending.get(module, name) for name, module in self.modules.items()}
        self.order[:] = self.names.values()
        self.candidates = {name: module for name, module in attending.items() if name in self.chosen}
        return attending

    def _observe_inputs(self) -> None:
        """Keep the inputs of chosen modules that may compute softmax themselves, by a hook on each until the end."""
        for name, module in self.candidates.items():
            if module not in self.own_softmax and may_compute_weights(module) and not is_recurrent(module):
                self.own_softmax.add(module)
                caller = self._caller(name)
                if may_compute_weights(caller):
                    self.callers.add(caller)
                self.hooks.callback(module.register_forward_pre_hook(self._keep_inputs, with_kwargs=True).remove)

    def _caller(self, name: str) -> nn.Module:
        """The module that holds another one, and calls it; a list of modules is not called itself."""
        parent = name.rpartition(".")[0]
        holds = isinstance(self.modules[parent], nn.ModuleList | nn.ModuleDict)
        return self._caller(parent) if holds and parent else self.modules[parent]

    @contextmanager
    def observing(self) -> Iterator[None]:
        """A block in which the calls of this thread are kept; at its end modules without a map get a reason."""
        with ExitStack() as stack:
            stack.enter_context(module_calls.observed_by(self))
            stack.enter_context(module_calls.observed_by(self.passes))  # after the watcher: the calls are kept
            stack.enter_context(generation_calls.observed_by(self.passes))
            stack.enter_context(backend_calls.observed_by(self))
            stack.enter_context(listeners.to(self))
            stack.enter_context(attend_listeners.to(self))
            stack.enter_context(self.hooks)
            stack.enter_context(self.recurrent.observing(self.candidates.values()))
            self._observe_inputs()
            try:
                yield
            finally:
                self._note_uncaptured()
                for calls in self.calls.values():
                    calls.release()

    # Events of the model

    def observes_functions(self, module: nn.Module) -> bool:
        """Whether functions of torch are reported while this module runs, so that its softmax can be followed."""
        return module in self.own_softmax or module in self.callers

    def module_started(self, module: nn.Module) -> None:
        """Count the call of an attention module and open its frame, which collects what happens until it ends.

        A module that is an `rg.Attention` or a composite (`is_called_attention`) is called in place of `rg.attend`. So
        its attention is that of its caller, and it does not count as running. A child without a name is new: the model
        replaced it.
        """
        if module in self.names:
            self._keep_returned(lambda returned: returned.frame.module is module)
            self.recurrent.module_started(module)
            if module is self.model or not is_called_attention(module):
                self.running.modules.append(module)
            if any(part is not None and part not in self.names for part in module._modules.values()):
                self._read_names()
                self._observe_inputs()
        name = self.attending.get(module)
        if name is not None or module is self.model:
            self.called.add(name or "")
            self.running.num_calls[name or ""] += 1
        if isinstance(module, nn.TransformerEncoderLayer):
            num_calls = self.running.num_calls[self.attending.get(module.self_attn, "")]
            self.running.frames.append(ModuleFrame(module, name, num_calls))
        elif name is not None:
            self.running.frames.append(ModuleFrame(module, name, self.running.num_calls[name]))

    def _keep_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook before a module: put its inputs into its frame, and the random numbers if its weights may be
        measured.

        If no name says that it is attention, the origins of its scores are followed, too: they decide.
        """
        is_own = self in module_calls.observers  # the hook belongs to the module, which other threads may run
        frames = self.running.frames
        if is_own and frames and frames[-1].module is module:
            frames[-1].inputs = snapshot(args, kwargs)
            is_unnamed = module in self.unnamed
            frames[-1].trace.origins = ScoreOrigins((args, kwargs)) if is_unnamed else None
            is_measurable = has_values(module) and not is_recurrent(module) and not is_unnamed
            frames[-1].random = torch.get_rng_state() if is_measurable else None

    def module_ended(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep the attention of a module that ended. `output` is None if it ended with an error.

        An error may have ended modules inside of it without a report, so they are dropped from the stacks, too.
        """
        running, frames = self.running.modules, self.running.frames
        self._keep_pictured(module, args, kwargs)
        if module in self.readers and output is not None and not inside_backward():
            self.seen.texts = self.seen.texts.after(module, args, kwargs)
        if self.seen.kept is not None and output is not None and not inside_backward():
            self.seen.kept.module_ended(module, args, kwargs, output)
        self._keep_returned(lambda returned: returned.caller is module)
        while module in running and running.pop() is not module:
            pass
        if output is not None:
            self.recurrent.module_ended(module)
        if not any(frame.module is module for frame in frames):
            return
        while (frame := frames.pop()).module is not module:
            pass
        if output is not None:
            frame.output = output
            self._keep_frame(frame, args, kwargs)

    def _keep_frame(self, frame: ModuleFrame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the attention of a module that ended, if it is read from the module and not from its calls.

        In this order: two maps that are subtracted, the softmaxes of the module itself, weights that are measured, what
        its adapter reads, and a layer of torch.
        """
        running, module, output = self.running.modules, frame.module, frame.output
        if is_differential(module):
            self._keep(frame.name, lambda: self._differential(frame))
        elif frame.inputs is not None and frame.trace.softmaxes:
            caller = running[-1] if running else None
            if caller in self.callers and not frame.trace.is_multiplied and frame.trace.returned_by(output):
                self.running.returned.append(ReturnedWeights(frame, caller))
            else:
                self._keep_softmax(frame)
        elif frame.random is not None and frame.inputs is not None and not self._observed_inside(frame.name or ""):
            self._keep(frame.name, lambda: self._probed(frame))
        elif is_adapted(module) and not frame.is_edited:
            self._keep_call(frame.name, lambda: observed_module(module, args, kwargs, output, module in self.deferred))
        elif isinstance(module, nn.TransformerEncoderLayer):
            self._keep_encoder_layer(frame, module, args, kwargs)

    def _keep_encoder_layer(
        self, frame: ModuleFrame, module: nn.TransformerEncoderLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Keep the attention of a layer of torch whose fused path did not call its attention module."""
        name = self.attending.get(module.self_attn)
        if name is not None and self.running.num_calls[name] == frame.num_calls:
            self.called.add(name)
            self.running.num_calls[name] += 1
            deferred = module.self_attn in self.deferred
            self._keep_call(name, lambda: encoder_layer(module, args, kwargs, frame.output, deferred))

    def _keep_pictured(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the inputs of the last call with an image or a sound, so that a page can show it."""
        inputs = self.seen.inputs
        if module in self.names:
            values = pictured_inputs(module, args, kwargs, inputs.values, module is self.model)
            self.seen.inputs = ModelInputs(inputs.config, values) if values else inputs

    def function_called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Keep a call of torch's attention functions; follow the softmaxes of any other function."""
        if backend_calls.inside or attend_listeners.busy:
            return
        for returned in self.running.returned:
            returned.frame.trace.follow(function, args, kwargs, output)
        if not self.running.frames:
            return
        frame = self.running.frames[-1]
        if isinstance(frame.module, Attends) or is_differential(frame.module):  # the map is not that of one function
            return
        if function in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
            frame.inputs, observed = None, sdpa if function is F.scaled_dot_product_attention else multihead_function
            self._keep_call(frame.name, lambda: observed(frame.module, args, kwargs, output))
        else:
            frame.trace.follow(function, args, kwargs, output)

    def call_edited(self, observed: ObservedCall | EditedProbe) -> None:
        """Keep a call of a function or module that an edit changed, in place of the one that ends."""
        for frame in self.running.frames[-1:]:
            frame.inputs, frame.is_edited = None, True
        if isinstance(observed, EditedProbe):
            name = self.names.get(observed.given.module)
            self._keep(name, lambda: replace(observed, name=name or "", slot=self.last_weights))
        else:
            self._keep_call(self.names.get(observed.call.module), lambda: observed)

    def softmax_edited(self, change: Callable[..., Tensor]) -> None:
        """Keep the change of the softmax that is followed next, for the run that reads its weights."""
        for frame in self.running.frames[-1:]:
            frame.trace.changes[len(frame.trace.softmaxes)] = change

    def output_patched(self, module: nn.Module, output: Tensor) -> None:
        """Keep patched outputs of a module that computes its softmax itself; it may have ended before."""
        frame = next((frame for frame in self.running.frames if frame.module is module), None)
        if frame is not None:
            frame.patched = output
        else:
            self._keep_patched(self.names.get(module), output)

    def _keep_patched(self, name: str | None, output: Tensor | None) -> None:
        """Add patched outputs (B, H, I, E) to the last call of a module, if values are kept."""
        if output is not None and self.keeps_values and name in self.calls:
            self.calls[name].calls[-1].patched = output.detach()

    def backend_called(self, call: AttentionCall, output: Any) -> None:
        """Keep one call of a backend, if its module belongs to the model."""
        if measuring:
            return
        frame = self.running.frames[-1] if self.running.frames else None
        if frame is not None and frame.module is call.module and is_differential(frame.module):
            frame.halves.append(observed_backend(call, output))
        else:
            self._keep_call(self.names.get(call.module), lambda: observed_backend(call, output))

    def on_attention_with_values(self, module: nn.Module | None, weights: AttentionMap, values: Values) -> None:
        """Keep a map reported by a module of `regard.nn`, or by `attend` for the module that called it."""
        by_attend, running = module is None, self.running.modules
        if by_attend and (backend_calls.inside or not running or isinstance(running[-1], Attends)):
            return  # the backend call is observed, and these modules report their own maps
        for frame in self.running.frames[-1:]:
            frame.inputs = None  # its weights are known
        self._keep_reported(self.names.get(running[-1] if module is None else module), by_attend, weights, values)

    def _keep_reported(self, name: str | None, by_attend: bool, weights: AttentionMap, values: Values) -> None:
        """Keep a map that `attend` reported, or else a module of `regard.nn`, whose next map may continue it.

        `name` is the path of the module, here and below; None if it is not in the model.
        `values` reads the values of a call that no edit changed.
        """
        note = "regard.attend reported its own map" if by_attend else "the module reported its own map"
        weights = weights if self.keeps_graphs else weights.detach()
        value, patched = weights.after_edit or (None if values is None else values(), None)
        kept = (value, patched) if self.keeps_values else (None, None)
        if not self.keeps_graphs:
            kept = [None if x is None else x.detach() for x in kept]
        self._keep(name, lambda: ModuleMap([weights], Check(name or "", note=note), not by_attend, *kept))

    def _innermost(self) -> nn.Module | None:
        """The innermost module of the model that runs in this thread."""
        return self.running.modules[-1] if self.running.modules else None

    # Captures

    def _keep_recurrent(self, module: nn.Module, read: Callable[[], CoreCall]) -> None:
        """Keep one call of a recurrent layer, which may continue the last one; `read` gives its tensors."""
        name = self.names.get(module)
        calls = self.calls.get(name or "")
        dtype = dtype_of(module, self.model)
        last = None if calls is None else calls.recurrent
        self._keep(name, lambda: RecurrentCall.of(name or "", read(), dtype, self.verify, last, self.keeps_values))

    def _keep_softmax(self, frame: ModuleFrame) -> None:
        """Keep the weights of a module that computed softmax itself."""
        if not frame.trace.is_attention:
            return  # a router of experts, a classifier or a gate
        if frame.trace.is_narrow and self._observed_inside(frame.name or ""):
            return  # a router beside the attention inside this module
        if frame.inputs is not None:
            self._keep(frame.name, lambda: self._traced(frame))
            self._keep_patched(frame.name, frame.patched)

    def _traced(self, frame: ModuleFrame) -> KeptCall:
        """The weights of the softmax of a module, or measured weights if they are not those that it multiplies by."""
        name, inputs, output = frame.name or "", frame.inputs or ((), {}), frame.output
        try:
            return RerunCall.of(name, frame.module, inputs, frame.trace, self.last_weights, output, self.keeps_values)
        except Untranslatable as reason:
            if frame.random is None:
                raise
            try:
                return self._probed(frame)
            except Untranslatable as other:
                raise Untranslatable(f"{reason}; {other}") from None

    def _probed(self, frame: ModuleFrame) -> KeptCall:
        """Measured weights; the runs of the module for it are no calls of the model."""
        assert frame.inputs is not None and frame.random is not None
        given = GivenCall(frame.module, *frame.inputs, frame.random)
        with measuring.on():
            return ProbedCall.of(frame.name or "", given, frame.output, self.last_weights)

    def _keep_returned(self, is_over: Callable[[ReturnedWeights], bool]) -> None:
        """Keep returned weights whose caller has ended, or whose module starts once more."""
        for returned in list(filter(is_over, self.running.returned)):
            self.running.returned.remove(returned)
            self._keep_softmax(returned.frame)

    def _keep_call(self, name: str | None, observe: Callable[[], ObservedCall]) -> None:
        """Keep a call of the module at a path. `observe` reads it, and only runs if the module is chosen."""
        self._keep(name, self._with_graph(lambda: self._capture(name or "", observe())))

    def _with_graph(self, capture: Callable[[], KeptCall]) -> Callable[[], KeptCall]:
        """The capture with gradients, if graphs are kept and the call has them; else without."""
        is_live = self.keeps_graphs and torch.is_grad_enabled()

        def run() -> KeptCall:
            with torch.set_grad_enabled(is_live):
                return capture()

        return run

    def _keep(self, name: str | None, capture: Callable[[], KeptCall]) -> None:
        """Keep what `capture` returns, if the module is chosen; else the reason of its `Untranslatable`.

        With one call that has no map the module has none: `missing` keeps it out from then on.
        """
        if name is None or name not in self.chosen or name in self.missing or inside_backward():
            return
        needs_graph = self.keeps_graphs and torch.is_grad_enabled()
        try:
            with torch.no_grad():
                captured = capture()
                if needs_graph and not captured.is_live:
                    raise Untranslatable(NO_GRAPH)
        except Untranslatable as reason:
            self.calls.pop(name, None)
            self.missing[name] = str(reason)
            return
        with self.keeping, torch.no_grad():
            self._add(name, captured)

    def _add(self, name: str, captured: KeptCall) -> None:
        """Append a call to the calls of its module, and update the module's statistics if reductions are watched."""
        if name not in self.calls:
            part = captured.part or self.torch_parts.get(name) or part_of(name, self.modules[name])
            self.calls[name] = ModuleCalls(
                part, statistics=ModuleStatistics(name, self.reductions) if self.reductions else None
            )
        self.calls[name].add(captured)
        if self.seen.kept is not None:
            self.seen.kept.keep_gates(self.candidates.get(name), self.calls[name].calls[-1])

    def _capture(self, name: str, observed: ObservedCall) -> KeptCall:
        """What is kept of a call: its queries and keys, or the returned weights if the call cannot be translated."""
        check_numbers(observed.output)
        try:
            call, translation = observed.call, translate(observed.call, self.masks)
        except Untranslatable as reason:
            return returned_call(name, observed, reason, self.keeps_values)
        verified = Check(name, note="verify=False")
        if self.verify:
            verified = check(name, observed, translation, self.verify == ALL)
        if observed.inputs is not None:
            return deferred_call(name, translation, observed.inputs, verified, self.keeps_values)
        query, key, value = call_tensors(call, translation, self.keeps_values)
        values = None if value is None else SharedKeys(value)
        patched = None if values is None or call.patched is None else call.patched.detach().transpose(1, 2)
        pieces, logsumexp = (translation.attention, translation.positions), row_logsumexp(call, translation)
        states = {} if logsumexp is None else call.states
        return Capture(*pieces, query, SharedKeys(key), verified, logsumexp, values, translation.edits, patched, states)

    def _differential(self, frame: ModuleFrame) -> KeptCall:
        """The difference of two softmaxes, from the two backend calls of a module that ended."""
        if len(frame.halves) != 2:
            raise Untranslatable(
                f"{type(frame.module).__name__} subtracts two maps, and does not compute them by two calls of the "
                "attention interface, as transformers 5.15 and later do"
            )
        first = self._capture(frame.name or "", frame.halves[0])
        if not isinstance(first, Capture):
            raise Untranslatable(f"the two softmaxes of {type(frame.module).__name__} cannot be recomputed")
        output = frame.output[0] if isinstance(frame.output, tuple) else frame.output
        return differential(frame.module, first, frame.halves, output)

    def _note_uncaptured(self) -> None:
        """Write down why a module has no map."""
        for name, module in self.candidates.items():
            is_known = module not in self.unnamed
            if is_known and name not in self.calls and name not in self.missing and not self._is_read_elsewhere(name):
                outside = f"{type(module).__name__} {FUSED if is_recurrent(module) else OUTSIDE}"
                self.missing[name] = outside if name in self.called else UNCALLED

    def _is_read_elsewhere(self, name: str) -> bool:
        """Whether the attention of a module is that of a part of it, or of a wrapper that does not call it."""
        is_wrapped = name not in self.called and any(name.startswith(f"{other}.") for other in self.calls if other)
        return is_wrapped or self._observed_inside(name)

    def _observed_inside(self, name: str) -> bool:
        """Whether the attention of a module inside this one was captured, or is missing with a reason."""
        start = f"{name}." if name else ""
        return any(other != name and other.startswith(start) for other in (*self.calls, *self.missing))

    def conclude(self) -> None:
        """Raise an error if nothing was captured, or if a map does not match the kernel's output."""
        if not self.calls and not self.missing and not self.attending.keys() - self.unnamed:
            raise RegardError(
                f"watch: {type(self.model).__name__} has no attention that can be captured. {SUPPORTED}; "
                "give the model that contains it."
            )
        if self.called and not self.calls:
            raise RegardError(nothing_captured(self.model, self.missing.values()))
        self._find_decoder()
        self._refuse_mismatches(f"{len(self.calls)} modules of {type(self.model).__name__}", "model, ")

    def _find_decoder(self) -> None:
        """Put self-attention into the decoder if its path names no part, and the sizes of the cross-attention do.

        Its tokens are then the queries of the cross-attention, and not the keys.
        """
        crossing = [own.calls[-1].shape for own in self.calls.values() if own.part == "cross" and own.calls]
        decoded = {queries for _, _, queries, _ in crossing} - {keys for *_, keys in crossing}
        for name, own in self.calls.items():
            if own.part == "encoder" and own.calls and "encoder" not in name.lower():
                own.part = "decoder" if own.calls[-1].shape[3] in decoded else "encoder"

    def _refuse_mismatches(self, watched: str, arguments: str = "") -> None:
        """Raise an error if a map differs from the output of its kernel. The texts say what was watched, and how."""
        wrong = self.seen.mismatched
        if wrong:
            checks = "\n".join(f"  {check}" for check in wrong.values())
            raise RegardError(
                f"watch: in {len(wrong)} of {watched}, recomputed weights times values differ from the output of the "
                f"kernel:\n{checks}\nSomething unknown changes the weights there. watch({arguments}verify=False) "
                "returns these maps anyway."
            )


class CompiledWatcher(Watcher):
    """Observes a model that is compiled, without hooks, for which torch would compile it again.

    It sees the operator inside of graphs, and calls of the backend that break a graph.
    """

    @contextmanager
    def observing(self) -> Iterator[None]:
        """A block in which the operators of this thread are kept."""
        calls = CompiledCalls(self.candidates, self._keep_call)
        with operator_observers.adding(calls), graph_breaks.adding(self):
            try:
                yield
            finally:
                self._note_uncaptured()

    def _note_uncaptured(self) -> None:
        """Write down that modules without a map did not run in a graph with the operator."""
        self.missing |= {
            name: NOT_IN_GRAPH
            for name, module in self.candidates.items()
            if module not in self.unnamed
            and name not in self.calls
            and name not in self.missing
            and not self._observed_inside(name)
        }
