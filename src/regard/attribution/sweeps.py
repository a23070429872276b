"""`sweep` measures one edit after another on a data set, many of them in one run of the model."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.checks import Count, HoldsMaps, Size, checked
from regard.base.errors import RegardError, first_few, first_line, nearest
from regard.base.html_table import html_table
from regard.base.shapes import as_tensor, unusual_kind
from regard.base.whole_files import write_whole
from regard.drawing.cell_colors import CellColors
from regard.drawing.panels import Panels
from regard.drawing.picture import draw_panels
from regard.edits.values import ActivationPatch, AttentionEdit, EditSequence, KnockOut, ReplaceWeights
from regard.edits.where import OF_TOKENS, Texts, Where, is_by_entry, with_fields
from regard.hf.attention_modules import attention_modules
from regard.hf.capture import WatchedAttention, watch
from regard.hf.capture.head_parts import blocks_of
from regard.hf.editing.editor import edit_what_is_there
from regard.hf.editing.layers import EditableLayers
from regard.maps import AttentionMap
from regard.stats.numbering import layer_number

FORMAT, VERSION = "regard sweep", 1
#: What the colors of a heatmap show.
QUANTITY = "change of the measure"
#: Ablations by name.
ABLATIONS = ("zero", "mean", "resample")
#: The axes of the table unless `over` names others, and all that it may name, as in `Where`.
ALL_HEADS = ("layers", "heads")
AXES = (*ALL_HEADS, *OF_TOKENS)
#: Seconds between two writes of the file.
PAUSE = 2.0
#: What a run costs beside its entries, in entries of a batch.
ENTRIES_OF_RUN = 3.0
#: The largest error of a run whose layers before the edit are not computed again, relative to its size.
TOLERANCE = 1e-3

#: From the model's output and the number of the example of each entry to a number for each entry, (entries,).
Measure = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class SweepTable:
    """What a model gives under each edit of a sweep.

    `axes` has the labels of each axis: {"layers": [...], "heads": [...]}. `values` (axes..., examples) is the measure
    of each example under each edit, NaN where the model has no such head, and `baseline` (examples,) without an edit.

    >>> import torch, regard as rg
    >>> values, baseline = torch.tensor([[1.0, 2.0], [4.0, 3.0]]), torch.tensor([1.0, 2.0])
    >>> table = rg.types.SweepTable({"heads": ["0", "1"]}, values, baseline)
    >>> table.effects, table.top(1)
    (tensor([0., 2.]), [({'heads': '1'}, 2.0)])
    """

    axes: dict[str, list[str]]
    values: Tensor
    baseline: Tensor

    @property
    def effects(self) -> Tensor:
        """The mean change of the measure by each edit, (axes...)."""
        return (self.values - self.baseline).mean(-1)

    def top(self, count: Count = 10) -> list[tuple[dict[str, str], float]]:
        """The edits with the largest |effect|: the label of each by axis, and the effect. Those without one, NaN, are
        left out.
        """
        effects = self.effects.flatten()
        order = effects.nan_to_num(0.0).abs().argsort(descending=True, stable=True)[:count]
        labels = [dict(zip(self.axes, names, strict=True)) for names in itertools.product(*self.axes.values())]
        return [(labels[n], float(effects[n])) for n in order.tolist() if not effects[n].isnan()]

    def heatmap(self, *, title: str = "", vmax: float | None = None, axes: Any = None) -> Any:
        """The effects as a figure of matplotlib: the first axis down, the second across, a panel for each other label.

        Red raises the measure, blue lowers it. Without `vmax` the largest effect has the darkest color.
        """
        axis = {"": [""]} if len(self.axes) == 1 else {}
        (down, rows), (across, columns), *others = (self.axes | axis).items()
        cells = self.effects.float().reshape(len(rows), len(columns), -1).movedim(2, 0)
        panels = [", ".join(one) for one in itertools.product(*(labels for _, labels in others))]
        shape, sides = (len(rows), len(columns)), (down, across)
        shown = Panels(cells, panels, shape, rows, columns, sides, True, QUANTITY)
        return draw_panels(shown, title, CellColors.of(shown, "weight", None, vmax), axes)

    def _repr_html_(self) -> str:
        rows = [(*labels.values(), effect) for labels, effect in self.top(20)]
        note = f"Mean change of the measure over {len(self.baseline)} examples; {self.effects.numel()} edits."
        return html_table("The edits with the largest effects", (*self.axes, "effect"), rows, note)

    def __repr__(self) -> str:
        sizes = " x ".join(f"{len(labels)} {name}" for name, labels in self.axes.items())
        lines = [f"  {effect:+.3g}: {', '.join(map(' '.join, one.items()))}" for one, effect in self.top(5)]
        return "\n".join([f"SweepTable({sizes}, {len(self.baseline)} examples)", *lines])


@checked
@torch.no_grad()
def sweep(
    model: nn.Module,
    edits: Callable[[Where], AttentionEdit] | Mapping[Any, AttentionEdit] | Sequence[AttentionEdit] | str,
    inputs: Mapping[str, Any] | Tensor,
    measure: Measure,
    *,
    over: Sequence[str] | Mapping[str, Any] = ALL_HEADS,
    into: Mapping[str, Where] | None = None,
    tokens: Texts | None = None,
    batch_size: Size = 32,
    file: str | PathLike[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> SweepTable:
    """Measure a model under each of many edits, on each example of a batch; several edits share one run.

    `edits` is a function that makes the edit of a selection, such as `rg.KnockOut`, or
    `lambda where: ActivationPatch(where, source=seen)`; or the name of an ablation of heads: "zero", "mean" (the output
    of the head at this position, averaged over the examples) or "resample" (that of the next example); or a list or a
    mapping of edits. `over` are the axes of the table: "layers", "heads", "queries" and "keys", each with all its
    numbers, or a mapping from an axis to its values, or to a mapping from labels to values. A value is a part of a
    `Where`: tokens may differ between examples (a list for each, a tensor, or a word with `tokens`).

    `inputs` are the tensors of the model, with the examples on their first axis. `measure(output, examples)` returns a
    number for each entry of the run, whose example has this index: `lambda out, n: out.logits[:, -1, 5]`.

    `into` makes it path patching (Wang et al. 2022, arXiv:2211.00593): `into={"query": rg.Where(heads="L9.H6")}`. A
    first run has the patch of the sender, and the outputs of all other heads held as they are without it; MLPs are
    computed. What the query, key or value of the receivers is in this run is patched into the run that is measured.

    A run has at most `batch_size` entries, or one example. Layers before the first edited one run once, if the blocks
    of the model allow it. With a `file` (JSON) a sweep that was stopped continues where it was; a file of another sweep
    is refused. `progress(done, count)` is called after each run; by default a terminal shows a line.

    >>> import torch, transformers, regard as rg
    >>> config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)
    >>> model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.tensor([[3, 1, 4], [1, 5, 9]])
    >>> table = rg.sweep(model, rg.KnockOut, {"input_ids": ids}, lambda out, n: out.logits[:, -1, 7])
    >>> table.effects.shape, len(table.top(3))
    (torch.Size([2, 2]), 3)
    """
    _check_measure(measure)
    runner = _Runner(model, inputs, measure, into or {})
    num = runner.num_examples
    chunks = [slice(n, min(n + batch_size, num)) for n in range(0, num, batch_size)]
    first = runner.plain(chunks[0])
    make = _ablation(edits, runner, chunks) if isinstance(edits, str) else edits
    grid = _Grid.of(make, over, first, tokens)
    runner.check(grid.edits)
    kept = _Kept.open(file, grid, num, into)
    report, done, count = progress or partial(_show, time.monotonic()), 0, len(grid.edits) * len(chunks)
    # a chunk has at most `batch_size` examples; a run has as many copies of it, each with one edit, as fit
    for chunk in chunks:
        plain = first if chunk is chunks[0] else runner.plain(chunk)
        kept.baseline(chunk, plain.measured)
        # NaN: not measured before, or not in the file
        todo = [n for n in range(len(grid.edits)) if bool(kept.values[n, chunk].isnan().any())]
        # edits of late blocks share a run, in which the blocks before them are not computed
        first_blocks = {n: plain.blocks.first(grid.edits[n]) for n in todo}
        todo.sort(key=first_blocks.__getitem__)
        done += len(grid.edits) - len(todo)
        for run in _runs([first_blocks[n] for n in todo], len(plain.blocks.outputs), plain.size, batch_size):
            group = todo[run]
            kept.values[group, chunk] = runner.run([grid.edits[n] for n in group], plain, first_blocks[group[0]])
            done += len(group)
            kept.save(done == count)
            report(done, count)
    return grid.table(kept)


def _check_measure(measure: Measure) -> None:
    """Refuse a measure that cannot be called with an output and the numbers of the examples."""
    try:
        signature = inspect.signature(measure)
    except ValueError:  # a function in C that does not tell its arguments
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise RegardError(
            f"sweep: measure is called as measure(output, examples), but it takes {signature}. The second argument has "
            f"the number of the example of each entry: lambda output, examples: output.logits[:, -1, 5]."
        ) from None


def _runs(first_blocks: list[int], num_blocks: int, num_examples: int, batch_size: int) -> list[slice]:
    """The edits of each run, as slices of a list of edits that is sorted by the first block that each needs.

    A run computes its blocks from that of its first edit on, for all of its edits. Small runs skip more blocks, large
    ones cost less per entry: these runs have the least sum of blocks x (entries + `ENTRIES_OF_RUN`).
    """
    size, best = max(1, batch_size // num_examples), [(0.0, 0)]
    for end in range(1, len(first_blocks) + 1):
        starts = range(max(0, end - size), end)
        entries = {n: (end - n) * num_examples + ENTRIES_OF_RUN for n in starts}
        best.append(min((best[n][0] + (num_blocks + 1 - first_blocks[n]) * entries[n], n) for n in starts))
    runs, end = [], len(first_blocks)
    while end:
        runs.append(slice(best[end][1], end))
        end = best[end][1]
    return runs[::-1]


def _taken(value: Any, size: int, entries: Tensor) -> Any:
    """The given entries (indices) of all tensors whose first axis has this size, also in dicts, lists and tuples.

    Other values stay as they are.
    """
    if isinstance(value, dict):
        return {name: _taken(one, size, entries) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_taken(one, size, entries) for one in value)
    return value[entries.to(value.device)] if isinstance(value, Tensor) and value.shape[:1] == (size,) else value


@dataclass(eq=False)
class _Plain:
    """A run of the examples of one chunk without an edit: what was measured (examples,), seen, and handed on by each
    block.

    `sources` caches what edits take from watched runs for these examples, by (id of the run, part, layer).
    """

    chunk: slice
    measured: Tensor
    seen: WatchedAttention
    blocks: _Blocks
    sources: dict[Any, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of examples of the chunk."""
        return self.chunk.stop - self.chunk.start


