"""One sequence over 2 and 4 processes is one sequence in one process: outputs, gradients, weights, bytes, losses.

Processes start once for each number of ranks and run all cases of rings.py; each test reads what they found.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import socket
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import regard as rg
from regard.base.errors import RegardError
from regard.cli.app import app
from rings import cases, main


def start(folder: Path, ranks: int, suite: str) -> list[int | None]:
    """Processes that know each other as those of torchrun do; their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    context = multiprocessing.get_context("forkserver")  # torch is imported once, not by every process
    context.set_forkserver_preload(["torch", "regard.api"])
    processes = [context.Process(target=main, args=(folder, suite, told | {"RANK": str(r)})) for r in range(ranks)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(600)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What all ranks found, by number of ranks."""

    @functools.cache
    def of(ranks):
        folder = tmp_path_factory.mktemp(f"ring{ranks}")
        codes = start(folder, ranks, "cases")
        assert codes == [0] * ranks
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]

    return of


@pytest.mark.slow
@pytest.mark.xdist_group("ring")  # the processes start once
@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(ranks, name, marks=pytest.mark.example if ranks == 4 else ())
        for ranks in (2, 4)
        for name in cases(ranks)
    ],
)
def test_many_ranks_are_as_one(found, ranks, name):
    for rank, said in enumerate(found(ranks)):
        assert said[name] == "ok", f"rank {rank}: {said[name]}"


def test_a_rank_that_is_lost_ends_the_others(tmp_path):
    codes = start(tmp_path, 2, "losses")
    assert codes == [0, -9]
    said = json.loads((tmp_path / "0.json").read_text())
    for seconds, words in said.values():
        assert "rank 0 of 2 got no answer" in words and "time-out" in words
        assert seconds < 200, "the limit of the ring, and not the 300 s of the default group"
    assert 1 < said["hung"][0] < 200


def test_a_plan_needs_no_processes():
    """By hand: 1,024 tokens on 4 ranks, 2 heads of width 8 in float32: a key with its value is 128 bytes."""
    x = torch.zeros(1, 2, 1024, 8, requires_grad=True)
    plan = rg.plan(x, x, x, attention=rg.Attention(mask=rg.causal()), engine=rg.Ring(ranks=4))
    assert [plan.sent(rank) for rank in range(4)] == [128 * 256 * later for later in (3, 2, 1, 0)]
    assert [plan.returned(rank) for rank in range(4)] == [128 * 256 * before for before in (0, 1, 2, 3)]
    assert {plan.gathered(rank) for rank in range(4)} == {128 * 256 * 3}
    assert plan.partners(1) == [2, 3]
    plan = rg.plan(x, x, x, attention=rg.Attention(mask=rg.documents([256] * 4)), engine=rg.Ring(ranks=4))
    assert [plan.sent(rank) for rank in range(4)] == [0] * 4
    assert [plan.cost(rank).pairs for rank in range(4)] == [2 * 256 * 256] * 4
    assert "0.0% of what an all-gather would" in str(plan)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("mask", [rg.causal(), rg.causal() & rg.window(100), None], ids=repr)
def test_no_pair_is_scored_twice_or_left_out(mask, layout):
    """Over all ranks as many pairs as one process scores where it cuts into the same blocks, or fewer."""
    x = torch.zeros(1, 2, 4096, 8)
    attention = rg.Attention(mask=mask)
    plan = rg.plan(x, x, x, attention=attention, engine=rg.Ring(ranks=8, layout=layout))
    pairs = sum(plan.cost(rank).pairs for rank in range(8))
    width = 100 if isinstance(mask, type(rg.causal() & rg.causal())) else 4096
    allowed = sum(min(i + 1, width) if mask is not None else 4096 for i in range(4096)) * 2
    assert 0.99 * allowed <= pairs <= 1.7 * allowed


def test_without_processes_the_ring_says_how_to_start_them():
    x = torch.zeros(1, 2, 8, 4)
    for engine in ("ring", rg.Ring()):
        with pytest.raises(RegardError, match="torchrun"):
            rg.Attention()(x, x, x, engine=engine)
    with pytest.raises(RegardError, match="Did you mean 'zigzag'"):
        rg.Ring(layout="zigzg")
    with pytest.raises(RegardError, match="at least 1"):
        rg.Ring(ranks=0)
    with pytest.raises(RegardError, match="too few for"):
        rg.plan(x, x, x, attention=rg.Attention(), engine=rg.Ring(ranks=9))


def test_the_command_prints_the_cost_model():
    asked = ["plan", "sliding_window", "--length", "4096", "--ranks", "4", "--set", "size=128"]
    told = CliRunner().invoke(app, asked)
    assert told.exit_code == 0, told.output
    lines = told.output.split("\n")
    assert "4,096 queries and 4,096 keys in contiguous shares over 4 ranks" in " ".join(lines)
    rows = [line.split() for line in lines if line[:5].strip().isdigit()]
    assert [row[-1] for row in rows] == ["1", "2", "3", "nobody"]
    assert CliRunner().invoke(app, [*asked, "--layout", "zigzag"]).exit_code == 0
