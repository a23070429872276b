"""The process of a trial: started here, or by a cluster on one of its machines."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from regard.cluster import check_engine, cluster, workers_that_fit
from regard.seq2seq.training.ranks import single_process

#: Environment of a trial: each has one core, and threads beyond it would only be in the way of the others.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
#: What `look` calls a process that was lost with its machine.
LOST = -signal.SIGKILL
#: Seconds that a machine of a cluster has to answer.
PATIENCE = 30


class Process(Protocol):
    """What is asked of the process of a trial."""

    def look(self) -> tuple[int | None, bytes]:
        """Its exit status, None while it runs, and what it has said since the last look."""
        ...

    def ask_to_stop(self) -> None:
        """A polite kill."""
        ...

    def end(self) -> None:
        """At once, whatever it is doing."""
        ...


#: Starts the process of a command, whose errors go to a file.
Start = Callable[[list[str], Path], Process]


class LocalProcess:
    """A process of this machine, heard through a pipe; what it writes to the error stream goes to the end of `log`."""

    def __init__(self, command: list[str], log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                env=single_process(os.environ) | ONE_THREAD,
                start_new_session=True,  # Ctrl-C reaches the first process alone, which then asks them to stop
            )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        os.set_blocking(self._pipe.fileno(), False)

    def look(self) -> tuple[int | None, bytes]:
        code, said = self._process.poll(), b""
        while not self._pipe.closed and (data := self._pipe.read(1 << 16)):
            said += data
        if code is not None:
            self._pipe.close()
        return code, said

    def ask_to_stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class ClusterProcess:
    """A `LocalProcess` on a machine of a Ray cluster, which has to see the folder of the trial under the same name.

    Until there is a processor for it, it waits and has said nothing.
    """

    def __init__(self, ray: Any, command: list[str], log: Path) -> None:
        self._ray = ray
        self._there = ray.remote(num_cpus=1, max_restarts=0)(LocalProcess).remote(command, log)
        self._asked = self._there.look.remote()

    def look(self) -> tuple[int | None, bytes]:
        if not self._ray.wait([self._asked], timeout=0)[0]:
            return None, b""
        try:
            code, said = self._ray.get(self._asked)
        except self._ray.exceptions.RayActorError:
            return LOST, b""
        if code is None:
            self._asked = self._there.look.remote()
        else:
            self._ray.kill(self._there)  # gives its processor back
        return code, said

    def ask_to_stop(self) -> None:
        self._there.ask_to_stop.remote()

    def end(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):  # lost already
            self._ray.get(self._there.end.remote(), timeout=PATIENCE)
        self._ray.kill(self._there)


@contextlib.contextmanager
def processors(engine: str, processes: int | None) -> Iterator[tuple[Start, int]]:
    """The function that starts a trial, and how many trials run at a time: `processes`, or one for each processor."""
    check_engine("compare", engine)
    if engine == "local":
        yield LocalProcess, processes or cores()
        return
    with cluster("compare") as ray:
        available = workers_that_fit(ray, "compare", processes, 1)
        yield partial(ClusterProcess, ray), processes or available


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
