"""Runs the quick tests under every setting that must not change a result: `make settings`.

The settings are the vector width, the number of threads, ignored signals, a user without root, and an environment
without the optional packages. Each run has several of them, and an empty home. A run that fails does not stop the
others, and every run leaves its log in .settings/. Arguments are handed to pytest; `--only` takes a part of the names
of runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[1]
LOGS = ROOT / ".settings"
QUICK = ("-q", "-n", "2", "--dist", "loadgroup", "-m", "not slow and not example", "-p", "no:cacheprovider")
#: Vector widths that torch has kernels for, the narrowest first; Regard's own kernels take the same.
CAPABILITIES = ("default", "avx2", "avx512")
#: What the quick tests cannot do without; the optional packages are all others.
BARE = ("numpy", "pytest", "pytest-xdist", "hypothesis")
#: The user and group "nobody".
NOBODY = 65534
OF_NOBODY = {"user": NOBODY, "group": NOBODY, "extra_groups": []}


@dataclass(frozen=True)
class Run:
    """One run of the quick tests."""

    capability: str
    threads: int
    signals_ignored: bool = False
    without_root: bool = False
    without_extras: bool = False

    @property
    def name(self) -> str:
        words = [f"{self.capability} vectors", f"{self.threads} thread" + "s" * (self.threads > 1)]
        words += ["signals ignored"] * self.signals_ignored + ["without root"] * self.without_root
        return ", ".join(words + ["without extras"] * self.without_extras)

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name.replace(', ', '-').replace(' ', '-')}.log"


RUNS = (
    Run("default", 1, signals_ignored=True),
    Run("avx2", 2, without_root=True),
    Run("avx512", 4),
    Run("avx2", 1, without_extras=True),
)


def available() -> tuple[str, ...]:
    """The capabilities that this processor has; torch takes the word of ATEN_CPU_CAPABILITY and would crash."""
    import torch

    widest = torch.backends.cpu.get_cpu_capability().lower()
    return CAPABILITIES[: CAPABILITIES.index(widest) + 1] if widest in CAPABILITIES else ("default",)


def bare_python(work: Path) -> Path:
    """Python of an environment without the optional packages."""
    subprocess.run([sys.executable, "-m", "venv", str(work / "bare")], check=True)
    python = work / "bare" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-qq", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "torch"], check=True)  # first and alone, so that nothing else chooses its build
    subprocess.run([*pip, *BARE], check=True)
    return python


def python_for_nobody(work: Path) -> Path:
    """This Python, or a copy of it with the same packages where it lies in a folder that others may not enter."""
    if nobody_can_run(sys.executable):
        return Path(sys.executable)
    base = Path(sys.base_prefix)
    leave_out = shutil.ignore_patterns("site-packages", "test", "share", "*.a")
    shutil.copytree(base, work / "python", symlinks=True, ignore=leave_out)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    environment = work / "venv"
    subprocess.run([work / "python" / "bin" / version, "-m", "venv", "--without-pip", environment], check=True)
    ours, theirs = (Path(prefix) / "lib" / version / "site-packages" for prefix in (sys.prefix, environment))
    (theirs / "ours.pth").write_text(f"{ours}\n")
    return environment / "bin" / "python"


def nobody_can_run(python: str) -> bool:
    """Whether that user may run it and read its library."""
    try:
        return subprocess.run([python, "-c", ""], stderr=subprocess.DEVNULL, **OF_NOBODY).returncode == 0
    except OSError:
        return False


def folder_of_nobody(work: Path) -> Path:
    """A home that nobody may write to, in a folder that it may enter."""
    home = work / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    work.chmod(0o755)
    return home


def command_of(run: Run, work: Path, arguments: list[str]) -> tuple[list[str], dict]:
    """The command of a run, and what `Popen` is told."""
    python, told, empty = Path(sys.executable), {}, work / "empty"
    empty.mkdir()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": str(run.threads),
        "OMP_WAIT_POLICY": "passive",  # threads of two processes share the cores
        "ATEN_CPU_CAPABILITY": run.capability,
        "REGARD_KERNEL": run.capability.replace("default", "baseline"),
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),  # programs compiled in another setting are not taken
        "HOME": str(empty),
        "XDG_CACHE_HOME": str(empty / "cache"),
    }
    if run.without_extras:
        python = bare_python(work)
    if run.signals_ignored:
        told["preexec_fn"] = ignore_signals
    if run.without_root and os.geteuid() == 0:
        python, home = python_for_nobody(work), str(folder_of_nobody(work))
        told |= OF_NOBODY
        environment |= dict.fromkeys(
            ("HOME", "TMPDIR", "HYPOTHESIS_STORAGE_DIRECTORY", "TORCHINDUCTOR_CACHE_DIR"), home
        )
        environment["LD_LIBRARY_PATH"] = str(work / "python" / "lib")  # the copy may be linked to its own library
    return [str(python), "-m", "pytest", *QUICK, *arguments], told | {"env": environment}


def ignore_signals() -> None:
    """As a shell without job control starts what it runs in the background, under nohup."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def passes(run: Run, arguments: list[str]) -> bool:
    """Run pytest; its output goes to the log, and from there to the terminal."""
    print(f"== {run.name}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, run.log.open("w") as log, run.log.open() as reader:
        try:
            command, told = command_of(run, Path(folder), arguments)
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, **told
            )
        except (OSError, subprocess.CalledProcessError) as error:
            print(error, file=log)
            return False
        follow(process, reader)
    print(f"== {run.name}: {(time.monotonic() - began) / 60:.1f} minutes, log in {run.log}", flush=True)
    return process.returncode == 0


def follow(process: subprocess.Popen, reader: TextIO) -> None:
    """Show a log until the process has ended; what it leaves running may hold the log open."""
    try:
        while process.poll() is None:
            time.sleep(1)
            print(reader.read(), end="", flush=True)
    finally:
        process.kill()
        process.wait()
    print(reader.read(), end="")


def main() -> int:
    """Run what was chosen, and name the runs that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the names of the runs to do")
    options, arguments = parser.parse_known_args()
    LOGS.mkdir(exist_ok=True)
    here, failed = available(), []
    for run in RUNS:
        if options.only not in run.name:
            continue
        if run.capability not in here:
            print(f"This processor has no {run.capability} vectors; the run has {here[-1]} ones.")
            run = replace(run, capability=here[-1])
        if not passes(run, arguments):
            failed.append(run)
    for run in failed:
        print(f"failed: {run.name} ({run.log})")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
