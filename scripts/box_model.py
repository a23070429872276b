"""Put a trained run into the package, its weights in half precision: python scripts/box_model.py RUN NAME."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

from regard.lab.runs.run import CONFIG, PRETRAINED, SETTINGS, SOURCE, TARGET, WEIGHTS, load_run
from regard.lab.runs.tensor_files import read_tensors, write_tensors

LARGEST = 5_000_000


def main() -> None:
    """Copy what translating needs, and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="what `regard train --out` wrote")
    parser.add_argument("name", help="what it is called in the package, as bahdanau-en-fr")
    given = parser.parse_args()
    load_run(given.run)
    folder = PRETRAINED / given.name
    folder.mkdir(parents=True, exist_ok=True)
    weights, facts = read_tensors(given.run / WEIGHTS)
    halved = {name: x.to(torch.float16) if x.is_floating_point() else x for name, x in weights.items()}
    write_tensors(folder / WEIGHTS, halved, facts)
    for name in (CONFIG, SETTINGS, SOURCE, TARGET):
        shutil.copy(given.run / name, folder / name)
    for name in (SOURCE, TARGET):  # stored once for all runs
        if (PRETRAINED / name).exists() and (PRETRAINED / name).read_bytes() == (folder / name).read_bytes():
            (folder / name).unlink()
    size = sum(file.stat().st_size for file in folder.iterdir())
    if size > LARGEST:
        shutil.rmtree(folder)
        raise SystemExit(f"{given.name} would take {size / 1e6:.2f} MB of {LARGEST / 1e6:g}. Train a smaller one.")
    print(f"{given.name}: {size / 1e6:.2f} MB, {load_run(folder).model.settings()}")


if __name__ == "__main__":
    main()
