"""The process of a trial, on this machine or on a machine of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from regard.base.cluster import check_engine, cluster, workers_that_fit
from regard.lab.training.ranks import single_process

#: Environment of a trial. Each trial has one core; more threads would slow the other trials.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
#: The exit status that `look` returns for a process whose machine is lost.
LOST = -signal.SIGKILL
#: Seconds to wait for the answer of a machine of a cluster.
PATIENCE = 30


class Process(Protocol):
    """The methods of the process of a trial."""

    def look(self) -> tuple[int | None, bytes]:
        """Its exit status, None while it runs, and its output since the last call."""
        ...

    def ask_to_stop(self) -> None:
        """Send SIGTERM."""
        ...

    def end(self) -> None:
        """Kill the process."""
        ...


#: Starts the process of a command, whose errors go to a file.
Start = Callable[[list[str], Path], Process]


class LocalProcess:
    """A local process that runs `command`. Its output is read from a pipe; its errors are appended to `log`."""

    def __init__(self, command: list[str], log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                env=single_process(os.environ) | ONE_THREAD,
                start_new_session=True,  # Ctrl-C reaches only the main process, which then stops the others
            )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        os.set_blocking(self._pipe.fileno(), False)

    def look(self) -> tuple[int | None, bytes]:
        code, output = self._process.poll(), b""  # polled before the pipe is read, so no last output is lost
        while not self._pipe.closed and (data := self._pipe.read(1 << 16)):
            output += data
        if code is not None:
            self._pipe.close()
        return code, output

    def ask_to_stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class ClusterProcess:
    """A `LocalProcess` on a machine of a Ray cluster. The folder of the trial must have the same path there.

    It waits, without output, until a processor is free. A call of `look` on the other machine is always under way;
    `look` here returns its result if it has arrived, and begins the next call.
    """

    def __init__(self, ray: Any, command: list[str], log: Path) -> None:
        self._ray = ray
        self._remote = ray.remote(num_cpus=1, max_restarts=0)(LocalProcess).remote(command, log)
        self._answer = self._remote.look.remote()

    def look(self) -> tuple[int | None, bytes]:
        if not self._ray.wait([self._answer], timeout=0)[0]:
            return None, b""
        try:
            code, output = self._ray.get(self._answer)
        except self._ray.exceptions.RayActorError:
            return LOST, b""
        if code is None:
            self._answer = self._remote.look.remote()
        else:
            self._ray.kill(self._remote)  # frees its processor
        return code, output

    def ask_to_stop(self) -> None:
        self._remote.ask_to_stop.remote()

    def end(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):  # already lost
            self._ray.get(self._remote.end.remote(), timeout=PATIENCE)
        self._ray.kill(self._remote)


@dataclass(frozen=True)
class Processors:
    """Where the trials of a comparison run: `start` starts one, `count` run at a time.

    `hardware` names the machine for the report, or the machines of the cluster by their number.
    """

    start: Start
    count: int
    hardware: dict[str, Any]


@contextlib.contextmanager
def processors(engine: str, processes: int | None) -> Iterator[Processors]:
    """The processors for `processes` trials at a time; by default for as many as there are processors."""
    check_engine("compare", engine)
    if engine == "local":
        yield this_machine(processes or cores())
        return
    with cluster("compare") as ray:
        count = workers_that_fit(ray, "compare", processes, 1)
        nodes = sum(node["Alive"] for node in ray.nodes())
        hardware = {"machines": nodes, "cores": int(ray.cluster_resources()["CPU"])}
        yield Processors(partial(ClusterProcess, ray), count, hardware | _shared(count))


def this_machine(count: int = 1) -> Processors:
    """The processors of this machine, for so many trials at a time."""
    return Processors(LocalProcess, count, {"machine": platform.machine(), "cores": cores()} | _shared(count))


def _shared(count: int) -> dict[str, int]:
    return {"processes": count, "threads_per_process": 1}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
