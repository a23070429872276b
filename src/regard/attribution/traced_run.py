"""`traced_run`: one run of a model with the map, the values and the output gradient of every attention call."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.attribution.inputs import TextInputs
from regard.attribution.projected_heads import ProjectedHeads, UnknownOutput
from regard.base.errors import RegardError
from regard.edits.layer_edits import LayerEdits
from regard.hf.calls import AttentionCall, CallObserver
from regard.hf.capture import WatchedAttention, watch
from regard.hf.capture.module_hooks import inside_backward
from regard.hf.capture.recurrent_calls import detached, is_recurrent
from regard.hf.capture.transformers_interface import backend_calls
from regard.hf.recurrent.core_calls import READERS
from regard.hf.recurrent.core_functions import core_functions, core_names
from regard.maps import AttentionMap, GradientMap

#: Chooses layers as `watch` does: numbers, module paths, or None for all.
Layers = Any
#: Why a recurrent layer is missing: the method does not read it, or its recurrence is not a known function.
RECURRENT = (
    "it is recurrent: method='weight-gradient' and 'chefer' read its weights, if its recurrence is one function of "
    "transformers"
)
#: The parts of a model; `WatchedAttention` has a view of each.
PARTS = ("encoder", "decoder", "cross")
#: Roundings of a number on its way through one layer, forward and backward.
ROUNDINGS = 20


@dataclass(frozen=True, eq=False)
class TracedCall:
    """One attention call: its weights (B, H, I, J), values (B, G, J, E), output and its gradient (B, H, I, E).

    G is the number of key heads, E the width of a value. `name` is the path of the module, with " (call 2)" if it
    attends several times; `index` is the number of the call among those of its module, from 0. `part` is one of PARTS.
    """

    name: str
    part: str
    module: nn.Module
    weights: AttentionMap
    value: Tensor
    output: Tensor
    gradient: Tensor
    index: int = 0
    #: Whether the call went through transformers' attention interface, where it can be changed.
    is_backend: bool = True

    def links(self) -> GradientMap:
        """w_ij (g_i . v_j)."""
        return GradientMap(self.weights, self.gradient, self.value)


@dataclass(frozen=True, eq=False)
class TracedRun:
    """All attention calls of a run in their order, and L of each sequence (`number`, (B,)).

    `gradients` are those of `Rules.tensors()`, in the same order. `missing` has the reason for each layer without a
    call.
    """

    calls: dict[str, TracedCall]
    number: Tensor
    missing: dict[str, str] = field(default_factory=dict)
    gradients: tuple[Tensor, ...] = ()

    @property
    def parts(self) -> dict[str, str]:
        """The part of the model that each call belongs to: encoder, decoder or cross."""
        return {name: call.part for name, call in self.calls.items()}


class Rules:
    """What a method adds to a traced run: other gradients, or further tensors. This class adds nothing.

    `traced_run` uses the methods in this order: `during` around the model's run, `before_gradients`, `tensors`,
    `keeps_graph`.
    """

    @contextmanager
    def during(self) -> Iterator[None]:
        """A block around the run of the model."""
        yield

    def before_gradients(self, number: Tensor, calls: Sequence[tuple[AttentionCall, Tensor]]) -> None:
        """Is called with L (B,), and with each attention call and its output, before the gradients are computed."""

    def tensors(self) -> list[Tensor]:
        """Further tensors whose gradients are wanted."""
        return []

    @property
    def keeps_graph(self) -> bool:
        """Whether the graph is needed after the gradients of the run, because the method computes more."""
        return False


class _Outputs(CallObserver):
    """Keeps the output of every attention call of a model, by module path, so that its gradient can be asked.

    Only calls of transformers' attention interface are reported here; `ProjectedHeads` finds other outputs.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.kept: dict[str, list[tuple[AttentionCall, Tensor]]] = defaultdict(list)

    def backend_called(self, call: AttentionCall, output: Any) -> None:
        """Keep a call of this model, if it is no checkpoint that runs again inside a backward pass."""
        name = self.names.get(call.module)
        if name is None or inside_backward():
            return
        output = output[0] if isinstance(output, tuple | list) else output
        if not output.requires_grad and torch.is_grad_enabled():
            output.requires_grad_()  # the parameters are frozen: the graph begins here
        self.kept[name].append((call, output))


