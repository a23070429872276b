"""A plugin of pytest for scripts/mutation.py: which test runs which line of the source, and how long it takes."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from pathlib import Path

import coverage
import pytest

SOURCE = Path(__file__).parents[1] / "src"
COVERAGE = coverage.Coverage(data_file=None, include=[f"{SOURCE}/*"], config_file=False)
COVERAGE.start()
SECONDS: dict[str, float] = {}
FAILED: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None):
    """Give the lines that run from here on to this test."""
    COVERAGE.switch_context(item.nodeid)
    start = time.perf_counter()
    try:
        return (yield)
    finally:
        SECONDS[item.nodeid] = time.perf_counter() - start


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what fails without any mutant, so that it judges none; pytest names it at the end."""
    if report.failed:
        FAILED.add(report.nodeid)


def pytest_sessionfinish() -> None:
    """Write `{file:line: {test: seconds}}`."""
    COVERAGE.stop()
    data, tests = COVERAGE.get_data(), defaultdict(dict)
    for file in data.measured_files():
        name = Path(file).relative_to(SOURCE)
        for line, contexts in data.contexts_by_lineno(file).items():
            tests[f"{name}:{line}"] |= {
                test: SECONDS[test] for test in contexts if test in SECONDS and test not in FAILED
            }
    Path(os.environ["REACHED"]).write_text(json.dumps(tests))
