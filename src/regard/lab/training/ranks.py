"""The rank of this process among those that train together, and collective operations over all of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard.base.errors import RegardError

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

    from regard.lab.runs.config import Training

#: Prefixes of environment variables about the other processes.
PREFIXES = ("SLURM_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "GROUP_", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Starter:
    """A program that starts processes, and the environment variables that it sets.

    They hold the number of a process, the number of all processes (`world`), that of processes on this machine, and
    that of machines. `command` starts `devices` processes on each of `machines`.
    """

    name: str
    number: str
    world: str
    on_machine: str
    machines: str
    command: str


TORCHRUN = Starter(
    "torchrun",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "torchrun --nnodes={machines} --nproc-per-node={devices}",
)
SLURM = Starter(
    "SLURM",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NNODES",
    "srun --nodes={machines} --ntasks-per-node={devices}",
)


def process_number(training: Training) -> int:
    """The number of this process among all that train together, from 0, before they are connected; then `rank` has it.

    torchrun and SLURM set it; then the configuration must have the same number of processes. Without them Lightning
    starts the other processes of this machine, and NODE_RANK is the number of the machine.
    """
    environment = cluster(training)
    if _starter() is not None:
        return environment.global_rank()
    return environment.node_rank() * training.devices + environment.local_rank()


def cluster(training: Training) -> ClusterEnvironment:
    """The environment from which Lightning's Trainer reads the same numbers."""
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    starter = _starter()
    if starter is None:
        return LightningEnvironment()
    _check(starter, training)
    if starter is TORCHRUN:
        return TorchElasticEnvironment()
    os.environ.setdefault(SLURM.on_machine, str(training.devices))  # srun --ntasks alone does not set it
    return SLURMEnvironment(auto_requeue=False)  # regard handles signals itself


def single_process(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a process that trains alone, without those about other processes."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIXES)}


def _starter() -> Starter | None:
    """The program that started this process among others, by its environment; None if there is none."""
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
        return TORCHRUN
    # the interactive shell of an allocation has these variables, but is not a task
    interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return SLURM if {"SLURM_PROCID", "SLURM_NTASKS"} <= os.environ.keys() and not interactive else None


def _check(starter: Starter, training: Training) -> None:
    """Raise an error if the configuration and the starter disagree: processes would train on the same pairs."""
    devices, machines = training.devices, training.machines
    world, number = int(os.environ[starter.world]), int(os.environ[starter.number])
    there = int(os.environ.get(starter.machines, machines))
    on_machine = int(os.environ.get(starter.on_machine, -(-world // there)))  # else an even share, rounded up
    if world == devices * machines and on_machine == devices:
        return
    command = starter.command.format(devices=devices, machines=machines)
    raise RegardError(
        f"train: {starter.name} started {world} processes, {on_machine} of them on this machine, and this is number "
        f"{number}; the configuration says training.devices={devices} and training.machines={machines}. Set "
        f"training.devices={on_machine} and training.machines={max(1, world // on_machine)}, or start them with "
        f"`{command}`."
    )


def world() -> int:
    """The number of processes that train together, after they are connected."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process after they are connected; before, `process_number` has it."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def summed(value: Tensor, device: torch.device) -> Tensor:
    """The sum over all processes. With several, `value` itself may be overwritten."""
    if world() > 1:
        value = value.to(device)
        dist.all_reduce(value)
    return value


def gathered(value: Tensor, device: torch.device) -> Tensor:
    """The values of all processes, stacked on the host: (processes, ...), in the order of ranks.

    `device` is that of the training, where the processes exchange them.
    """
    if world() == 1:
        return value[None]
    every = [torch.zeros_like(value, device=device) for _ in range(world())]
    dist.all_gather(every, value.to(device))
    return torch.stack(every).cpu()


@contextlib.contextmanager
def together() -> Iterator[None]:
    """If one process raises a `RegardError` inside, all raise one, so that none waits. All processes enter it."""
    refused = None
    try:
        yield
    except RegardError as error:
        refused = error
    errors: list[Any] = [None] * world()
    if world() > 1:
        dist.all_gather_object(errors, str(refused or ""))
    if refused is not None:
        raise refused
    for number, message in enumerate(errors):
        if message:
            raise RegardError(f"train: process {number + 1} of {world()} stopped, and so did this one: {message}")


@contextlib.contextmanager
def answers(training: Training) -> Iterator[None]:
    """Raise a `RegardError` if another process does not answer. The process that ended prints its own error."""
    try:
        yield
    except RuntimeError as error:
        count = training.devices * training.machines
        if count == 1 or isinstance(error, RegardError) or not _is_of_transport(error):
            raise
        detail = str(error).strip().split("\n")[0].split(". ")[0]
        raise RegardError(
            f"train: another of the {count} processes has ended, or did not answer within training.timeout_minutes="
            f"{training.timeout_minutes:g}. The one that ended first says why; --resume goes on from what was saved. "
            f"[{detail}]"
        ) from None


def _is_of_transport(error: RuntimeError) -> bool:
    """Whether an error is about the connection to other processes; torch has no class for all of these errors."""
    return isinstance(error, dist.DistError) or any(
        name in str(error) for name in ("gloo", "NCCL", "Connection closed")
    )
