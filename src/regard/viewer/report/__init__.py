"""The report of a comparison: Markdown, one page that opens without a network, figures, and all numbers as JSON."""

from regard.viewer.report.writing import write_report

__all__ = ["write_report"]
