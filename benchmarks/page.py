"""`python -m benchmarks.page FILE.json ...`: all measured goals as one table in docs/development/benchmarks.md.

The files are those of `python -m benchmarks --json FILE`. All are of one commit; each processor and vector width has a
column of its own. Missed goals come first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measure import Goal
from benchmarks.report import Report
from benchmarks.runner import Line, Row
from regard.base.errors import RegardError
from regard.base.whole_files import write_whole

PAGE = Path(__file__).resolve().parents[1] / "docs" / "development" / "benchmarks.md"
#: What stands between two lines of the page: the first and the last of them.
MARKS = "<!-- python -m benchmarks.page -->", "<!-- end of python -m benchmarks.page -->"
#: The most machines whose figures stand side by side.
MOST_MACHINES = 3


@dataclass
class Entry:
    """A line of the table: one goal, or one peer without a goal, with what each machine measured."""

    work: str
    against: str
    goals: dict[str, str] = field(default_factory=dict)
    cells: dict[str, str] = field(default_factory=dict)
    shares: dict[str, str] = field(default_factory=dict)
    is_missed: bool = False


def column_of(report: Report) -> str:
    """The processor, the vector width of the kernels, and the threads if there are several."""
    machine = report.machine
    threads = "" if machine.threads == 1 else f", {machine.threads} threads"
    return f"{machine.name}, {machine.kernel or machine.device}{threads}"


def entries(reports: Iterable[Report]) -> list[Entry]:
    """The lines of all reports, those with a missed goal first, then those with a goal."""
    found: dict[tuple[str, str, str], Entry] = {}
    reports = list(reports)
    measured = {(column_of(report), row.work) for report in reports for row in report.rows if not row.broken}
    for report in reports:
        column = column_of(report)
        for row in report.rows:
            if row.broken and (column, row.work) in measured:
                continue  # no time was left for it in this file, and another file has it
            for against, goal, text, memory in _results(row):
                key = row.work, against, goal.unit if goal else memory
                entry = found.setdefault(key, Entry(row.work, against))
                if goal is not None:
                    entry.goals[column] = goal.wanted
                entry.is_missed |= goal is not None and not goal.holds
                entry.cells[column] = f"**{text}**" if goal is not None and not goal.holds else text
                entry.shares[column] = _share(row)
    return sorted(found.values(), key=lambda entry: (not entry.is_missed, not entry.goals))


def _results(row: Row) -> Iterator[tuple[str, Goal | None, str, str]]:
    """The peer, the goal if there is one, and the measured number of each result of a row; why there is none."""
    if row.broken:
        yield "", None, row.broken, "broken"
    for goal in row.goals:
        yield "", goal, _measured(goal), ""
    for line in row.lines:
        for goal in line.goals:
            yield line.name, goal, _measured(goal), ""
        if not line.goals and line.ratio is not None:
            yield line.name, None, _ratio(line), ""
        if row.memory is not None and line.memory is not None and not any("memory" in g.unit for g in line.goals):
            yield line.name, None, f"{row.memory:,.0f}; {line.memory:,.0f} MiB", "memory"


def _measured(goal: Goal) -> str:
    return f"{goal.measured:,.0f}" if goal.measured >= 100 else f"{goal.measured:.3g}"


def _ratio(line: Line) -> str:
    assert line.ratio is not None
    return f"{line.ratio:.3g} x faster"


def _share(row: Row) -> str:
    shares = (row.multiply_adds, "multiply-adds"), (row.reading, "reading")
    return ", ".join(f"{share:.0f} % of {limit}" for share, limit in shares if share is not None)


def table(reports: list[Report]) -> str:
    """The conditions of the runs, how many goals hold, and the table."""
    commits = sorted({report.commit for report in reports})
    if len(commits) > 1:
        raise RegardError(f"benchmarks.page: the files are of the commits {', '.join(commits)}; measure all at one.")
    columns = list(dict.fromkeys(map(column_of, reports)))
    if len(columns) > MOST_MACHINES:
        raise RegardError(
            f"benchmarks.page: the files are of {len(columns)} machines ({'; '.join(columns)}), more than "
            f"{MOST_MACHINES}. Leave some out."
        )
    lines = entries(reports)
    parts = [_conditions(reports, columns), _counts(reports, columns), "\n".join(_rows(lines, columns))]
    return "\n\n".join(parts)


def _conditions(reports: list[Report], columns: list[str]) -> str:
    versions = {name: version for report in reports for name, version in report.versions.items()}
    machines = {column_of(report): str(report.machine) for report in reports}
    said = f"Measured at commit {reports[0].commit}: {', '.join(f'{n} {v}' for n, v in sorted(versions.items()))}.\n\n"
    groups = sorted({part for report in reports for part in report.command.split("--only ")[-1].split()[0].split(",")})
    said += f"Command: `python -m benchmarks --only {','.join(groups)} --json FILE`, in one or several parts.\n\n"
    return said + "\n".join(f"- {column}: {machines[column]}" for column in columns)


def _counts(reports: list[Report], columns: list[str]) -> str:
    goals = {c: [g for r in reports if column_of(r) == c for g in r.goals] for c in columns}
    held = (f"{sum(g.holds for g in found)} of {len(found)} goals hold on {c}" for c, found in goals.items())
    return "; ".join(held) + ". Missed ones are bold and come first."


def _rows(lines: list[Entry], columns: list[str]) -> Iterator[str]:
    yield f"| work | against | {' | '.join(columns)} | goal | share of the limit |"
    yield f"|---|---|{'---:|' * len(columns)}---|---|"
    for entry in lines:
        cells = " | ".join(entry.cells.get(column, "-") for column in columns)
        goals, shares = (_once_each(found, columns) for found in (entry.goals, entry.shares))
        yield f"| {entry.work} | {entry.against} | {cells} | {goals} | {shares} |"


def _once_each(found: dict[str, str], columns: list[str]) -> str:
    """What the columns say, in their order; once where they say the same."""
    return "; ".join(dict.fromkeys(found[column] for column in columns if found.get(column)))


def written(page: str, text: str) -> str:
    """The page with a text between its marks."""
    before, rest = page.split(MARKS[0])
    return f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.split(MARKS[1])[1]}"


def main(paths: list[str]) -> int:
    if not paths:
        print("Name the files of `python -m benchmarks --json FILE`.", file=sys.stderr)
        return 2
    try:
        text = table([Report.load(Path(path)) for path in paths])
    except (RegardError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    write_whole(PAGE, written(PAGE.read_text(encoding="utf-8"), text))
    print(f"Wrote {PAGE}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
