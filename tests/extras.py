"""Where an optional package is not installed, the tests that need it are skipped, and the package is named.

With all of `regard[dev]` installed this plugin skips nothing.
"""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from regard.errors import RegardError

TESTS = Path(__file__).parent


@cache
def missing(path: Path) -> frozenset[str]:
    """Packages that are not installed and that a test module needs at its top, itself or through what it imports."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return frozenset().union(*map(absent, names))


def absent(module: str) -> frozenset[str]:
    """Packages whose absence keeps `module` from being imported."""
    if (TESTS / f"{module}.py").exists():
        return missing(TESTS / f"{module}.py")
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if is_missing(error):
            return frozenset({error.name or module})
        raise
    return frozenset()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_test = collection_path.name.startswith("test_")
    return True if is_test and not_installed() and missing(collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """Skip a test that comes upon a package that is not installed."""
    try:
        return (yield)
    except (ModuleNotFoundError, RegardError) as error:
        if is_missing(error):
            pytest.skip(str(error))
        raise


def is_missing(error: Exception) -> bool:
    """Whether a package is missing; one that is there in a version that will not do is a failure."""
    if isinstance(error, ModuleNotFoundError):
        return find_spec((error.name or "").partition(".")[0] or "regard") is None
    return any(name in not_installed() for name in asked_for(str(error)))


def asked_for(message: str) -> set[str]:
    """The distributions that a message says to install."""
    extras = project_extras()
    names = set()
    for name, inner in re.findall(r"pip install '?([\w.-]*\w)(?:\[([\w,]+)\])?", message):
        names |= (
            set().union(*(distributions(part, extras) for part in inner.split(","))) if name == "regard" else {name}
        )
    return names


@cache
def not_installed() -> frozenset[str]:
    """Distributions of `regard[dev]` that are not here."""
    return frozenset(name for name in distributions("dev", project_extras()) if not is_installed(name))


def project_extras() -> dict[str, list[str]]:
    return tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def distributions(extra: str, extras: dict[str, list[str]]) -> set[str]:
    """The distributions of an extra on this system, through the extras it names."""
    names = set()
    for requirement in map(Requirement, extras[extra]):
        if requirement.name == "regard":
            names = names.union(*(distributions(part, extras) for part in requirement.extras))
        elif requirement.marker is None or requirement.marker.evaluate():
            names.add(requirement.name)
    return names


def is_installed(distribution: str) -> bool:
    try:
        return bool(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return False


def pytest_report_header() -> list[str]:
    left_out = {path.name: missing(path) for path in sorted(TESTS.glob("test_*.py"))} if not_installed() else {}
    return [f"left out: {name} (needs {', '.join(sorted(needs))})" for name, needs in left_out.items() if needs]