class _Cores:
    """Keeps the calls of recurrent layers of a model by module path: the name of the function that computed them, its
    arguments and its result, in the graph. `READERS` (hf/recurrent/core_calls.py) read such a call.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = {module: name for name, module in model.named_modules() if core_names(module)}
        self.kept: dict[str, list[tuple[str, dict[str, Any], Any]]] = defaultdict(list)
        self._running: nn.Module | None = None

    @contextmanager
    def observing(self) -> Iterator[None]:
        """A block around the model's run in which calls are kept."""
        with ExitStack() as stack:
            for module in self.modules:
                stack.callback(module.register_forward_pre_hook(self._start).remove)
            stack.enter_context(core_functions.observed_by(self, self.modules))
            yield

    def _start(self, module: nn.Module, _: Any) -> None:
        """The hook before a recurrent module: note that it runs, because the report of a function does not name it."""
        self._running = module

    def core_called(self, name: str, given: dict[str, Any], result: Any, edits: LayerEdits | None) -> None:
        """Keep a call of the recurrent module that runs. `edits` are not read: a traced run has none of its own.

        `name` is that of the core function, and `given` its arguments by name (`hf/recurrent/core_functions.py`).
        """
        if self._running is None or inside_backward():
            return
        first = result[0] if isinstance(result, tuple) else result
        if not first.requires_grad and torch.is_grad_enabled():
            first.requires_grad_()  # the parameters are frozen: the graph begins here
        self.kept[self.modules[self._running]].append((name, given, result))


def traced_run(
    model: nn.Module,
    inputs: TextInputs,
    number: Callable[[Any], Tensor],
    layers: Layers = None,
    rules: Rules | None = None,
    with_recurrent: bool = False,
) -> TracedRun:
    """Run a model, and compute the gradient of L = `number(outputs)` at the output of each of its attention calls.

    L has one number for each sequence, (B,). The gradients of parameters are not changed. `rules` may change how
    gradients are computed. Recurrent layers are among the calls if `with_recurrent`, and missing otherwise.
    """
    observer, rules, cores = _Outputs(model), rules or Rules(), _Cores(model if with_recurrent else nn.Module())
    recurrent = {name: module for name, module in model.named_modules() if is_recurrent(module)}
    projections = ProjectedHeads(model)
    with (
        gradients_on(),
        watch(model, layers=layers, keep="qkv") as seen,
        backend_calls.observed_by(observer),
        projections.kept(),
        cores.observing(),
        rules.during(),
    ):
        outputs = inputs.run(model)
    with gradients_on():
        value = number(outputs)
        rules.before_gradients(value, [call for calls in observer.kept.values() for call in calls])
        found, missing = _found(seen, observer, projections, cores, recurrent)
        _check_found(model, found, missing)
        # one backward pass for all: first the outputs of the calls, then the tensors of the rules
        outputs = [step for part in found for step in part.steps]
        slopes = iter(_gradients(value, [*outputs, *rules.tensors()], rules.keeps_graph))
    # this takes the gradients of the outputs; those that are left in `slopes` belong to the rules
    calls = {part.label: part.traced(torch.cat([next(slopes) for _ in part.steps], 1)) for part in found}
    return TracedRun(calls, value.detach(), missing, tuple(slopes))


