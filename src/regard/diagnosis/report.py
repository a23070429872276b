"""`CheckFinding` and `CheckReport`: what `regard.check` returns and prints."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any, Literal

from regard.base.html_table import html_table

Verdict = Literal["right", "wrong", "unknown"]
_SIGNS = {"wrong": "✗ wrong", "unknown": "? unknown", "right": "✓ right"}
#: Properties without which nothing is known of what a function computes.
DECISIVE = ("scores", "steps")


@dataclass(frozen=True)
class CheckFinding:
    """One property of an attention function: `verdict` is right, wrong or unknown.

    `what` is the property, such as "scale". `mistake` names the mistake if the verdict is wrong. `evidence` is what was
    measured, and `remedy` says what to change.

    >>> CheckFinding("scale", "wrong", "The factor is 1.", "Divide by sqrt(d).", "the scores are not scaled").what
    'scale'
    """

    what: str
    verdict: Verdict
    evidence: str
    remedy: str = ""
    mistake: str = ""


@dataclass(frozen=True)
class CheckReport:
    """What `regard.check` found: `findings`, the named `mechanism` that it equals, and `ok`.

    `call` says how the function was called. `equal` has all names of the catalog that give the same weights;
    `mechanism` is the first one, or None. `ok` is True if everything is right, False if there is a mistake, and None if
    what the function should compute was not checked: `unchecked` says what. `print` shows the report as a table.

    >>> report = CheckReport("f", "f(q, k, v)", (CheckFinding("scale", "right", "The factor is 1/sqrt(d)."),))
    >>> print(report)
    f: no mistake found
      called as  f(q, k, v)
      equals     no mechanism of the catalog
    <BLANKLINE>
      right    scale          The factor is 1/sqrt(d).
    """

    subject: str
    call: str
    findings: tuple[CheckFinding, ...]
    equal: tuple[str, ...] = ()

    @property
    def ok(self) -> bool | None:
        return False if self.mistakes else None if self.unchecked else True

    @property
    def unchecked(self) -> tuple[str, ...]:
        """What could not be checked, so that a right report would say too much."""
        return tuple(f.what for f in self.findings if f.what in DECISIVE and f.verdict == "unknown")

    @property
    def mistakes(self) -> tuple[str, ...]:
        """The mistakes by name; empty if none was found. One finding may have two, with "; " between them."""
        wrong = (finding.mistake for finding in self.findings if finding.verdict == "wrong")
        return tuple(mistake for mistakes in wrong for mistake in mistakes.split("; "))

    @property
    def mechanism(self) -> str | None:
        return self.equal[0] if self.equal else None

    @property
    def open_questions(self) -> tuple[str, ...]:
        """What the check could not decide, because it may be intended: the convention of a mask, for example."""
        unknown = (finding.what for finding in self.findings if finding.verdict == "unknown")
        return tuple(what for what in unknown if what not in DECISIVE)

    def as_dict(self) -> dict[str, Any]:
        """All values as a dict that JSON can hold."""
        findings = [asdict(finding) for finding in self.findings]
        names: dict[str, Any] = {"subject": self.subject, "ok": self.ok, "mistakes": list(self.mistakes)}
        names |= {"unchecked": list(self.unchecked), "open_questions": list(self.open_questions)}
        names |= {"mechanism": self.mechanism, "equal": list(self.equal)}
        return names | {"call": self.call, "findings": findings}

    def _repr_html_(self) -> str:
        """A table for notebooks: mistakes first, each with its remedy."""
        rows = [(_SIGNS[f.verdict], f.what, "\n".join(filter(None, (_said(f), f.remedy)))) for f in self._by_verdict()]
        title = f"{self.subject}: {_counted(self.mistakes, self.unchecked)}{_asked(self.open_questions)}"
        return html_table(title, (), rows)

    def _by_verdict(self) -> list[CheckFinding]:
        """The findings with the mistakes first, and what is right last."""
        order = {"wrong": 0, "unknown": 1, "right": 2}
        return sorted(self.findings, key=lambda finding: order[finding.verdict])

    def __repr__(self) -> str:
        return str(self)  # what the prompt of Python shows

    def __str__(self) -> str:
        others = f" (the same weights here: {', '.join(self.equal[1:])})" if self.equal[1:] else ""
        equals = f"{self.mechanism}{others}" if self.equal else "no mechanism of the catalog"
        head = [
            f"{self.subject}: {_counted(self.mistakes, self.unchecked)}{_asked(self.open_questions)}",
            *_wrapped("  called as  ", self.call),
            *_wrapped("  equals     ", equals),
            "",
        ]
        rows = [_row(finding) for finding in self._by_verdict()]
        return "\n".join([*head, *rows])


def _counted(mistakes: tuple[str, ...], unchecked: tuple[str, ...]) -> str:
    """How many mistakes there are and which, in words; or what was not checked."""
    if unchecked and not mistakes:
        return f"not checked: {', '.join(unchecked)}"
    found = {0: "no mistake found", 1: "1 mistake"}.get(len(mistakes), f"{len(mistakes)} mistakes")
    return f"{found}: {'; '.join(mistakes)}" if mistakes else found


def _asked(questions: tuple[str, ...]) -> str:
    """The questions that the user decides, as the end of a title; empty if there are none."""
    return f"; for you to decide: {', '.join(questions)}" if questions else ""


def _said(finding: CheckFinding) -> str:
    """The mistake of a finding, if it has one, as a sentence before the evidence."""
    mistake = f"{finding.mistake[0].upper()}{finding.mistake[1:]}. " if finding.mistake else ""
    return mistake + finding.evidence


def _row(finding: CheckFinding) -> str:
    """The lines of one finding in the printed report: verdict, property and evidence, then the remedy."""
    lines = _wrapped(f"  {finding.verdict:<8} {finding.what:<14} ", _said(finding))
    return "\n".join([*lines, *(_wrapped(" " * 26 + "-> ", finding.remedy) if finding.remedy else [])])


def _wrapped(first: str, text: str, width: int = 100) -> list[str]:
    """Lines of `text` behind `first`; the later lines start below the text."""
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=" " * len(first)) or [first.rstrip()]
