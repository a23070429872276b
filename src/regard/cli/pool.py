"""A corpus read by many workers: each holds the model, documents stream to them, and what comes back is in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from regard.cli.folding import Key, Outcome, measure
from regard.cli.reading import Reader
from regard.cluster import cluster, workers_that_fit
from regard.errors import RegardError

#: Documents that travel together, and how many of these batches a worker has before it at most.
BATCH, AHEAD = 4, 4
#: How often a worker that died is started again, and what it was at given to it again.
RETRIES = 3


class Worker:
    """A process with the model: measures documents."""

    def __init__(self, key: Key, threads: int) -> None:
        torch.set_num_threads(threads)
        self.key, self.reader = key, Reader.load(key.model)

    def check(self) -> None:
        """Refuse to count numbers of another model."""
        if self.reader.fingerprint() != self.key.weights:
            raise RegardError(
                f"see: a worker has another model under the name {self.key.model}. Give all the same one."
            )

    def measure(self, documents: list[str]) -> list[dict[str, Any]]:
        """What comes of each document, as plain numbers."""
        return [measure(self.reader, one, self.key.layers, self.key.length).to_json() for one in documents]


@dataclass(frozen=True)
class Pool:
    """Workers on a Ray cluster; None: as many as there are processors for. Each takes the threads that torch has here.

    A worker that dies is started again, and measures again what it was at: outcomes are taken in once, in the order
    of the documents, so that they add up to the last digit of one process.
    """

    workers: int | None = None

    def outcomes(self, documents: Iterable[str], key: Key) -> Iterator[Outcome]:
        """What comes of each document, in their order."""
        threads = torch.get_num_threads()
        with cluster("see") as ray:
            count = workers_that_fit(ray, "see", self.workers, threads)
            remote = ray.remote(num_cpus=threads, max_restarts=RETRIES, max_task_retries=RETRIES)(Worker)
            from ray.util import ActorPool

            workers = [remote.remote(key, threads) for _ in range(count)]
            try:
                ray.get([worker.check.remote() for worker in workers])
                yield from _in_order(ActorPool(workers), documents, count)
            except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
                raise _lost(error) from None
            except ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, RegardError) else error from None


def _in_order(pool: Any, documents: Iterable[str], workers: int) -> Iterator[Outcome]:
    waiting, rest = 0, iter(documents)
    while batch := list(itertools.islice(rest, BATCH)):
        pool.submit(lambda worker, those: worker.measure.remote(those), batch)
        waiting += 1
        if waiting > AHEAD * workers:
            yield from map(Outcome.from_json, pool.get_next())
            waiting -= 1
    for _ in range(waiting):
        yield from map(Outcome.from_json, pool.get_next())


def _lost(error: Exception) -> RegardError:
    said = " ".join(str(error).split())[:300]
    return RegardError(
        f"see: a worker could not be started, or ended {RETRIES + 1} times over the same documents. It needs the model "
        "under the same name as here; if its memory was used up, lower --length or --workers. With --save, what was "
        f"done is kept, and the same command goes on. [{said}]"
    )