@dataclass(eq=False)
class _Runner:
    """Runs a model with some edits of some examples.

    `inputs` are those of all examples, `measure` is the number that is compared, and `into` has the receivers of path
    patching: heads, by what of them is patched. In a run the batch holds one copy of the examples for each edit, one
    after the other. In the methods, `chunk` is the range of examples of a run, `copies` the number of its edits, and
    `plain` the run of these examples without an edit.
    """

    model: nn.Module
    inputs: Mapping[str, Any] | Tensor
    measure: Measure
    into: Mapping[str, Where]

    @cached_property
    def layers(self) -> EditableLayers:
        """The layers of the model, which are read once for all runs; a compiled model is refused."""
        return EditableLayers.of(self.model)

    @cached_property
    def num_examples(self) -> int:
        """The size of the first axis of the first tensor."""
        values = [self.inputs] if isinstance(self.inputs, Tensor) else self.inputs.values()
        sizes = [len(value) for value in values if isinstance(value, Tensor) and value.ndim]
        if not sizes or not sizes[0]:
            raise RegardError("sweep: inputs have no examples. Give the tensors of the model: {'input_ids': ids}.")
        return sizes[0]

    def _outputs(self, numbers: Tensor) -> Any:
        """The output of the model for the examples of these numbers, a vector in which some may repeat."""
        if isinstance(self.inputs, Tensor):
            return self.model(_taken(self.inputs, self.num_examples, numbers))
        try:
            return self.model(**_taken(dict(self.inputs), self.num_examples, numbers))
        except (RuntimeError, ValueError, IndexError) as error:
            sizes = {name: len(x) for name, x in self.inputs.items() if isinstance(x, Tensor) and x.ndim}
            if isinstance(error, RegardError) or len({*sizes.values()}) < 2:
                raise
            raise RegardError(
                f"sweep: the first axis of each input has the examples, and these inputs differ: {sizes}. The model "
                f"cannot run them: {first_line(error)}. Give each input for all {self.num_examples} examples."
            ) from error

    def plain(self, chunk: slice) -> _Plain:
        """The run of some examples without an edit, which is checked to be the same if its blocks are replayed."""
        blocks = _Blocks(self.model, chunk.stop - chunk.start)
        with blocks.recorded(), watch(self.model, keep="qkv", verify=False) as seen:
            measured = self._measured(chunk, 1)
        blocks.check(lambda: self._measured(chunk, 2), measured)
        return _Plain(chunk, measured[0], seen, blocks)

    def _measured(self, chunk: slice, copies: int) -> Tensor:
        """The measure of each copy and example, (copies, examples)."""
        numbers = torch.arange(chunk.start, chunk.stop).repeat(copies)
        measured = self.measure(self._outputs(numbers), numbers)
        try:
            result = as_tensor(measured)
        except (TypeError, ValueError, RuntimeError):
            raise RegardError(
                f"sweep: measure(output, examples) returns a tensor of numbers, got {type(measured).__name__}."
            ) from None
        if kind := "on the meta device" if result.is_meta else unusual_kind(result):
            raise RegardError(f"sweep: measure(output, examples) returns a tensor of real numbers; this one is {kind}.")
        if result.shape != numbers.shape:
            raise RegardError(
                f"sweep: measure(output, examples) returns a number for each of the {len(numbers)} entries of the run, "
                f"a tensor ({len(numbers)},); got the shape {tuple(result.shape)}."
            )
        return result.detach().double().cpu().reshape(copies, -1)

    def run(self, edits: Sequence[AttentionEdit], plain: _Plain, block: int) -> Tensor:
        """The measure under each edit, (edits, examples), from one run.

        Blocks before number `block`, the first edited one, are replayed. With `into`, the edits only act in a first
        run, and the run that is measured has patches of the receivers in their place.
        """
        starts = range(0, len(edits) * plain.size, plain.size)
        placed = [self._placed(part, n, plain) for one, n in zip(edits, starts, strict=True) for part in one.parts]
        if self.into:
            placed, block = self._received(placed, block, len(edits), plain)
        with plain.blocks.replayed(block, len(edits)), edit_what_is_there(self.model, placed, self.layers):
            return self._measured(plain.chunk, len(edits))

    def _received(self, sent: list[Any], block: int, copies: int, plain: _Plain) -> tuple[list[Any], int]:
        """Patches of the receivers with what they read if only the senders change, and the number of their first block.

        `sent` are the edits of the senders, which follow the patches that hold the outputs of all heads.
        """
        numbers = torch.arange(plain.chunk.start, plain.chunk.stop).repeat(copies)
        outputs = {name: self._of_layer(plain.seen, name, plain, "output") for name in plain.seen.names}
        outputs = _taken(outputs, plain.size, torch.arange(plain.size).repeat(copies))
        held = ActivationPatch(Where(), "output", outputs)
        with (
            plain.blocks.replayed(block, copies),
            edit_what_is_there(self.model, [held, *sent], self.layers),
            watch(self.model, keep="qkv", verify=False) as seen,
        ):
            self._outputs(numbers)
        patches = [
            ActivationPatch(where, part, {name: seen.patch_source(part, name) for name in _selected(where, seen.names)})
            for part, where in self.into.items()
        ]
        return patches, min(map(plain.blocks.first, patches))

    def _placed(self, part: Any, start: int, plain: _Plain) -> Any:
        """An edit of one copy of the examples, whose entries in the batch begin at `start`.

        Tokens that differ between examples are cut to those of this chunk, as are the tensors that the edit takes.
        """
        where: Where = part.where
        chosen = {name: getattr(where, name) for name in OF_TOKENS}
        own = {name: choice[plain.chunk] for name, choice in chosen.items() if is_by_entry(choice)}
        where = with_fields(where, batch=slice(start, start + plain.size), **own)
        if isinstance(part, ActivationPatch):
            return with_fields(part, where=where, source=self._of_examples(part.source, where, plain, part.part))
        if isinstance(part, ReplaceWeights):
            return with_fields(part, where=where, weights=self._of_examples(part.weights, where, plain))
        return with_fields(part, where=where)

    def _of_examples(self, given: Any, where: Where, plain: _Plain, part: str = "") -> Any:
        """What an edit takes from another run, cut to the examples of this run.

        `given` is a watched run, tensors or maps by layer, or one tensor or map (B, H, ...) of all examples. `part` is
        that of an `ActivationPatch`, or empty. Tensors for one example serve all and stay as they are.
        """
        if isinstance(given, Mapping | HoldsMaps):
            names = _selected(where, given.names) if isinstance(given, WatchedAttention) else [*given]  # type: ignore
            return {name: self._of_layer(given, name, plain, part) for name in names}
        is_of_all = isinstance(given, Tensor | AttentionMap) and given.ndim == 4 and len(given) == self.num_examples
        if not is_of_all or plain.size == self.num_examples:
            return given
        return given[plain.chunk] if isinstance(given, Tensor) else given.select(plain.chunk, slice(None))

    def _of_layer(self, given: Any, name: Any, plain: _Plain, part: str) -> Any:
        """What an edit takes from one layer of another run, cut to the examples of this run.

        `name` is the layer in `given`, and `part` that of an `ActivationPatch`, such as "key", or "" for weights.
        `plain.seen` is a run of these examples, so it needs no cut. The result is kept in `plain.sources`: a watched
        run computes it anew each time.
        """
        at = id(given), part, name
        if at not in plain.sources:
            is_part = part and isinstance(given, WatchedAttention)
            source = given.patch_source(part, name) if is_part else given[name]
            plain.sources[at] = source if given is plain.seen else self._of_examples(source, Where(), plain)
        return plain.sources[at]

    def check(self, edits: Sequence[AttentionEdit]) -> None:
        """Refuse edits that a sweep cannot place in a batch."""
        for part in (part for one in edits for part in one.parts):
            where: Where = part.where  # type: ignore[attr-defined]
            if where.batch is not None:
                raise RegardError(f"sweep: {part!r} names batch entries, which a sweep chooses. Leave out batch.")
            where.token_sets(self.num_examples)  # refuses tokens for another number of examples
            if self.into and not (isinstance(part, ActivationPatch) and part.part == "output"):
                raise RegardError(f"sweep(into=...): a sender is an ActivationPatch of outputs, got {part!r}.")


