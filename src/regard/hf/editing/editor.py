"""`edit` changes the attention of a model while a block runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention_output import AttentionOutput, attend_editors, attend_listeners
from regard.base.checks import checked
from regard.base.errors import RegardError, first_few
from regard.base.versions import hidden_eager
from regard.edits.layer_edits import LayerEdits, Pairs, layer_edits
from regard.edits.recurrent_edits import LINKS
from regard.edits.values import ActivationPatch, AttentionEdit, EditSequence, KnockOut
from regard.edits.where import Indices, Roles, Texts, Where, flat, has_texts, is_layer, with_fields
from regard.hf.attention_modules import (
    OF_TORCH,
    may_compute_weights,
    names_called,
    part_of,
)
from regard.hf.calls import OWN_SOFTMAX, RECURRENCE, AttentionCall, CallObserver, Untranslatable, measuring
from regard.hf.capture.captured_calls import is_differential
from regard.hf.capture.module_hooks import module_calls
from regard.hf.capture.module_rerun import snapshot
from regard.hf.capture.recurrent_calls import RecurrentLayers, detached, is_recurrent
from regard.hf.capture.softmax_trace import Trace
from regard.hf.capture.transformers_interface import backend_calls
from regard.hf.capture.value_probe import GivenCall, has_values
from regard.hf.edited_calls import allows_one, editors
from regard.hf.editing.attend_edits import edited_attend
from regard.hf.editing.layers import EditableLayers
from regard.hf.editing.patches import OF_KEYS, CallPatch, check_length, patches_of, with_patches
from regard.hf.editing.places import Place, first_numbers, place_of
from regard.hf.editing.recurrent_layers import LastCalls, changed_output
from regard.hf.heads.model_heads import Heads, ModelHeads
from regard.hf.recurrent.core_calls import READERS, CoreCall, rwkv
from regard.hf.recurrent.core_functions import core_functions
from regard.hf.recurrent.inline_layers import inline_reader
from regard.stats.numbering import layer_number


@dataclass(eq=False)
class EditedRun:
    """What an edit changed: the number of edited calls of each attention module, by module path.

    `left_out` has the layers that ran and that the edit selects, but cannot change, with their class: recurrent layers
    with several recurrences (Zamba), and modules whose weights are no softmax that is known.

    >>> import regard as rg
    >>> rg.hf.EditedRun(rg.KnockOut(rg.Where(keys=0)), {"h.0.attn": 2})
    EditedRun(KnockOut(Where(keys=0)): h.0.attn 2 calls)
    """

    edit: AttentionEdit
    calls: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        changed = ", ".join(f"{name} {n} call{'s' * (n > 1)}" for name, n in self.calls.items())
        left_out = f"; left out: {first_few(list(self.left_out), 5)}" if self.left_out else ""
        return f"EditedRun({self.edit!r}: {changed or 'nothing yet'}{left_out})"


@checked
def edit(
    model: nn.Module,
    edits: AttentionEdit,
    tokens: Texts | None = None,
    targets: Texts | None = None,
    roles: Any = None,
) -> AbstractContextManager[EditedRun]:
    """Change the attention of a model while the block runs: knock out, scale, steer, replace or patch weights.

    `edits` is a `KnockOut`, `ScaleWeights`, `AddToScores`, `ReplaceWeights` or `ActivationPatch`, or several of them
    joined by `&`. `tokens` are the tokens of the text, if the edit names words; `targets` those of the queries, if they
    differ. `roles` is a table of `regard.roles`, or a mapping from names to heads (layer, head), if the edit names
    roles.

    Attention that goes through transformers' attention interface (sdpa, eager, `regard` and flash backends) is edited,
    and so is the softmax of a module that computes it itself (BLOOM, DeBERTa, MPT), where an `ActivationPatch` reaches
    the outputs alone. Weights that a watch measures (Longformer, block-sparse BigBird) are edited after several runs,
    without gradients. `KnockOut` and `ScaleWeights` also act on recurrent layers that transformers computes by a
    function (Gated DeltaNet, Kimi Delta, Mamba-1 and -2, RWKV-4), on recurrent attention of Regard, and without
    gradients on the layers of LFM2, MiniMax, RecurrentGemma and xLSTM: the read of one query loses what one token
    wrote, and the state keeps it. This is exact for given gates, decays, erasures and normalizers.
    Queries and keys are counted in the whole sequence, also in `generate()`, with caches, beams and windows. The
    backend computes the call as it is; the selected rows of the selected heads are computed again, in linear memory.
    So what no edit selects keeps its bits in that layer. A row that loses all its keys has output 0.

    The model is the same before and after the block, also after an exception. Blocks may be nested: the edits of the
    inner block follow those of the outer one. With gradient checkpointing call `backward` inside the block. An edit
    belongs to its thread, as `watch` does, and a watch inside or around the block returns what the model ran, patched
    outputs too. A block in which the model ran, and whose edit selected nothing, ends with a `RegardError`. So does one
    whose edit names no layers, if a layer that it selects cannot be edited (Zamba's). Name the others then:
    what a slice or a pattern of layers leaves out is in `left_out` of the `EditedRun` that the block yields.

    >>> import torch, transformers, regard as rg
    >>> config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)
    >>> model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.tensor([[3, 1, 4, 1, 5]])
    >>> with rg.edit(model, rg.KnockOut(rg.Where.parse("L1.H0: #4 -> #2"))), rg.watch(model) as seen:
    ...     _ = model(ids)
    >>> seen[1][0, :, 4].gt(0).int().tolist()
    [[1, 1, 0, 1, 1], [1, 1, 1, 1, 1]]
    """
    _Editor(model, edits, tokens, targets, roles)  # its errors are raised here
    return _Block(lambda: _Editor(model, edits, tokens, targets, roles))


@contextmanager
def edit_what_is_there(model: nn.Module, edits: Sequence[Any], layers: EditableLayers) -> Iterator[EditedRun]:
    """`edit` for edits of which some may select nothing, because the mask forbids their pairs.

    `layers` are those of the model.
    """
    with _editing(_Editor(model, EditSequence(tuple(edits)), None, None, None, layers), may_be_empty=True) as run:
        yield run


@contextmanager
def _editing(editor: _Editor, may_be_empty: bool = False) -> Iterator[EditedRun]:
    """One block of edits; if it ends without an error, `conclude` refuses an edit that changed nothing."""
    with editor.open():
        yield editor.run
    editor.conclude(may_be_empty)


class _Block(AbstractContextManager[EditedRun]):
    """A context manager that can be entered several times, one block inside another too."""

    def __init__(self, new_editor: Callable[[], _Editor]) -> None:
        self._new_editor = new_editor
        self._open: list[AbstractContextManager[EditedRun]] = []

    def __enter__(self) -> EditedRun:
        block = _editing(self._new_editor())
        run = block.__enter__()
        self._open.append(block)
        return run

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.pop().__exit__(*error)


@dataclass(eq=False)
class _Frame:
    """A module that runs: what it was given, the number of its attention calls, and its softmaxes.

    `given` are its positional and named arguments, if it may compute a softmax itself. `trace` follows its softmaxes,
    and `softmaxes` are the numbers of those that edits changed. `call` is what `given` was at the start, to run it
    again; None if its weights cannot be measured.
    """

    module: nn.Module
    given: tuple[Any, Any] | None = None
    num_calls: int = 0
    trace: Trace = field(default_factory=Trace)
    softmaxes: list[int] = field(default_factory=list)
    call: GivenCall | None = None


class _State(threading.local):
    """What runs in one thread.

    `places` has the place of the next call of each module, `outputs` the patches of the output of the call that runs,
    and `frames` the modules that run. `sizes` are the first two sizes of the inputs of the model: one of them
    is the batch. `projected` has the patches of the next call of an output projection, and `recurrent` the last call of
    each recurrent layer, which the next one may continue.
    """

    def __init__(self) -> None:
        self.places: dict[nn.Module, Place | None] = {}
        self.outputs: list[CallPatch] = []
        self.frames: list[_Frame] = []
        self.sizes: set[int] = set()
        self.recurrent: LastCalls = {}
        self.projected: dict[nn.Module, list[CallPatch]] = {}


def _shown(name: str) -> str:
    """The path of a module in an error; a model that is itself the module has an empty one."""
    return name or "the model"


def _names_words(edits: AttentionEdit) -> bool:
    """Whether queries or keys of an edit are words."""
    chosen = (flat(choice) for part in edits.parts for choice in (part.where.queries, part.where.keys))  # type: ignore
    return any(isinstance(one, str) for choice in chosen for one in choice)


class _NoEditor:
    """Stands for the editor in a copy of a model that is made inside an edit: the copy is not edited."""

    def _keep_place(self, *_: Any) -> None:
        """Do nothing, as no edit runs."""

    _keep_sizes = _patch_projected = _keep_place


class _Editor(CallObserver):
    """Changes the calls of one model. It observes which attention modules run, to name those that it cannot edit.

    `edits` are the single edits with words and roles resolved to numbers; elsewhere an edit is named by its place in
    this list. `selected` are the modules of whose heads an edit selects some, and `own_softmax` those of them that may
    compute a softmax themselves, and `inside` the recurrent layers among them that compute inside their module.
    `observed` are all attention modules and recurrent layers, and `editable` those that some edit could change, each
    with its path.

    In the methods, `part` or `edit` is a single edit and `number` its place in `edits`, `heads` are those that it
    selects in a module, `name` is the path of the module of a call, and `place` has the numbers of the first query and
    the first key of the call in the whole sequence.
    """

    def __init__(
        self,
        model: nn.Module,
        edits: AttentionEdit,
        tokens: Texts | None,
        targets: Texts | None,
        roles: Roles | None,
        layers: EditableLayers | None = None,
    ) -> None:
        self.model, self.run = model, EditedRun(edits)
        texts = [] if tokens is None or not _names_words(edits) else tokens if has_texts(tokens) else [tokens]
        self.num_tokens = [len(text) for text in texts]  # of each text in which a word has to be found
        found = ((part, part.where.found(tokens, targets, roles)) for part in edits.parts)  # type: ignore[attr-defined]
        self.edits: list[Any] = [with_fields(part, where=where) for part, where in found]
        self.layers = layers or EditableLayers.of(model)
        # Module path -> (number of the edit, the edit, the heads), for each edit that selects heads of the module.
        self.selecting = {path: self._selecting(path) for path in self.layers.editable.values()}
        self.selected = {module for module, path in self.layers.editable.items() if self.selecting[path]}
        self.own_softmax = {m for m in self.selected if may_compute_weights(m) and not is_recurrent(m)}
        self.projected = self._output_projections()
        self.state = _State()
        self.inside = {module for module in self.selected if inline_reader(module) is not None}
        self.inline = RecurrentLayers(lambda: None, lambda: self in editors, self._inline_ended, self._inline_changed)
        # Of each edit, by its number: the calls that it changed, and why it changed none.
        self.num_changed = [0] * len(self.edits)
        self.reasons: dict[int, str] = {}
        # Path -> class of the modules that ran without a call that can be edited.
        self.unedited: dict[str, str] = {}
        # The same for the edits, by their number, that recurrent layers do not have.
        self.inapplicable: dict[int, dict[str, str]] = {}
        # (edit, layer number) -> the first path with it, and (edit, path) -> the tokens that a patched module read.
        self.paths: dict[tuple[int, int | None], str] = {}
        self.lengths: dict[tuple[int, str], int] = {}
        self.was_run = False
        for n, part in enumerate(self.edits):
            self._check_layers(n, part)

    def __reduce__(self) -> tuple[type[_NoEditor], tuple[()]]:
        """Hooks of an edited model are copied and pickled with it."""
        return _NoEditor, ()

    def _selecting(self, path: str) -> list[tuple[int, Any, Indices]]:
        """The edits that select heads of the module at a path: number, edit, heads."""
        chosen = ((n, part, part.where.heads_in(path)) for n, part in enumerate(self.edits))
        return [(n, part, heads) for n, part, heads in chosen if heads is not None]

    def _output_projections(self) -> dict[nn.Module, Heads]:
        """The heads of selected modules that may compute their softmax themselves, if an edit patches outputs.

        Their outputs are patched where their output projection reads them.
        """
        if not self.own_softmax or not any(isinstance(part, ActivationPatch) for part in self.edits):
            return {}
        try:
            layouts = ModelHeads.of(self.model, "edit").by_name.values()
        except RegardError:  # none is known
            return {}
        return {layout.module: layout for layout in layouts if layout.module in self.own_softmax}

    def _check_layers(self, number: int, part: Any) -> None:
        """Refuse layers that the model does not have, and words that were not found."""
        for name in ("queries", "keys"):
            part.where.indices(name)
        paths = list(self.layers.editable.values())
        if not paths:
            raise RegardError(
                f"edit: {type(self.model).__name__} has no attention modules. Give the model that has them."
            )
        unknown = [one for one in part.where.names_layers if not any(is_layer(one, path) for path in paths)]
        if not unknown and any(number == n for chosen in self.selecting.values() for n, _, _ in chosen):
            return
        layer_numbers = sorted({n for n in map(layer_number, paths) if n is not None})
        numbers = f"It has layers {first_few(layer_numbers, 40)}, " if layer_numbers else "It has "
        which = f"names layer {unknown[0]!r}, which is no attention layer" if unknown else "selects no layer"
        raise RegardError(
            f"edit: {part!r} {which} of {type(self.model).__name__}. {numbers}in the modules {first_few(paths, 3)}."
        )

    @contextmanager
    def open(self) -> Iterator[None]:
        """A block in which the calls of the model are changed; without edits it does nothing."""
        if not self.edits:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(backend_calls.replaced())
            stack.enter_context(module_calls.observed_by(self))
            stack.enter_context(editors.adding(self))
            stack.enter_context(attend_editors.adding(self._attend))
            recurrent = self.selected & self.layers.recurrent.keys()
            stack.enter_context(core_functions.changed_by(self._core_called, recurrent))
            stack.enter_context(self.inline.observing(self.inside))
            if any(part.where.names_entries for part in self.edits):  # type: ignore[attr-defined]
                stack.callback(self.model.register_forward_pre_hook(self._keep_sizes, with_kwargs=True).remove)
            for layout in self.projected.values():
                hook = partial(self._patch_projected, layout)
                stack.callback(layout.output.register_forward_pre_hook(hook).remove)
            for module in self.selected:  # a hook also makes layers of torch leave their fused path
                stack.callback(module.register_forward_pre_hook(self._keep_place, with_kwargs=True).remove)
            yield

    # Events of the model

    def _keep_place(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook before a module: keep where its next call stands in the sequence, and its arguments if it may run
        again.
        """
        if self in editors:  # the hook belongs to the module, which other threads may run
            is_cross = part_of(self.layers.names[module], module) == "cross"
            self.state.places[module] = place_of(module, args, kwargs, is_cross)
            if self.state.frames and self.state.frames[-1].module is module and module in self.own_softmax:
                self.state.frames[-1].given = args, kwargs
                if has_values(module):
                    given = GivenCall(module, *snapshot(args, kwargs), torch.get_rng_state())
                    self.state.frames[-1].call = given

    def _keep_sizes(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook before the model: keep the sizes of its inputs, one of which is its batch size."""
        if self in editors:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            self.state.sizes = {size for tensor in tensors for size in tensor.shape[:2]}

    def observes_functions(self, module: nn.Module) -> bool:
        """Whether a module may call a function of torch, or compute a softmax, and an edit selects it."""
        of_torch = isinstance(module, nn.MultiheadAttention)
        calls = module in self.selected and not of_torch and bool(OF_TORCH & names_called(type(module)))
        return calls or module in self.own_softmax

    def module_started(self, module: nn.Module) -> None:
        """Open a frame for an attention module or recurrent layer that starts."""
        self.was_run |= module in self.layers.names
        if module in self.layers.observed:
            self.state.frames.append(_Frame(module))

    def module_ended(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Close the frame of a module, and those inside of it that an error ended; note if no call of it was edited.

        After an error `output` is None, and nothing is noted.
        """
        if not any(module is frame.module for frame in self.state.frames):
            return
        while (frame := self.state.frames.pop()).module is not module:
            pass
        if output is not None and not frame.num_calls and module not in self.inside:  # they are edited later
            self.unedited[self.layers.observed[module]] = type(module).__name__
        if output is not None and frame.softmaxes:
            self._check_softmax(frame)

    def function_called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Follow the softmaxes of a module to the product with its values."""
        for frame in self.state.frames[-1:]:
            if frame.given is not None and not (backend_calls.inside or attend_listeners.busy):
                frame.trace.follow(function, args, kwargs, output)

    def softmax_edited(self, change: Callable[..., Tensor]) -> None:
        """Note that the softmax that is followed next was changed."""
        for frame in self.state.frames[-1:]:
            if frame.given is not None:
                frame.softmaxes.append(len(frame.trace.softmaxes))

    def _core_called(self, name: str, given: dict[str, Any], result: Any) -> tuple[Any, LayerEdits | None] | None:
        """The result of a recurrence as the open edits change it, and these edits; None if another model runs.

        `name` is that of the core function, `given` its arguments by name (`hf/recurrent/core_functions.py`).
        """
        module = self.state.frames[-1].module if self.state.frames else None
        if module is None or result is None:
            return None
        if not any(editor.selects(module) for editor in editors):
            return result, None
        reader = READERS[name]
        read, read_graph = partial(reader, detached(given), detached(result)), partial(reader, given, result)
        return changed_output(self.state.recurrent, module, reader, read, result, read_graph)

    def _inline_changed(self, module: nn.Module, read: Callable[[], CoreCall], result: Any) -> Any:
        """The result of a recurrence inside a module as the open edits change it, and these edits.

        The innermost block knows the edits of all; another one returns None.
        """
        if [editor for editor in editors if editor.selects(module)][-1] is not self:
            return None
        return changed_output(self.state.recurrent, module, inline_reader(module), read, result)

    def _inline_ended(self, module: nn.Module, read: Callable[[], CoreCall]) -> None:
        """Keep the state after a call of a module, which the next one may continue."""
        call = self.state.recurrent.pop(module, None)
        if call is not None and (after := read().after):
            call.core = replace(call.core, after=after)
            self.state.recurrent[module] = call

    def _check_softmax(self, frame: _Frame) -> None:
        """Refuse a softmax that was changed, and whose weights are not those that the module multiplies by."""
        kind, name = type(frame.module).__name__, self.layers.names[frame.module]
        try:
            number, reason = frame.trace.weighted_sum(kind).weights.number, f"{kind} multiplies by another softmax"
        except Untranslatable as error:
            number, reason = None, str(error)
        if frame.softmaxes != [number]:
            raise RegardError(
                f"edit: {_shown(name)} cannot be edited at its softmax: {reason}. Name other layers: Where(layers=...)."
            )

    def softmax_inputs(self, module: nn.Module) -> tuple[Any, Any] | None:
        """The arguments of a selected module that runs, if it may compute a softmax itself."""
        frames = self.state.frames
        return frames[-1].given if frames and frames[-1].module is module else None

    def module_given(self, module: nn.Module) -> GivenCall | None:
        """What a selected module was given, if no attention in it was edited and its weights may be measured."""
        frames = self.state.frames
        is_unedited = frames and frames[-1].module is module and not frames[-1].num_calls
        return frames[-1].call if is_unedited else None

    # Changes of a call

    def selects(self, module: nn.Module) -> bool:
        """Whether an edit selects some of the heads of a module."""
        return module in self.selected

    def edited(self, call: AttentionCall) -> AttentionCall:
        """The call with patched queries, keys and values, and with the edits of its weights.

        A patch makes a new call, also where it changes the output only, so that the call counts as edited. `selecting`
        has each edit that selects the module: its number, the edit and the heads.
        """
        name = self.layers.names.get(call.module)
        self.state.outputs = []
        if name is None:
            return call
        selecting = self.selecting[name] if name in self.selecting else self._selecting(name)
        if call.backend == RECURRENCE:
            selecting = [one for one in selecting if self._reaches_links(one[0], call, name)]
            if not selecting:
                return call
        for frame in self.state.frames:
            frame.num_calls += 1
        if not selecting:
            return call
        place = self._checked_place(call, name, [part for _, part, _ in selecting])
        with_patch = self._with_projected_patch if call.backend == OWN_SOFTMAX else self._with_patch
        edits, original = [], call
        for n, part, heads in selecting:
            if heads.is_finite and heads.last >= (H := call.query.shape[1]):
                last = f"{_shown(name)} has heads 0 to {H - 1}"
                raise RegardError(f"edit: {part!r} selects head {heads.last}, and {last}.")
            self._check_number(n, part, name)
            if isinstance(part, ActivationPatch):
                call = with_patch(n, part, heads, call, name, place)
            elif pairs := self._pairs_of(n, part, heads, call, place):
                edits += layer_edits(part, pairs, name, len(call.query))
        self.run.calls[name] = self.run.calls.get(name, 0) + (bool(edits) or call is not original)
        return call.with_edits(LayerEdits(tuple(edits)), place) if edits else call

    def _checked_place(self, call: AttentionCall, name: str, parts: list[Any]) -> tuple[int, int]:
        """The numbers of the first query and key of a call; a call that these edits cannot change is refused."""
        if is_differential(call.module):
            raise RegardError(f"edit: {_shown(name)} subtracts two softmaxes, and such heads cannot be edited.")
        is_cross = part_of(name, call.module) == "cross"
        place = call.place or first_numbers(call, self.state.places.get(call.module), is_cross)
        self._check_tokens(call, place[0])
        if any(part.where.queries is not None for part in parts):
            _check_counted(call, name)
        if any(part.where.names_entries for part in parts):
            self._check_entries(call, name)
        return place

    def _pairs_of(
        self, number: int, part: Any, heads: Indices, call: AttentionCall, place: tuple[int, int]
    ) -> list[Pairs]:
        """The pairs of an edit in these heads that a call has, in sets for batch entries with the same tokens.

        If the call has no pair of a set, the reason is kept for the error of an edit that selects nothing.
        """
        pairs = []
        for own in Pairs.of(part.where, heads, len(call.query)):
            reason = self._why_no_pair(number, own, call, *place)
            if reason is None:
                pairs.append(own)
                self.num_changed[number] += 1
            else:
                self.reasons[number] = reason
        return pairs

    def _reaches_links(self, number: int, call: AttentionCall, name: str) -> bool:
        """Whether an edit acts on the weights of a recurrent layer; otherwise the layer is noted as not edited.

        Only `KnockOut` and `ScaleWeights` (`LINKS`) do: there are no scores. RWKV-4 computes weighted means, and its
        other weights would have to grow if one is knocked out and the rest renormalized. The number of a layer that
        also has attention means the attention (Falcon-H1).
        """
        edit: Any = self.edits[number]
        layer, is_link = layer_number(name), isinstance(edit, LINKS)
        is_beside = layer in edit.where.names_layers and any(
            layer_number(path) == layer for path in self.layers.attending.values() if path != name
        )
        is_mean = call.function is rwkv and isinstance(edit, KnockOut) and edit.renormalize
        if is_link and not is_beside and not is_mean:
            return True
        self.inapplicable.setdefault(number, {})[name] = type(call.module).__name__
        return False

    def _with_patch(
        self, number: int, edit: ActivationPatch, heads: Indices, call: AttentionCall, name: str, place: tuple[int, int]
    ) -> AttentionCall:
        """The call with patched queries, keys or values; a patch of the output is kept for `patched`.

        `number` is the place of the edit among all, and `place` has the numbers of the first query and key in the whole
        sequence. A patched call has no log-sum-exp: the kernel returns that of the patched tensors.
        """
        start = place[edit.part in OF_KEYS]
        of_tokens = call.key if edit.part in OF_KEYS else call.query
        self.lengths[number, name] = max(self.lengths.get((number, name), 0), start + of_tokens.shape[2])
        patches = patches_of(edit, heads, call, name, start)
        if not patches:
            self.reasons[number] = f"the run had tokens {start} to {start + of_tokens.shape[2] - 1}"
            return call
        self.num_changed[number] += 1
        if edit.part == "output":
            self.state.outputs += patches
            return replace(call)
        changed = getattr(call, edit.part)
        return replace(call, logsumexp=None, **{edit.part: with_patches(changed, patches)})  # type: ignore[arg-type]

    def _with_projected_patch(
        self, number: int, edit: ActivationPatch, heads: Indices, call: AttentionCall, name: str, place: tuple[int, int]
    ) -> AttentionCall:
        """The call of a module that computes its softmax itself; its output projection will read the patched heads.

        The values of such a call have no channels, so they get the width of a head, which a patch must fit.
        """
        layout = self.projected.get(call.module)
        if layout is None or edit.part != "output":
            raise RegardError(
                f"edit: {edit!r} cannot patch {_shown(name)}: {type(call.module).__name__} computes its softmax "
                "itself, so its queries, keys and values are not accessible, and its outputs only before a known "
                "output projection. "
                "part='output' patches those, and edits of scores and of weights reach it."
            )
        wide = replace(call, value=call.value.new_empty(*call.value.shape[:3], layout.head_dim))
        patched = self._with_patch(number, edit, heads, wide, name, place)
        if patched is wide:
            return call
        self.state.projected.setdefault(layout.output, []).extend(self.state.outputs)
        self.state.outputs = []
        return replace(call)  # another object, which counts as an edited call

    def _patch_projected(self, layout: Heads, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The hook before an output projection: its arguments with patched heads in its input (B, I, H E).

        None leaves them as they are: no patch waits, another thread runs the module, or it runs again to be measured.
        """
        patches = self.state.projected.pop(layout.output, []) if self in editors else []
        if not patches or measuring:
            return None
        outputs = args[0].unflatten(-1, (layout.num_heads, layout.head_dim)).transpose(1, 2)
        outputs = with_patches(outputs, patches)
        for observer in module_calls.observers:
            observer.output_patched(layout.module, outputs)
        return outputs.transpose(1, 2).flatten(2), *args[1:]

    def _attend(self, *inputs: Any, **options: Any) -> AttentionOutput | None:
        """A call of `regard.attend` with all open edits; None if they change nothing."""
        if not self.state.frames or backend_calls.inside:
            return None
        return edited_attend(self.state.frames[-1].module, *inputs, **options)

    def patched(self, call: AttentionCall, output: Tensor) -> Tensor:
        """The output (B, I, H, E) of the call with patched heads."""
        patches, self.state.outputs = self.state.outputs, []
        return with_patches(output.transpose(1, 2), patches).transpose(1, 2).contiguous() if patches else output

    def _check_number(self, number: int, part: Any, name: str) -> None:
        """Refuse a number of a layer that two modules have: self-attention and cross-attention, encoder and decoder.

        `part` is one of the edits and `number` its place among them; `name` is the path of the module that runs.
        """
        layer = layer_number(name)
        if layer not in part.where.names_layers:
            return
        first_path = self.paths.setdefault((number, layer), name)
        if first_path != name:
            raise RegardError(
                f"edit: {part!r} names layer {layer}, which is {first_path} and {name}. Give the module path: "
                f"Where(layers={first_path!r}, ...)."
            )

    def _check_tokens(self, call: AttentionCall, first_query: int) -> None:
        """Refuse tokens of another text: a whole text without padding and cache has as many tokens as were given.

        `first_query` is the number of the first query: with a cache it is not 0.
        """
        (B, _, I, _), J = call.query.shape, call.key.shape[2]
        is_pair = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        if len(self.num_tokens) != B or first_query or I != J or min(self.num_tokens) >= J or is_pair:
            return
        raise RegardError(
            f"edit: {min(self.num_tokens)} tokens were given, and the model reads {J}, so a word would name another "
            "place. Give all tokens, special ones too: tokenizer.convert_ids_to_tokens(inputs['input_ids'][0])."
        )

    def _check_entries(self, call: AttentionCall, name: str) -> None:
        """Refuse batch entries of a call whose batch is not that of the model, such as windows of an image."""
        if (B := len(call.query)) > 1 and self.state.sizes and B not in self.state.sizes:
            raise RegardError(
                f"edit: {_shown(name)} was called with {B} batch entries, which are not those of the model, such as "
                "windows of an image. Run each input alone, and leave out batch and tokens of each entry."
            )

    def _why_no_pair(
        self, number: int, pairs: Pairs, call: AttentionCall, first_query: int, first_key: int
    ) -> str | None:
        """Why the call has none of the pairs of an edit, in words; None if it has one.

        The mask is asked only while the edit has changed no call: after that no reason is needed at the end.
        """
        I, J = call.query.shape[2], call.key.shape[2]
        if not pairs.queries.among(range(first_query, first_query + I)):
            return f"the run had queries {first_query} to {first_query + I - 1}"
        if not pairs.keys.among(range(first_key, first_key + J)):
            return f"the run had keys {first_key} to {first_key + J - 1}"
        if not self.num_changed[number] and not allows_one(call, pairs, first_query, first_key):
            return "the mask of the model forbids all its pairs"
        return None

    def conclude(self, may_be_empty: bool) -> None:
        """Refuse an edit that selected nothing, and layers that cannot be edited.

        With `may_be_empty` an edit may select nothing, if the reason is known (`reasons`).
        """
        if not self.was_run:
            return
        if self.state.projected:
            raise RegardError(
                "edit: an ActivationPatch was not applied, because the output projection of its module did not run "
                "after the softmax. Name other layers: Where(layers=...)."
            )
        for (number, path), length in self.lengths.items():
            check_length(self.edits[number], path, length)
        for number, part in enumerate(self.edits):
            where: Where = part.where
            unedited = {name: kind for name, kind in self.unedited.items() if where.heads_in(name) is not None}
            unedited |= self.inapplicable.get(number, {})
            named = [path for path in unedited if any(self._is_named(path, one) for one in where.names_layers)]
            names_none = where.layers is None and not where.names_layers
            if named or (unedited and (names_none or not self.num_changed[number])):
                raise RegardError(self._not_edited(part, unedited, named or list(unedited)))
            self.run.left_out |= unedited
            if not self.num_changed[number] and not (may_be_empty and number in self.reasons):
                reason = self.reasons.get(number, "no attention that it selects was called")
                raise RegardError(f"edit: {part!r} selected nothing: {reason}.")

    def _is_named(self, path: str, layer: int | str) -> bool:
        """Whether a name means this layer; not if it is recurrent, and attention beside it was edited (Falcon-H1)."""
        beside = [name for name, count in self.run.calls.items() if count and is_layer(layer, name)]
        is_attention = path in self.layers.attending.values()
        return is_layer(layer, path) and (is_attention or not beside)

    def _not_edited(self, part: Any, unedited: dict[str, str], paths: list[str]) -> str:
        """The error for an edit that could not change the modules at `paths`; `unedited` has the class by path."""
        kinds = ", ".join(dict.fromkeys(unedited[path] for path in paths))
        edited = [path for path, count in self.run.calls.items() if count and part.where.heads_in(path) is not None]
        edited = [path for path in edited if path not in unedited]
        remedy = f" Name the layers that it can change: Where(layers={edited!r}, ...)." if edited else ""
        return (
            f"edit: {part!r} could not be applied to {', '.join(paths[:5])}: {kinds} {self._why_not(part, paths)} The "
            f"model ran without this edit there.{hidden_eager(self.model)}{remedy}"
        )

    def _why_not(self, part: Any, paths: list[str]) -> str:
        """Why an edit cannot change these modules, as the end of a sentence that begins with their classes."""
        if not set(paths) <= set(self.layers.recurrent.values()):
            return (
                "computes several recurrences in its module, or computes its weights itself, not by one softmax over "
                "the keys. Edits reach the attention interface of transformers, F.scaled_dot_product_attention, "
                "nn.MultiheadAttention, regard.attend, regard.nn, layers of transformers with one recurrence that is "
                "known, and a module that multiplies its values by its own softmax."
            )
        if isinstance(part, KnockOut):
            return (
                "computes a recurrence that is a weighted mean, and a removed weight is not shared among the others. "
                "Use KnockOut(..., renormalize=False) or ScaleWeights."
            )
        return "is recurrent: it has no scores and no softmax. KnockOut and ScaleWeights change its weights."


def _check_counted(call: AttentionCall, name: str) -> None:
    """Refuse numbers of queries if it is not known whether the first query of a module of torch is number 0."""
    module, I, J = call.module, call.query.shape[2], call.key.shape[2]
    is_known = part_of(name, module) == "cross" or hasattr(module, "is_cross_attention")
    if call.function is F.multi_head_attention_forward and I < J and not is_known:
        raise RegardError(
            f"edit: {_shown(name)} was called with {I} queries and {J} keys. It is not known whether these queries are "
            "the last tokens of the keys, or another text. Say so before: module.is_cross_attention = True if queries "
            "count from 0, False if the last query is the last key."
        )
