"""`CheckProgress`: which check runs, what was found so far, and the time limit."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from regard.base.errors import RegardError
from regard.diagnosis.report import CheckFinding

#: About as many calls of a function are made; those with masks take more, those that fail fewer.
USUAL_CALLS = 200
#: Called with the name of the check that runs, the number of calls that have returned, and the findings so far.
Tell = Callable[[str, int, tuple[CheckFinding, ...]], object]


class LimitReached(BaseException):
    """The time is over. It is no Exception, so that neither the user's code nor a check takes it for a failed call."""


@dataclass
class CheckProgress:
    """The state of one check: which property is looked at, the findings and calls so far. `limit` is in seconds.

    `tell` gets these at each change. `started` is the time at which the check began, and `is_calling` says whether the
    user's function runs now.
    """

    limit: float | None = None
    tell: Tell = lambda check, calls, findings: None
    check: str = "arguments and axes"
    findings: list[CheckFinding] = field(default_factory=list)
    calls: int = 0
    num_threads: int = field(default_factory=torch.get_num_threads)  # outside of the check, for its times
    started: float = field(default_factory=lambda: time.monotonic())
    is_calling: bool = False
    changed: float = field(default_factory=lambda: time.monotonic())  # when the last call began or returned

    def begin(self, check: str) -> None:
        """The next check runs."""
        self.check = check
        self._tell()

    def add(self, findings: list[CheckFinding]) -> None:
        self.findings += findings
        self._tell()

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """One call of the user's function. The time is checked before and after it."""
        self._stop_if_late()
        self._call_changed(is_calling=True)
        self._tell()
        try:
            yield
        except LimitReached:
            raise  # the call did not return
        except BaseException:
            self._call_changed(is_calling=False)
            raise
        self._call_changed(is_calling=False)
        self._stop_if_late()

    def _call_changed(self, is_calling: bool) -> None:
        """A call begins or has returned."""
        self.calls += not is_calling
        self.is_calling, self.changed = is_calling, time.monotonic()

    def _tell(self) -> None:
        self.tell(self.check, self.calls, tuple(self.findings))

    def _stop_if_late(self) -> None:
        if self.limit is not None and time.monotonic() - self.started >= self.limit:
            raise LimitReached

    @contextmanager
    def limited(self, subject: str) -> Iterator[None]:
        """Ends the block with a `RegardError` when the time is over. `subject` is the name of what is checked.

        In the main thread of Linux and macOS an alarm ends a call that does not return. Elsewhere, and where a program
        has an alarm of its own, the time is checked between calls.
        """
        has_alarm = self.limit is not None and _alarm_is_free()
        try:
            if has_alarm:
                signal.signal(signal.SIGALRM, self._ring)
                signal.setitimer(signal.ITIMER_REAL, self.limit or 0, 1.0)  # again, if the function catches everything
            try:
                yield
            finally:
                if has_alarm:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
        except LimitReached:
            raise RegardError(self._over(subject)) from None

    def _ring(self, number: int, frame: Any) -> None:
        """What the alarm does: it raises in the code that runs at the time."""
        raise LimitReached

    def _over(self, subject: str) -> str:
        """The text of the error when the time is over: where it went, and what was found."""
        now = time.monotonic()
        waited = now - self.changed
        slow = f"{self.calls} calls took {(now - self.started) / max(self.calls, 1):.2g} s each"
        if waited > (now - self.started) / 2:
            slow = f"a call has not returned for {waited:.0f} s, so it may be endless"
            if not self.is_calling:
                slow = f"the search for the mistake has taken {waited:.0f} s since the last call"
        return (
            f"check: {subject}: stopped after {now - self.started:.0f} s, at the check {self.check!r}: {slow}. About "
            f"{USUAL_CALLS} calls are needed. Found so far: {counted_findings(self.findings)}. Make calls faster, or "
            "raise the limit: regard.check(..., limit=600), or --limit 600 for the command, in seconds."
        )


@contextmanager
def of_threads(number: int) -> Iterator[None]:
    """Inside, torch computes in that number of threads; afterwards in as many as before.

    The tensors of a check are small. Several threads save no time on them, and on a busy machine they wait for each
    other: there a check took 40 times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _alarm_is_free() -> bool:
    """Whether an alarm can be set: in the main thread, where the program has no alarm of its own."""
    return (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
        and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    )


def counted_findings(findings: list[CheckFinding] | tuple[CheckFinding, ...]) -> str:
    """The mistakes by name, and how many properties are right, in words."""
    wrong = [finding.mistake for finding in findings if finding.verdict == "wrong"]
    right = sum(finding.verdict == "right" for finding in findings)
    return "; ".join([*wrong, *([f"{right} properties are right"] if right else [])]) or "nothing"
