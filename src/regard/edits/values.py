"""Edits of attention as values, and as JSON: selections as typed, tensors as lists or in a safetensors file."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.base.checks import HoldsMaps, checked
from regard.base.errors import RegardError, nearest
from regard.base.whole_files import whole_file
from regard.edits.where import Where
from regard.maps.attention_map import AttentionMap

# Edits as JSON: selections as they were typed, tensors as nested lists or in a safetensors file, never pickled.


#: What an edit in JSON says that it is.
FORMAT = "regard edit"
#: The version of the format; texts of later versions are refused.
VERSION = 1


def to_json(edits: Sequence[Any], tensors: str | PathLike[str] | None = None) -> str:
    """Edits as JSON. With `tensors` their tensors are written to this safetensors file, and the text names it."""
    kept: dict[str, Tensor] = {}
    parts = [_written(part, kept if tensors is not None else None) for part in edits]
    data: dict[str, Any] = {"format": FORMAT, "version": VERSION, "edits": parts}
    if kept:
        from safetensors.torch import save_file

        path = Path(fspath(tensors))  # type: ignore[arg-type]
        with whole_file(path, "to_json") as draft:
            save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in kept.items()}, draft)
        data["tensors"] = str(path)
    return json.dumps(data, ensure_ascii=False, allow_nan=False)


def _written(edit: Any, kept: dict[str, Tensor] | None) -> dict[str, Any]:
    """One edit as data for JSON. Its tensors are added to `kept`, by name; if this is None, they become lists."""
    values = {field.name: getattr(edit, field.name) for field in fields(edit)}
    return {"edit": type(edit).__name__} | {name: _value(value, edit, kept) for name, value in values.items()}


def _value(value: Any, edit: Any, kept: dict[str, Tensor] | None) -> Any:
    """The value of a field of an edit as data for JSON; `_read_value` reads it.

    Of what is given for many layers, only the layers that the edit selects are written.
    """
    if isinstance(value, Where):
        given = ((field.name, getattr(value, field.name)) for field in fields(value))
        return {name: _choice(choice) for name, choice in given if choice is not None}
    if isinstance(value, AttentionMap):
        value = value.dense()
    if isinstance(value, Tensor):
        if kept is None and not bool(value.isfinite().all()):
            raise RegardError(
                f"to_json: a tensor of {edit!r} holds inf or NaN, which JSON does not have. Write the tensors to a "
                "file: to_json(tensors=path)."
            )
        dtype = str(value.dtype).removeprefix("torch.")
        if kept is None:
            return {"tensor": value.detach().cpu().double().tolist(), "dtype": dtype}
        name = f"{type(edit).__name__} {len(kept)}"
        kept[name] = value
        return {"kept": name}
    if isinstance(value, Mapping | HoldsMaps):
        # an `ActivationPatch` reads a part of the heads from a watched run; other edits take its maps
        read = getattr(value, "patch_source", None) if hasattr(edit, "part") else None
        maps = value.maps if isinstance(value, HoldsMaps) else value
        own = [name for name in maps if edit.where.heads_in(str(name)) is not None]
        return {"layers": [[name, _value(read(edit.part, name) if read else maps[name], edit, kept)] for name in own]}
    return value


def _choice(choice: Any) -> Any:
    """A part of a `Where` as data for JSON; `_read_choice` reads it."""
    if isinstance(choice, slice):
        return {"slice": [choice.start, choice.stop, choice.step]}
    return [_choice(value) for value in choice] if isinstance(choice, tuple) else choice


# Edits, as values: what is changed in the attention of a model while a block runs.


#: Weights in place of those of a model: given rows, equal weights, a map of another run, or one for each layer.
Given = Tensor | str | AttentionMap | Mapping
#: Equal weights of all keys that the mask allows.
UNIFORM = "uniform"
#: The largest error of a sum of given weights, if their dtype does not round by more.
ROUNDING = 1e-3
#: What an `ActivationPatch` may replace.
PARTS = ("output", "query", "key", "value")


class AttentionEdit:
    """Base of all edits. `&` joins edits; an edit prints as one would type it, and `to_json` saves it.

    Edits of scores (`KnockOut` with renormalization, `AddToScores`) act before the softmax, edits of weights
    (`ScaleWeights`, `ReplaceWeights`, `KnockOut` without) after it, each in the order of `&`. An `ActivationPatch` of
    queries, keys or values acts before the attention, one of the output after it.

    >>> import regard as rg
    >>> first = rg.KnockOut(rg.Where(layers=1, keys=0)) & rg.edits.ScaleWeights(rg.Where(heads="L0.H2"), 0.5)
    >>> first
    KnockOut(Where(layers=1, keys=0)) & ScaleWeights(Where(heads='L0.H2'), 0.5)
    >>> rg.edits.edit_from_json(first.to_json()) == first
    True
    """

    @property
    def parts(self) -> tuple[AttentionEdit, ...]:
        """The single edits, in their order."""
        return (self,)

    def __and__(self, other: AttentionEdit) -> EditSequence:
        if not isinstance(other, AttentionEdit):
            raise RegardError(f"edit & {type(other).__name__}: both sides must be edits, such as KnockOut(Where(...)).")
        return EditSequence((*self.parts, *other.parts))

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return hash((type(self), *(_hashable(getattr(self, f.name)) for f in fields(self))))  # type: ignore[arg-type]

    def to_json(self, tensors: str | PathLike[str] | None = None) -> str:
        """The edit as JSON. Tensors become nested lists, or are written to the safetensors file `tensors`."""
        return to_json(self.parts, tensors)


@dataclass(frozen=True, eq=False)
class EditSequence(AttentionEdit):
    """Several edits, applied in order; made by `&`. Without edits it changes nothing.

    >>> import regard as rg
    >>> len(rg.edits.EditSequence() & rg.KnockOut(rg.Where(keys=0)))
    1
    """

    edits: tuple[AttentionEdit, ...] = ()

    @property
    def parts(self) -> tuple[AttentionEdit, ...]:
        return self.edits

    def __iter__(self) -> Iterator[AttentionEdit]:
        return iter(self.edits)

    def __len__(self) -> int:
        return len(self.edits)

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.edits)) or "EditSequence()"


class Selecting(AttentionEdit):
    """An edit of the pairs that `where` selects."""

    where: Where

    def __repr__(self) -> str:
        shown = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is MISSING:
                shown.append(_typed(value))
            elif value is not field.default:
                shown.append(f"{field.name}={_typed(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"


@checked
@dataclass(frozen=True, eq=False, repr=False)
class KnockOut(Selecting):
    """w_ij = 0 for the selected pairs (attention knockout: Geva et al. 2023, arXiv:2304.14767).

    With `renormalize` the pairs are masked before the softmax, so the other weights of a row grow and it still sums to
    1; sinks take part. A row that loses all its keys has weights 0 and output 0. Without, the other weights stay.

    >>> import regard as rg
    >>> rg.KnockOut(rg.Where.parse("L5.H3: #4 -> #2"), renormalize=False)
    KnockOut(Where(heads='L5.H3', queries=4, keys=2), renormalize=False)
    """

    where: Where
    renormalize: bool = True


@checked
@dataclass(frozen=True, eq=False, repr=False)
class ScaleWeights(Selecting):
    """w_ij -> factor w_ij for the selected pairs, after the softmax; the row is not normalized again.

    >>> import regard as rg
    >>> rg.edits.ScaleWeights(rg.Where(layers=0, keys=0), 0.5)
    ScaleWeights(Where(layers=0, keys=0), 0.5)
    """

    where: Where
    factor: float

    def __post_init__(self) -> None:
        _check_finite("ScaleWeights", "factor", self.factor)


@checked
@dataclass(frozen=True, eq=False, repr=False)
class AddToScores(Selecting):
    """s_ij -> s_ij + amount for the selected pairs, before the softmax: the weight grows by exp(amount), then rows are
    normalized (PASTA, Zhang et al. 2024, arXiv:2311.02262, with amount = -log(alpha) on the other keys).

    >>> import regard as rg
    >>> rg.edits.AddToScores(rg.Where(heads="L1.H0", keys=[2, 3]), 2.0)
    AddToScores(Where(heads='L1.H0', keys=[2, 3]), 2.0)
    """

    where: Where
    amount: float

    def __post_init__(self) -> None:
        _check_finite("AddToScores", "amount", self.amount)


@checked
@dataclass(frozen=True, eq=False, repr=False)
class ReplaceWeights(Selecting):
    """The rows of the selected heads and queries are replaced by other weights, after the softmax.

    `weights` are a tensor of rows (rows, J), (heads, rows, J) or (batch, heads, rows, J), with a row for each selected
    query, in that order, or (J,), one row for all of them; "uniform", equal weights of all keys that the mask allows
    (of the selected `keys` only, if `where` has some; a row that may attend to none of them keeps its weights); an
    `AttentionMap` of another run, of which the same heads and rows are taken; or a mapping from layer numbers or module
    paths to one of these, such as the `seen` of `rg.watch`.

    Given rows are not negative and sum to 1, or to less in a model with sinks: `ScaleWeights` makes other sums. They
    may have no weight on keys that the mask forbids, and must have the length of the run.

    >>> import torch, regard as rg
    >>> rg.edits.ReplaceWeights(rg.Where(heads="L1.H0"), "uniform")
    ReplaceWeights(Where(heads='L1.H0'), 'uniform')
    """

    where: Where
    weights: Given

    def __post_init__(self) -> None:
        of_layers = self.weights.values() if isinstance(self.weights, Mapping) else [self.weights]
        for weights in of_layers:
            _check_weights(weights)
        if self.where.keys is not None and any(not isinstance(weights, str) for weights in of_layers):
            raise RegardError(
                f"ReplaceWeights({self.where!r}, ...): whole rows are replaced, so leave keys out. With 'uniform' keys "
                "are those that share the row."
            )


@checked
@dataclass(frozen=True, eq=False, repr=False)
class ActivationPatch(Selecting):
    """A part of the selected heads and tokens is that of another run (activation patching: Vig et al. 2020,
    arXiv:2004.12265; Zhang and Nanda 2024, arXiv:2309.16042).

    `part` is the "output" of heads before the output projection, or the "query", "key" or "value" that they compute.
    `source` is a tensor (B, H, n, D) of all heads and tokens of the other run (for keys and values: all key heads), a
    mapping from layer numbers or module paths to such tensors, or the `seen` of `rg.watch(model, keep="qkv")`.
    `where.queries` selects the tokens of outputs and queries, `where.keys` those of keys and values. Query heads that
    share a key head (grouped-query attention) can only be patched together in "key" and "value".

    >>> import torch, regard as rg
    >>> rg.edits.ActivationPatch(rg.Where(heads="L1.H0", queries=3), source=torch.zeros(1, 2, 5, 4))
    ActivationPatch(Where(heads='L1.H0', queries=3), source=tensor of shape (1, 2, 5, 4))
    """

    where: Where
    part: str = "output"
    source: Any = None

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise RegardError(f"ActivationPatch(part={self.part!r}): {nearest(self.part, PARTS)}")
        if self.source is None:
            raise RegardError(
                "ActivationPatch(source=...): give the run to patch from, the `seen` of rg.watch(model, keep='qkv'), "
                "or a tensor."
            )
        unread, own = ("queries", "keys") if self.part in ("key", "value") else ("keys", "queries")
        if getattr(self.where, unread) is not None:
            raise RegardError(
                f"ActivationPatch(part={self.part!r}): it belongs to {own}, so select {own}, not {unread}."
            )


def _check_finite(edit: str, name: str, number: float) -> None:
    """Refuse an infinite number, NaN, and an integer that no float can hold."""
    if isinstance(number, int) and abs(number) > sys.float_info.max:
        raise RegardError(f"{edit}: the {name} is an integer beyond the largest float, {sys.float_info.max:.3g}.")
    if not math.isfinite(number.detach() if isinstance(number, Tensor) else number):
        remedy = " KnockOut removes pairs." if number < 0 else ""
        raise RegardError(f"{edit}({name}={number}): the {name} must be a finite number.{remedy}")


def _check_weights(weights: Any) -> None:
    """Refuse rows that are no weights."""
    if isinstance(weights, str) and weights != UNIFORM:
        raise RegardError(f"ReplaceWeights(weights={weights!r}): weights are a tensor, a map or {UNIFORM!r}.")
    if not isinstance(weights, Tensor):
        if not isinstance(weights, str | AttentionMap):
            raise RegardError(
                f"ReplaceWeights: weights are a tensor, a map or {UNIFORM!r}, got {type(weights).__name__}."
            )
        return
    if not 1 <= weights.ndim <= 4 or not weights.is_floating_point() or not weights.numel():
        raise RegardError(
            f"ReplaceWeights: rows are a tensor of numbers (rows, J), (heads, rows, J) or (batch, heads, rows, J), got "
            f"{weights.dtype} of shape {tuple(weights.shape)}."
        )
    if not bool(weights.isfinite().all()) or bool((weights < 0).any()):
        raise RegardError("ReplaceWeights: weights must be finite and not negative.")
    check_sums(weights, least=0.0)


def check_sums(rows: Tensor, least: float = 1.0) -> None:
    """Refuse rows whose weights sum to more than 1, or to less than `least`, by more than their dtype rounds."""
    total, error = rows.double().sum(-1).flatten(), max(ROUNDING, torch.finfo(rows.dtype).eps / 2)
    wrong = (total > 1 + error) | (total < least - error)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise RegardError(
            f"ReplaceWeights: row {row} of the given weights sums to {float(total[row]):.4g}, and must sum to 1. "
            "Divide it by its sum; ScaleWeights(where, factor) after it gives a row another sum."
        )


def _same(one: Any, other: Any) -> bool:
    """Whether two values of fields are equal: tensors by their numbers, those for many layers layer by layer."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    one, other = (given.maps if isinstance(given, HoldsMaps) else given for given in (one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(_same(one[name], other[name]) for name in one)
    return type(one) is type(other) and bool(one == other)


