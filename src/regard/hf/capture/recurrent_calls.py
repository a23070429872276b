"""`RecurrentCall`: a captured call of a recurrent layer. With a cache, each call continues the one before it.

A call continues another if its first state equals the last state of that call, bit for bit. So the map of a generated
token reaches back to the first token. A layer that begins with a state from before the watch is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import get_ident
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from regard.base.shapes import spread_indices
from regard.edits.layer_edits import EditedMap, LayerEdit, LayerEdits, PairEdit, Pairs
from regard.edits.where import EVERY, Indices
from regard.hf.calls import Untranslatable, check_numbers
from regard.hf.capture.kept_calls import ROWS, TOLERANCE, Check, KeptCall
from regard.hf.recurrent.core_calls import READERS, CoreCall, heads_of
from regard.hf.recurrent.core_functions import core_functions, core_names
from regard.hf.recurrent.forms import joined, map_of
from regard.hf.recurrent.inline_layers import InlineReader, Seen, inline_reader, named_arguments
from regard.maps.attention_map import AttentionMap
from regard.maps.scored_map import Convolution
from regard.pieces.transition import Steps

#: Called with a module, and a function that returns its call or raises the reason why there is none.
OnCall = Callable[[nn.Module, Callable[[], CoreCall]], None]
#: Called with an inline layer, a function that reads its call, and its output or the input of the part that reads its
#: recurrence: returns the same with the open edits, and these; None if another block does so.
ChangeInline = Callable[[nn.Module, Callable[[], CoreCall], Any], tuple[Any, LayerEdits | None] | None]


class _Running(threading.local):
    """The layers that run in one thread: the core calls of each module so far, and what inline layers have seen."""

    def __init__(self) -> None:
        self.cores: dict[nn.Module, list[Callable[[], CoreCall]]] = {}
        self.seen: dict[nn.Module, Seen] = {}


#: (Inline layer, thread) -> the edits of its last call, while an edit of it is open.
inline_edits: dict[tuple[nn.Module, int], LayerEdits | None] = {}


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module computes a recurrent layer, by what it calls or its learned decay; older code is not read."""
    has_decay = hasattr(module, "A_log") and (hasattr(module, "out_proj") or hasattr(module, "o_proj"))
    return has_decay or bool(core_names(module)) or inline_reader(module) is not None


