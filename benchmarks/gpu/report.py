"""The tables of docs/benchmarks.md and the line of README.md, from the JSON files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.gpu import rows
from benchmarks.gpu.rows import Row

Found = dict[str, list[Row]]
#: What stands between two lines of a page: the first and the last of them.
MARKS = "<!-- make gpu -->", "<!-- end of make gpu -->"
PAGES: dict[str, Callable[[Found], str]]


def read(folder: Path, parts: Iterable[str]) -> Found:
    return {name: rows.read(folder / f"{name}.json") for name in parts}


def write(root: Path, found: Found) -> int:
    """Put tables and line into the pages; an exit code."""
    every = [row for part in found.values() for row in part]
    if not every or any(row["device"].startswith("dry run") for row in every):
        print("There are no rows of a GPU, so the pages stay as they are.", file=sys.stderr)
        return 2
    for page, text in PAGES.items():
        path = root / page
        path.write_text(replaced(path.read_text(encoding="utf-8"), text(found)), encoding="utf-8")
    return 0


def replaced(page: str, text: str) -> str:
    """The page with a text between its marks."""
    before, rest = page.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}"


def summary(found: Found) -> str:
    return f"{tables(found)}\n\n{line(found)}"


def line(found: Found) -> str:
    """README's sentences."""
    every = [row for part in found.values() for row in part]
    if not every:
        return "No GPU has run Regard yet."
    checks = [row for row in found["bits"] if "identical" in row]
    same = sum(row["holds"] for row in checks)
    said = f"On one {every[0]['device']}, in {same} of {len(checks)} checks of `watch`, `edit`, `generate` and "
    said += "`attribute` on torch's flash, efficient, cuDNN and math kernels, outputs keep their bits and numbers are "
    said += "those of float64 up to rounding."
    longest = [row for row in found["overhead"] if "times" in row]
    if longest:
        row = max(longest, key=lambda row: row["tokens"])
        said += f" A watched forward pass of {row['tokens']:,} tokens takes {row['times']:.2f} x its time."
    return f"{said} [Measured](docs/benchmarks.md#on-a-gpu)."


def tables(found: Found) -> str:
    every = [row for part in found.values() for row in part]
    names = ("device", "commit", "torch", "cuda", "transformers", "triton")
    used = (f"{name} {', '.join(sorted({str(row[name]) for row in every if name in row}))}" for name in names)
    parts = [f"Measured by `make gpu`: {'; '.join(used)}."]
    parts += [_bits(found["bits"]), _overhead(found["overhead"]), *_kernels(found["kernels"])]
    parts += [_backend(found["backend"]), _ring(found["ring"])]
    return "\n\n".join(part for part in parts if part)


def _bits(found: list[Row]) -> str:
    """One line for each model, length, dtype and check; one column for each kernel."""
    kernels = list(dict.fromkeys(row["kernel"] for row in found))
    lines: dict[tuple, dict[str, str]] = {}
    for row in found:
        lines.setdefault(tuple(row[name] for name in ("model", "tokens", "dtype", "check")), {})[row["kernel"]] = _bit(
            row
        )
    cells = [[*map(_cell, key), *(line.get(kernel, "") for kernel in kernels)] for key, line in lines.items()]
    legend = (
        "Bits: whether outputs keep their bits (with an edit, those of the other heads), and the largest difference to "
        "float64: of weights, of the edited head; for `generate` of logits to those without a watch; for `attribute` "
        "of weight x gradient to eager attention, relative. After it: of weights to eager attention in the same dtype. "
        "A number in bold is over its limit. A dash: refused, or torch has no such kernel."
    )
    return _table(legend, ["model", "tokens", "dtype", "check", *kernels], cells)


def _bit(row: Row) -> str:
    if "identical" not in row:
        return _none(row)
    difference = f"{row['difference']:.1e}"
    within = difference if row["difference"] <= row["limit"] else f"**{difference}**"
    eager = f"; eager {row['to_eager']:.1e}" if "to_eager" in row else ""
    own = " (own key heads)" if row["key_heads"] == "own" else ""
    missed = "" if row["holds"] or not row["identical"] or row["difference"] > row["limit"] else ", **not verified**"
    return f"{'identical' if row['identical'] else '**other bits**'}, {within}{eager}{missed}{own}"


def _overhead(found: list[Row]) -> str:
    names = ["model", "tokens", "plain_ms", "watched_ms", "times", "plain_gib", "watched_gib", "profile_ms"]
    return _listed(
        "What a watch costs in bfloat16; the profile is entropy and strongest links of all weights.", names, found
    )


def _kernels(found: list[Row]) -> list[str]:
    right = ["form", "dtype", "entropy", "top", "received", "distance", "cells", "logsumexp", "used"]
    times = ["form", "tokens", "logsumexp_ms", "statistics_ms", "statistics_gib", "sdpa_ms", "flex_ms"]
    flex = ["form", "tokens", "difference", "ms", "flex_ms", "sdpa_ms", "backward_ms", "flex_backward_ms"]
    legends = {
        "statistics are right": ("Errors of the Triton kernels to float64, relative.", right),
        "statistics, ms": ("One pass of the Triton kernels beside the forward pass of SDPA and FlexAttention.", times),
        "flex engine": ("The flex engine beside FlexAttention by hand, and SDPA with its flag or a dense mask.", flex),
    }
    return [
        _listed(legend, names, [row for row in found if row["work"] == work])
        for work, (legend, names) in legends.items()
    ]


def _backend(found: list[Row]) -> str:
    names = ["work", "model", "dtype", "tokens", "regard", "sdpa"]
    return _listed("The backend of `rg.register()` beside sdpa.", names, found)


def _ring(found: list[Row]) -> str:
    names = ["ranks", "backend", "tokens", "output", "gradients", "ms"]
    return _listed("A ring: errors to float64, relative, and forward and backward.", names, found)


def _listed(legend: str, names: list[str], found: list[Row]) -> str:
    return _table(legend, names, [[_cell(row[name]) if name in row else _none(row) for name in names] for row in found])


def _table(legend: str, names: list[str], cells: list[list[str]]) -> str:
    if not cells:
        return ""
    heads = [name.replace("_ms", ", ms").replace("_gib", ", GiB").replace("_", " ") for name in names]
    lines = [heads, ["---"] * len(names), *cells]
    return "\n".join([legend, "", *("| " + " | ".join(line) + " |" for line in lines)])


def _none(row: Row) -> str:
    return "**error**" if "error" in row else "-"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1e}" if abs(value) < 1e-3 else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


PAGES = {"docs/benchmarks.md": tables, "README.md": line}
