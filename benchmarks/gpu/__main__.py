"""`python -m benchmarks.gpu [PART...]`: what Regard does on a GPU, row by row into JSON files, then into the pages."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import torch

from benchmarks.gpu import report, rows
from benchmarks.gpu.machine import Machine

#: Most urgent first.
PARTS = {
    "bits": "watch, edit, generate and attribute on each kernel of SDPA",
    "overhead": "what a watch costs",
    "kernels": "the Triton kernels and the flex engine",
    "backend": "rg.register() beside sdpa",
    "ring": "a ring on the device",
}
ROOT = Path(__file__).resolve().parents[2]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    known = "; ".join(f"{name}: {what}" for name, what in PARTS.items())
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{known}; report: only write the pages")
    parser.add_argument("--minutes", type=float, default=8, help="of each part; what is left, the next run measures")
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured")
    parser.add_argument("--pretend", action="store_true", help="a dry run on a pretend device; writes no pages")
    parser.add_argument("--out", type=Path, help="folder of the JSON files (build/gpu, build/gpu-pretend)")
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.parts if name not in (*PARTS, "report")]:
        parser.error(f"there is no part {unknown[0]!r}. Known parts: {', '.join(PARTS)}, report.")
    chosen.out = chosen.out or ROOT / "build" / ("gpu-pretend" if chosen.pretend else "gpu")
    return chosen


def machine_of(chosen: argparse.Namespace) -> Machine | None:
    if chosen.pretend:
        from benchmarks.gpu import pretend

        return Machine(pretend.prepare(), small=True)
    return Machine(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None


def main() -> int:
    chosen = arguments()
    if chosen.parts == ["report"]:
        return report.write(ROOT, report.read(chosen.out, PARTS))
    machine = machine_of(chosen)
    if machine is None:
        print('There is no CUDA device here; a dry run needs none: make gpu ARGS="--pretend".', file=sys.stderr)
        return 2
    left = 0
    for name in [name for name in chosen.parts if name != "report"] or PARTS:
        path = chosen.out / f"{name}.json"
        if chosen.fresh:
            path.unlink(missing_ok=True)
        part = importlib.import_module(f"benchmarks.gpu.{name}")
        left += rows.measure(part.jobs(machine), machine, path, 60 * chosen.minutes)
    found = report.read(chosen.out, PARTS)
    print(report.summary(found))
    if left:
        print(f"{left} rows are not measured yet: run the same command again.")
    if not chosen.pretend:
        report.write(ROOT, found)
    return int(any("error" in row or row.get("holds") is False for part in found.values() for row in part))


if __name__ == "__main__":
    sys.exit(main())
