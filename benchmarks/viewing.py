"""The goals of the page: how fast tiles of a long text come, what the server holds, how large one file is."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

import regard as rg
from benchmarks import in_browser
from benchmarks.measure import Goal, added_memory
from benchmarks.texts import HEADS, LAYERS, LENGTH, long_text
from regard.types import TextReading
from regard.viewer import Sheet, load_run, save_run, write_page
from regard.viewer.answers import TILE, Answers
from regard.viewer.sheet import QUICK

#: Megabytes of a page of all 72 heads of MiniLM at 512 tokens, by viewers that hold every weight (docs/benchmarks.md).
BERTVIZ, INSPECTUS = 831, 96


def goals() -> Iterator[Goal]:
    """Every goal, measured as it is asked for; tiles by one thread each, as the server computes them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield from tiles_come_at_once()
    yield from the_first_picture()
    torch.set_num_threads(threads)
    yield Goal(f"memory that the server adds, {where()}", added_memory(prepare_tiles), 500, "MiB")
    yield from one_file()
    yield from in_browser.goals()


def where() -> str:
    return f"{LAYERS} layers x {HEADS} heads, n = {LENGTH}"


def some_tiles(answers: Answers, count: int = 135, seed: int = 0) -> list[float]:
    """Seconds of each of some tiles that nobody asked for before, as many of each level."""
    drawn, times = random.Random(seed), []
    for at in range(count):
        level = at % (QUICK + 5)
        most = -(-LENGTH // (TILE << level))
        row, col, head = drawn.randrange(most), drawn.randrange(most), drawn.randrange(HEADS)
        pool = drawn.choice(("mean", "max"))
        start = time.perf_counter()
        answers.answer(f"tile/0/{drawn.randrange(LAYERS)}/{head}/{level}/{row}/{col}/{pool}")
        times.append(time.perf_counter() - start)
    return times


def tiles_come_at_once() -> Iterator[Goal]:
    answers = Answers([long_text()])
    some_tiles(answers, 9, seed=1)
    times = some_tiles(answers)
    yield Goal(f"a tile of any level, median, {where()}", 1000 * statistics.median(times), 50, "ms")
    yield Goal("the same, 9 in 10", 1000 * statistics.quantiles(times, n=10)[-1], 250, "ms")


def the_first_picture() -> Iterator[Goal]:
    """From a saved folder to the tiles of the whole map, as `regard view` gives them."""
    with tempfile.TemporaryDirectory() as folder:
        save_run(folder, [long_text()])
        start = time.perf_counter()
        answers = Answers(load_run(folder))
        for path in ("texts", "text/0", *(f"tile/0/0/0/6/{r}/{c}/mean" for r in range(4) for c in range(4))):
            answers.answer(path)
        yield Goal(f"folder to first picture, {where()}", time.perf_counter() - start, 1, "s")


def prepare_tiles() -> Callable[[], object]:
    text = long_text()
    for weights in text.maps:
        weights.row_statistic  # noqa: B018 - is computed at the first look
    return partial(serve_tiles, text)


def serve_tiles(text: Sheet) -> object:
    return some_tiles(Answers([text]))


def one_file(n: int = 512) -> Iterator[Goal]:
    """All heads of a model of MiniLM's shape."""
    torch.manual_seed(0)
    maps = {}
    for layer in range(6):
        q, k, v = (torch.randn(1, 12, n, 32) for _ in range(3))
        maps[f"layer.{layer}"] = rg.Attention()(q, k, v).weights
    with tempfile.TemporaryDirectory() as folder:
        size = (
            write_page(Path(folder) / "page.html", [TextReading.of("A text", maps, ["token"] * n)]).stat().st_size / 1e6
        )
    yield Goal(f"one file, 72 heads, n = {n}", size, 15, "MB")
    yield Goal(
        "the same beside bertviz and inspectus", INSPECTUS / size, 6, f"x smaller ({BERTVIZ / size:.0f})", at_most=False
    )