def _hashable(value: Any) -> Any:
    """What equal values of a field share, and what has a hash: the shape of a tensor, the layers of a mapping."""
    value = value.maps if isinstance(value, HoldsMaps) else value
    if isinstance(value, Mapping):
        return tuple(value)
    return tuple(value.shape) if isinstance(value, Tensor) else value


def _typed(value: Any) -> str:
    """A value of a field as one would type it, or what it is if it is too large."""
    if isinstance(value, Mapping | HoldsMaps):  # one tensor or map for each layer
        maps = value.maps if isinstance(value, HoldsMaps) else value
        return f"{type(value).__name__} of {len(maps)} layers"
    return f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


# Edits from the JSON that `edit.to_json()` wrote.


KINDS: dict[str, type[Selecting]] = {
    k.__name__: k for k in (KnockOut, ScaleWeights, AddToScores, ReplaceWeights, ActivationPatch)
}


def edit_from_json(text: str) -> AttentionEdit:
    """The edit of a text that `edit.to_json()` wrote. A file of tensors that the text names is read.

    >>> import regard as rg
    >>> rg.edits.edit_from_json(rg.edits.AddToScores(rg.Where.parse("L1.H0: it -> animal"), 2.0).to_json())
    AddToScores(Where(heads='L1.H0', queries='it', keys='animal'), 2.0)
    """
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
            raise RegardError(
                f"edit_from_json: the text is no edit of version {VERSION}. Write it with edit.to_json()."
            )
        kept = _tensors(data["tensors"]) if "tensors" in data else {}
        edits = tuple(_read(part, kept) for part in data["edits"])
    except RegardError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RegardError(f"edit_from_json: the text is damaged: {error}. Write it with edit.to_json().") from None
    return edits[0] if len(edits) == 1 else EditSequence(edits)


