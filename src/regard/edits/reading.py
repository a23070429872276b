"""Edits from the JSON that `edit.to_json()` wrote."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import RegardError, nearest
from regard.edits.selection import Where
from regard.edits.values import (
    ActivationPatch,
    AddToScores,
    AttentionEdit,
    EditSequence,
    KnockOut,
    ReplaceWeights,
    ScaleWeights,
    Selecting,
)
from regard.edits.writing import FORMAT, VERSION

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
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RegardError(f"edit_from_json: the file of tensors {path} cannot be read: {error}.") from None


def _read(part: dict[str, Any], kept: dict[str, Tensor]) -> AttentionEdit:
    kind = KINDS.get(part["edit"])
    if kind is None:
        raise RegardError(f"edit_from_json: there is no edit {part['edit']!r}. {nearest(str(part['edit']), KINDS)}")
    values = {name: _read_value(value, kept) for name, value in part.items() if name not in ("edit", "where")}
    where = Where(**{name: _read_choice(choice) for name, choice in part["where"].items()})
    return kind(where, **values)  # type: ignore[call-arg]


def _read_value(value: Any, kept: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "layers" in value:
        return {name: _read_value(one, kept) for name, one in value["layers"]}
    if "kept" in value:
        return kept[value["kept"]]
    return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))


def _read_choice(choice: Any) -> Any:
    if isinstance(choice, dict):
        return slice(*choice["slice"])
    return [_read_choice(one) for one in choice] if isinstance(choice, list) else choice
