"""Reads and writes tensors with facts in one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.base.errors import MissingPackage, RegardError
from regard.base.whole_files import write_whole


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


def _safetensors() -> Any:
    """The module `safetensors.torch`; the error for a missing package names the extra that has it."""
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise MissingPackage("load_run", "safetensors", "lab") from None
    return safetensors.torch
