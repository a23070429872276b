"""Lint, types and tests of the files that differ from a commit, within a minute: `make quick`.

    python scripts/changed.py [--since COMMIT] [--seconds 30]

A changed test file is run whole. For a changed source file, the test files that name its module or one of its public
names are run, the one that names it most often first. When the seconds are over, the tests that are left are not run,
and their number is printed.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def changed_files(since: str) -> list[Path]:
    """Python files that differ from a commit, and those that git does not track yet."""
    commands = (
        ["git", "diff", "--name-only", "--diff-filter=d", since],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    listed = [subprocess.run(c, cwd=ROOT, check=True, capture_output=True, text=True).stdout for c in commands]
    names = sorted({line for text in listed for line in text.splitlines() if line.endswith(".py")})
    return [ROOT / name for name in names]


def public_names(path: Path) -> list[str]:
    """The functions and classes that a module defines for others."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, kinds)]
    return [name for name in defined if not name.startswith("_")]


def module_of(path: Path) -> str:
    """The dotted name of a source file."""
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")


def mentions(path: Path) -> dict[Path, int]:
    """Test file -> how often it names the module of a source file or one of its public names."""
    words = [re.escape(module_of(path)), *map(re.escape, public_names(path))]
    pattern = re.compile(r"\b(?:" + "|".join(words) + r")\b")
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    counts = {test: len(pattern.findall(test.read_text())) for test in tests}
    return {test: count for test, count in counts.items() if count}


def tests_of(files: list[Path]) -> list[str]:
    """What pytest is asked to run: changed tests, examples in docstrings, then test files by number of mentions."""
    changed = [path for path in files if ROOT / "tests" in path.parents and path.name.startswith("test_")]
    sources = [path for path in files if path.is_relative_to(ROOT / "src")]
    examples = [f"tests/front/test_public.py::test_examples_in_docstrings_run[{module_of(path)}]" for path in sources]
    counts: dict[Path, int] = {}
    for path in sources:
        for test, count in mentions(path).items():
            counts[test] = counts.get(test, 0) + count
    others = sorted((test for test in counts if test not in changed), key=lambda test: -counts[test])
    return [*map(str, changed), *(name for name in examples if ".cli" not in name), *map(str, others)]


class Deadline:
    """A plugin of pytest that ends the session when its seconds are over; they begin with the first test."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end: float | None = None
        self.num_run = 0

    def pytest_runtest_setup(self) -> None:
        """Start the clock."""
        self.end = self.end or time.monotonic() + self.seconds

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Stop after this test if the time is over."""
        self.num_run += 1
        if self.end and time.monotonic() > self.end:
            total = len(item.session.items)
            item.session.shouldstop = f"the seconds are over: {total - self.num_run} of {total} tests were not run"


def main() -> int:
    """Return 0 if lint, types and the tests that ran pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default="HEAD", metavar="COMMIT", help="the commit to compare with (HEAD)")
    parser.add_argument("--seconds", type=float, default=30, help="no test begins later (30)")
    options = parser.parse_args()
    files = changed_files(options.since)
    if not files:
        print(f"No Python file differs from {options.since}; --since main compares with another commit.")
        return 0
    bin_folder, names = Path(sys.executable).parent, [str(path) for path in files]
    sources = [name for name in names if Path(name).is_relative_to(ROOT / "src")]
    lint = [[bin_folder / "ruff", "format", "--check", *names], [bin_folder / "ruff", "check", *names]]
    if any(subprocess.run(command, cwd=ROOT).returncode for command in lint):
        return 1
    types = subprocess.Popen([bin_folder / "pyright", *sources], cwd=ROOT) if sources else None
    os.chdir(ROOT)
    tests = tests_of(files)
    plan = ["-q", "-x", "-m", "not slow and not example", *tests]
    status = pytest.main(plan, plugins=[Deadline(options.seconds)]) if tests else 0
    if status == pytest.ExitCode.INTERRUPTED:  # stopped by the deadline; a failure has a status of its own
        status = 0
    return int(status) or (types.wait() if types else 0)


if __name__ == "__main__":
    sys.exit(main())
