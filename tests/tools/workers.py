"""`pytest -n N`: N forks of one process run the tests that it has collected.

So importing torch, transformers and jax and collecting all tests (20 s) are paid once, and not in each worker. A unit
of work is a file, or a group that tests are marked with: one worker runs it, in order. The longest start first.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import warnings
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace

import pytest

#: Processor seconds of the files and groups that take longer than their number of tests says; rough ones will do.
SECONDS = {
    "ring": 80,  # its two processes wait for turns of the processor
    "tests/engine/test_flex.py": 75,
    "tests/project/test_pages.py": 65,
    "tests/diagnosis/test_likeness.py": 63,
    "tests/laws/test_mask_laws.py": 63,
    "tests/diagnosis/test_check.py": 60,
    "tests/laws/test_laws.py": 50,
    "tests/laws/test_accelerator.py": 45,
    "tests/front/test_types.py": 40,
    "tests/cli/test_exercises.py": 33,
    "tests/viewer/test_page_access.py": 32,
    "tests/maps/test_map_tensors.py": 31,
    "tests/hf/test_compiled.py": 26,
    "tests/viewer/test_page_browser.py": 25,
    "tests/lab/test_training_processes.py": 24,
    "tests/lab/test_report.py": 24,
    "tests/viewer/test_page_heads.py": 24,
    "tests/engine/test_kernel_processes.py": 23,
    "tests/viewer/test_page_faults.py": 23,
    "wheel": 20,
    "tests/viewer/test_page_first.py": 19,
    "tests/lab/test_training_resume.py": 18,
    "tests/laws/test_transforms.py": 17,
    "tests/viewer/test_page_live.py": 17,
    "tests/laws/test_gradients_of_calls.py": 16,
    "tests/hf/test_layer_numbers.py": 16,
    "tests/viewer/test_page_numbers.py": 16,
    "tests/project/test_gpu_benchmark.py": 15,
    "tests/project/test_tutorial_rows.py": 15,
    "tests/edits/test_edit_batches.py": 15,
    "tests/cli/test_cli.py": 15,
}
FORK = multiprocessing.get_context("fork") if hasattr(os, "fork") else None


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("workers")
    # Only pytest itself may call an option by one small letter, says the public method.
    group._addoption("-n", dest="workers", type=int, default=0, help="run the tests in so many processes")


def units(items: list[pytest.Item]) -> deque[list[int]]:
    """The numbers of the items of each unit of work, the longest unit first."""
    found: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        group = item.get_closest_marker("group")
        found.setdefault(group.args[0] if group else item.nodeid.partition("::")[0], []).append(number)
    longest_first = sorted(found.items(), key=lambda unit: -SECONDS.get(unit[0], 0.04 * len(unit[1])))
    return deque(numbers for _, numbers in longest_first)


@dataclass
class Worker:
    """A process that runs units, as the one that started it sees it."""

    process: multiprocessing.Process
    connection: Connection
    unit: list[int] = field(default_factory=list)  # what it has not yet finished

    @classmethod
    def start(cls, session: pytest.Session, others: list[Worker]) -> Worker:
        ours, theirs = FORK.Pipe()
        open_here = [ours, *(worker.connection for worker in others)]
        process = FORK.Process(target=work, args=(session, theirs, open_here))
        process.start()
        theirs.close()
        return cls(process, ours)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.option.workers
    if not count or FORK is None or session.config.option.collectonly or session.testsfailed:
        return None
    assert threading.active_count() == 1, "a fork would lose the threads that importing the tests has started"
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)  # of jax, which has started none
    session.config._tmp_path_factory.getbasetemp()  # each worker has a folder in it
    waiting, workers = units(session.items), []
    try:
        while waiting or workers:
            while waiting and len(workers) < count:
                workers.append(Worker.start(session, workers))
            for connection in wait([worker.connection for worker in workers]):
                listen(session, workers, waiting, connection)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
    finally:
        for worker in workers:
            worker.process.terminate()
        gc.freeze()  # else pytest and Python, as they end, look for garbage among the 19,000 tests: 5 s
    return True


def listen(session: pytest.Session, workers: list[Worker], waiting: deque[list[int]], connection: Connection) -> None:
    """Do what a worker asks for; where it has ended within a test, that test has failed, and the others wait again."""
    worker = next(worker for worker in workers if worker.connection is connection)
    try:
        follow(session, worker, waiting, *connection.recv())
    except EOFError:
        workers.remove(worker)
        worker.process.join()
        assert worker.unit or worker.process.exitcode == 0, "what fixtures of the session do at their end has failed"
        if worker.unit:
            report_end(session, worker)
            waiting.extendleft([worker.unit[1:]] if worker.unit[1:] else [])


def follow(session: pytest.Session, worker: Worker, waiting: deque[list[int]], kind: str, told: object) -> None:
    """Do what a worker asks for: the next unit of work, or that others hear of what it has done."""
    hook = session.config.hook
    if kind == "unit":
        worker.unit = list(waiting.popleft()) if waiting else []
        worker.connection.send(worker.unit)
    elif kind == "warning":
        hook.pytest_warning_recorded.call_historic(kwargs=told)
    else:
        worker.unit.pop(0)
        for data in told:
            hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=session.config, data=data))


def report_end(session: pytest.Session, worker: Worker) -> None:
    """The test within which a worker has ended has failed."""
    item = session.items[worker.unit[0]]
    words = f"the process of this test ended with status {worker.process.exitcode}"
    report = pytest.TestReport(item.nodeid, item.location, {}, "failed", words, "call")
    session.config.hook.pytest_runtest_logreport(report=report)


class Reporter:
    """Sends what the plugins of a worker are told to the process that started it."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config, self.connection, self.reports = config, connection, None
        config.pluginmanager.register(self)
        self.reports = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_runtest_logfinish(self) -> None:
        self.connection.send(("reports", self.reports))
        self.reports = []

    def pytest_warning_recorded(self, warning_message, when, nodeid, location) -> None:
        if self.reports is None:  # pytest repeats earlier warnings to each new plugin
            return
        message = f"{warning_message.category.__name__}: {warning_message.message}"
        plain = warnings.WarningMessage(message, UserWarning, warning_message.filename, warning_message.lineno)
        told = {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}
        self.connection.send(("warning", told))


def work(session: pytest.Session, connection: Connection, of_others: list[Connection]) -> None:
    """Run units until there is none left, in a process of its own."""
    for other in of_others:
        other.close()
    config = session.config
    config.pluginmanager.unregister(name="terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")
    capture.read_global_capture()
    capture.stop_global_capturing()  # a file that all processes would write to
    capture.start_global_capturing()
    Reporter(config, connection)
    factory = config._tmp_path_factory
    factory._basetemp = factory.getbasetemp() / f"worker-{os.getpid()}"
    factory._basetemp.mkdir()
    between = SimpleNamespace(listchain=lambda: [session])  # what stays set up after a unit
    while True:
        connection.send(("unit", None))
        unit = [session.items[number] for number in connection.recv()]
        if not unit:
            break
        for item, following in zip(unit, [*unit[1:], between], strict=True):
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    capture.stop_global_capturing()
    session._setupstate.teardown_exact(None)
