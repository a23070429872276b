"""`TrainingLoop`: one update of the weights, logging and validation after it, and saving and loading of the state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from regard.base.errors import RegardError
from regard.lab.data.batches import Batch
from regard.lab.evaluation import clock
from regard.lab.evaluation.validation import Score, Validation, negative_log_likelihood
from regard.lab.models.loss import translation_loss
from regard.lab.models.sharding import all_rows, gathered_weights, is_sharded, own_rows, shard, sharded_like
from regard.lab.models.systems import find_system
from regard.lab.runs.config import Config
from regard.lab.runs.run import METRICS, STATE, WEIGHTS, MetricsFile, named_weights, put_weights, save_weights
from regard.lab.training.averaging import Averaging
from regard.lab.training.ranks import gathered, rank, summed, together, world
from regard.lab.training.schedule import Plateau, Schedule
from regard.lab.training.state import read_state, write_state
from regard.lab.training.stream import Epochs, TrainingProgress, UpdateBatches

if TYPE_CHECKING:
    from regard.lab.models.translator import Translator

#: The version of the saved state; increase it when older states cannot be continued.
FORMAT = 1


@dataclass(frozen=True, eq=False)
class Task:
    """A model, its configuration and its data: the task of a training.

    Args:
        model: The system, with its first weights.
        config: Of the run; the sections data and tokenizer are not used here.
        epochs: The batches of this process, by epoch.
        valid: Batches of this process' share of the held-out pairs; without them there is no validation.
        score: BLEU of the model on held-out pairs, or None.
        folder: The folder of the run; None keeps the run in memory.
        facts: Facts that must equal those of a saved state to continue from it, such as the hash of the corpus.
    """

    model: Translator
    config: Config
    epochs: Epochs
    valid: Sequence[Batch] = ()
    score: Score | None = None
    folder: Path | None = None
    facts: tuple[tuple[str, Any], ...] = ()

    @property
    def schedule(self) -> Schedule:
        """The schedule of the learning rate, with the value for "auto"."""
        training, model = self.config.training, self.config.model
        peak = training.learning_rate
        if peak == "auto":
            # for noam the formula of the paper has its peak itself
            peak = 1.0 if training.schedule == "noam" else find_system(model.system).learning_rate
        return Schedule(training.schedule, float(peak), training.warmup, model.width)


class TrainingLoop(LightningModule):
    """A model in training: `training_step` is one update, with logging, validation and saving after it.

    The training loss is the sum of losses / number of target tokens, both over all batches of the update in all
    processes. So it does not depend on how the pairs are distributed. The optimizer is Adam with the betas of the
    Transformer's paper, 0.9 and 0.98. `on_step` is called after every update with the progress. `resume` is the file of
    a saved state from which the training goes on; None begins a new one.
    """

    averaging: Averaging
    optimizer: torch.optim.Optimizer

    def __init__(
        self, task: Task, on_step: Callable[[TrainingProgress], object] = lambda _: None, resume: Path | None = None
    ) -> None:
        super().__init__()
        self.automatic_optimization = False  # `training_step` calls backward and the optimizer itself
        self.model, self.task, self.on_step = task.model, task, on_step
        self.training_config = task.config.training
        self.schedule = task.schedule
        plateau = Plateau(self.training_config.plateau_patience, self.training_config.plateau_decay)
        self.progress = TrainingProgress(plateau=plateau)
        #: Set from outside, for example by Ctrl-C: the training ends before its next update.
        self.interrupted = False
        self.reason = ""
        #: Called after the setup of Lightning, before the first step.
        self.before_training: Callable[[], Any] = lambda: None
        self._took = 0.0  # seconds of the last step that are not in the progress yet
        self._resume = resume
        self._metrics = None if task.folder is None else MetricsFile(task.folder / METRICS)

    # Methods that Lightning calls

    def configure_model(self) -> None:
        """Shard the weights first; the averages and the optimizer are then made of the shards of this process."""
        if self.training_config.strategy == "fsdp" and self.device_mesh is not None:
            shard(self.model, self.device_mesh["data_parallel"])
        self.averaging = Averaging(self.model, self.training_config.average)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9, fused=True)
        if self._resume:
            self.load(self._resume)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer that `configure_model` made, which Lightning calls before."""
        return self.optimizer

    def transfer_batch_to_device(
        self, batch: UpdateBatches, device: torch.device, dataloader_idx: int
    ) -> UpdateBatches:
        if device.type != "cpu":
            batch.batches = [part.to(device) for part in batch.batches]
        return batch

    def training_step(self, batch: UpdateBatches, batch_idx: int) -> None:
        """One update, or the end of the training if the budget is used up.

        Lightning calls it in all processes. `_agree` comes first, so that all of them stop at the same update.
        """
        start = clock.seconds(self.device)
        tokens, pairs = self._agree(batch)
        if self._ended(batch):
            self.trainer.should_stop = True
            return
        total = self._backward(batch, tokens)
        self._update(batch)
        self._count(batch, total, tokens, pairs)
        self._took = clock.seconds(self.device) - start
        self._after()

    # One step

    def _agree(self, update: UpdateBatches) -> tuple[int, int]:
        """Target tokens and pairs of all processes; also adds the time of the last step and shares requests to stop."""
        tokens, pairs = sum(b.num_tokens for b in update.batches), sum(map(len, update.batches))
        shared = torch.tensor([tokens, pairs, self._took, float(self.interrupted)], dtype=torch.float64)
        shared = summed(shared, self.device)
        tokens, pairs, took, stops = shared.tolist()
        self.progress.seconds += took / world()
        self.progress.add(seconds=took / world())
        self._took = 0.0
        self.interrupted = stops > 0
        return int(tokens), int(pairs)

    def _ended(self, update: UpdateBatches) -> bool:
        """Whether to stop before this update; sets the reason."""
        progress, (unit, amount) = self.progress, self.training_config.budget
        progress.share = {
            "minutes": progress.seconds / 60,
            "steps": progress.step,
            "epochs": update.epoch + update.place / update.num_batches,
        }[unit] / amount
        patience = self.task.config.validation.patience
        if progress.share >= 1:
            self.reason = "budget"
        elif self.interrupted:
            self.reason = "interrupted"
        elif patience and progress.waited >= patience:
            self.reason = "patience"
        return bool(self.reason)

    def _backward(self, update: UpdateBatches, tokens: int) -> float:
        """Compute the gradients of the mean loss over all tokens; returns the sum of the losses of this process."""
        total = 0.0
        self.model.train()
        for number, batch in enumerate(update.batches, 1):
            full = batch.filled  # a process without pairs computes a dummy batch, because the others wait for it
            loss = translation_loss(self.model, full.source, full.target, self.training_config.label_smoothing)
            smoothed = loss.smoothed if len(batch) else loss.smoothed * 0.0
            with nullcontext() if number == len(update.batches) else self._unsummed():
                self.manual_backward(smoothed * (world() / tokens))  # the gradients of processes are averaged
            total += float(smoothed.detach())
        return total

    def _unsummed(self) -> AbstractContextManager[None]:
        """Inside, gradients stay in their process: those of all batches of an update are sent once, after the last.

        Sharded gradients are sent for each batch, because a process has no memory for whole ones.
        """
        strategy = self.trainer.strategy
        return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()

    def _update(self, update: UpdateBatches) -> None:
        """Set the learning rate, clip the gradients, step the optimizer, and average the new weights."""
        step, training = self.progress.step + 1, self.training_config
        rate = self.schedule.rate(step, self.progress.share, self.progress.plateau.factor)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = all_rows(torch.nn.utils.clip_grad_norm_(self.model.parameters(), training.clip or math.inf))
        if not math.isfinite(norm):
            raise self._diverged(update, rate)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.averaging.add()

    def _diverged(self, update: UpdateBatches, rate: float) -> RegardError:
        """The error for a loss that is not finite; saves the state before the step if its weights are finite.

        `update` has the batches of the step, and `rate` was its learning rate.
        """
        self.optimizer.zero_grad()
        self.reason = "diverged"
        broken = sum(bool((~own_rows(weight).isfinite()).any()) for weight in self.model.parameters())
        is_finite = not summed(torch.tensor(float(broken)), self.device).item()
        if is_finite:
            self.save()
        pairs = [index for batch in update.batches for index in batch.indices]
        return RegardError(
            f"train: the loss or its gradient is not a finite number at step {self.progress.step + 1} (epoch "
            f"{update.epoch + 1}, batch {update.place + 1} of {update.num_batches}, learning rate {rate:.3g}, "
            "training pairs "
            f"{', '.join(map(str, pairs))}).{self._kept('The state before that step' if is_finite else '')} "
            "Lower training.learning_rate or training.clip, or check these pairs."
        )

    def _kept(self, state: str = "") -> str:
        """A sentence about what the folder holds after a failure."""
        folder = self.task.folder
        if folder is None or not (folder / STATE).exists():
            return " Nothing was saved before it."
        return f" {state or 'The state that was saved last'} is kept in {folder}."

    def _count(self, update: UpdateBatches, total: float, tokens: int, pairs: int) -> None:
        """Add an update to the progress. `total` is the loss of this process, the other sums are of all processes."""
        progress = self.progress
        progress.step += 1
        progress.epoch, progress.place = update.following
        progress.tokens += tokens
        progress.pairs += pairs
        progress.add(loss=total, tokens=tokens, pairs=pairs)

    # After a step

    def _after(self) -> None:
        """Log, validate and save, each when it is due; rows are written also if validation fails."""
        progress, training, validation = self.progress, self.training_config, self.task.config.validation
        try:
            if progress.step % training.log_steps == 0:
                self.log_row()
            if validation.steps and progress.step % validation.steps == 0:
                self.validate()
        finally:
            self._write_rows()
        waited = progress.seconds - progress.saved
        by_time = training.save_minutes and waited >= 60 * training.save_minutes
        first_weights = progress.best is not None and not progress.saved  # best weights need a saved state, too
        if by_time or first_weights or (training.save_steps and progress.step % training.save_steps == 0):
            self.save()
        self.on_step(progress)

    def log_row(self) -> None:
        """Add a row to metrics.csv, with means over the steps since the last row."""
        progress, recent = self.progress, self.progress.recent
        loss = summed(torch.tensor(recent.get("loss", 0.0), dtype=torch.float64), self.device).item()
        seconds = recent.get("seconds", 0.0) + self._took
        row = {
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "train_loss": loss / max(recent.get("tokens", 0.0), 1.0),
            "tokens_per_second": round(recent.get("tokens", 0.0) / seconds, 1) if seconds else None,
            "pairs_per_second": round(recent.get("pairs", 0.0) / seconds, 1) if seconds else None,
        }
        progress.recent = {"seconds": -self._took}  # _agree adds these seconds at the next step
        self._note(row)

    def validate(self) -> Validation | None:
        """Evaluate the averaged weights, keep them if they are the best, and update the plateau schedule.

        The result is None if there are no held-out pairs.
        """
        if not self.task.valid:
            return None
        # validation must not change the random numbers of training
        apart = torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])
        with apart, self.averaging.swapped_in(), gathered_weights(self.model):
            self.model.eval()
            validation = self._measure()
        self.model.train()
        self._note({"valid_loss": validation.loss, "perplexity": validation.perplexity, "bleu": validation.bleu})
        self.progress.plateau = self.progress.plateau.after(validation.loss)
        by_bleu = self.task.config.validation.monitor == "bleu" and validation.bleu is not None
        # smaller is better
        value = -validation.bleu if by_bleu and validation.bleu is not None else validation.loss
        better = self.progress.best is None or value < self.progress.best
        self.progress.waited = 0 if better else self.progress.waited + 1
        if better:
            self.progress.best = value
            if self.task.config.validation.keep == "best":
                self._save_weights()
        return validation

    def _measure(self) -> Validation:
        """The loss of the present weights over the held-out pairs of all processes, and BLEU if it is measured."""
        total, tokens = negative_log_likelihood(self.model, self.task.valid)
        total, tokens = summed(torch.tensor([total, tokens], dtype=torch.float64), self.device).tolist()
        if not math.isfinite(total):
            raise self._diverged_validation()
        return Validation(total / max(tokens, 1.0), self._bleu() if self.task.score else None)

    def _bleu(self) -> float:
        """BLEU on validation pairs. The first process translates; with sharded weights all processes do."""
        assert self.task.score is not None
        try:
            bleu = self.task.score(self.model) if is_sharded(self.model) or rank() == 0 else 0.0
        except RegardError as error:  # decoding raises it for scores that are not finite
            raise self._diverged_validation() from error
        return summed(torch.tensor(0.0 if rank() else bleu, dtype=torch.float64), self.device).item()

    def _diverged_validation(self) -> RegardError:
        """The error for a validation whose loss or scores are not finite."""
        self.reason = "diverged"
        return RegardError(
            f"train: the loss on the validation pairs, or a score of their translations, is not a finite number after "
            f"step {self.progress.step}: the training has diverged.{self._kept()} Lower training.learning_rate or "
            "training.clip."
        )

    def _note(self, numbers: dict[str, float | None]) -> None:
        """Add numbers to the row of this step, and to TensorBoard."""
        self.progress.note(**numbers)
        for logger in self.loggers:
            logger.log_metrics(
                {name: value for name, value in numbers.items() if value is not None}, self.progress.step
            )

    def _write_rows(self) -> None:
        """Write metrics.csv; only the first process does."""
        if rank() == 0 and self._metrics is not None:
            self._metrics.write(self.progress.rows)

    def on_train_epoch_end(self) -> None:
        """Stop after the last epoch; otherwise Lightning would start the batches again."""
        self.trainer.should_stop = True

    def on_train_end(self) -> None:
        """Write the last row and the state, and validate unless the training was interrupted."""
        progress = self.progress
        if not self.reason:
            self.reason, progress.share = "budget", 1.0  # all epochs are finished
        if progress.recent.get("tokens"):
            self.log_row()
        last = progress.rows[-1] if progress.rows else {}
        if self.reason != "interrupted" and not (last.get("step") == progress.step and "valid_loss" in last):
            self.validate()
        self._write_rows()
        self.save()  # all processes wait here, so they can read the files of the first process afterwards

    # Saving and resuming

    def save(self) -> None:
        """Write the whole state to one file, and the weights for translation unless better ones are kept."""
        self.progress.saved = self.progress.seconds
        # all processes take part in these exchanges, also those that write nothing
        random = {name: gathered(state, self.device) for name, state in _generators(self.device).items()}
        loss = summed(torch.tensor(self.progress.recent.get("loss", 0.0), dtype=torch.float64), self.device).item()
        self.progress.recent["loss"] = 0.0 if rank() else loss  # the first process has the sum of all
        if self.task.folder is None:
            return
        if self.task.config.validation.keep == "last" or self.progress.best is None:
            self._save_weights()
        tensors: dict[str, Tensor] = {f"model.{name}": value for name, value in named_weights(self.model).items()}
        tensors |= {f"average.{name}": value for name, value in self.averaging.weights.items()}
        for name, weight in self.model.named_parameters():
            for key, value in self.optimizer.state.get(weight, {}).items():
                tensors[f"{key}.{name}"] = value
        tensors |= {f"random.{name}": states for name, states in random.items()}
        facts = {"format": FORMAT, "facts": dict(self.task.facts), "averaged": self.averaging.num_steps}
        facts["standing"] = self.progress.to_json()
        write_state(self.task.folder / STATE, tensors, facts, self.progress.step)

    def load(self, path: Path) -> None:
        """Restore the state that `save` wrote; raises an error for a state of other data."""
        saved, facts = read_state(path)
        if facts.get("format") != FORMAT:
            raise RegardError(f"{path} is a state of format {facts.get('format')}, not {FORMAT}. Train the run again.")
        other = [name for name, value in self.task.facts if facts["facts"].get(name) != value]
        if other:
            raise RegardError(
                f"{path} is the state of a run with another {' and '.join(other)}. "
                "Use the data of that run, or another --out."
            )
        put_weights(self.model, saved.under("model"), path)
        self.averaging.load(saved.under("average"), facts["averaged"])
        # the state of Adam, by torch's names; there is none before the first step
        moments = {key: values for key in ("step", "exp_avg", "exp_avg_sq") if (values := saved.under(key))}
        for name, weight in self.model.named_parameters():
            self.optimizer.state[weight] = {
                key: values[name] if key == "step" else sharded_like(weight, values[name])
                for key, values in moments.items()
            }
        self.progress = TrainingProgress.from_json(facts["standing"])
        if rank_zero_only.rank:
            self.progress.recent["loss"] = 0.0  # the first process has the sum of all
        self._random = dict(saved.under("random"))

    def on_train_start(self) -> None:
        """Move the averages to the device. Restore the generators last, because the setup draws from them."""
        self.before_training()
        self.averaging.weights = {name: value.to(self.device) for name, value in self.averaging.weights.items()}
        random = self.__dict__.pop("_random", None)
        if random is not None:
            _set_generators(random, self.device)
            self._write_rows()  # drops the rows that were written after the saved state

    def _save_weights(self) -> None:
        """Write the averaged weights to model.safetensors. All processes call it."""
        if not self.task.folder:
            return
        # gathered one tensor at a time; only the first process keeps them
        weights = {}
        for name, value in self.averaging.weights.items():
            rows = all_rows(value)
            if rank() == 0:
                weights[name] = rows
        with together():
            if rank() == 0:
                save_weights(self.model, weights, self.task.folder / WEIGHTS, {"step": self.progress.step})


def _generators(device: torch.device) -> dict[str, Tensor]:
    """The states of the random generators of this process."""
    on_device = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **on_device}


def _set_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the generators of this process; if the number of processes changed, they keep their new seeds."""
    if len(states["cpu"]) != world():
        return
    torch.set_rng_state(states["cpu"][rank()].clone())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].reshape(world(), -1)[rank()].clone(), device)
