"""What ranks say to each other: one handshake a call, then keys and gradients from rank to rank."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.errors import RegardError

#: How many operations the ranks of a group have agreed on so far.
_counts: MutableMapping[Any, int] = WeakKeyDictionary()
#: For groups that only carry tensors of a device: one of the same ranks that carries those of the CPU.
_host_groups: MutableMapping[Any, Any] = WeakKeyDictionary()
#: The learned tensors that the ranks of a group have compared.
_compared: MutableMapping[Any, Any] = WeakKeyDictionary()


class RankLost(RegardError, RuntimeError):
    """Another rank has ended, or did not answer within the time-out of the process group."""


class Agreement(NamedTuple):
    """What ranks agreed on: the number of this operation among all of the group, and the lengths of every rank."""

    number: int
    lengths: list[tuple[int, int]]


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
        self.group: Any = dist.group.WORLD if group is None else group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    @contextlib.contextmanager
    def answers(self, about: str, operation: str = "attend") -> Iterator[None]:
        """Say who waited for what when the others do not answer."""
        try:
            yield
        except RuntimeError as error:
            first = str(error).strip().split("\n")[0].split(". ")[0]
            raise RankLost(
                f"{operation}: rank {self.rank} of {self.ranks} got no answer ({about}): a rank has ended, or took "
                "longer than the time-out of the process group. The rank that ended first says why; "
                f"init_process_group(timeout=...) says how long to wait. [{first}]"
            ) from error

    def check_device(self, kind: str) -> None:
        """Refuse tensors that the group cannot carry; gloo sends those of the CPU from rank to rank."""
        backends = _backends(self.group)
        backend = backends.get(kind)
        if backend is None or (backend == "gloo" and kind != "cpu"):
            able = sorted(each for each, name in backends.items() if each == "cpu" or name != "gloo")
            remedy = {"cpu": "'gloo'", "cuda": "'nccl'"}.get(kind, "a backend that can")
            raise RegardError(
                f"attend: the tensors are on {kind}, and the process group ({', '.join(sorted({*backends.values()}))}) "
                f"sends only those of {' and '.join(able)} from rank to rank. Start it with "
                f"init_process_group({remedy}), or move the tensors."
            )

    @property
    def _host_group(self) -> Any:
        """The same ranks as a group that carries tensors of the CPU: no device is waited for. Collective at first."""
        if "cpu" in _backends(self.group):
            return self.group
        if self.group not in _host_groups:
            ranks = dist.get_process_group_ranks(self.group)
            _host_groups[self.group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return _host_groups[self.group]

    def swap(self, to: int, sent: Sequence[Tensor], source: int, room: list[Tensor]) -> Transfer:
        """Start to send tensors to one rank and to fill `room` with those of another; nothing is sent for nothing."""
        sent = [t.contiguous() for t in sent]
        calls = [dist.P2POp(dist.isend, t, group=self.group, group_peer=to) for t in sent]
        calls += [dist.P2POp(dist.irecv, t, group=self.group, group_peer=source) for t in room]
        about = f"sending to rank {to}, receiving from rank {source}"
        with self.answers(about):
            works = dist.batch_isend_irecv(calls) if calls else []
        return Transfer(self, about, works, sent, room)

    def agree(
        self,
        operation: str,
        said: Mapping[str, str] | RegardError,
        lengths: tuple[int, int] = (0, 0),
        once: Mapping[str, str] | None = None,
    ) -> Agreement:
        """The lengths of all ranks, once each has said the same; else everyone is told which rank differs in what.

        Every collective operation begins with this, so that ranks that begin different ones are told so. `once` is
        compared among the ranks that give it. The host waits for the other hosts, and for no device.
        """
        if isinstance(said, Mapping):
            said = {"operation": operation, **said}
        own = _number(said), _number(once or {})
        mine = torch.tensor([*own, _counts.get(self.group, 0), *lengths])
        rows = [torch.zeros_like(mine) for _ in range(self.ranks)]
        with self.answers("comparing what is asked for", operation):
            dist.all_gather(rows, mine, group=self._host_group)
        everyone = [row.tolist() for row in rows]
        _counts[self.group] = number = 1 + max(row[2] for row in everyone)
        if {row[0] for row in everyone} != {own[0]} or own[0] == 0 or len({row[1] for row in everyone} - {0}) > 1:
            self._differ(operation, said, once or {})
        return Agreement(number, [(row[3], row[4]) for row in everyone])

    @property
    def compared(self) -> MutableMapping[Tensor, bool]:
        """The learned tensors that all ranks were found to have alike: they are compared once, not at every step."""
        return _compared.setdefault(self.group, WeakTensorKeyDictionary())

    def _differ(self, operation: str, said: Mapping[str, str] | RegardError, once: Mapping[str, str]) -> NoReturn:
        everyone = self.collected({**said, **once} if isinstance(said, Mapping) else str(said))
        if isinstance(said, RegardError):
            raise said
        for rank, words in enumerate(everyone):
            if isinstance(words, str):
                raise RegardError(f"{operation}: rank {rank} refused its share: {words}")
        raise RegardError(
            f"{operation}: {difference(everyone)}. All ranks have to ask for the same, in the same order; only the "
            "lengths of their shares may differ."
        )

    def collected(self, thing: Any) -> list[Any]:
        """Any small object of every rank."""
        found: list[Any] = [None] * self.ranks
        with self.answers("collecting"):
            dist.all_gather_object(found, thing, group=self._host_group)
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


def _backends(group: Any) -> dict[str, str]:
    """The backend of a group for each kind of device: {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))  # type: ignore[misc]


def _number(said: Mapping[str, str] | RegardError) -> int:
    """A number of 60 bits for words; 0 for none and for a refusal."""
    if isinstance(said, RegardError) or not said:
        return 0
    return int(hashlib.sha256(repr(dict(said)).encode()).hexdigest()[:15], 16)


def difference(everyone: Sequence[Mapping[str, str]]) -> str:
    """In what ranks differ, and which has what; the words of most come last.

    >>> difference([{"batch": "2"}, {"batch": "2"}, {"batch": "3"}])
    'the ranks differ in the batch: 3 on rank 2; 2 on ranks 0, 1'
    """
    for name in dict.fromkeys(name for said in everyone for name in said):
        ranks = {rank: said[name] for rank, said in enumerate(everyone) if name in said}
        counted = Counter(ranks.values())
        if len(counted) > 1:
            told = [(words, [rank for rank in ranks if ranks[rank] == words]) for words, _ in counted.most_common()]
            parts = (
                f"{words} on rank{'s'[: len(who) > 1]} {', '.join(map(str, who))}" for words, who in reversed(told)
            )
            return f"the ranks differ in the {name}: {'; '.join(parts)}"
    raise AssertionError("their digests differ, so they do")
