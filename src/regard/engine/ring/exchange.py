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
    """The result of a handshake: the number of the operation in its group, and the lengths of every rank."""

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
        """Start to send tensors to one rank and to fill `room` from another; without tensors no message is sent."""
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
        request: Mapping[str, str] | RegardError,
        lengths: tuple[int, int] = (0, 0),
        learned: Mapping[str, str] | None = None,
    ) -> Agreement:
        """Compare the requests of all ranks, and return the lengths of all; if requests differ, raise on every rank.

        Every collective operation begins with this handshake. The error says which rank has what. `learned` is
        compared only among the ranks that give it. The host waits for the other hosts, and for no device.
        """
        if isinstance(request, Mapping):
            request = {"operation": operation, **request}
        own = _number(request)
        mine = torch.tensor([own, _number(learned or {}), _counts.get(self.group, 0), *lengths])
        rows = [torch.zeros_like(mine) for _ in range(self.ranks)]
        with self.answers("comparing what is asked for", operation):
            dist.all_gather(rows, mine, group=self._host_group)
        requests, learned_values, counts, *num_tokens = zip(*(row.tolist() for row in rows), strict=True)
        _counts[self.group] = number = 1 + max(counts)
        if {*requests} != {own} or own == 0 or len({*learned_values} - {0}) > 1:
            self._differ(operation, request, learned or {})
        return Agreement(number, list(zip(*num_tokens, strict=True)))

    @property
    def compared(self) -> MutableMapping[Tensor, bool]:
        """The learned tensors that were equal on all ranks: they are compared once, not at every step."""
        return _compared.setdefault(self.group, WeakTensorKeyDictionary())

    def _differ(self, operation: str, request: Mapping[str, str] | RegardError, learned: Mapping[str, str]) -> NoReturn:
        everyone = self.collected({**request, **learned} if isinstance(request, Mapping) else str(request))
        if isinstance(request, RegardError):
            raise request
        for rank, answer in enumerate(everyone):
            if isinstance(answer, str):
                raise RegardError(f"{operation}: rank {rank} refused its share: {answer}")
        raise RegardError(
            f"{operation}: {difference(everyone)}. All ranks have to ask for the same, in the same order; only the "
            "lengths of their shares may differ."
        )

    def collected(self, thing: Any) -> list[Any]:
        """Any small object of every rank."""
        objects: list[Any] = [None] * self.ranks
        with self.answers("collecting"):
            dist.all_gather_object(objects, thing, group=self._host_group)
        return objects

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


def _number(request: Mapping[str, str] | RegardError) -> int:
    """A hash of 60 bits; 0 for an empty request and for a refusal."""
    if isinstance(request, RegardError) or not request:
        return 0
    return int(hashlib.sha256(repr(dict(request)).encode()).hexdigest()[:15], 16)


def difference(everyone: Sequence[Mapping[str, str]]) -> str:
    """The first entry in which ranks differ: each value with its ranks, the most common value last.

    >>> difference([{"batch": "2"}, {"batch": "2"}, {"batch": "3"}])
    'the ranks differ in the batch: 3 on rank 2; 2 on ranks 0, 1'
    """
    for name in dict.fromkeys(name for request in everyone for name in request):
        ranks = {rank: request[name] for rank, request in enumerate(everyone) if name in request}
        counted = Counter(ranks.values())
        if len(counted) > 1:
            parts = []
            for value, count in reversed(counted.most_common()):
                holders = ", ".join(str(rank) for rank in ranks if ranks[rank] == value)
                parts.append(f"{value} on rank{'s' if count > 1 else ''} {holders}")
            return f"the ranks differ in the {name}: {'; '.join(parts)}"
    raise AssertionError("their digests differ, so they do")
