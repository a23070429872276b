"""Errors of the user's function: where they were raised, and with which inputs."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

#: Folders of code that is not the user's.
_LIBRARIES = (
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
)


class ProgramEnded(Exception):
    """The user's function raised SystemExit, which would end the check without a word."""


@dataclass(frozen=True)
class FailedCall:
    """One call that raised: the inputs with their shapes, and the error with its line."""

    inputs: str
    error: str

    @classmethod
    def of(cls, error: Exception, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> FailedCall:
        """`shapes` are names and shapes of the inputs. Of `ProgramEnded` the SystemExit that caused it is named."""
        cause = error.__cause__ if isinstance(error, ProgramEnded) and error.__cause__ else error
        message = f"{type(cause).__name__}: {short_message(cause, 110)}".removesuffix(": ")
        return cls(", ".join(f"{name} {shape}" for name, shape in shapes), message + place_of(error))


def short_message(error: BaseException, most: int = 120) -> str:
    """The message of an error in one line of at most so many characters."""
    return " ".join(str(error).split())[:most]


def listed(failed: Iterable[FailedCall]) -> str:
    """A line for each error, with the inputs that raised it first. Errors that differ in numbers are one."""
    by_error: dict[str, list[FailedCall]] = {}
    for call in dict.fromkeys(failed):
        by_error.setdefault(re.sub(r"\d+", "#", call.error), []).append(call)
    calls = [(same[0], f", and {len(same) - 1} more" if len(same) > 1 else "") for same in by_error.values()]
    return "\n".join(f"  {first.inputs}{more}: {first.error}" for first, more in calls)


def is_not_written(failed: Iterable[FailedCall]) -> bool:
    """Whether the first call met an empty function: one that raises NotImplementedError, or returns None."""
    return next((call.error.startswith("NotImplementedError") for call in failed), False)


def place_of(error: BaseException) -> str:
    """The last line of the user's code that was running, as " (mine.py, line 3)"; empty if there is none."""
    cause = error.__cause__ if isinstance(error, ProgramEnded) and error.__cause__ else error
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if not _is_of_library(frame.filename)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _is_of_library(file: str) -> bool:
    """Whether a file is not the user's. Code that numpy or Python made has a name in place of a file."""
    return file.startswith(("<frozen", "<__array", *(f"{folder}/" for folder in _LIBRARIES)))
