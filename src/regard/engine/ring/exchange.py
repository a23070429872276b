"""Messages between ranks: one handshake for each call, then keys and gradients from rank to rank."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.base.errors import RegardError

#: Number of operations that the ranks of a group have agreed on.
_counts: MutableMapping[Any, int] = WeakKeyDictionary()
#: For each group that carries no tensors of the CPU: a second group of the same ranks that does.
_host_groups: MutableMapping[Any, Any] = WeakKeyDictionary()
#: The learned tensors that were equal on all ranks of a group.
_compared: MutableMapping[Any, Any] = WeakKeyDictionary()


class RankLost(RegardError, RuntimeError):
    """Another rank has ended, or did not answer within the time-out of the process group."""


class Agreement(NamedTuple):
    """The result of a handshake: the number of the operation in its group, and the lengths and the seed of the call.

    `lengths` are the numbers of queries and of keys of each rank.
    """

    number: int
    lengths: list[tuple[int, int]]
    seed: int


@dataclass(frozen=True, eq=False)
class Transfer:
    """Tensors that are being sent and received; `wait` returns the received ones."""

    exchange: Exchange
    description: str
    works: Sequence[Any]
    sent: Sequence[Tensor]  # must live until they are sent
    received: list[Tensor]

    def wait(self) -> list[Tensor]:
        """The received tensors, once all of them have arrived."""
        with self.exchange.answers(self.description):
            for work in self.works:
                work.wait()
        return self.received


class Exchange:
    """The ranks of one process group, and the messages of one of them."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        # Maps keep their exchange. A group that they kept too would outlive destroy_process_group(), and the threads
        # of gloo, which then still run while Python ends, abort the process.
        self._group = ref(dist.group.WORLD if group is None else group)
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    @property
    def group(self) -> Any:
        """The process group, while it exists."""
        group = self._group()
        if group is None:
            raise RegardError(
                f"attend: the process group of {self.ranks} ranks has been destroyed, and other ranks hold parts of "
                "the map. Call destroy_process_group() after the last use of a map."
            )
        return group

    @contextlib.contextmanager
    def answers(self, description: str, operation: str = "attend") -> Iterator[None]:
        """Turn an error of the transport into `RankLost`, which says what this rank waited for (`description`)."""
        try:
            yield
        except RuntimeError as error:
            first = str(error).strip().split("\n")[0].split(". ")[0]
            raise RankLost(
                f"{operation}: rank {self.rank} of {self.ranks} got no answer ({description}): a rank has ended, or "
                "took longer than the time-out of the process group. The rank that ended first says why; "
                f"init_process_group(timeout=...) sets the time-out. [{first}]"
            ) from error

    def check_device(self, kind: str) -> None:
        """Refuse tensors that the group cannot send from rank to rank; gloo can send only tensors of the CPU.

        `kind` is the type of their device, such as "cuda".
        """
        backends = _backends(self.group)
        backend = backends.get(kind)
        if backend is None or (backend == "gloo" and kind != "cpu"):
            able = sorted(device for device, name in backends.items() if device == "cpu" or name != "gloo")
            remedy = {"cpu": "'gloo'", "cuda": "'nccl'"}.get(kind, "a backend that can")
            raise RegardError(
                f"attend: the tensors are on {kind}, and the process group ({', '.join(sorted({*backends.values()}))}) "
                f"sends only tensors of {' and '.join(able)} from rank to rank. Start it with "
                f"init_process_group({remedy}), or move the tensors."
            )

    @property
    def _host_group(self) -> Any:
        """A group of the same ranks that carries tensors of the CPU, so that no host waits for a device.

        The first use is collective.
        """
        if "cpu" in _backends(self.group):
            return self.group
        if self.group not in _host_groups:
            ranks = dist.get_process_group_ranks(self.group)
            _host_groups[self.group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return _host_groups[self.group]

    def swap(self, to: int, sent: Sequence[Tensor], source: int, buffers: list[Tensor]) -> Transfer:
        """Start to send the tensors `sent` to rank `to`, and to receive tensors of rank `source` into `buffers`.

        Empty messages are skipped. Rank `to` must expect tensors of these sizes from this rank, and `source` must send
        tensors of the sizes of `buffers`.
        """
        sent = [t.contiguous() for t in sent]
        calls = [dist.P2POp(dist.isend, t, group=self.group, group_peer=to) for t in sent]
        calls += [dist.P2POp(dist.irecv, t, group=self.group, group_peer=source) for t in buffers]
        description = f"sending to rank {to}, receiving from rank {source}"
        with self.answers(description):
            works = dist.batch_isend_irecv(calls) if calls else []
        return Transfer(self, description, works, sent, buffers)

    def agree(
        self,
        operation: str,
        request: Mapping[str, str] | RegardError,
        lengths: tuple[int, int] = (0, 0),
        learned: Mapping[str, str] | None = None,
        seed: int = 0,
    ) -> Agreement:
        """Compare the requests of all ranks, and return the lengths of all; if requests differ, raise on every rank.

        `request` has what must be equal on all ranks, by name, or is the error with which this rank refuses. `learned`
        has digests of learned values, and is compared only among the ranks that give it. `lengths` are the numbers of
        queries and keys of this rank, which may differ. All ranks get the seed of rank 0.

        Every collective operation begins with this handshake of 48 bytes a rank, even if the same call ran before: two
        calls in a different order on two ranks would give wrong numbers. The error says which rank has what. The host
        waits for the other hosts, and for no device.
        """
        if isinstance(request, Mapping):
            request = {"operation": operation, **request}
        own_hash, count = _hash(request), _counts.get(self.group, 0)  # a hash of 0 says that this rank refuses
        message = torch.tensor([own_hash, _hash(learned or {}), count, seed, *lengths], device="cpu")
        messages = [torch.zeros_like(message) for _ in range(self.ranks)]
        with self.answers("comparing requests", operation):
            dist.all_gather(messages, message, group=self._host_group)
        hashes, learned_hashes, counts, seeds, *num_tokens = zip(*(m.tolist() for m in messages), strict=True)
        _counts[self.group] = number = 1 + max(counts)
        # learned values have a hash of 0 on ranks that have nothing to compare
        if {*hashes} != {own_hash} or own_hash == 0 or len({*learned_hashes} - {0}) > 1:
            self._differ(operation, request, learned or {})
        return Agreement(number, list(zip(*num_tokens, strict=True)), seeds[0])

    @property
    def compared(self) -> MutableMapping[Tensor, bool]:
        """The learned tensors that were equal on all ranks, which are compared once and not at every step."""
        return _compared.setdefault(self.group, WeakTensorKeyDictionary())

    def _differ(self, operation: str, request: Mapping[str, str] | RegardError, learned: Mapping[str, str]) -> NoReturn:
        """Raise the error of the handshake: a refusal, or the first difference between the requests. Collective.

        A rank that refuses raises its own error, all others the refusal of the first rank that refuses. `learned` has
        digests of learned values, which were not compared yet.
        """
        requests = self.collected({**request, **learned} if isinstance(request, Mapping) else str(request))
        if isinstance(request, RegardError):
            raise request
        for rank, refusal in enumerate(requests):
            if isinstance(refusal, str):
                raise RegardError(f"{operation}: rank {rank} refused its share: {refusal}")
        raise RegardError(
            f"{operation}: {difference(requests)}. All ranks must make the same calls in the same order; only the "
            "lengths of their shares may differ."
        )

    def collected(self, value: Any) -> list[Any]:
        """A small object of every rank, in the order of the ranks. Collective."""
        objects: list[Any] = [None] * self.ranks
        with self.answers("collecting"):
            dist.all_gather_object(objects, value, group=self._host_group)
        return objects

    def gathered(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """The shares of all ranks, of lengths `counts`, concatenated on axis 2; `x` is that of this rank. Collective.

        Ranks can gather only tensors of one size, so all are padded to the longest.
        """
        padded = x.new_zeros(*x.shape[:2], max(counts), *x.shape[3:])
        padded[:, :, : x.shape[2]] = x.detach()
        sent = padded.flatten().view(torch.uint8)  # bytes, which every backend can carry
        received = [torch.zeros_like(sent) for _ in counts]
        with self.answers("gathering"):
            dist.all_gather(received, sent, group=self.group)
        shares = [share.view(x.dtype).view(padded.shape) for share in received]
        return torch.cat([share[:, :, :count] for share, count in zip(shares, counts, strict=True)], 2)


def _backends(group: Any) -> dict[str, str]:
    """The backend of a group for each kind of device: {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))  # type: ignore[misc]


def _hash(request: Mapping[str, str] | RegardError) -> int:
    """A hash of 60 bits, which an int64 holds; 0 for an empty request and for a refusal."""
    if isinstance(request, RegardError) or not request:
        return 0
    return int(hashlib.sha256(repr(dict(request)).encode()).hexdigest()[:15], 16)


def difference(requests: Sequence[Mapping[str, str]]) -> str:
    """The first entry in which the requests of the ranks differ: each value with its ranks, the most common one last.

    >>> difference([{"batch": "2"}, {"batch": "2"}, {"batch": "3"}])
    'the ranks differ in the batch: 3 on rank 2; 2 on ranks 0, 1'
    """
    for name in dict.fromkeys(name for request in requests for name in request):
        ranks = {rank: request[name] for rank, request in enumerate(requests) if name in request}
        counted = Counter(ranks.values())
        if len(counted) > 1:
            parts = []
            for value, count in reversed(counted.most_common()):
                holders = ", ".join(str(rank) for rank in ranks if ranks[rank] == value)
                parts.append(f"{value} on rank{'s' if count > 1 else ''} {holders}")
            return f"the ranks differ in the {name}: {'; '.join(parts)}"
    raise AssertionError("the digests of the requests differ, so an entry must differ")
