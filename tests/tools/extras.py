"""Where an optional package is not installed, or transformers is an older one, the tests that need more are skipped.

The reason names the package or the name that is not there. With all of `regard[dev]` installed at the versions of
constraints.txt, or newer, this plugin skips nothing. A name that Regard itself misses is a failure with any version.
"""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb

import pytest
from packaging.requirements import Requirement

import regard
from regard.base.errors import RegardError
from regard.base.versions import numbers

#: What transformers says of a name or an option that it has not yet.
NAMES = (
    r"<?module '?transformers\b.* has no attribute|.*AttentionInterface'.* has no attribute 'get_interface'"
    r"|\w+ does not support an attention impl|Unknown quantization backend"
)
#: How Regard refuses what an older transformers cannot do, and the version that can.
REFUSALS = {
    r"needs transformers 5\.15 or newer": "5.15",
    r"needs transformers 5\.[01] or newer": "5.1",
    r"T5Attention computes several recurrences in its module, or computes its weights itself": "5.15",
    r"does not call transformers' attention interface|did not use the attention interface|cannot be pruned": "5.1",
    r"computes ScaledDotProductFlashAttentionForCpu outside of its norms": "5.1",
    r"in the code of another transformers than 5\.23|are not as in transformers 5\.23": "5.23",
}
TOOLS, SOURCE = Path(__file__).parent, Path(regard.__file__).parent
#: The transformers of constraints.txt, for which the tests were written.
PINNED = numbers(
    re.search(r"^transformers==(.+)$", (TOOLS.parents[1] / "constraints.txt").read_text(), re.MULTILINE)[1]
)


@cache
def missing(path: Path) -> frozenset[str]:
    """Packages that are not installed and that a test module needs at its top, itself or through what it imports."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return frozenset().union(*(absent(name, path.parent) for name in names))


def absent(module: str, folder: Path) -> frozenset[str]:
    """Packages whose absence keeps a test of `folder` from importing `module`."""
    for own in (TOOLS, folder):
        if (own / f"{module}.py").exists():
            return missing(own / f"{module}.py")
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
    """Skip a test that comes upon a package that is not installed, or upon what transformers has not yet."""
    try:
        return (yield)
    except (ImportError, AttributeError, ValueError) as error:  # RegardError is a ValueError
        if is_missing(error) or is_newer(error):
            pytest.skip(str(error))
        raise


pytest_runtest_setup = pytest_runtest_call


def is_missing(error: Exception) -> bool:
    """Whether a package is missing; one that is there in a version that will not do is a failure."""
    if isinstance(error, ModuleNotFoundError):
        return find_spec((error.name or "").partition(".")[0] or "regard") is None
    return isinstance(error, RegardError) and any(name in not_installed() for name in asked_for(str(error)))


def is_newer(error: Exception, installed: str | None = None) -> bool:
    """Whether a test needs a newer transformers: `installed` lacks a name or a backend, or Regard refuses it."""
    if not is_installed("transformers"):
        return False
    here = numbers(installed or metadata.version("transformers"))
    if isinstance(error, RegardError):
        refused = [version for pattern, version in REFUSALS.items() if re.search(pattern, str(error))]
        return any(here < numbers(version) for version in refused)
    is_name = re.match(NAMES, str(error))
    is_module = isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "transformers"
    return bool(is_name or is_module) and here < PINNED and not concerns_regard(error)


def older_than(version: str) -> bool:
    """Whether the transformers that is installed is older."""
    return is_installed("transformers") and numbers(metadata.version("transformers")) < numbers(version)


def needs_transformers(version: str, why: str) -> pytest.MarkDecorator:
    """Skips a test of what older transformers do not have."""
    return pytest.mark.skipif(older_than(version), reason=f"transformers {version}: {why}")


def concerns_regard(error: Exception) -> bool:
    """Whether code of Regard was running when the error came."""
    files = [Path(frame.f_code.co_filename) for frame, _ in walk_tb(error.__traceback__)]
    return any(SOURCE in file.parents for file in files)


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
    return tomllib.loads((TOOLS.parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]


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
    left_out = {path.name: missing(path) for path in sorted(TOOLS.parent.rglob("test_*.py"))} if not_installed() else {}
    return [f"left out: {name} (needs {', '.join(sorted(needs))})" for name, needs in left_out.items() if needs]
