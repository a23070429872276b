"""`python -m benchmarks [NAME...]`: measure every goal and say which hold."""

from __future__ import annotations

import platform
import subprocess
import sys

import torch

from benchmarks import spine, translating, viewing, watching

SUITES = {
    "spine": spine.goals,
    "watching": watching.goals,
    "viewing": viewing.goals,
    "translating": translating.goals,
}


def conditions() -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    threads = f"{torch.get_num_threads()} threads"
    return f"commit {commit or 'unknown'}, torch {torch.__version__}, {platform.machine()}, {threads}, float32"


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
