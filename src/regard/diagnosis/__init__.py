"""Diagnosis: `check` finds the mistakes of a user's own attention function, and runs the laws on pieces of Regard."""

from regard.diagnosis.checking import check
from regard.diagnosis.report import CheckFinding, CheckReport

__all__ = ["CheckFinding", "CheckReport", "check"]
