"""Run an example with other seeds: `python docs/claims/seeds.py 13` runs examples/studies/13_*.py three times.

`python docs/claims/seeds.py 22 6` runs examples/studies/22_*.py six times.

Every number that differs between the runs is printed as its range. What the example asserts must hold in each run.
"""

import os
import re
import runpy
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import torch

os.environ["MPLBACKEND"] = "Agg"  # the figures are drawn, not shown
EXAMPLES = Path(__file__).parents[2] / "examples" / "studies"
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")


def lines_printed(script, shift):
    """What a script prints if `shift` is added to every seed that it sets."""
    import matplotlib.pyplot as plt

    set_seed, printed = torch.manual_seed, StringIO()
    shifted = mock.patch("torch.manual_seed", lambda seed: set_seed(seed + shift))
    unsaved = mock.patch("regard.drawing.show_or_save", lambda path: None)
    with shifted, unsaved, redirect_stdout(printed):
        runpy.run_path(str(script), run_name="__main__")
    plt.close("all")
    return printed.getvalue().splitlines()


def merged(lines):
    """One line for the same line of several runs: 0.5, 0.7 and 0.6 become [0.5 to 0.7]."""
    if len({NUMBER.sub("#", line) for line in lines}) > 1:
        return "\n".join(lines)  # they differ in words
    columns = zip(*(NUMBER.findall(line) for line in lines), strict=True)
    ranges = iter([_range(sorted(column, key=lambda text: float(text.replace(",", "")))) for column in columns])
    return NUMBER.sub(lambda _: next(ranges), lines[0])


def _range(numbers):
    return numbers[0] if numbers[0] == numbers[-1] else f"[{numbers[0]} to {numbers[-1]}]"


def main(number, seeds="3"):
    (script,) = EXAMPLES.glob(f"{number}_*.py")
    runs = [lines_printed(script, 1000 * run) for run in range(int(seeds))]
    print(f"{script.name}, {seeds} seeds:")
    for lines in zip(*runs, strict=True):
        print(merged(lines))


if __name__ == "__main__":
    main(*sys.argv[1:3])
