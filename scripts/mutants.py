"""A plugin of pytest for scripts/mutation.py: judges mutants of functions in forks of one process.

A fork exchanges the code of one function and runs the tests that reach it; the tests are collected once.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

FOLDER = Path(os.environ["MUTATION"])


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Judge every mutant that is in a function, as many at a time as there are workers."""
    wish = json.loads((FOLDER / "waiting.json").read_text())
    items = {item.nodeid: item for item in session.items}
    for name in _failing(session.items, wish["workers"]):
        print(f"left out: {name} fails in a fork of the unchanged source", flush=True)
        del items[name]
    running: dict[int, str] = {}
    for mutant in wish["mutants"]:
        exchange = _exchange(mutant)
        if exchange is None or not mutant["tests"]:
            continue
        while len(running) >= wish["workers"]:
            _collect(running)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _judge(exchange, [items[name] for name in mutant["tests"] if name in items], wish["patience"])
        running[child] = mutant["name"]
    while running:
        _collect(running)
    return True


def _failing(items: list[pytest.Item], workers: int) -> list[str]:
    """The tests that fail in a fork without any mutant (they compile, or start threads), which can judge none."""
    known = FOLDER / "failing.json"
    if known.exists():
        return [item.nodeid for item in items if item.nodeid in json.loads(known.read_text())]
    for number in range(workers):
        if os.fork() == 0:
            _be_quiet()
            part = items[number::workers]
            names = [item.nodeid for item in part if any(r.failed for r in runtestprotocol(item, log=False))]
            (FOLDER / f"failing-{number}").write_text(json.dumps(names))
            os._exit(0)
    for _ in range(workers):
        os.wait()
    parts = [FOLDER / f"failing-{number}" for number in range(workers)]
    names = [name for part in parts for name in json.loads(part.read_text())]
    known.write_text(json.dumps(names))
    return names


def _be_quiet() -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)


def _collect(running: dict[int, str]) -> None:
    child, status = os.wait()
    name = running.pop(child)
    verdict = {0: "survived", 1: "killed"}.get(os.waitstatus_to_exitcode(status), "hangs")
    killer = FOLDER / f"killer-{child}"
    by = f"\n            by {killer.read_text()}" if killer.exists() else ""
    killer.unlink(missing_ok=True)
    with (FOLDER / "forked.jsonl").open("a") as file:
        file.write(json.dumps([name, verdict]) + "\n")
    print(f"{verdict:11s} {name}{by}", flush=True)


def _judge(exchange: list[tuple[FunctionType, CodeType]], items: list[pytest.Item], patience: int) -> None:
    """In the fork: exchange the code, run tests until one fails, and end with the verdict."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(patience)
    _be_quiet()
    for function, code in exchange:
        function.__code__ = code
    for item in items:
        if any(report.failed for report in runtestprotocol(item, log=False)):
            (FOLDER / f"killer-{os.getpid()}").write_text(item.nodeid)
            os._exit(1)
    os._exit(0)


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