@dataclass(frozen=True, eq=False)
class _Part:
    """One call of a module, with its output (B, I, H, E) or (B, I, H E) in the graph, and its values (B, G, J, E).

    `name` is the path of the module, and `index` the place of the call among its calls. `steps` holds the output as one
    tensor. A decoder that calls its attention once for each query has one for each of them. `is_backend`: the call went
    through transformers' attention interface.
    """

    seen: WatchedAttention
    name: str
    index: int
    module: nn.Module
    value: Tensor
    steps: list[Tensor]
    is_backend: bool

    @property
    def label(self) -> str:
        """The name of the call: the module path, with the number of the call if there are several."""
        return self.name if len(self.seen.calls(self.name)) == 1 else f"{self.name} (call {self.index + 1})"

    @property
    def part(self) -> str:
        """The part of the model; "encoder" for a module that the watch puts in none."""
        return next((part for part in PARTS if self.name in getattr(self.seen, part).names), "encoder")

    def traced(self, slope: Tensor) -> TracedCall:
        """The call with the gradient of its output; `slope` is dL/d(output) in the shape of the output."""
        output = torch.cat(self.steps, 1).detach()
        # from (B, I, H, E) or (B, I, H E) to (B, H, I, E)
        num_heads = self.seen.calls(self.name)[self.index].shape[1]
        heads, slope = (x.reshape(*x.shape[:2], num_heads, -1).transpose(1, 2) for x in (output, slope))
        weights, value = self.seen.calls(self.name)[self.index], self.value.detach()
        return TracedCall(self.label, self.part, self.module, weights, value, heads, slope, self.index, self.is_backend)


@dataclass(frozen=True, eq=False)
class _RecurrentPart(_Part):
    """One call of a recurrent layer. Its output is weights times values, perhaps times a factor `scale`, such as a
    gate.

    `core` is the name of the function, its arguments and its result, as in `_Cores`.
    """

    core: tuple[str, dict[str, Any], Any]

    def traced(self, slope: Tensor) -> TracedCall:
        """The call with the gradient at weights times values, scale * dL/d(output).

        A reader takes the output from a result and moves its heads to axis 1. The gradient has the same shape, so it is
        read as if it were a result.
        """
        function, given, result = self.core
        output = READERS[function](detached(given), detached(result))
        of_slope = READERS[function](detached(given), (slope, None) if isinstance(result, tuple) else slope)
        gradient = of_slope.output if output.scale is None else of_slope.output * output.scale
        weights = self.seen.calls(self.name)[self.index]
        call = TracedCall(self.label, self.part, self.module, weights, self.value.detach(), output.output, gradient)
        return replace(call, index=self.index, is_backend=False)


def _found(
    seen: WatchedAttention,
    observer: _Outputs,
    projections: ProjectedHeads,
    cores: _Cores,
    recurrent: dict[str, nn.Module],
) -> tuple[list[_Part], dict[str, str]]:
    """The calls whose outputs are known, and the reasons why others are not.

    Three sources are tried for each module: transformers' attention interface, the functions of recurrent layers, and
    the inputs of output projections. A source counts if it has as many calls as the watch.
    """
    found: list[_Part] = []
    missing = seen.missing
    for name in seen.names:
        num_calls, calls = len(seen.calls(name)), observer.kept.get(name, [])
        if len(calls) == num_calls:
            found += [_Part(seen, name, n, call.module, call.value, [x], True) for n, (call, x) in enumerate(calls)]
            continue
        if name in recurrent and len(cores.kept[name]) == num_calls:
            for n, core in enumerate(cores.kept[name]):
                result, weights = core[2][0] if isinstance(core[2], tuple) else core[2], seen.calls(name)[n]
                found.append(_RecurrentPart(seen, name, n, recurrent[name], weights.value, [result], False, core))
            continue
        if name in recurrent:
            missing[name] = RECURRENT
            continue
        try:
            for n, (module, value, steps) in enumerate(projections.outputs(seen, name)):
                found.append(_Part(seen, name, n, module, value, steps, False))
        except UnknownOutput as reason:
            missing[name] = str(reason)
    return found, missing