def _tensors(path: str) -> dict[str, Tensor]:
    """The tensors, by name, of the safetensors file that `to_json` wrote."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RegardError(f"edit_from_json: the file of tensors {path} cannot be read: {error}.") from None


def _read(part: dict[str, Any], kept: dict[str, Tensor]) -> AttentionEdit:
    """The edit that `_written` wrote."""
    kind = KINDS.get(part["edit"])
    if kind is None:
        raise RegardError(f"edit_from_json: there is no edit {part['edit']!r}. {nearest(str(part['edit']), KINDS)}")
    values = {name: _read_value(value, kept) for name, value in part.items() if name not in ("edit", "where")}
    where = Where(**{name: _read_choice(choice) for name, choice in part["where"].items()})
    return kind(where, **values)  # type: ignore[call-arg]


def _read_value(value: Any, kept: dict[str, Tensor]) -> Any:
    """The value of a field that `_value` wrote. `kept` has the tensors of the file, by name."""
    if not isinstance(value, dict):
        return value
    if "layers" in value:
        return {name: _read_value(one, kept) for name, one in value["layers"]}
    if "kept" in value:
        return kept[value["kept"]]
    return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))


def _read_choice(choice: Any) -> Any:
    """The part of a `Where` that `_choice` wrote."""
    if isinstance(choice, dict):
        return slice(*choice["slice"])
    return [_read_choice(value) for value in choice] if isinstance(choice, list) else choice
