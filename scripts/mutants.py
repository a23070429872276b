"""A plugin of pytest for scripts/mutation.py: judges mutants of functions in forks of one process.

A fork exchanges the code of one function and runs the tests that reach it; the tests are collected once. A test that
kills must pass in a fork without the mutant; otherwise it is named and left out, and the mutant is judged again.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

FOLDER = Path(os.environ["MUTATION"])
FAILED: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what fails."""
    if report.failed:
        FAILED.add(report.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Judge every mutant that is in a function, as many at a time as there are workers."""
    wish = json.loads((FOLDER / "waiting.json").read_text())
    Court({item.nodeid: item for item in session.items}, wish).judge_all()
    return True


class Court:
    """The tests, the mutants that wait for a verdict, and the forks that run."""

    def __init__(self, items: dict[str, pytest.Item], wish: dict[str, Any]) -> None:
        self.items, self.patience, self.workers = items, wish["patience"], wish["workers"]
        self.waiting = [mutant for mutant in wish["mutants"] if mutant["tests"]]
        self.count, self.judged = wish["count"], wish["count"] - len(wish["mutants"])
        self.running: dict[int, dict[str, Any]] = {}
        self.passing: dict[str, bool] = {}

    def judge_all(self) -> None:
        """Write a verdict on each; those that change what runs at import are left to scripts/mutation.py."""
        while self.waiting or self.running:
            if self.waiting and len(self.running) < self.workers:
                mutant = self.waiting.pop(0)
                exchange = _exchange(mutant)
                if exchange is not None:
                    items = [self.items[name] for name in mutant["tests"] if self.passing.get(name, True)]
                    self.running[self._fork(lambda: _first_failure(exchange, items))] = mutant  # noqa: B023 - forks at once
            else:
                self._collect()

    def _fork(self, run: Callable[[], str]) -> int:
        """A process that runs this, writes what it returns to a file of its own, and ends; 1: it returned something."""
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(self.patience)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        status = 3
        try:
            found = run()
            (FOLDER / f"killer-{os.getpid()}").write_text(found)
            status = 1 if found else 0
        finally:
            os._exit(status)

    def _collect(self) -> None:
        child, status = os.wait()
        mutant = self.running.pop(child)
        path = FOLDER / f"killer-{child}"
        killer = path.read_text() if path.exists() else ""
        path.unlink(missing_ok=True)
        if killer and not self._passes(killer):
            print(f"left out: {killer} fails in a fork of the unchanged source", flush=True)
            self.waiting.insert(0, mutant)
            return
        code = os.waitstatus_to_exitcode(status)
        verdict = {0: "survived", 1: "killed", -signal.SIGALRM: "hangs"}.get(code, "crashes")
        self.judged += 1
        with (FOLDER / "verdicts.jsonl").open("a") as file:
            file.write(json.dumps([mutant["name"], {"verdict": verdict, "by": killer}]) + "\n")
        print(f"[{self.judged}/{self.count}] {verdict:8s} {mutant['name']}", flush=True)
        if killer:
            print(f"{'':10s}by {killer}", flush=True)

    def _passes(self, name: str) -> bool:
        """Whether a test passes in a fork without a mutant."""
        if name not in self.passing:
            child = self._fork(lambda: _first_failure([], [self.items[name]]))
            _, status = os.waitpid(child, 0)
            (FOLDER / f"killer-{child}").unlink(missing_ok=True)
            self.passing[name] = status == 0
        return self.passing[name]


def _first_failure(exchange: list[tuple[FunctionType, CodeType]], items: list[pytest.Item]) -> str:
    """In a fork: exchange the code, and run tests until one fails; its name, or nothing."""
    for function, code in exchange:
        function.__code__ = code
    for item in items:
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None)  # with the filters of warnings that it asks for
        if item.nodeid in FAILED:
            return item.nodeid
    return ""


def _exchange(mutant: dict[str, Any]) -> list[tuple[FunctionType, CodeType]] | None:
    """The functions that a mutant changes, each with its new code; None: it changes what runs at import."""
    path = Path(sys.modules["regard"].__path__[0]).parent / mutant["file"]
    original = path.read_bytes()
    changed = original[: mutant["start"]] + mutant["after"].encode() + original[mutant["stop"] :]
    old, new = (dict(_functions(compile(text, str(path), "exec"))) for text in (original, changed))
    inside = [key for key in old if old[key] != new.get(key, old[key])]
    if not inside:
        return None
    known = {code: new[key] for key in inside for code in [old[key]]}
    live = [function for function in gc.get_objects() if type(function) is FunctionType]  # asks no __class__
    found = [(function, known[function.__code__]) for function in live if function.__code__ in known]
    return found or None


def _functions(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    """The outermost functions of a module, with those of its classes."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 0x2:  # CO_NEWLOCALS: a function, and no class
                yield (constant.co_qualname, constant.co_firstlineno), constant
            else:
                yield from _functions(constant)
