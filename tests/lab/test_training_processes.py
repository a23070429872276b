"""Two processes that train together are one process with the double batch, and go on together; so they are where
each holds only its share of the weights."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch

from regard.base.errors import RegardError
from regard.lab.runs.config import Config, read_config
from regard.lab.runs.run import METRICS, STATE, WEIGHTS, read_metrics, read_tensors
from regard.lab.training.fitting import fit
from regard.lab.training.preparation import prepare, reconfigured
from regard.lab.training.state import read_state

# 21 pairs of batches of 1 and 2 processes: the last batch of an epoch has no row for the second
COMMON = (
    "data.corpus=reverse",
    "data.size=29",
    "data.valid=4",
    "data.test=4",
    "tokenizer.kind=words",
    "model.width=8",
    "model.dropout=0.0",
    "training.schedule=constant",
    "training.warmup=3",
    "training.log_steps=1",
    "training.save_minutes=0",
    "validation.steps=4",
    "validation.sentences=4",
    "validation.batch=3",
)

#: Adds as much to all scores of a row, which a softmax does not see: its gradient is noise, and Adam magnifies it.
IDLE = "key.bias"

#: What each process runs: eight steps, and then, in another fit, eight more.
SCRIPT = """
import pathlib, sys, torch
torch.set_num_threads(1)
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from regard.lab.runs.config import read_config
from regard.lab.training.fitting import fit
from regard.lab.training.preparation import prepare
folder, first, second, *common = sys.argv[1:]
configure, sent = DDPStrategy.configure_ddp, []

def sum_gradients(state, bucket):
    sent.append(bucket.buffer().nbytes)
    return allreduce_hook(None, bucket)

def counting(strategy):
    configure(strategy)
    strategy.model.register_comm_hook(None, sum_gradients)

DDPStrategy.configure_ddp = counting
for strategy, steps, resume in ((first, 8, False), (second, 16, True)):
    config = read_config(None, [*common, f"training.strategy={strategy}", f"training.steps={steps}"])
    task = prepare(config, pathlib.Path(folder)).task
    fit(task, resume=resume)
    own = sum((w.to_local() if hasattr(w, "to_local") else w).numel() for w in task.model.parameters())
    every = sum(w.numel() for w in task.model.parameters())
    assert sum(sent) == (8 * 4 * every if strategy == "ddp" else 0), "the gradients of each update are sent once"
    sent.clear()
    assert own == every if strategy == "ddp" else 0.4 * every < own < 0.6 * every, (strategy, own, every)
torch.distributed.barrier()  # none closes its connections while another still uses them
torch.distributed.destroy_process_group()
"""


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if "RANK" not in name} | {"OMP_NUM_THREADS": "1"}


def launch(commands: Path, folder: Path, first: str, second: str, *arguments: str) -> None:
    """Two processes, told who they are as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    told |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    command = [commands / "python", "-c", SCRIPT, str(folder), first, second, *arguments]
    processes = []
    for rank in range(2):
        mine = environment() | told | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(
            subprocess.Popen(command, env=mine, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        said = [process.communicate(timeout=900)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)


def check_same(two: Path, one: Path, steps: int, *options: str) -> None:
    """Losses and weights of two processes against those of one with the double batch."""
    config = read_config(None, (*COMMON, *options, "training.sentences=2", f"training.steps={steps}"))
    fit(prepare(config, one).task)
    compare(two, one, steps)


def changed(folder: Path, *overrides: str) -> Config:
    """The configuration of a run that is gone on with."""
    return reconfigured(folder, lambda sections: read_config(None, overrides, sections))


def compare(two: Path, one: Path, steps: int) -> None:
    """Losses and weights of two runs."""
    ours, theirs = read_metrics(two / METRICS), read_metrics(one / METRICS)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == list(range(1, steps + 1))
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("epoch", "train_loss", "valid_loss", "bleu"):
            assert (mine.get(name) is None) == (other.get(name) is None)
            if mine.get(name) is not None:
                assert mine[name] == pytest.approx(other[name], abs=1e-4), (mine["step"], name)
    weights = [read_tensors(folder / WEIGHTS)[0] for folder in (two, one)]
    for name, tensor in weights[0].items():
        if not name.endswith(IDLE):
            assert (tensor - weights[1][name]).abs().max() < 1e-4, name


def test_two_processes_are_one_with_the_double_batch_also_when_they_go_on(tmp_path, commands):
    two = tmp_path / "two"
    launch(commands, two, "ddp", "ddp", *COMMON, "training.sentences=1", "training.devices=2", "training.accumulate=2")
    assert len(read_tensors(two / STATE)[0]["random.cpu"]) == 2
    check_same(two, tmp_path / "one", 16, "training.accumulate=2")
    assert read_metrics(two / METRICS)[-1]["epoch"] == 2  # an epoch has 11 batches: both sides of its end were seen
    with pytest.raises(RegardError, match=r"3 processes cannot resume .* has 2 sentences.* with 1, 2 processes"):
        changed(two, "training.devices=3")
    for folder in (two, tmp_path / "one"):  # one process takes the pairs of both
        config = changed(folder, "training.devices=1", "training.steps=20")
        fit(prepare(config, folder).task, resume=True)
    compare(two, tmp_path / "one", 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategies", "system"),
    [(("fsdp", "fsdp"), "transformer"), (("ddp", "fsdp"), "bahdanau"), (("fsdp", "ddp"), "hybrid")],
)
def test_shares_of_the_weights_give_the_numbers_of_whole_ones(tmp_path, commands, strategies, system):
    options = f"model.system={system}", "model.num_heads=2" if system != "bahdanau" else "model.num_heads=auto"
    two, one = tmp_path / "two", tmp_path / "one"
    launch(commands, two, *strategies, *COMMON, *options, "training.sentences=1", "training.devices=2")
    check_same(two, one, 16, *options)
    parts = sorted(path.name for path in two.joinpath("state").iterdir())
    shared = ["state-16-1-of-2.safetensors", "state-16-2-of-2.safetensors"] if strategies[1] == "fsdp" else []
    assert parts == [*shared, "state.safetensors"]  # those of step 8 are gone
    ours, theirs = (read_state(folder / STATE)[0] for folder in (two, one))  # by one process
    assert set(ours) == set(theirs)
    for name in ours:
        if not name.startswith("random") and not name.endswith(IDLE):
            torch.testing.assert_close(ours[name], theirs[name], atol=1e-4, rtol=0)
    if shared:
        (two / "state" / shared[1]).unlink()
        with pytest.raises(RegardError, match=r"2-of-2.safetensors is missing: .* Copy all of them"):
            read_state(two / STATE)


@pytest.mark.slow
def test_the_command_starts_the_other_processes_itself(tmp_path, commands):
    two = tmp_path / "two"
    command = [commands / "python", "-m", "regard.cli.main", "train", *COMMON, "--steps", "8", "--out", two]
    command += ["training.sentences=1", "training.devices=2"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=900)
    assert done.returncode == 0, done.stderr
    check_same(two, tmp_path / "one", 8)