def _selected(where: Where, names: Sequence[str]) -> list[str]:
    """The paths of the layers in which an edit selects a head."""
    return [name for name in names if where.heads_in(name) is not None]


class _Blocks:
    """The blocks of a model in the order in which they ran, and what each handed on for `size` examples.

    Blocks before the first edited one give what they gave without an edit, so they need not run again. `names` are the
    attention modules of each block. It is empty, and nothing is replayed, if an attention is in no block, if a block
    has a `forward` of its own, or in training mode.
    """

    def __init__(self, model: nn.Module, size: int) -> None:
        self.size = size
        paths = list(attention_modules(model))
        names = blocks_of(model, paths)
        # `replayed` sets and deletes `forward` of the block itself, so another one there would be lost
        is_known = sum(map(len, names.values())) == len(paths) and not any("forward" in vars(block) for block in names)
        self.names = names if is_known and not model.training else {}
        self.outputs: list[tuple[nn.Module, Any]] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep what each block hands on."""
        with ExitStack() as stack:
            for block in self.names:
                stack.callback(block.register_forward_hook(self._keep).remove)
            yield
        if len({block for block, _ in self.outputs}) < len(self.outputs):
            self.outputs = []  # a block that ran twice (ALBERT)

    def _keep(self, block: nn.Module, _: Any, output: Any) -> None:
        """The hook after a block: keep a copy of its output, because the next block may add to its input in place."""
        self.outputs.append((block, _taken(output, self.size, torch.arange(self.size))))

    def check(self, measured: Callable[[], Tensor], expected: Tensor) -> None:
        """Replay all blocks for two copies, and compare with the plain run; keep the outputs if both are the same.

        `measured` runs the model (2, examples), `expected` (1, examples) is the measure of the plain run.
        """
        try:
            with self.replayed(len(self.outputs), 2):
                is_same = torch.allclose(
                    measured(), expected.expand(2, -1), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
                )
        except Exception:  # code of any model, which may need what its blocks do beside their output
            is_same = False
        self.outputs = self.outputs if is_same else []

    def first(self, edits: AttentionEdit) -> int:
        """The number of the first block that an edit changes; 0, so that all blocks run, if that is not known."""
        blocks = ((n, self.names[block]) for n, (block, _) in enumerate(self.outputs))
        own = (n for n, names in blocks if any(_selected(part.where, names) for part in edits.parts))  # type: ignore
        return next(own, 0)

    @contextmanager
    def replayed(self, count: int, copies: int) -> Iterator[None]:
        """Let the first `count` blocks return what they returned without an edit, for `copies` of the examples."""
        with ExitStack() as stack:
            entries = torch.arange(self.size).repeat(copies)
            for block, output in self.outputs[:count]:
                block.forward = lambda *_, output=output, **__: _taken(output, self.size, entries)
                stack.callback(delattr, block, "forward")
            yield


def _ablation(kind: str, runner: _Runner, chunks: Sequence[slice]) -> Callable[[Where], AttentionEdit]:
    """The function that makes the ablation of a selection, from the outputs of heads of all examples.

    `kind` is the name of the ablation, and `chunks` are the ranges of examples of each run. The sources are
    (1, H, n, E) for "mean", and (examples, H, n, E) for "resample", where each example has the next one's.
    """
    if kind not in ABLATIONS:
        raise RegardError(f"sweep: there is no ablation {kind!r}. {nearest(kind, ABLATIONS)}")
    if kind == "zero":
        return KnockOut
    if runner.num_examples < 2:
        raise RegardError(f"sweep({kind!r}): this ablation takes the outputs of other examples; give at least two.")
    runs = [runner.plain(chunk).seen for chunk in chunks]
    outputs = {name: torch.cat([seen.patch_source("output", name) for seen in runs]) for name in runs[0].names}
    # the last example has the outputs of the first
    source = {name: x.mean(0, keepdim=True) if kind == "mean" else x.roll(-1, 0) for name, x in outputs.items()}
    return lambda where: ActivationPatch(where, "output", source)


@dataclass(frozen=True, eq=False)
class _Grid:
    """The edits of a sweep, and where their values stand in the table.

    `axes` are the labels of each axis. `places[n]` is the index of edit n in the flattened table; cells without an
    edit, such as a head that a smaller layer has not, stay NaN.
    """

    axes: dict[str, list[str]]
    edits: Sequence[AttentionEdit]
    places: list[int]

    @classmethod
    def of(cls, make: Any, over: Any, plain: _Plain, tokens: Texts | None) -> _Grid:
        """The grid of `sweep(edits=make, over=...)`: a table of selections for a function, else a list of edits.

        `plain` is a run of the model, whose maps tell the numbers of layers, heads and tokens. Words in the edits
        become numbers of `tokens`.
        """
        if callable(make):
            grid = cls._of_axes(make, over, plain.seen.maps)
        else:
            if tuple(over) != ALL_HEADS:
                raise RegardError(
                    f"sweep(over={over!r}): a list or mapping of edits is the only axis of its table, and each edit "
                    "says itself where it acts. Leave `over` out, or give a function of a selection, as rg.KnockOut is."
                )
            cells = list(make.values() if isinstance(make, Mapping) else make)
            grid = cls({"edits": list(map(str, make))}, cells, list(range(len(cells))))
        if not grid.edits:
            raise RegardError("sweep: there are no edits.")
        found = ((with_fields(part, where=part.where.found(tokens)) for part in one.parts) for one in grid.edits)  # type: ignore
        return replace(grid, edits=[EditSequence(tuple(parts)) for parts in found])

    @classmethod
    def _of_axes(cls, make: Any, over: Any, maps: Mapping[str, AttentionMap]) -> _Grid:
        """An edit for each combination of values of the axes; heads that a layer does not have are skipped.

        `make` and `over` are the arguments `edits` and `over` of `sweep`. `maps` are those of a run of the model.
        """
        if not over:
            raise RegardError(f"sweep(over={over!r}): name at least one axis of the table: {', '.join(AXES)}.")
        values = {axis: _values(axis, over, maps) for axis in over}
        num_heads = {n: maps[name].shape[1] for name, n in _layers(maps).items()}
        edits, places = [], []
        for place, chosen in enumerate(itertools.product(*(one.values() for one in values.values()))):
            where = dict(zip(values, chosen, strict=True))
            layer, head = where.get("layers"), where.get("heads")
            if isinstance(layer, int | str) and isinstance(head, int) and head >= num_heads.get(layer, sys.maxsize):
                continue
            edits.append(None if isinstance(make, nn.Module) else make(Where(**where)))
            if not isinstance(edits[-1], AttentionEdit):
                raise RegardError("sweep: edits(where) must return an edit, such as rg.KnockOut(where).")
            places.append(place)
        return cls({axis: list(one) for axis, one in values.items()}, edits, places)

    def table(self, kept: _Kept) -> SweepTable:
        """The measured values in the shape of the axes."""
        sizes = [len(labels) for labels in self.axes.values()]
        values = kept.values.new_full((torch.Size(sizes).numel(), kept.values.shape[1]), torch.nan)
        values[self.places] = kept.values
        return SweepTable(self.axes, values.unflatten(0, sizes), kept.plain)


def _values(axis: str, over: Any, maps: Mapping[str, AttentionMap]) -> dict[str, Any]:
    """The values of an axis, by label: those that `over` gives, or all numbers.

    `over` is the argument of `sweep`. For numbers of heads and tokens the largest layer of `maps` counts.
    """
    if axis not in AXES:
        raise RegardError(f"sweep(over=...): there is no axis {axis!r}. {nearest(str(axis), AXES)}")
    given = over[axis] if isinstance(over, Mapping) else None
    if isinstance(given, Mapping):
        return {str(label): value for label, value in given.items()}
    if given is not None and (isinstance(given, str) or not isinstance(given, Iterable)):
        raise RegardError(
            f"sweep(over=...): give the values of an axis in a list or a dict: {{{axis!r}: [{given!r}]}}."
        )
    if given is None:
        shapes = [one.shape for one in maps.values()]
        sizes = {"heads": 1, "queries": 2, "keys": 3}
        given = _layers(maps).values() if axis == "layers" else range(max(shape[sizes[axis]] for shape in shapes))
    return {str(value): value for value in given}


def _layers(maps: Mapping[str, AttentionMap]) -> dict[str, int | str]:
    """The number of each layer by its path; the paths themselves if two modules share a number or one has none."""
    numbers = {name: layer_number(name) for name in maps}
    is_unique = None not in numbers.values() and len(set(numbers.values())) == len(maps)
    return {name: number if is_unique and number is not None else name for name, number in numbers.items()}


@dataclass(eq=False)
class _Kept:
    """The values that were measured, and their file.

    `values` (edits, examples) and `plain` (examples,), the run without an edit, are NaN where nothing was measured.
    `about` identifies the sweep in the file. `saved` is when the file was last written, on the monotonic clock.
    """

    values: Tensor
    plain: Tensor
    path: Path | None
    about: dict[str, Any]
    saved: float = 0.0

    @classmethod
    def open(cls, file: Any, grid: _Grid, num: int, into: Any) -> _Kept:
        """The values in a file of this sweep, or none. `num` is the number of examples. A file of another sweep is
        refused.
        """
        named = [_named(part) for one in (*grid.edits,) for part in (one, *one.parts)] + [repr(into)]
        digest = hashlib.sha256("\n".join(named).encode()).hexdigest()
        about = {"format": FORMAT, "version": VERSION, "edits": digest, "axes": grid.axes, "examples": num}
        path = None if file is None else Path(fspath(file))
        empty = torch.full((len(grid.edits), num), torch.nan, dtype=torch.float64)
        if path is None or not path.exists():
            return cls(empty, empty.new_full((num,), torch.nan), path, about)
        try:
            data = json.loads(path.read_text())
            values, plain = (torch.tensor(data.pop(name), dtype=torch.float64) for name in ("values", "baseline"))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RegardError(f"sweep: {path} is no file of a sweep: {error}. Name another file.") from None
        if data != about or values.shape != empty.shape:
            raise RegardError(f"sweep: {path} is of another sweep (other edits or examples). Name another file.")
        return cls(values, plain, path, about)

    def baseline(self, chunk: slice, measured: Tensor) -> None:
        """Keep what the examples of a chunk give without an edit; refuse a file in which they gave something else."""
        known = self.plain[chunk]
        if not bool(known.isnan().any()) and not torch.allclose(known, measured, rtol=TOLERANCE, atol=TOLERANCE):
            raise RegardError(
                f"sweep: without an edit {self.path} has {first_few(known.tolist(), 3)}, and this run gives "
                f"{first_few(measured.tolist(), 3)}: another model, other inputs or another measure. Name another file."
            )
        self.plain[chunk] = measured

    def save(self, is_last: bool) -> None:
        """Write the file, if it was written at least `PAUSE` seconds ago or nothing follows."""
        if self.path is None or (not is_last and time.monotonic() - self.saved < PAUSE):
            return
        numbers = {"baseline": self.plain.tolist(), "values": self.values.tolist()}
        write_whole(self.path, json.dumps(self.about | numbers))
        self.saved = time.monotonic()


def _named(one: Any) -> str:
    """An edit as text: its class, its selection and its numbers, without tensors."""
    given = [getattr(one, each.name) for each in fields(one)]
    return f"{type(one).__name__} {[value for value in given if isinstance(value, int | float | str | Where)]!r}"


def _show(begin: float, done: int, count: int) -> None:
    """Show the progress in a line, if a terminal reads it. `begin` is the start on the monotonic clock."""
    if sys.stderr.isatty():
        left = (time.monotonic() - begin) / max(done, 1) * (count - done)
        line = f"\rsweep: {done} of {count} edits, {left:.0f} s left "
        print(line, end="\n" if done == count else "", file=sys.stderr, flush=True)
