"""`python -m benchmarks`: measure every goal and say which hold."""

from __future__ import annotations

import platform
import subprocess
import sys

import torch

from benchmarks.spine import goals


def conditions() -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    threads = f"{torch.get_num_threads()} threads"
    return f"commit {commit or 'unknown'}, torch {torch.__version__}, {platform.machine()}, {threads}, float32"


def main() -> int:
    print(conditions())
    missed = 0
    for goal in goals():
        print(goal, flush=True)
        missed += not goal.holds
    print("All goals hold." if not missed else f"{missed} goals were missed.")
    return 1 if missed else 0


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
