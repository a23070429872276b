"""Runs the quick tests with the oldest versions that pyproject.toml allows: `make oldest`.

Every lower bound becomes the version that is installed, into an environment of its own (.venv-oldest);
what has no bound is the newest. Arguments are handed to pytest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
VENV = ROOT / ".venv-oldest"
#: Extras that tests run; the peers of the benchmarks and what builds the documentation have no lower bounds.
EXTRAS = ("cli", "hf", "corpus", "lab", "ray", "view", "demo")
#: Slow tests, without which nothing of an extra would be run: those of Ray.
SLOW = ("tests/test_cluster.py",)
#: At the versions of constraints.txt, since they test and are not tested.
TOOLS = ("pytest", "hypothesis", "pytest-xdist")


def floors() -> dict[str, str]:
    """Name -> the oldest version allowed, of everything that has a lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *(r for extra in EXTRAS for r in project["optional-dependencies"][extra])]
    matches = (re.match(r"([\w.-]+)[^>=]*[>=]=([\w.]+)", requirement) for requirement in listed)
    return {match[1]: match[2] for match in matches if match}


def tools() -> list[str]:
    """What runs the tests, as constraints.txt pins it."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line.split("==")[0] in TOOLS]


def install(python: Path) -> None:
    """Make the environment, or bring it to the bounds of today."""
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    oldest = floors()
    constraints = VENV / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in oldest.items()))
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--constraint", str(constraints)]
    subprocess.run([*pip, "torch"], check=True)  # first and alone, so that nothing else chooses its build
    subprocess.run([*pip, "--editable", f"{ROOT}[{','.join(EXTRAS)}]", *tools()], check=True)
    print("Oldest versions:", ", ".join(f"{name} {version}" for name, version in oldest.items()), flush=True)


def main() -> int:
    """Install, run all tests, and return whether some failed."""
    python = VENV / "bin" / "python"
    install(python)
    pytest = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup"]
    runs = [[*pytest, "-m", "not slow and not example", *sys.argv[1:]]]
    if not sys.argv[1:]:
        runs.append([*pytest, *SLOW])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    statuses = [subprocess.run(run, cwd=ROOT, env=environment).returncode for run in runs]
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
