"""Reads and writes the files of a run: tensors with facts in one safetensors file, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.errors import RegardError
from regard.whole_files import write_whole


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """A safetensors file; the facts are JSON in its header, so that both are of the same moment."""
    save = _safetensors().save
    near = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_whole(path, save(near, metadata={"facts": json.dumps(facts)}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the facts of a file; one that is cut short or of another kind is named."""
    _safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("facts", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise RegardError(f"{path} is missing: this is no whole run folder.") from None
    except (SafetensorError, ValueError, OSError) as error:
        raise RegardError(
            f"{path} is truncated or no safetensors file ({error}). Copy it again, or train the run anew."
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; a missing or truncated file is named."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RegardError(f"{path} is missing: this is no whole run folder.") from None
    except (OSError, ValueError) as error:
        raise RegardError(f"{path} cannot be read or is truncated ({error}). Copy it again.") from None
    if not isinstance(data, dict):
        raise RegardError(f"{path} holds no JSON object. Copy it again.")
    return data


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise RegardError("Weights are read and written by safetensors: pip install 'regard[lab]'") from None
    return safetensors.torch
