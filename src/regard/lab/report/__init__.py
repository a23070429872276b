"""The report of a comparison of translators: Markdown, one HTML page, figures, and all numbers as JSON."""

from regard.lab.report.writing import write_report

__all__ = ["write_report"]
