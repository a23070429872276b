"""What ranks say to each other: one handshake a call, then keys and gradients from rank to rank."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard.errors import RegardError


class RankLost(RegardError, RuntimeError):
    """Another rank has ended, or did not answer within the time-out of the process group."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """Tensors on their way; `wait` gives those that arrive."""

    exchange: Exchange
    about: str
    works: Sequence[Any]
    sent: Sequence[Tensor]  # kept until they have left
    arriving: list[Tensor]

    def wait(self) -> list[Tensor]:
        with self.exchange.answers(self.about):
            for work in self.works:
                work.wait()
        return self.arriving


class Exchange:
    """The ranks of one process group, as one of them sees them."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    @contextlib.contextmanager
    def answers(self, about: str) -> Iterator[None]:
        """Say who waited for what when the others do not answer."""
        try:
            yield
        except RuntimeError as error:
            first = str(error).strip().split("\n")[0].split(". ")[0]
            raise RankLost(
                f"attend: rank {self.rank} of {self.ranks} got no answer ({about}): a rank has ended, or took longer "
                "than the time-out of the process group. The rank that ended first says why; "
                f"init_process_group(timeout=...) says how long to wait. [{first}]"
            ) from error

    def swap(self, to: int, sent: Sequence[Tensor], source: int, room: list[Tensor]) -> Transfer:
        """Start to send tensors to one rank and to fill `room` with those of another; nothing is sent for nothing."""
        group = dist.group.WORLD if self.group is None else self.group
        sent = [t.contiguous() for t in sent]
        calls = [dist.P2POp(dist.isend, t, group=group, group_peer=to) for t in sent]
        calls += [dist.P2POp(dist.irecv, t, group=group, group_peer=source) for t in room]
        about = f"sending to rank {to}, receiving from rank {source}"
        with self.answers(about):
            works = dist.batch_isend_irecv(calls) if calls else []
        return Transfer(self, about, works, sent, room)

    def agree(self, said: Mapping[str, str] | RegardError, lengths: tuple[int, int]) -> list[tuple[int, ...]]:
        """The lengths of all ranks, once each has said the same; else everyone is told which rank differs in what."""
        refused = isinstance(said, RegardError)
        digest = 0 if refused else int(hashlib.sha256(repr(dict(said)).encode()).hexdigest()[:15], 16)
        mine = torch.tensor([digest, *lengths], device=self._device)
        rows = [torch.zeros_like(mine) for _ in range(self.ranks)]
        with self.answers("comparing what is asked for"):
            dist.all_gather(rows, mine, group=self.group)
        found = [tuple(row.tolist()) for row in rows]
        if refused or any(row[0] != digest for row in found):
            self._differ(said)
        return [row[1:] for row in found]

    def _differ(self, said: Mapping[str, str] | RegardError) -> None:
        everyone = self.collected(str(said) if isinstance(said, RegardError) else dict(said))
        if isinstance(said, RegardError):
            raise said
        for rank, words in enumerate(everyone):
            if isinstance(words, str):
                raise RegardError(f"attend: rank {rank} refused its share: {words}")
        raise RegardError(f"attend: {difference(everyone)}. Give all ranks the same; only lengths may differ.")

    def collected(self, thing: Any) -> list[Any]:
        """Any small object of every rank."""
        found: list[Any] = [None] * self.ranks
        with self.answers("collecting"):
            dist.all_gather_object(found, thing, group=self.group)
        return found

    def gathered(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """The shares of all ranks, `counts` long each, one after the other on axis 2."""
        room = x.new_zeros(*x.shape[:2], max(counts), *x.shape[3:])
        room[:, :, : x.shape[2]] = x.detach()
        flat = room.flatten().view(torch.uint8)  # bytes, which every backend can carry
        found = [torch.zeros_like(flat) for _ in counts]
        with self.answers("gathering"):
            dist.all_gather(found, flat, group=self.group)
        parts = [part.view(x.dtype).view(room.shape) for part in found]
        return torch.cat([part[:, :, :count] for part, count in zip(parts, counts, strict=True)], 2)

    @property
    def _device(self) -> torch.device:
        backend = dist.get_backend(self.group)
        return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def difference(everyone: Sequence[Mapping[str, str]]) -> str:
    """Which ranks differ from most in what.

    >>> difference([{"batch": "2"}, {"batch": "2"}, {"batch": "3"}])
    'rank 2 has the batch 3, where others have 2'
    """
    for name in everyone[0]:
        said = [words[name] for words in everyone]
        usual = Counter(said).most_common(1)[0][0]
        for rank, words in enumerate(said):
            if words != usual:
                return f"rank {rank} has the {name} {words}, where others have {usual}"
    raise AssertionError("their digests differ, so they do")