class RecurrentLayers:
    """Observes core functions through their names, and inline layers through hooks, in the watching thread.

    A core function is a function of transformers that computes a recurrence (`hf/recurrent/core_calls.py`); an inline
    layer computes it in its forward. `innermost` returns the module that runs and calls such a function, `is_own`
    whether this thread is watched, and `on_call` gets each call when its module ends. `change` edits inline layers, if
    these are not only observed.
    """

    def __init__(
        self,
        innermost: Callable[[], nn.Module | None],
        is_own: Callable[[], bool],
        on_call: OnCall,
        change: ChangeInline | None = None,
    ) -> None:
        self._innermost, self._is_own, self._on_call, self._change = innermost, is_own, on_call, change
        self._running = _Running()

    @contextmanager
    def observing(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Observe these modules while the block runs."""
        modules = list(modules)
        with ExitStack() as stack:
            stack.enter_context(core_functions.observed_by(self, [m for m in modules if core_names(m)]))
            for module in modules:
                reader = inline_reader(module)
                if reader is not None:
                    self._hook(stack, module, reader)
            yield

    # Core functions

    def core_called(self, name: str, given: dict[str, Any], result: Any, edits: LayerEdits | None) -> None:
        """Keep a call of a core function until its module ends; it is only read if the module is wanted.

        `name` is that of the function, and `given` its arguments by name (`hf/recurrent/core_functions.py`).
        """
        module = self._innermost()
        if module is not None and result is not None:
            given, result = detached(given), detached(result)
            read = self._running.cores.setdefault(module, []).append
            read(lambda: replace(READERS[name](given, result), edits=edits))

    def module_started(self, module: nn.Module) -> None:
        """Forget the core calls of a run that raised an error."""
        self._running.cores.pop(module, None)

    def module_ended(self, module: nn.Module) -> None:
        """Report the core calls of a module that ended; those of its heads are one call."""
        readers = self._running.cores.pop(module, None)
        if readers is not None:
            self._on_call(module, lambda: read_core(module, lambda: heads_of([read() for read in readers])))

    # Inline layers

    def _hook(self, stack: ExitStack, module: nn.Module, reader: InlineReader) -> None:
        """Observe an inline layer and its parts until the stack closes.

        Other threads may run the module too, so the hook asks whether this one is watched.
        """

        def start(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._is_own():
                given = named_arguments(module, args, kwargs)
                self._running.seen[module] = Seen(detached(given), reader.state_before(module, given))

        def end(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen = self._running.seen.pop(module, None)
            if seen is not None:
                read = partial(reader.read, module, seen, detached(output))
                edits = inline_edits.get((module, get_ident()))
                self._on_call(module, lambda: replace(read_core(module, read), edits=edits))

        def change(part: nn.Module, args: Any, output: Any = None) -> Any:
            """The input of the last part, or the output of a module without parts, with the open edits."""
            if module not in self._running.seen:
                return None
            seen, given, result = self._running.seen[module], output, output
            if reader.parts:
                given, result = args[0], ()
                seen.inputs[reader.parts[-1]] = given.detach()
            changed = self._change(module, partial(reader.read, module, seen, detached(result)), given)  # type: ignore[misc]
            if changed is None:
                return None
            edited, inline_edits[module, get_ident()] = changed
            return (edited, *args[1:]) if reader.parts else edited

        stack.callback(module.register_forward_pre_hook(start, with_kwargs=True).remove)
        if self._change is not None:
            stack.callback(lambda: inline_edits.pop((module, get_ident()), None))
            if reader.parts:
                stack.callback(getattr(module, reader.parts[-1]).register_forward_pre_hook(change).remove)
            else:  # before the hooks of a watch around the edit
                stack.callback(module.register_forward_hook(change, prepend=True).remove)
        stack.callback(module.register_forward_hook(end, with_kwargs=True).remove)
        for part in reader.parts:
            self._hook_part(stack, module, part)

    def _hook_part(self, stack: ExitStack, module: nn.Module, part: str) -> None:
        """Keep the input and the output of a part of a layer while the layer runs."""

        def end(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            seen = self._running.seen.get(module)
            if seen is not None and isinstance(output, Tensor):
                seen.inputs[part], seen.outputs[part] = args[0].detach(), output.detach()

        child = getattr(module, part, None)
        if isinstance(child, nn.Module):
            stack.callback(child.register_forward_hook(end).remove)


def read_core(module: nn.Module, read: Callable[[], CoreCall]) -> CoreCall:
    """The call; in another version of a model, whose tensors are not as expected, the reason why there is none."""
    try:
        return read()
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise Untranslatable(
            f"the tensors of {type(module).__name__} are not as in transformers 5.23 ({type(error).__name__}: {error})"
        ) from error


@torch.no_grad()
def detached(value: Any) -> Any:
    """The same tensors without their graphs, in tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        return type(value)(detached(part) for part in value) if type(value) in (tuple, list) else value
    return {name: detached(part) for name, part in value.items()} if type(value) is dict else value


UNKNOWN_STATE = (
    "the layer begins with a state from before the watch, so its weights on the earlier tokens are unknown; run the "
    "whole text inside the with-block"
)


#: Heads that are verified, if each of thousands of channels is a head.
HEADS = 64
#: The value of `verify` that recomputes every row.
ALL_ROWS = "all"


@dataclass(eq=False)
class RecurrentCall(KeptCall):
    """One call of a recurrent layer: the tensors of its weights, and the call that it continues.

    `name` is the path of the module, and `core` has the tensors of this call. `order` has, for each batch entry, the
    entry of the earlier call that it continues; None: the same one. `dtype` is the precision of the layer, `verified`
    the argument `verify` of the watch, and `keeps_values` is its keep="qkv".
    """

    name: str
    core: CoreCall
    dtype: torch.dtype
    verified: bool | str = True
    earlier: RecurrentCall | None = None
    order: Tensor | None = None
    keeps_values: bool = False
    check: Check = field(init=False)
    _map: AttentionMap | None = field(default=None, init=False, repr=False)
    has_state: ClassVar[bool] = True  # type: ignore[misc]

    def __post_init__(self) -> None:
        self.check = Check(self.name, note="verify=False")

    @staticmethod
    def of(
        name: str,
        core: CoreCall,
        dtype: torch.dtype,
        verified: bool | str,
        last: RecurrentCall | None,
        keeps_values: bool = False,
    ) -> RecurrentCall:
        """The call, joined to the last one if it begins with its state. A state of zeros begins a text."""
        check_numbers(core.output)
        core = replace(core, value=core.value.detach(), output=core.output.detach())
        if not core.before or not bool(core.before[0].any()):
            return RecurrentCall(name, core, dtype, verified, keeps_values=keeps_values)
        if last is None:
            raise Untranslatable(UNKNOWN_STATE)
        order = _order(core.before, last.core.after)
        return RecurrentCall(name, core, dtype, verified, last, order, keeps_values)

    @property
    def kind(self) -> str:  # type: ignore[override]
        """What the layer is, such as "delta rule"."""
        return self.core.kind

    @property
    def part(self) -> str | None:  # type: ignore[override]
        return None if "encoder" in self.name.lower() else "decoder"

    @property
    def shape(self) -> tuple[int, int, int, int]:  # type: ignore[override]
        B, H, I, _ = self.core.value.shape
        return B, H, I, sum(call.core.value.shape[2] for call, _ in self.run())

    @property
    def map(self) -> AttentionMap:
        """The weights of this call on all tokens so far. Maps of single steps are not kept: each has all tokens."""
        num_queries = self.core.value.shape[2]
        if num_queries == 1:
            return self._edited(map_of(self.form(), 1))
        if self._map is None:
            self._map = self._edited(map_of(self.form(), num_queries))
        return self._map

    def whole_map(self) -> AttentionMap:
        """The weights of all tokens so far, with a row for each, (B, H, J, J)."""
        return self._edited(map_of(self.form(), self.shape[3]))

    def _edited(self, weights: AttentionMap) -> AttentionMap:
        """The weights after the edits of each call, which act on its own rows.

        The steps of a generation have the same edit each for its own query, so they are joined to one edit of all these
        queries: `rows` has its query numbers.
        """
        rows: dict[tuple[PairEdit, Pairs], tuple[LayerEdit, list[int]]] = {}
        stop = self.shape[3]
        for call, _ in self.run():
            start = stop - call.core.value.shape[2]
            for one in () if call.core.edits is None else call.core.edits.edits:
                _, numbers = rows.setdefault((one.edit, replace(one.pairs, queries=EVERY)), (one, []))
                numbers += one.pairs.queries.among(range(start, stop))
            stop = start
        edits = [
            replace(one, pairs=replace(one.pairs, queries=Indices.of(*sorted(numbers))))
            for one, numbers in rows.values()
        ]
        return EditedMap(weights, LayerEdits(tuple(edits))) if edits else weights

    def without_map(self) -> Self:
        """A copy without its map, which a map may hold (`KeptCall.without_map`)."""
        alone = super().without_map()
        alone._map = None
        return alone

    def form(self) -> Steps | Convolution:
        """The tensors of the weights, of all tokens up to this call, for the batch entries of this call."""
        calls = list(self.run())[::-1]
        with torch.no_grad(), torch.autocast(self.core.value.device.type, enabled=False):
            return joined([call.core.form() for call, _ in calls], [order for _, order in calls])  # type: ignore[type-var]

    def read_values(self) -> Tensor:
        """The values (B, H, J, E) of all tokens up to this call. W . values is the output of the recurrence."""
        return _whole([(call.core.value, order) for call, order in list(self.run())[::-1]])

    @torch.no_grad()
    def verify(self) -> None:
        """Compare W . values with the output of the layer, for a few rows of this call and of those before it.

        The check is that of all these calls, so only the last call of a run is verified.
        """
        if not self.verified:
            return
        calls = list(self.run())[::-1]
        value = _whole([(call.core.value, order) for call, order in calls])
        heads, rows = self._sampled(value)
        weights = self.whole_map().tile(head=heads, rows=rows)
        expected = weights.to(value.dtype) @ value[:, heads]
        parts = [_output(call.core) for call, _ in calls]
        scale, offset, actual = (
            _whole([(part[n], order) for part, (_, order) in zip(parts, calls, strict=True)])[:, heads][:, :, rows]
            for n in range(3)
        )
        check = self._compared(expected * scale + offset, actual)
        for call, _ in calls:
            call.check = check

    def _sampled(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The heads and rows that are verified: all heads, and a few rows; of thousands of channels only some."""
        _, H, J, E = value.shape
        if self.verified == ALL_ROWS:
            return torch.arange(H), torch.arange(J)
        heads = spread_indices(H, HEADS if E == 1 else H)
        return heads, spread_indices(J, ROWS)

    def forget(self) -> None:
        """Drop the outputs of this run of calls, and values that are not kept: they are only needed to verify it."""
        for call, _ in self.run():
            value = call.core.value if self.keeps_values else call.core.value[..., :0].clone()
            output = call.core.output[..., :0].clone()
            call.core = replace(call.core, value=value, output=output, scale=None, offset=None)

    def _compared(self, expected: Tensor, actual: Tensor) -> Check:
        """The check of the largest difference of the output that the weights give and the actual one, (B, H, I, E).

        Its tolerance is a share, by dtype (`TOLERANCE`), of the largest actual number. An output that is not finite is
        not checked.
        """
        if not bool(actual.isfinite().all()):
            return Check(self.name, note="the output is not finite")
        error = float((expected - actual).abs().max()) if actual.numel() else 0.0
        share = TOLERANCE.get(self.dtype, TOLERANCE[torch.float32])
        tolerance = share * max(float(actual.abs().max()) if actual.numel() else 0.0, 1e-6)
        return Check(self.name, error, tolerance, error <= tolerance)

    def run(self) -> Iterator[tuple[RecurrentCall, Tensor | None]]:
        """This call and those that it continues, the last one first.

        With each come its batch entries that the entries of this call continue; None if they are the same.
        """
        call: RecurrentCall | None = self
        order: Tensor | None = None
        while call is not None:
            yield call, order
            if call.order is not None:
                order = call.order if order is None else call.order[order]
            call = call.earlier


def dtype_of(*modules: nn.Module) -> torch.dtype:
    """The dtype of the first parameter: the precision in which a layer computes."""
    return next((parameter.dtype for module in modules for parameter in module.parameters()), torch.float32)


def _order(before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> Tensor | None:
    """The batch entry of the last call that each entry continues; None if all are the same.

    `before` is the state before this call, and `after` that after the last one. States are (B, ...). `Untranslatable`
    if the state of an entry is none of the last call.
    """
    if len(before) != len(after) or any(a.shape[1:] != b.shape[1:] for a, b in zip(after, before, strict=True)):
        raise Untranslatable(UNKNOWN_STATE)
    after = tuple(a.to(b) for a, b in zip(after, before, strict=True))
    if all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(after, before, strict=True)):
        return None
    # (B, B'): whether all states of an entry are those of an entry of the last call.
    same = torch.stack([(b[:, None] == a[None]).flatten(2).all(2) for a, b in zip(after, before, strict=True)]).all(0)
    if not bool(same.any(1).all()):
        raise Untranslatable(UNKNOWN_STATE)
    return same.int().argmax(1)


def _output(core: CoreCall) -> tuple[Tensor, Tensor, Tensor]:
    """The factor, the summand and the result of an output, (B, H, n, E) each."""
    scale = torch.ones_like(core.output) if core.scale is None else core.scale.expand_as(core.output)
    offset = torch.zeros_like(core.output) if core.offset is None else core.offset.expand_as(core.output)
    return scale.detach(), offset.detach(), core.output


def _whole(parts: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """One tensor from those of consecutive calls, each with the batch entries that the last call continues."""
    return torch.cat([x if order is None else x[order] for x, order in parts], 2)
