"""One sequence over 2 and 4 processes is one sequence in one process: outputs, gradients, weights, bytes, losses.

Processes start once for each number of ranks. Each case of rings.py is a test, which all ranks run at its turn.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket

import pytest
import torch
from typer.testing import CliRunner

import regard as rg
from regard.base.errors import RegardError
from regard.cli.app import app
from rings import cases, lose_ranks, serve


class Ranks:
    """Processes that know each other as those of torchrun do, and answer what they found."""

    def __init__(self, ranks, target):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
        context = multiprocessing.get_context("forkserver")  # torch is imported once, not by every process
        context.set_forkserver_preload(["torch", "regard.api"])
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=target, args=(told | {"RANK": str(rank)}, theirs))
            process.start()
            theirs.close()  # so that the end of a process is the end of its answers
            self.pipes.append(mine)
            self.processes.append(process)

    def send(self, name):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # a rank that has ended
                pipe.send(name)

    def answer(self, rank):
        try:
            return self.pipes[rank].recv() if self.pipes[rank].poll(600) else "no answer in 600 s"
        except EOFError:
            return "this process has ended"

    def exit_codes(self):
        for process in self.processes:
            process.join(600)
        return [process.exitcode for process in self.processes]

    def kill(self):
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()


#: The numbers of ranks whose processes have been started.
STARTED = set()


@pytest.fixture(scope="module")
def ring():
    """One process group for all cases of a number of ranks. (A parameter would start one for each case: pytest tears
    a fixture down where the next test has another row of parameters, though its value is the same.)
    """
    started = {}

    def of(num_ranks):
        if num_ranks not in started:
            assert num_ranks not in STARTED, "the processes of a number of ranks start once"
            STARTED.add(num_ranks)
            started[num_ranks] = Ranks(num_ranks, serve)
        return started[num_ranks]

    try:
        yield of
        for num_ranks, ranks in started.items():
            ranks.send(None)
            assert ranks.exit_codes() == [0] * num_ranks
    finally:
        for ranks in started.values():
            ranks.kill()


@pytest.mark.slow
@pytest.mark.xdist_group("ring")  # the processes start once
@pytest.mark.parametrize(
    ("num_ranks", "name"),
    [
        pytest.param(ranks, name, marks=pytest.mark.example if ranks == 4 else ())
        for ranks in (2, 4)
        for name in cases(ranks)
    ],
)
def test_many_ranks_are_as_one(ring, num_ranks, name):
    ranks = ring(num_ranks)
    ranks.send(name)
    wrong = {rank: said for rank in range(num_ranks) if (said := ranks.answer(rank)) != "ok"}
    assert not wrong, "\n".join(f"rank {rank}: {said}" for rank, said in wrong.items())


def test_a_rank_that_is_lost_ends_the_others():
    ranks = Ranks(2, lose_ranks)
    try:
        said = ranks.answer(0)
        assert ranks.exit_codes() == [0, -9]
    finally:
        ranks.kill()
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
    with pytest.raises(RegardError, match="plan: the ring engine takes no cache"):
        rg.plan(x, x, x, attention=rg.Attention(), engine=rg.Ring(ranks=2), cache=rg.GrowingCache())


def test_the_command_prints_the_cost_model():
    asked = ["plan", "sliding_window", "--length", "4096", "--ranks", "4", "--set", "size=128"]
    told = CliRunner().invoke(app, asked)
    assert told.exit_code == 0, told.output
    lines = told.output.split("\n")
    assert "4,096 queries and 4,096 keys in contiguous shares over 4 ranks" in " ".join(lines)
    rows = [line.split() for line in lines if line[:5].strip().isdigit()]
    assert [row[-1] for row in rows] == ["1", "2", "3", "nobody"]
    assert CliRunner().invoke(app, [*asked, "--layout", "zigzag"]).exit_code == 0
