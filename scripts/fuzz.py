"""Draws pairs of features and compares them with formulas and laws: `make fuzz`.

Prints each draw that fails, with the command that repeats it, and one line for each pair. The pairs are in
tests/tools/feature_pairs.py, and calls of quick paths in tests/tools/drawn_calls.py. The first seed is drawn, printed,
and may be given.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "tools"))
import torch

import backend_calls  # noqa: F401 - its draws are pairs too
import drawn_calls  # noqa: F401 - and its own
import feature_pairs


def draw(name: str, seeds: range) -> int:
    """Run the draws of a pair, and return how many failed."""
    failed, began = 0, time.monotonic()
    for seed in seeds:
        try:
            feature_pairs.run(name, seed)
        except Exception as error:
            failed += 1
            lines = [f"{type(error).__name__}: {str(error).strip().splitlines()[0]}", *error.__notes__]
            print("\n".join(lines), flush=True)
    print(f"{name}: {len(seeds)} draws, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    return failed


def main() -> int:
    """Draw, and return whether a draw failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=10_000, help="how many in all (10,000)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**9), help="the first seed")
    parser.add_argument("--pair", action="append", choices=[*feature_pairs.PAIRS], help="only this pair of features")
    chosen = parser.parse_args()
    names = chosen.pair or [*feature_pairs.PAIRS]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"First seed: {chosen.seed}", flush=True)
    each = -(-chosen.draws // len(names))
    return int(sum(draw(name, range(chosen.seed, chosen.seed + each)) for name in names) > 0)


if __name__ == "__main__":
    sys.exit(main())
