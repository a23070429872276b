"""Which process this one is, as torchrun, SLURM and Lightning tell it; and what processes say when one fails."""

from __future__ import annotations

import multiprocessing
import os
import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only

from regard.base.errors import RegardError
from regard.lab.comparison.processes import LocalProcess
from regard.lab.runs.config import Training, read_config
from regard.lab.runs.tensor_files import write_tensors
from regard.lab.training import loop, ranks
from regard.lab.training.fitting import _trainer, fit
from regard.lab.training.preparation import prepare
from regard.lab.training.ranks import answers, process_number, together

#: Two tasks of SLURM on one machine, as `srun --ntasks=2` tells them; the first has the number 0.
TASKS = {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NODEID": "0"}


def slurm(number):
    return TASKS | {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}


def torchrun(number, count, **others):
    told = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_WORLD_SIZE": 1}
    return {name: str(value) for name, value in (told | others).items()}


@pytest.fixture
def set_environment(monkeypatch):
    """What the environment says, and nothing that the tests' own environment says."""

    def tell(variables):
        for name in list(os.environ):
            if name.startswith(ranks.PREFIXES):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    tell({})
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # Lightning keeps the number of a trainer for the whole process
    yield tell
    os.environ.pop(ranks.SLURM.on_machine, None)  # which is told on to Lightning


def test_tasks_of_slurm_on_one_machine_share_the_corpus(set_environment):
    seen = []
    for number in range(2):
        set_environment(slurm(number))
        config = read_config(
            None, ["data.corpus=reverse", "data.size=60", "tokenizer.kind=words", "model.width=8", "training.devices=2"]
        )
        assert process_number(config.training) == number
        task = prepare(config).task
        seen.append({index for batch in task.epochs(0) for index in batch.indices})
        trainer = _trainer(task)
        assert (trainer.global_rank, trainer.world_size) == (number, 2)
    assert not seen[0] & seen[1] and len(seen[0] | seen[1]) > 40


@pytest.mark.parametrize(
    ("variables", "config", "words"),
    [
        (slurm(1), {}, ("SLURM started 2 processes", "number 1", "training.devices=2 and", "srun --nodes=1")),
        (slurm(0), {"devices": 1, "machines": 2}, ("SLURM", "2 of them on this machine", "training.machines=2")),
        (torchrun(2, 3), {"devices": 2}, ("torchrun started 3", "Set training.devices=3", "--nproc-per-node=2")),
        (torchrun(0, 2), {}, ("torchrun started 2 processes", "training.devices=1")),
    ],
)
def test_other_processes_than_the_configuration_says_are_refused(set_environment, variables, config, words):
    set_environment(variables)
    with pytest.raises(RegardError) as error:
        process_number(Training(**config))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("variables", "config", "number"),
    [
        ({}, {"devices": 2}, 0),
        ({"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "4"}, {"devices": 2, "machines": 2}, 3),  # by Lightning
        (torchrun(1, 2), {"devices": 2}, 1),
        (torchrun(3, 4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, GROUP_WORLD_SIZE=2), {"devices": 2, "machines": 2}, 3),
        (slurm(0) | torchrun(1, 2), {"devices": 2}, 1),  # torchrun in a task
        ({"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "train"}, {}, 0),  # the shell of an allocation
        (slurm(1) | {"SLURM_JOB_NAME": "interactive"}, {}, 0),
        (slurm(0) | {"SLURM_NTASKS": "1"}, {}, 0),
    ],
)
def test_every_starter_tells_the_number(set_environment, variables, config, number):
    set_environment(variables)
    assert process_number(Training(**config)) == number


def test_a_task_alone_trains(set_environment):
    set_environment(slurm(0) | {"SLURM_NTASKS": "1"})
    wish = [
        "data.corpus=reverse",
        "data.size=60",
        "tokenizer.kind=words",
        "model.width=8",
        "training.steps=2",
        "validation.sentences=0",
    ]
    assert fit(prepare(read_config(None, wish)).task).progress.step == 2


def test_a_trial_is_no_task_of_those_that_run_the_comparison(set_environment, tmp_path):
    set_environment(slurm(1))
    process = LocalProcess(["env"], tmp_path / "log")
    said, code = b"", None
    while code is None:
        code, more = process.look()
        said += more
    assert b"SLURM" not in said and b"PATH=" in said


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_time_out_can_be_set(set_environment, strategy):
    config = read_config(None, [f"training.strategy={strategy}", "training.devices=2", "training.timeout_minutes=2"])
    assert _trainer(SimpleNamespace(config=config)).strategy._timeout == timedelta(minutes=2)


def test_each_process_goes_on_with_the_random_state_of_its_device(monkeypatch):
    put = {}
    monkeypatch.setattr(loop, "world", lambda: 2)
    monkeypatch.setattr(loop, "rank", lambda: 1)
    monkeypatch.setattr(torch, "set_rng_state", lambda state: put.update(cpu=state))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: put.update(cuda=state))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor([9]))
    device = torch.device("cuda", 1)
    assert loop._generators(device).keys() == {"cpu", "cuda"}
    states = {"cpu": torch.tensor([[1], [2]]), "cuda": torch.tensor([[3], [4]])}
    loop._set_generators(states, device)
    assert put == {"cpu": torch.tensor([2]), "cuda": torch.tensor([4])}
    put.clear()
    monkeypatch.setattr(loop, "world", lambda: 3)  # others than saved it
    loop._set_generators(states, device)
    assert put == {}


def failing(folder, number, port):
    """One of two processes: the second cannot write its share, and then is lost."""
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=number == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=60))
    said = folder / f"{number}.txt"
    try:
        with together():
            write_tensors(folder / "no" / "such" if number else folder / "share", {"x": torch.ones(2)}, {})
    except RegardError as error:
        said.write_text(str(error))
    if number:
        os._exit(9)
    try:
        with answers(Training(devices=2)):
            dist.all_reduce(torch.zeros(1))
    except RegardError as error:
        said.write_text(f"{said.read_text()}\n{error}")


def test_one_that_fails_ends_all_at_once_and_is_named(tmp_path):
    (tmp_path / "no").write_text("a file where a folder should be")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=failing, args=(tmp_path, number, port)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)  # less than the 30 minutes of training.timeout_minutes
    assert [process.exitcode for process in processes] == [0, 9]
    refused, lost = (tmp_path / "0.txt").read_text().split("\n")
    assert "process 2 of 2 stopped, and so did this one" in refused and "cannot be written" in refused
    assert "another of the 2 processes has ended" in lost and "training.timeout_minutes=30" in lost
    assert (tmp_path / "1.txt").read_text().startswith(str(tmp_path / "no" / "such"))
