"""Reads and writes the files of a run: tensors with facts in one safetensors file, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.errors import MissingPackage, RegardError
from regard.whole_files import write_whole


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a safetensors file; the facts are JSON in its header, so both are of the same moment."""
    save = _safetensors().save
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_whole(path, save(on_host, metadata={"facts": json.dumps(facts)}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the facts of a file; the error for a truncated or other file names it."""
    _safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("facts", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise RegardError(f"{path} is missing, so the folder of the run is incomplete.") from None
    except (SafetensorError, ValueError, OSError, RecursionError) as error:
        raise RegardError(
            f"{path} is truncated or not a safetensors file ({error}). Copy it again, or train again."
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file; the error for a missing or truncated file names it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RegardError(f"{path} is missing, so the folder of the run is incomplete.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RegardError(f"{path} cannot be read or is truncated ({error}). Copy it again.") from None
    if not isinstance(data, dict):
        raise RegardError(f"{path} is not a JSON object. Copy it again.")
    return data


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise MissingPackage("load_run", "safetensors", "lab") from None
    return safetensors.torch
