"""The saved state of a training: one file, and with sharded weights one more file for each process.

The first file names the others and is written last. So a process that is killed earlier leaves the older state intact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.lab.models.sharding import is_sharded_tensor, own_rows
from regard.lab.runs.tensor_files import read_tensors, write_tensors
from regard.lab.training.ranks import rank, together, world


def write_state(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], step: int) -> None:
    """Write tensors and facts. All processes call it: each writes its shards, and the first writes everything else.

    Args:
        path: Of the first file; the files of the processes are in the same folder.
        tensors: The tensors of this process.
        facts: Plain numbers and texts.
        step: Part of the file names, so the files of an older step are kept until the new ones are complete.
    """
    shards = {name: own_rows(tensor) for name, tensor in tensors.items() if is_sharded_tensor(tensor)}
    names = [f"{path.stem}-{step}-{number + 1}-of-{world()}.safetensors" for number in range(world())] if shards else []
    if names:
        with together():
            write_tensors(path.with_name(names[rank()]), shards, {})
    with together():
        if rank() == 0:
            write_tensors(path, {n: t for n, t in tensors.items() if n not in shards}, {**facts, "parts": names})
    if rank() == 0:
        for older in path.parent.glob(f"{path.stem}-*-of-*.safetensors"):
            if older.name not in names:
                older.unlink(missing_ok=True)


def read_state(path: Path) -> tuple[Saved, dict[str, Any]]:
    """The state that `write_state` wrote; any number of processes can read it, one tensor at a time."""
    tensors, facts = read_tensors(path)
    return Saved(tensors, [_opened(path.with_name(name)) for name in facts.pop("parts", [])]), facts


class Saved(Mapping[str, Tensor]):
    """Saved tensors by name; a sharded tensor is read from all files and concatenated when it is accessed.

    `tensors` are in memory, `parts` are the open files of the processes, and `kind` is a prefix of the visible names.

    >>> saved = Saved({"model.weight": torch.ones(2), "random.cpu": torch.zeros(1)})
    >>> list(saved.under("model"))
    ['weight']
    """

    def __init__(self, tensors: Mapping[str, Tensor], parts: Sequence[Any] = (), kind: str = "") -> None:
        self._tensors, self._parts, self._kind = tensors, parts, kind

    def under(self, kind: str) -> Saved:
        """The tensors whose names begin with `kind` and a dot, by the rest of their names."""
        return Saved(self._tensors, self._parts, f"{kind}.")

    def __getitem__(self, name: str) -> Tensor:
        full = self._kind + name
        if full in self._tensors:
            return self._tensors[full]
        if not self._parts or full not in self._parts[0].keys():  # noqa: SIM118 - not a dict
            raise KeyError(name)
        return torch.cat([part.get_tensor(full) for part in self._parts])

    def __iter__(self) -> Iterator[str]:
        every = [*self._tensors, *(self._parts[0].keys() if self._parts else ())]
        return (name.removeprefix(self._kind) for name in every if name.startswith(self._kind))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _opened(path: Path) -> Any:
    """An open file with the shards of one process; its tensors are read when they are asked for."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(path), framework="pt")
    except FileNotFoundError:
        raise RegardError(f"{path} is missing: the state has a file of each process. Copy all of them.") from None
    except (SafetensorError, OSError) as error:
        raise RegardError(f"{path} is truncated or not a safetensors file ({error}). Copy it again.") from None
