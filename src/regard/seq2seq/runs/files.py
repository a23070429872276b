"""Files that are whole or not there: tensors with their facts in one file, written beside and then renamed."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.errors import RegardError

#: Prefix of the names of files that are being written.
DRAFT = ".regard-"


def write_whole(path: Path, content: bytes | str) -> None:
    """Write to a file beside it, then rename: whoever is killed, or has no space left, leaves the old file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder) / "facts.json", "{}")
    ...     os.listdir(folder)
    ['facts.json']
    """
    data = content.encode() if isinstance(content, str) else content
    draft = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=DRAFT)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # a rename that reaches the disk before its data would be a truncated file
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except OSError as error:
        if draft is not None and os.path.exists(draft):
            os.remove(draft)
        raise _unwritten(path, len(data), error) from error


def append(path: Path, text: str) -> None:
    """Append to a file, unbuffered. A line that a kill cut short lacks its line feed."""
    data = text.encode()
    try:
        with path.open("ab", buffering=0) as file:
            file.write(data)
    except OSError as error:
        raise _unwritten(path, len(data), error) from error


def remove_drafts(folder: Path) -> None:
    """Remove the drafts that killed processes left in a folder and in the folders inside it."""
    for draft in (*folder.glob(f"{DRAFT}*"), *folder.glob(f"*/{DRAFT}*")):
        draft.unlink(missing_ok=True)


def _unwritten(path: Path, size: int, error: OSError) -> RegardError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = " Make room, and run it again (a training goes on with --resume)." if full else ""
    kept = f" What {path.name} held before is kept." if path.exists() else ""
    return RegardError(f"{path} ({size:,} bytes) cannot be written: {error.strerror or error}.{kept}{remedy}")


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
