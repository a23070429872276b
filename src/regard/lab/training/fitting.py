"""`fit`: trains a task with Lightning's `Trainer` until its budget is used up, or until it is interrupted."""

from __future__ import annotations

import contextlib
import logging
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_only

from regard.base.errors import RegardError
from regard.lab.models.sharding import is_sharded
from regard.lab.runs.config import Training
from regard.lab.runs.guards import stop_signals
from regard.lab.runs.run import STATE, WEIGHTS, load_weights
from regard.lab.training.loop import Task, TrainingLoop
from regard.lab.training.ranks import answers, cluster
from regard.lab.training.stream import TrainingProgress, update_batches


@dataclass(frozen=True)
class Outcome:
    """How a training ended.

    Args:
        reason: "budget", "interrupted" or "patience".
        progress: The progress at the end.
    """

    reason: str
    progress: TrainingProgress = field(repr=False)


def fit(task: Task, *, resume: bool = False, on_step: Callable[[TrainingProgress], object] = lambda _: None) -> Outcome:
    """Train until the budget or the patience is used up, or until Ctrl-C; the state is saved in each case.

    Afterwards the model has the weights for translation: the averaged weights of the best validation or of the last
    step, as `validation.keep` says.

    Args:
        task: From `prepare`.
        resume: Continue from the state in the folder of the task.
        on_step: Called after every step with the progress of the training.
    """
    with quiet():
        loop = TrainingLoop(task, on_step, _state(task) if resume else None)
        trainer = _trainer(task)  # sets the number of this process
        training = task.config.training
        with _one_thread_count(training.threads), _kernels(task), _stopping(loop), answers(training):
            try:
                trainer.fit(loop, _Stream(loop))
            except SystemExit:  # Lightning raises it after a second Ctrl-C
                raise KeyboardInterrupt from None
        if rank_zero_only.rank == 0 or is_sharded(task.model):
            _load_translation_weights(loop)
    return Outcome(loop.reason, loop.progress)


def _load_translation_weights(loop: TrainingLoop) -> None:
    """Put the weights for translation into the model."""
    task = loop.task
    if task.config.validation.keep == "best" and loop.progress.best is not None and task.folder is not None:
        load_weights(task.model, task.folder / WEIGHTS)
        return
    with torch.no_grad():
        for name, weight in task.model.named_parameters():
            weight.copy_(loop.averaging.weights[name])


class _Stream:
    """The updates as an iterable for Lightning, without a length; it starts at the progress of the loop."""

    def __init__(self, loop: TrainingLoop) -> None:
        self.loop = loop

    def __iter__(self) -> Iterator[Any]:
        task, progress = self.loop.task, self.loop.progress
        training = task.config.training
        return update_batches(
            task.epochs, training.accumulate, (progress.epoch, progress.place), training.epochs or None
        )


def _state(task: Task) -> Path:
    """The saved state in the folder of the task; an error if there is none."""
    path = None if task.folder is None else task.folder / STATE
    if path is None or not path.exists():
        raise RegardError(f"train: {task.folder} has no saved state. Leave --resume out to begin a training.")
    return path


def _trainer(task: Task) -> Trainer:
    """Lightning's trainer, which moves data and connects processes.

    `TrainingLoop` does all else: the budget, logging, validation and saving.
    """
    training = task.config.training
    return Trainer(
        accelerator=training.accelerator,
        devices=training.devices,
        num_nodes=training.machines,
        strategy=_strategy(task.config.training),
        plugins=[cluster(training)],
        precision="bf16-mixed" if training.precision == "bfloat16" else "32-true",
        max_epochs=-1,  # `TrainingLoop` counts the budget: Lightning cannot resume inside an epoch
        logger=_loggers(task),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )


def _strategy(training: Training) -> Any:
    """How the processes of a training share the work, for Lightning."""
    if (world := training.devices * training.machines) == 1:
        return "auto"
    options: dict[str, Any] = {"process_group_backend": "gloo" if training.accelerator == "cpu" else None}
    options["timeout"] = timedelta(minutes=training.timeout_minutes)
    if training.strategy == "fsdp":
        return ModelParallelStrategy(world, 1, **options)  # all processes share the data, and no layer is split
    return DDPStrategy(gradient_as_bucket_view=True, broadcast_buffers=False, **options)


def _loggers(task: Task) -> Any:
    """The TensorBoard logger, or False for none."""
    if not task.config.training.tensorboard or task.folder is None:
        return False
    try:
        from lightning.pytorch.loggers import TensorBoardLogger

        return TensorBoardLogger(task.folder, name="", version="tensorboard")
    except ModuleNotFoundError:
        raise RegardError("training.tensorboard needs one more package: pip install tensorboard") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress tips and warnings of Lightning; they are about features that are not used here."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\..*")
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # no output is changed in place
            warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")  # torch's, on any flag
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _one_thread_count(threads: int) -> Iterator[None]:
    """Inside, torch uses this number of threads."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _kernels(task: Task) -> Iterator[None]:
    """Disable oneDNN for bfloat16 on processors without bfloat16: its LSTM raises an error, torch's own does not."""
    unsupported = task.config.training.precision == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    with torch.backends.mkldnn.flags(enabled=False) if unsupported else contextlib.nullcontext():  # type: ignore[attr-defined]
        yield


@contextlib.contextmanager
def _stopping(loop: TrainingLoop) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP ends the training after its step; the second ends it at once."""

    def stop(number: int, frame: Any) -> None:
        """Note the first signal for the training loop; raise KeyboardInterrupt at the second."""
        if loop.interrupted:
            raise KeyboardInterrupt
        loop.interrupted = True

    with stop_signals(stop) as numbers:
        loop.before_training = lambda: [
            signal.signal(number, stop) for number in numbers
        ]  # Lightning sets its own handlers
        yield
