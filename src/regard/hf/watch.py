"""Watching a Hugging Face model: its own backend computes, and what it was given is kept.

Attention modules of transformers ask `AttentionInterface.get_interface` for their backend at every
call. While a model is watched, that one method hands out the same backend inside a listener. So no
configuration changes, masks are made as ever, and outputs are bit-identical. Not thread-safe: the
method belongs to the whole process, and watching starts and ends in one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import RegardError, nearest
from regard.hf.modules import Chosen, attention_modules, part_of
from regard.hf.translate import Call, Masks, Untranslatable, translate
from regard.hf.verify import Check, check
from regard.hf.watched import Capture, Keys, Part, Watched

KEEPS = ("qk",)
OUTSIDE = "computes its own weights, not through the attention interface of transformers"


@contextmanager
def watch(
    model: nn.Module, layers: Iterable[int | str] | None = None, keep: str = "qk", verify: bool = True
) -> Iterator[Watched]:
    """See every attention weight of a Hugging Face model while its own backend runs it.

    Queries and keys are kept, O(n) for each layer, and weights are recomputed from them when asked
    for; the outputs of the model are bit-identical. `layers` takes layer numbers or module paths
    (with * and ?). With `verify` a few rows of every call are recomputed and compared with what the
    kernel returned, and the block ends in a `RegardError` if they differ.

    Several models may be watched at once and blocks may be nested. A model that is compiled, or that
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
    _check_model(model)
    watcher = _Watcher(model, Chosen(layers), verify)
    with watcher.listening():
        yield watcher.seen
    watcher.conclude()


class _Watcher:
    """Listens for one model: sorts the calls of its modules into captures and reasons."""

    def __init__(self, model: nn.Module, chosen: Chosen, verify: bool) -> None:
        self.model, self.chosen, self.verify, self.masks = model, chosen, verify, Masks()
        self.names = {module: name for name, module in model.named_modules()}
        self.candidates = {name: module for name, module in attention_modules(model).items() if name in chosen}
        chosen.check(self.names.values(), attention_modules(model))
        self.parts: dict[str, Part] = {}
        self.missing: dict[str, str] = {}
        self.ran: set[str] = set()
        self.seen = Watched(self.parts, self.missing, list(self.names.values()), verify)

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in {"": self.model, **self.candidates}.items():
                hook = module.register_forward_pre_hook(lambda *_, name=name: self.ran.add(name))
                stack.callback(hook.remove)
            stack.enter_context(_tap.to(self))
            try:
                yield
            finally:
                self._note_unheard()

    @torch.no_grad()
    def hear(self, call: Call, output: Any) -> None:
        """Take one call of a backend, if its module belongs to the model."""
        name = self.names.get(call.module)
        if name is None or name not in self.chosen or name in self.missing:
            return
        try:
            capture = self._capture(name, call, output)
        except Untranslatable as reason:
            self.parts.pop(name, None)
            self.missing[name] = str(reason)
            return
        self.parts.setdefault(name, Part(part_of(name, call.module))).add(capture)

    def _capture(self, name: str, call: Call, output: Any) -> Capture:
        translation = translate(call, self.masks)
        checked = check(name, call, translation, _first(output)) if self.verify else Check(name, note="verify=False")
        query, key = _own(translation.query.detach()), _own(call.key.detach(), call.key)
        return Capture(translation.attention, translation.positions, query, Keys(key), checked)

    def _note_unheard(self) -> None:
        heard = {*self.parts, *self.missing}
        for name, module in self.candidates.items():
            if name not in heard and not any(other.startswith(f"{name}.") for other in heard):
                outside = f"{type(module).__name__} {OUTSIDE}"
                self.missing[name] = outside if name in self.ran else "was not called inside the with-block"

    def conclude(self) -> None:
        """Refuse to end in silence: nothing captured, or maps that are not what the kernel computed."""
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
            f"watch: nothing of {type(self.model).__name__} was captured although it ran.{listed} Only models whose "
            "attention goes through transformers' attention interface can be watched (BERT, Llama, T5, ViT and some "
            "350 more); output_attentions=True with attn_implementation='eager' may still return its weights."
        )


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _own(tensor: Tensor, source: Tensor | None = None) -> Tensor:
    """The tensor, copied only where it is a static cache, which is written in place at the next step."""
    static = source is not None and hasattr(source, "_dynamo_static_input_type")
    return tensor.clone() if static else tensor


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise RegardError(f"watch: expected a Hugging Face model, got {type(model).__name__}.")
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            where = f"its part {name!r}" if name else "the model"
            raise RegardError(
                f"watch: {where} is compiled, and compiled code does not ask for its backend again. Watch the model "
                "that was compiled: model._orig_mod after torch.compile(model), one loaded anew after model.compile()."
            )
    if "transformers" not in sys.modules:
        raise RegardError(
            f"watch: {type(model).__name__} is no model of transformers, which is not even loaded. For your own "
            "attention call regard.attend, whose result holds the weights."
        )


# The one method that is replaced while anyone listens


class _Tap:
    """`AttentionInterface.get_interface`, replaced while anyone listens."""

    def __init__(self) -> None:
        self.listeners: list[_Watcher] = []
        self.ours: Callable[..., Any] | None = None
        self._theirs: Callable[..., Any] | None = None

    @contextmanager
    def to(self, watcher: _Watcher) -> Iterator[None]:
        interface = _interface()
        if self.ours is None:
            self._open(interface)
        self.listeners.append(watcher)
        try:
            yield
        finally:
            self.listeners.remove(watcher)
            if not self.listeners:
                self._close(interface)

    def _open(self, interface: Any) -> None:
        original = interface.get_interface

        @wraps(original)
        def get_interface(this: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
            function = original(this, attn_implementation, default)
            return self._overheard(function, attn_implementation) if self.ours is get_interface else function

        self._theirs = original
        self.ours = interface.get_interface = get_interface

    def _close(self, interface: Any) -> None:
        """Put the method back; if someone else wrapped ours meanwhile, ours stays and only passes on."""
        if interface.get_interface is self.ours:
            interface.get_interface = self._theirs
        self.ours = self._theirs = None

    def _overheard(self, function: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            output = function(*args, **options)
            call = _call(backend or "eager", function, args, options)
            for watcher in tuple(self.listeners):
                watcher.hear(call, output)
            return output

        return run


_tap = _Tap()


def _interface() -> Any:
    from transformers import __version__
    from transformers.modeling_utils import AttentionInterface

    if not hasattr(AttentionInterface, "get_interface"):
        raise RegardError(
            f"watch: transformers {__version__} has another attention interface; pip install 'transformers>=5,<6'."
        )
    return AttentionInterface


def _call(backend: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Call:
    """The arguments by name, however they were passed."""
    names = ("module", "query", "key", "value", "attention_mask")
    given = {**dict(zip(names, args, strict=False)), **options}
    if len(args) > len(names):
        given["a sixth positional argument"] = args[len(names) :]
    module, query, key, value, mask = (given.pop(name, None) for name in names)
    return Call(module, backend, function, query, key, value, mask, given)
