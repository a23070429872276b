"""`RayWorkers` measures the documents of a corpus in several processes of a Ray cluster, and keeps their order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from regard.base.cluster import cluster, workers_that_fit
from regard.base.errors import RegardError, first_line
from regard.hf.text_reader import TextReader
from regard.profiling.corpus_profile import CorpusKey, DocumentResult, measure_document

#: The operation that error messages name.
OPERATION = "profile_corpus"
#: Documents in a batch, and how many batches may be on their way for each worker.
BATCH, AHEAD = 4, 4
#: How often a worker that died is restarted and repeats its batch.
RETRIES = 3


class Worker:
    """A process that holds the model of a corpus run (`key`) and measures documents with this number of threads."""

    def __init__(self, key: CorpusKey, threads: int) -> None:
        torch.set_num_threads(threads)
        self.key, self.reader = key, TextReader.load(key.model)

    def check(self) -> None:
        """Refuse a model with the right name but other weights."""
        if self.reader.fingerprint() != self.key.weights:
            raise RegardError(
                f"{OPERATION}: a worker has another model under the name {self.key.model}. Give all hosts the same one."
            )

    def measure(self, documents: list[str]) -> list[dict[str, Any]]:
        """The result of each document, as plain data."""
        return [measure_document(self.reader, text, self.key.layers, self.key.length).to_json() for text in documents]


@dataclass(frozen=True)
class RayWorkers:
    """Workers on a Ray cluster (None: as many as there are processors for), each with torch's number of threads here.

    A worker that dies is restarted and repeats its batch. Each result is merged once, in the order of the documents,
    so sums equal those of one process to the last digit. If workers die `RETRIES` + 1 times over a batch, its
    documents are measured one by one, and a document over which another worker dies is reported as unreadable.
    """

    workers: int | None = None
    kind: type[Worker] = Worker

    def results(self, documents: Iterable[str], key: CorpusKey) -> Iterator[DocumentResult]:
        """The result of each document, in the order of the documents."""
        threads = torch.get_num_threads()
        with cluster(OPERATION) as ray:
            count = workers_that_fit(ray, OPERATION, self.workers, threads)
            remote = ray.remote(num_cpus=threads, max_restarts=RETRIES, max_task_retries=RETRIES)(self.kind)
            group = WorkerGroup(ray, lambda: remote.remote(key, threads))
            try:
                yield from group.in_order(documents, count)
            except group.death_errors as error:
                raise _lost(error) from None
            except ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, RegardError) else error from None


class WorkerGroup:
    """Workers that take batches as they become free. `start` starts a worker; `ray` is the module.

    `death_errors` are raised by a call of a worker whose process ended.
    """

    def __init__(self, ray: Any, start: Callable[[], Any]) -> None:
        self.ray, self._start = ray, start
        self.death_errors = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)

    def in_order(self, documents: Iterable[str], count: int) -> Iterator[DocumentResult]:
        """The result of every document, in order, from `count` workers."""
        idle, batches = self.start_workers(count), enumerate(batches_of(documents))
        running: dict[Any, tuple[int, list[str], Any]] = {}  # future -> number of the batch, its documents, its worker
        finished: dict[int, list[DocumentResult]] = {}  # results of batches behind one that still runs
        next_batch = 0
        while True:
            while idle and len(running) + len(finished) < AHEAD * count and (numbered := next(batches, None)):
                worker = idle.pop()
                running[worker.measure.remote(numbered[1])] = (*numbered, worker)
            if not running:
                return
            future = self.ray.wait(list(running))[0][0]
            number, batch, worker = running.pop(future)
            finished[number], worker = self.results_of(future, batch, worker)
            idle.append(worker)
            while next_batch in finished:
                yield from finished.pop(next_batch)
                next_batch += 1

    def results_of(self, future: Any, batch: list[str], worker: Any) -> tuple[list[DocumentResult], Any]:
        """The results of a batch, and a free worker: a new one if this one is dead."""
        try:
            return [DocumentResult.from_json(data) for data in self.ray.get(future)], worker
        except self.death_errors:
            return self.measure_one_by_one(batch)

    def measure_one_by_one(self, batch: list[str]) -> tuple[list[DocumentResult], Any]:
        """The results of a batch over which workers died: each document alone, to find the cause."""
        results = []
        (worker,) = self.start_workers(1)
        for document in batch:
            try:
                (data,) = self.ray.get(worker.measure.options(max_task_retries=0).remote([document]))
                results.append(DocumentResult.from_json(data))
            except self.death_errors as error:
                reason = f"a worker ended {RETRIES + 2} times over it. {first_line(error) or type(error).__name__}"
                results.append(DocumentResult(reason=reason))
                self.ray.kill(worker)
                (worker,) = self.start_workers(1)
        return results, worker

    def start_workers(self, count: int) -> list[Any]:
        """Start workers, and wait until they have loaded the model."""
        workers = [self._start() for _ in range(count)]
        self.ray.get([worker.check.remote() for worker in workers])
        return workers


def batches_of(documents: Iterable[str]) -> Iterator[list[str]]:
    """The documents in batches."""
    rest = iter(documents)
    while batch := list(itertools.islice(rest, BATCH)):
        yield batch


def _lost(error: Exception) -> RegardError:
    """The error for workers that ended before they could measure a document."""
    reason = " ".join(str(error).split())[:300]
    return RegardError(
        f"{OPERATION}: a worker could not start, or ended before it had the model. It needs the model under the same "
        "name as here. If it ran out of memory, lower `length` (--length) or `workers` (--workers). With a folder "
        f"(--save) the profile so far is kept, and the same command continues. [{reason}]"
    )
