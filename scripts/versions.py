"""Runs Regard with other versions: `make oldest`, `make newest`, and the table of docs/guides/install.md (`table`).

`oldest` and `newest` run the quick tests in an environment of their own (.venv-oldest, .venv-newest): every lower bound
of pyproject.toml becomes the version that is installed, or everything is the newest. Arguments are handed to pytest.
`table` computes a few small results with each pair in VERSIONS, compares them with formulas, and writes what was right
to the guide. CUDA libraries are not fetched: where the build of torch needs them, empty ones stand in.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from cuda_stubs import write
from version_probe import FEATURES

ROOT = Path(__file__).parent.parent
#: Extras that tests run; the peers of the benchmarks and what builds the documentation have no lower bounds.
EXTRAS = ("cli", "hf", "corpus", "lab", "ray", "view", "demo")
#: Slow tests, without which nothing of an extra would be run: those of Ray.
SLOW = ("tests/engine/test_cluster.py",)
#: At the versions of constraints.txt, since they test and are not tested.
TOOLS = ("pytest", "hypothesis", "pytest-xdist")
#: The rows of the table: torch and transformers.
VERSIONS = (
    *((torch, "5.23.0") for torch in ("2.8.0", "2.9.1", "2.10.0", "2.12.1", "2.13.0", "2.15.0")),
    *(("2.13.0", transformers) for transformers in ("4.57.6", "5.0.0", "5.12.1", "5.15.1", "5.22.2", "5.24.0")),
    ("2.8.0", "4.57.6"),
)
#: Requirements of torch that a machine without a GPU does not need.
OF_CUDA = re.compile(r"^Requires-Dist: (nvidia|cuda|triton).*\n", re.MULTILINE)
GUIDE = ROOT / "docs" / "guides" / "install.md"
TABLE = re.compile(r"(<!-- scripts/versions\.py table -->\n).*?(<!-- end -->)", re.DOTALL)


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


def pip(python: Path | str, *arguments: str) -> None:
    """Install packages."""
    subprocess.run([str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *arguments], check=True)


def without_cuda(site: Path) -> dict[str, str]:
    """The environment variables with which the torch in `site` can be imported."""
    for metadata in site.glob("torch-*.dist-info/METADATA"):
        metadata.write_text(OF_CUDA.sub("", metadata.read_text()))
    stubs = site / "cuda_stubs"
    if (site / "torch" / "lib" / "libtorch_cuda.so").exists() and not stubs.exists():
        write(site, stubs)
    return {"LD_LIBRARY_PATH": str(stubs)} if stubs.exists() else {}


def install(python: Path, mode: str) -> dict[str, str]:
    """Make the environment, or bring it to the versions of today; the variables that its torch needs."""
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    versions = floors() if mode == "oldest" else {}
    constraints = python.parents[1] / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    torch = f"torch=={versions['torch']}" if versions else "torch"
    pip(python, "--upgrade", "--no-deps", torch)  # first and alone, so that nothing else chooses its build
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    )
    variables = without_cuda(Path(site.stdout.strip()))
    eager = ["--upgrade", "--upgrade-strategy", "eager"] if mode == "newest" else []
    pip(python, *eager, "--constraint", str(constraints), "--editable", f"{ROOT}[{','.join(EXTRAS)}]", *tools())
    listed = [str(python), "-m", "pip", "list", "--disable-pip-version-check", "--format", "freeze"]
    found = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
    print(f"{mode}:", ", ".join(line for line in found if line.split("==")[0] in floors()), flush=True)
    return variables


def run_tests(mode: str, arguments: list[str]) -> int:
    """Install, run the quick tests, and return whether some failed."""
    python = ROOT / f".venv-{mode}" / "bin" / "python"
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | install(python, mode)
    pytest = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup"]
    if mode == "oldest":  # old packages call what newer packages deprecate
        pytest += ["-W", "ignore::DeprecationWarning"]
    runs = [[*pytest, "-m", "not slow and not example", *arguments]]
    if not arguments:
        runs.append([*pytest, *SLOW])
    statuses = [subprocess.run(run, cwd=ROOT, env=environment).returncode for run in runs]
    return int(any(statuses))


def overlay(package: str, version: str) -> Path:
    """A folder with one version of a package, which stands before the installed one."""
    folder = ROOT / ".venv-versions" / f"{package}-{version}"
    if not folder.exists():
        alone = ["--no-deps"] if package == "torch" else []
        pip(sys.executable, *alone, "--target", str(folder), f"{package}=={version}")
    return folder


def probe(torch: str, transformers: str) -> dict[str, str]:
    """Feature -> "yes", or why not, with these versions."""
    folders = [overlay("torch", torch), overlay("transformers", transformers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | without_cuda(folders[0])
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [*folders, ROOT / "src"]))
    command = [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "version_probe.py")]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if run.returncode:
        return dict.fromkeys(FEATURES, [f"exit {run.returncode}", *run.stderr.strip().splitlines()][-1])
    return json.loads(run.stdout.splitlines()[-1])


def write_table() -> int:
    """Probe all pairs of versions, and write the table of the guide."""
    rows = [f"| torch | transformers | {' | '.join(FEATURES)} |", "|---|---|" + "---|" * len(FEATURES)]
    for torch, transformers in VERSIONS:
        found = probe(torch, transformers)
        for feature, result in found.items():
            print(f"torch {torch}, transformers {transformers}, {feature}: {result}", flush=True)
        cells = ["yes" if found[feature] == "yes" else "no" for feature in FEATURES]
        rows.append(f"| {torch} | {transformers} | {' | '.join(cells)} |")
    text = "\n".join(rows)
    GUIDE.write_text(TABLE.sub(lambda match: f"{match[1]}{text}\n{match[2]}", GUIDE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(write_table() if sys.argv[1] == "table" else run_tests(sys.argv[1], sys.argv[2:]))
