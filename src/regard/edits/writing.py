"""Edits as JSON: selections as they were typed, tensors as nested lists or in a safetensors file, never pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.base.checks import HoldsMaps
from regard.base.errors import RegardError
from regard.base.whole_files import whole_file
from regard.edits.selection import Where
from regard.maps.attention_map import AttentionMap

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
    values = {field.name: getattr(edit, field.name) for field in fields(edit)}
    return {"edit": type(edit).__name__} | {name: _value(value, edit, kept) for name, value in values.items()}


def _value(value: Any, edit: Any, kept: dict[str, Tensor] | None) -> Any:
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
        read = getattr(value, "patch_source", None) if hasattr(edit, "part") else None  # of a watched run
        maps = value.maps if isinstance(value, HoldsMaps) else value
        own = [name for name in maps if edit.where.heads_in(str(name)) is not None]
        return {"layers": [[name, _value(read(edit.part, name) if read else maps[name], edit, kept)] for name in own]}
    return value


def _choice(choice: Any) -> Any:
    if isinstance(choice, slice):
        return {"slice": [choice.start, choice.stop, choice.step]}
    return [_choice(one) for one in choice] if isinstance(choice, tuple) else choice
