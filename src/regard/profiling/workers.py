"""A corpus read by many workers: each holds the model, documents stream to them, and what comes back is in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from regard.cluster import cluster, workers_that_fit
from regard.errors import RegardError
from regard.hf.text_reader import Reader
from regard.profiling.corpus_state import Key, Outcome, measure

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

    A worker that dies is started again and repeats its batch. Outcomes are added once, in the order of the documents,
    so that sums equal those of one process to the last digit. If workers die `RETRIES` + 1 times over a batch, its
    documents are measured one by one, and a document that ends its worker again is set aside.
    """

    workers: int | None = None
    kind: type[Worker] = Worker

    def outcomes(self, documents: Iterable[str], key: Key) -> Iterator[Outcome]:
        """What comes of each document, in their order."""
        threads = torch.get_num_threads()
        with cluster("see") as ray:
            count = workers_that_fit(ray, "see", self.workers, threads)
            remote = ray.remote(num_cpus=threads, max_restarts=RETRIES, max_task_retries=RETRIES)(self.kind)
            crew = Crew(ray, lambda: remote.remote(key, threads))
            try:
                yield from crew.in_order(documents, count)
            except crew.died as error:
                raise _lost(error) from None
            except ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, RegardError) else error from None


class Crew:
    """Workers that take batches as they become free; `start` starts a worker."""

    def __init__(self, ray: Any, start: Callable[[], Any]) -> None:
        self.ray, self.start = ray, start
        self.died = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)

    def in_order(self, documents: Iterable[str], count: int) -> Iterator[Outcome]:
        """The outcome of every document, in order, from `count` workers."""
        idle, batches = self.hire(count), enumerate(batched(documents))
        running: dict[Any, tuple[int, list[str], Any]] = {}
        finished: dict[int, list[Outcome]] = {}
        next_batch = 0
        while True:
            while idle and len(running) + len(finished) < AHEAD * count and (numbered := next(batches, None)):
                worker = idle.pop()
                running[worker.measure.remote(numbered[1])] = (*numbered, worker)
            if not running:
                return
            future = self.ray.wait(list(running))[0][0]
            number, batch, worker = running.pop(future)
            finished[number], worker = self.outcomes_of(future, batch, worker)
            idle.append(worker)
            while next_batch in finished:
                yield from finished.pop(next_batch)
                next_batch += 1

    def outcomes_of(self, future: Any, batch: list[str], worker: Any) -> tuple[list[Outcome], Any]:
        """The outcomes of a batch, and a free worker: a new one if this one is dead."""
        try:
            return [Outcome.from_json(outcome) for outcome in self.ray.get(future)], worker
        except self.died:
            return self.one_by_one(batch)

    def one_by_one(self, batch: list[str]) -> tuple[list[Outcome], Any]:
        """The outcomes of documents over which workers died, each measured alone to find the one at fault."""
        outcomes = []
        (worker,) = self.hire(1)
        for document in batch:
            try:
                (outcome,) = self.ray.get(worker.measure.options(max_task_retries=0).remote([document]))
                outcomes.append(Outcome.from_json(outcome))
            except self.died as error:
                outcomes.append(Outcome(reason=f"a worker ended {RETRIES + 2} times over it. {_first_line(error)}"))
                self.ray.kill(worker)
                (worker,) = self.hire(1)
        return outcomes, worker

    def hire(self, count: int) -> list[Any]:
        """Start workers, and wait until they have loaded the model."""
        workers = [self.start() for _ in range(count)]
        self.ray.get([worker.check.remote() for worker in workers])
        return workers


def batched(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents in batches, which are sent together."""
    rest = iter(documents)
    while batch := list(itertools.islice(rest, BATCH)):
        yield batch


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _lost(error: Exception) -> RegardError:
    said = " ".join(str(error).split())[:300]
    return RegardError(
        "see: a worker could not be started, or ended before it had the model. It needs the model under the same name "
        "as here; if its memory was used up, lower --length or --workers. With --save, what was done is kept, and the "
        f"same command goes on. [{said}]"
    )