@contextmanager
def gradients_on() -> Iterator[None]:
    """Compute gradients, also inside torch.no_grad and torch.inference_mode of the caller."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _gradients(value: Tensor, outputs: list[Tensor], keeps_graph: bool = False) -> list[Tensor]:
    """dL/do of each output, in order; zeros where L does not depend on it.

    `value` is L of each sequence, (B,). Its sum is derived: sequences do not depend on each other. With `keeps_graph`
    the graph can be derived again.
    """
    if not outputs:
        return []
    grad = partial(torch.autograd.grad, retain_graph=keeps_graph, allow_unused=True)
    slopes = grad(value.sum(), outputs) if value.requires_grad else [None]
    if all(slope is None for slope in slopes):
        raise RegardError(
            "attribute: the target does not depend on any attention through differentiable operations. Compute it "
            "without .detach(), .item() or argmax; a model whose forward runs under torch.no_grad has no "
            "gradients, and neither has a layer of torch.ao.quantization.quantize_dynamic."
        )
    slopes = [torch.zeros_like(x) if slope is None else slope for slope, x in zip(slopes, outputs, strict=True)]
    if not all(bool(slope.isfinite().all()) for slope in slopes):
        dtype = str(outputs[0].dtype).removeprefix("torch.")
        remedy = " Gradients overflow in float16: use model.float()." if outputs[0].dtype == torch.float16 else ""
        raise RegardError(f"attribute: the gradients of the model are NaN or infinite in {dtype}.{remedy}")
    return slopes


def _check_found(model: nn.Module, found: list[Any], missing: dict[str, str]) -> None:
    """Refuse a run in which no attention call has a known output."""
    if found:
        return
    reasons = "; ".join(dict.fromkeys(missing.values())) or "no attention ran"
    raise RegardError(
        f"attribute: no attention of {type(model).__name__} can be attributed: {reasons}. Gradients of heads are read "
        "from transformers' attention interface (GPT-2, Llama, BERT, T5, ViT and some 350 more), and from the inputs "
        "of output projections, as in regard.nn."
    )


def check_model(model: object, operation: str = "attribute") -> None:
    """Refuse a model that has no gradients, or whose results are random (dropout) or imprecise (autocast)."""
    if not isinstance(model, nn.Module):
        raise RegardError(f"{operation}: model is a {type(model).__name__}; give a torch.nn.Module.")
    if any(_drops(part) for part in model.modules()):
        raise RegardError(
            f"{operation}: {type(model).__name__} is in training mode, so its dropout changes the result of each run. "
            "Call model.eval() first."
        )
    parameters = list(model.parameters())
    if any(parameter.is_inference() for parameter in parameters):
        raise RegardError(
            f"{operation}: the parameters of {type(model).__name__} were made inside torch.inference_mode, so they "
            "have no gradients. Make or load the model outside of it."
        )
    devices = {parameter.device.type for parameter in parameters if not parameter.is_meta}
    if any(map(torch.is_autocast_enabled, devices)):
        raise RegardError(
            f"{operation}: torch.autocast is active, so gradients have 2 to 3 digits, and links that cancel would be "
            "noise. Leave the autocast block."
        )


def precision_notes(model: nn.Module, num_layers: int) -> tuple[str, ...]:
    """What a reader of an attribution of a model in half precision must know; nothing for float32.

    Each layer rounds some 20 times on the way to the target and back, each time by up to u = eps / 2 of the number.
    Independent errors add up to u sqrt(20 layers).
    """
    half = {parameter.dtype for parameter in model.parameters()} & {torch.float16, torch.bfloat16}
    if not half:
        return ()
    dtype = max(half, key=lambda one: torch.finfo(one).eps)
    share = torch.finfo(dtype).eps / 2 * math.sqrt(ROUNDINGS * max(num_layers, 1))
    return (
        f"The model computes in {str(dtype).removeprefix('torch.')}: numbers below {share:.1%} of the largest may be "
        "rounding. model.float() has 7 digits.",
    )


def _drops(part: nn.Module) -> bool:
    """Whether a module is in training mode and has a probability of dropout, its own or for a function of torch."""
    names = vars(part).items()
    return part.training and (
        (isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0)
        or any("drop" in name and isinstance(value, float) and value > 0 for name, value in names)
    )
