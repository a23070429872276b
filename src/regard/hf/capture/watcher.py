"""Watching a model: its own backend computes, and what it was given is kept.

Attention is heard where it is asked for: at transformers' attention interface, at
`F.scaled_dot_product_attention` and at torch's own attention modules; `regard.attend` and the modules
of `regard.nn` tell it. Nothing of the model's is changed and outputs are bit-identical. What is patched belongs to the
process, what listens to one thread (`regard.context`): threads may watch at once, the same model too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.checks import checked
from regard.errors import RegardError, nearest
from regard.hf.attention_modules import (
    Chosen,
    attention_modules,
    inside_torch_layers,
    is_loud,
    part_of,
    parts_of_torch_layers,
)
from regard.hf.calls import DIRECT, NO_NUMBERS, Call, Masks, Untranslatable, translate
from regard.hf.capture.lazy_projection import Unprojected
from regard.hf.capture.model_maps import Capture, Keys, Part, Told, Watched
from regard.hf.capture.module_hooks import inside_backward, running
from regard.hf.capture.module_rerun import Held, Slot, snapshot
from regard.hf.capture.module_statistics import ModuleStatistics, checked_folds
from regard.hf.capture.softmax_trace import Trace
from regard.hf.capture.torch_calls import Heard, encoder_layer, multihead, sdpa
from regard.hf.capture.transformers_interface import tap
from regard.hf.capture.verification import Check, check
from regard.maps import AttentionMap, Fold
from regard.nn import Attends, listeners
from regard.seen import attend_listeners

KEEPS = ("qk", "statistics")
ALL = "all"
UNCALLED = "was not called inside the with-block by the thread that watches"
OUTSIDE = (
    "computes its own weights, through neither the attention interface of transformers nor "
    "F.scaled_dot_product_attention nor nn.MultiheadAttention nor regard.attend"
)
#: What can be watched.
WATCHED = (
    "Only models whose attention goes through transformers' attention interface (BERT, Llama, T5, ViT and some 350 "
    "more), F.scaled_dot_product_attention, nn.MultiheadAttention or regard.attend can be watched"
)


@checked
def watch(
    model: nn.Module,
    layers: int | str | Iterable[int | str] | None = None,
    keep: str = "qk",
    verify: bool | str = True,
    folds: Iterable[Fold] | None = None,
) -> AbstractContextManager[Watched]:
    """See every attention weight of a model, of transformers or in plain torch, while its own backend runs it.

    Queries and keys are kept, O(n) for each layer, and weights are recomputed from them when asked
    for; the outputs of the model are bit-identical. `layers` takes layer numbers or module paths
    (with * and ?). With `verify` a few rows of every call are recomputed and compared with what the
    kernel returned, and the block ends in a `RegardError` if they differ; every row, in quadratic time but linear
    memory, if the backend is one that you registered, or with `verify="all"`. Of a module that computes softmax
    itself (Bloom, GPT-J, DeBERTa) the inputs are kept, and it runs once more when its map is looked at.

    With `keep="statistics"` every call is folded by `folds` (by default entropy, strongest link, distance
    and weight received) while the model runs, and its queries and keys are let go at once:
    `seen.statistics[name].of(regard.Entropy)`.

    Several models may be watched at once and blocks may be nested. A watch sees the calls of its own thread:
    several threads may watch at once, and for a model that runs in another thread the watch begins there (or give the
    thread the context: `Thread(target=contextvars.copy_context().run, args=(model.generate, ...))`). What activation
    checkpointing computes again in a backward pass is no second call. A model that is compiled, or that
    computes attention in its own way, is refused or listed in `missing`: it never gets a wrong map.

    >>> import torch, transformers, regard as rg
    >>> config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)
    >>> model = transformers.GPT2LMHeadModel(config).eval()
    >>> with rg.watch(model) as seen:
    ...     _ = model(torch.tensor([[3, 1, 4, 1, 5]]))
    >>> seen[1], seen[1].attention.mask
    (AttentionMap(1 x 2 heads x 5 queries x 5 keys), causal())
    """
    if keep not in KEEPS:
        raise RegardError(f"watch(keep={keep!r}): what is kept is one of a few. {nearest(str(keep), KEEPS)}")
    if verify not in (True, False, ALL):
        raise RegardError(
            f"watch(verify={verify!r}): verify is True (a few rows), {ALL!r} (every row) or False (none)."
        )
    _check_model(model)
    chosen, kept = Chosen(layers), checked_folds(folds, keep)
    return _Watch(lambda: _watching(_Watcher(model, chosen, verify, kept)))


@contextmanager
def _watching(watcher: _Watcher) -> Iterator[Watched]:
    with watcher.listening():
        yield watcher.seen
    watcher.conclude()


class _Watch(AbstractContextManager[Watched]):
    """A context manager that may be entered again: each block sees its own calls."""

    def __init__(self, begin: Callable[[], AbstractContextManager[Watched]]) -> None:
        self._begin = begin
        self._blocks: list[AbstractContextManager[Watched]] = []

    def __enter__(self) -> Watched:
        block = self._begin()
        seen = block.__enter__()
        self._blocks.append(block)
        return seen

    def __exit__(self, *error: Any) -> bool | None:
        return self._blocks.pop().__exit__(*error)

    def __getitem__(self, key: object) -> NoReturn:
        raise RegardError(
            f"watch(...)[{key!r}]: nothing is captured before the watch is entered. Run the model inside "
            "`with regard.watch(model) as seen:` and read the maps from `seen`."
        )


@dataclass(eq=False)
class Frame:
    """A module that runs: its path if it attends, how often the attention in it had run before, and what it did."""

    module: nn.Module
    name: str | None
    inside: int
    given: tuple[Any, Any] | None = None
    trace: Trace = field(default_factory=Trace)


class _Watcher:
    """Listens for one model: sorts the calls of its modules into captures and reasons."""

    def __init__(self, model: nn.Module, chosen: Chosen, verify: bool | str, folds: tuple[Fold, ...]) -> None:
        self.folds = folds
        self.model, self.chosen, self.verify, self.masks = model, chosen, verify, Masks()
        self.slot, self.hooks = Slot(), ExitStack()
        self.order: list[str] = []
        self.names: dict[nn.Module, str] = {}
        self.modules: dict[str, nn.Module] = {}
        self.attending: dict[nn.Module, str] = {}
        self.candidates: dict[str, nn.Module] = {}
        self.loud: set[nn.Module] = set()
        attending = self._read_names()
        chosen.check(self.names.values(), attending)
        self.torch_parts, self.known = parts_of_torch_layers(model), inside_torch_layers(model)
        self.parts: dict[str, Part] = {}
        self.missing: dict[str, str] = {}
        self.ran: Counter[str] = Counter()
        self.stack: list[Frame] = []
        self.running: list[nn.Module] = []
        self.seen = Watched(self.parts, self.missing, self.order, bool(verify))

    def _read_names(self) -> dict[str, nn.Module]:
        """Read the names of modules and which of them attend. A model may exchange modules while it runs (BigBird)."""
        attending = attention_modules(self.model)
        self.names = {module: name for name, module in self.model.named_modules()}
        self.modules = {name: module for module, name in self.names.items()}
        self.order[:] = self.modules
        self.attending = {module: name for name, module in attending.items()}
        self.candidates = {name: module for name, module in attending.items() if name in self.chosen}
        return attending

    def _listen_to_the_loud(self) -> None:
        for module in self.candidates.values():
            if module not in self.loud and is_loud(module):
                self.loud.add(module)
                self.hooks.callback(module.register_forward_pre_hook(self._given, with_kwargs=True).remove)

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(running.followed_by(self))
            stack.enter_context(tap.to(self))
            stack.enter_context(listeners.to(self))
            stack.enter_context(attend_listeners.to(self))
            stack.enter_context(self.hooks)
            self._listen_to_the_loud()
            try:
                yield
            finally:
                self._note_unheard()

    # What the model does

    def is_loud(self, module: nn.Module) -> bool:
        return module in self.loud

    def started(self, module: nn.Module) -> None:
        if module in self.names:
            self.running.append(module)
            if any(part is not None and part not in self.names for part in module._modules.values()):
                self._read_names()
                self._listen_to_the_loud()
        name = self.attending.get(module)
        if name is not None or module is self.model:
            self.ran[name or ""] += 1
        if isinstance(module, nn.TransformerEncoderLayer):
            self.stack.append(Frame(module, name, self.ran[self.attending.get(module.self_attn, "")]))
        elif name is not None:
            self.stack.append(Frame(module, name, self.ran[name]))

    def _given(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_own = self in running.followers  # the hook belongs to the module, which other threads may run
        if is_own and self.stack and self.stack[-1].module is module:
            self.stack[-1].given = snapshot(args, kwargs)

    def ended(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        while module in self.running and self.running.pop() is not module:
            pass
        if not any(frame.module is module for frame in self.stack):
            return
        while (frame := self.stack.pop()).module is not module:
            pass
        if output is None:
            return
        name, given = frame.name, frame.given
        if given is not None and frame.trace.softmaxes:
            self._keep(name, lambda: Held.of(name or "", module, given, frame.trace, self.slot))
        elif isinstance(module, nn.MultiheadAttention):
            self._take(frame.name, lambda: multihead(module, args, kwargs, output, module in self.known))
        elif isinstance(module, nn.TransformerEncoderLayer):
            name = self.attending.get(module.self_attn)
            if name is not None and self.ran[name] == frame.inside:
                self.ran[name] += 1
                known = module.self_attn in self.known
                self._take(name, lambda: encoder_layer(module, args, kwargs, output, known))

    def asked(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self.stack or tap.inside or attend_listeners.busy:
            return
        frame = self.stack[-1]
        if isinstance(frame.module, Attends):  # it tells by itself
            return
        if function is F.scaled_dot_product_attention:
            frame.given = None
            self._take(frame.name, lambda: sdpa(frame.module, args, kwargs, output))
        else:
            frame.trace.follow(function, args, kwargs, output)

    def hear(self, call: Call, output: Any) -> None:
        """Take one call of a backend, if its module belongs to the model."""
        self._take(self.names.get(call.module), lambda: Heard(call, _first(output)))

    def told(self, module: nn.Module | None, weights: AttentionMap) -> None:
        """Take the map that a module of `regard.nn` tells, or `attend` for the module that called it."""
        called = module is None
        if called and (tap.inside or not self.running or isinstance(self.running[-1], Attends)):
            return  # the backend is heard itself, and these modules tell their own maps
        name = self.names.get(self.running[-1] if module is None else module)
        note = "regard.attend told its own map" if called else "the module told its own map"
        self._keep(name, lambda: Told([weights], Check(name or "", note=note), steps=not called))

    # What is kept of it

    def _take(self, name: str | None, hear: Callable[[], Heard]) -> None:
        self._keep(name, lambda: self._capture(name or "", hear()))

    @torch.no_grad()
    def _keep(self, name: str | None, capture: Callable[[], Capture | Held | Told | Unprojected]) -> None:
        if name is None or name not in self.chosen or name in self.missing or inside_backward():
            return
        try:
            captured = capture()
        except Untranslatable as reason:
            self.parts.pop(name, None)
            self.missing[name] = str(reason)
            return
        if name not in self.parts:
            part = self.torch_parts.get(name) or part_of(name, self.modules[name])
            self.parts[name] = Part(part, statistics=ModuleStatistics(name, self.folds) if self.folds else None)
        self.parts[name].add(captured)

    def _capture(self, name: str, heard: Heard) -> Capture | Unprojected:
        if heard.output.is_meta:
            raise Untranslatable(NO_NUMBERS)
        call, translation = heard.call, translate(heard.call, self.masks)
        checked = Check(name, note="verify=False")
        if self.verify:
            checked = check(name, heard, translation, self.verify == ALL)
        if heard.inputs is not None:
            return Unprojected(name, translation.attention, translation.positions, heard.inputs, checked)
        query, key = _own(translation.query.detach()), _own(call.key.detach(), call)
        return Capture(translation.attention, translation.positions, query, Keys(key), checked)

    def _note_unheard(self) -> None:
        heard = {*self.parts, *self.missing}
        for name, module in self.candidates.items():
            if name not in heard and not any(other.startswith(f"{name}.") for other in heard):
                outside = f"{type(module).__name__} {OUTSIDE}"
                self.missing[name] = outside if name in self.ran else UNCALLED

    def conclude(self) -> None:
        """Refuse to end in silence: nothing captured, or maps that are not what the kernel computed."""
        if not self.parts and not self.attending:
            raise RegardError(
                f"watch: {type(self.model).__name__} has no attention that could be seen. {WATCHED}; "
                "give the model that holds it."
            )
        if self.ran and not self.parts:
            raise RegardError(self._nothing())
        wrong = self.seen.mismatched
        if wrong:
            found = "\n".join(f"  {check}" for check in wrong.values())
            where = f"{len(wrong)} of {len(self.parts)} modules of {type(self.model).__name__}"
            raise RegardError(
                f"watch: in {where}, recomputed weights "
                f"times values are not what the kernel returned:\n{found}\nSomething that changes the weights "
                "was not understood. watch(model, verify=False) gives these maps all the same."
            )

    def _nothing(self) -> str:
        reasons = dict.fromkeys(self.missing.values())
        listed = f" {len(self.missing)} attention modules: {'; '.join(reasons)}." if reasons else ""
        return (
            f"watch: nothing of {type(self.model).__name__} was captured although it ran.{listed} {WATCHED}; "
            "output_attentions=True with attn_implementation='eager' may still return its weights."
        )


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _own(tensor: Tensor, call: Call | None = None) -> Tensor:
    """The tensor, copied only where it is a static cache, which is written in place at the next step."""
    return tensor.clone() if call is not None and _is_static(call) else tensor


def _is_static(call: Call) -> bool:
    if hasattr(call.key, "_dynamo_static_input_type"):
        return True
    place = call.key.untyped_storage().data_ptr()
    return call.backend == DIRECT and any(b.untyped_storage().data_ptr() == place for b in call.module.buffers())


def _is_compiled(module: nn.Module) -> bool:
    forward = module.forward
    own = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
    return own or hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if _is_compiled(module):
            where = f"its part {name!r}" if name else "the model"
            raise RegardError(
                f"watch: {where} is compiled, and compiled code does not ask for its backend again. Watch the model "
                "that was compiled: model._orig_mod after torch.compile(model), one loaded anew after model.compile() "
                "or after its forward was compiled."
            )
