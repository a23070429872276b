"""`python -m benchmarks [NAME...]`: measure every goal of watching, the page and translation, and say which hold.

Mechanisms beside their peers are measured by `regard bench`.
"""

from __future__ import annotations

import platform
import sys

import torch

from benchmarks import ring, translating, viewing, watching
from regard.bench.roofline import commit

SUITES = {
    "watching": watching.goals,
    "viewing": viewing.goals,
    "translating": translating.goals,
    "ring": ring.goals,
}


def conditions() -> str:
    threads = f"{torch.get_num_threads()} threads"
    return f"commit {commit() or 'unknown'}, torch {torch.__version__}, {platform.machine()}, {threads}, float32"


def main() -> int:
    names = sys.argv[1:] or list(SUITES)
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        print(f"There is no benchmark {unknown[0]!r}. Known names: {', '.join(SUITES)}.", file=sys.stderr)
        return 2
    print(conditions())
    missed = 0
    for name in names:
        for goal in SUITES[name]():
            print(goal, flush=True)
            missed += not goal.holds
    print("All goals hold." if not missed else f"{missed} goals were missed.")
    return 1 if missed else 0


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
