"""`pytest -n N`: N forks of one process run the tests that it has collected.

So importing torch, transformers and jax and collecting all tests (20 s) are paid once, and not in each worker. A unit
of work is a file, or a group that tests are marked with: one worker runs it, in order. The longest start first.
"""

from __future__ import annotations

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
#: The ring waits for turns of the processor, so its processes take minutes beside two busy workers: it starts first.
SECONDS = {
    "ring": 400,
    "tests/project/test_pages.py": 170,
    "tests/laws/test_laws.py": 100,
    "tests/laws/test_mask_laws.py": 90,
    "tests/diagnosis/test_check.py": 80,
    "tests/engine/test_flex.py": 80,
    "tests/diagnosis/test_likeness.py": 75,
    "tests/lab/test_training_processes.py": 66,
    "tests/project/test_machines.py": 60,
    "tests/engine/test_kernel_processes.py": 50,
    "tests/laws/test_accelerator.py": 45,
    "tests/project/test_docs.py": 40,
    "tests/front/test_types.py": 40,
    "tests/lab/test_report.py": 35,
    "tests/viewer/test_page_browser.py": 35,
    "tests/viewer/test_page.py": 30,
    "tests/viewer/test_page_heads.py": 30,
    "tests/viewer/test_page_picture.py": 30,
    "tests/laws/test_transforms.py": 25,
    "tests/viewer/test_page_access.py": 25,
    "tests/viewer/test_page_faults.py": 25,
    "tests/lab/test_training_ranks.py": 25,
    "tests/hf/test_compiled.py": 25,
    "tests/maps/test_map_tensors.py": 25,
    "tests/laws/test_combinations.py": 20,
    "tests/base/test_junk_calls.py": 20,
    "tests/base/test_extras.py": 20,
    "wheel": 20,
    "tests/engine/test_kernel_chosen.py": 15,
    "tests/engine/test_kernel_library.py": 15,
    "tests/laws/test_long_combinations.py": 15,
    "tests/engine/test_kernel_folds.py": 15,
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
