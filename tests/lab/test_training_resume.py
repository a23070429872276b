"""A training that was stopped, at whatever moment and however rudely, goes on to the same numbers."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from regard import RegardError
from regard.base.whole_files import write_whole
from regard.cli.app import app
from regard.lab import SYSTEMS
from regard.lab.models.loss import Loss
from regard.lab.runs import run
from regard.lab.runs.config import read_config
from regard.lab.runs.run import METRICS, STATE, WEIGHTS, load_run, read_metrics
from regard.lab.runs.tensor_files import read_tensors
from regard.lab.training import preparation
from regard.lab.training.fitting import fit
from regard.lab.training.preparation import prepare, reconfigured

TINY = (
    "data.corpus=reverse",
    "data.size=60",
    "tokenizer.kind=words",
    "model.width=8",
    "training.sentences=4",
    "training.accumulate=2",
    "training.steps=12",
    "training.warmup=3",
    "training.log_steps=2",
    "training.save_steps=3",
    "training.save_minutes=0",
    "validation.steps=4",
    "validation.sentences=4",
)
#: What the clock has no part in.
EXACT = ("step", "epoch", "learning_rate", "train_loss", "valid_loss", "perplexity", "bleu")


class Killed(Exception):
    """Stands for a power cut: nothing of ours may run after it."""


def train(folder: Path, *overrides: str, resume: bool = False, on_step=lambda standing: None):
    if resume:
        config = reconfigured(folder, lambda sections: read_config(None, overrides, sections))
    else:
        config = read_config(None, (*TINY, *overrides))
    return fit(prepare(config, folder).task, resume=resume, on_step=on_step)


def at_step(number, action):
    return lambda standing: action() if standing.step == number else None


def killed():
    raise Killed


def interrupted():
    os.kill(os.getpid(), signal.SIGINT)


def same(one: Path, other: Path):
    """All that was logged and all weights, bit for bit."""
    rows = [
        [{name: row.get(name) for name in EXACT} for row in read_metrics(folder / METRICS)] for folder in (one, other)
    ]
    assert rows[0] == rows[1] and len(rows[0]) > 3
    assert (one / WEIGHTS).read_bytes() == (other / WEIGHTS).read_bytes()
    mine, theirs = (read_tensors(folder / STATE)[0] for folder in (one, other))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_every_system_goes_on_bit_for_bit(system, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train(straight, f"model.system={system}")
    with pytest.raises(Killed):
        train(broken, f"model.system={system}", on_step=at_step(8, killed))  # a state of step 6 is there
    assert read_tensors(broken / STATE)[1]["standing"]["step"] == 6
    outcome = train(broken, resume=True)
    assert outcome.reason == "budget" and outcome.progress.step == 12
    same(straight, broken)


@pytest.mark.parametrize("schedule", ["plateau", "noam", "inverse_square_root", "constant"])
def test_every_schedule_goes_on_after_ctrl_c(schedule, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    wish = (f"training.schedule={schedule}", "training.plateau_patience=1", "training.learning_rate=0.01")
    train(straight, *wish)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    outcome = train(broken, *wish, on_step=at_step(7, interrupted))
    assert outcome.reason == "interrupted" and outcome.progress.step == 7
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    load_run(broken)  # a whole run at any time
    train(broken, resume=True)
    # the interrupt logged the odd step that it came at
    rows = [row for row in read_metrics(broken / METRICS) if row["step"] != 7]
    assert [row["valid_loss"] for row in rows] == [row["valid_loss"] for row in read_metrics(straight / METRICS)]
    assert (straight / WEIGHTS).read_bytes() == (broken / WEIGHTS).read_bytes()


def test_sampled_pieces_and_a_finished_run_go_on(tmp_path):
    wish = ("tokenizer.kind=unigram", "tokenizer.source_size=35", "tokenizer.target_size=35", "tokenizer.sampling=true")
    straight, longer = tmp_path / "straight", tmp_path / "longer"
    train(straight, *wish, "training.schedule=constant")
    train(longer, *wish, "training.schedule=constant", "training.steps=8")
    again = train(longer, resume=True)  # nothing is left to do
    assert again.progress.step == 8
    train(longer, "training.steps=12", resume=True)
    same(straight, longer)


def test_a_process_that_is_killed_goes_on_bit_for_bit(tmp_path):
    folder, wish = tmp_path / "killed", ("training.schedule=constant", "training.steps=1000000", "validation.steps=0")
    command = [sys.executable, "-m", "regard.cli.main", "train", *TINY, *wish, "--out", str(folder)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        began = time.monotonic()
        while not (folder / STATE).exists():
            assert process.poll() is None and time.monotonic() - began < 600, (tmp_path / "log").read_text()
            time.sleep(0.01)
        time.sleep(0.0137)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    step = read_tensors(folder / STATE)[1]["standing"]["step"]
    assert 0 < step < 1000000
    train(folder, f"training.steps={step + 5}", resume=True)
    straight = tmp_path / "straight"
    train(straight, *wish[::2], "training.schedule=constant", f"training.steps={step + 5}")
    same(straight, folder)


def test_a_loss_that_is_no_number_stops_with_the_last_good_weights(tmp_path, monkeypatch):
    from regard.lab.training import loop

    whole, calls = loop.translation_loss, []

    def poisoned(*arguments):
        calls.append(1)
        loss = whole(*arguments)
        return Loss(loss.smoothed * float("nan"), loss.nll, loss.num_tokens) if len(calls) == 12 else loss

    monkeypatch.setattr(loop, "translation_loss", poisoned)
    with pytest.raises(RegardError) as error:
        train(tmp_path / "bad", "validation.steps=0")
    said = str(error.value)
    assert "at step 6 (epoch 1, batch 11 of 12" in said and "training pairs" in said and "learning_rate" in said
    tensors, facts = read_tensors(tmp_path / "bad" / STATE)
    assert facts["standing"]["step"] == 5
    monkeypatch.setattr(loop, "translation_loss", whole)
    with pytest.raises(Killed):
        train(tmp_path / "good", "validation.steps=0", "training.save_steps=5", on_step=at_step(6, killed))
    for name, tensor in read_tensors(tmp_path / "good" / STATE)[0].items():
        assert name == "random.cpu" or torch.equal(tensor, tensors[name])
    load_run(tmp_path / "bad")


def test_weights_that_are_no_numbers_never_replace_a_good_state(tmp_path):
    folder, seen = tmp_path / "run", []

    def poison(standing):
        if standing.step == 7:
            seen.append((folder / STATE).read_bytes())
            with torch.no_grad():
                next(models[-1].parameters()).fill_(math.inf)

    models, built = [], preparation._model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "_model", lambda *args: models.append(built(*args)) or models[-1])
        with pytest.raises(RegardError, match=r"at step 8 .*The state that was saved last is kept in"):
            train(folder, "validation.steps=0", "training.save_steps=5", on_step=poison)
    assert (folder / STATE).read_bytes() == seen[0]
    assert train(folder, resume=True).progress.step == 12


def test_a_validation_that_is_no_number_says_so(tmp_path):
    wish = ("training.learning_rate=1e30", "training.clip=0", "training.warmup=0")
    with pytest.raises(RegardError, match=r"train: the loss.* not a finite number.*Lower training.learning_rate"):
        train(tmp_path / "run", *wish)


def test_a_full_disk_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "facts"
    write_whole(path, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        with pytest.raises(
            RegardError, match=r"facts \(100,000 bytes\) cannot be written.*The old content of facts is kept.*room"
        ):
            write_whole(path, b"x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["facts"]


def test_training_on_a_full_disk_can_go_on_from_the_last_state(tmp_path, monkeypatch):
    straight, full = tmp_path / "straight", tmp_path / "full"
    train(straight)
    monkeypatch.undo()

    def no_space():
        def fsync(descriptor):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("regard.base.whole_files.os.fsync", fsync)

    with pytest.raises(RegardError, match=r"No space left on device.*is kept.*--resume"):
        train(full, on_step=at_step(7, no_space))
    monkeypatch.undo()
    assert not [name for _, _, names in os.walk(full) for name in names if name.startswith(".regard-")]
    train(full, resume=True)
    same(straight, full)


def test_patience_ends_a_training_that_gets_no_better(tmp_path):
    outcome = train(tmp_path, "training.learning_rate=1e-12", "validation.monitor=loss", "validation.patience=1")
    assert outcome.reason == "patience" or outcome.progress.waited == 0
    patient = train(tmp_path / "x", "validation.monitor=bleu", "validation.patience=1", "validation.steps=1")
    assert patient.reason == "patience" and patient.progress.step < 12


def test_what_a_state_depends_on_must_not_change(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(RegardError, match="not the folder of a run"):
        train(folder, resume=True)
    train(folder, "training.steps=2")
    for change in ("model.width=16", "data.size=61", "tokenizer.kind=bpe", "training.sentences=8"):
        with pytest.raises(RegardError, match="cannot change when a run is resumed"):
            train(folder, change, resume=True)
    config = read_config(None, (*TINY, "data.size=61"))
    with pytest.raises(RegardError, match="state of a run with another corpus"):
        fit(prepare(config, folder).task, resume=True)
    (folder / STATE).write_bytes((folder / STATE).read_bytes()[:-50])
    with pytest.raises(RegardError, match="truncated"):
        train(folder, resume=True)
    (folder / STATE).unlink()
    with pytest.raises(RegardError, match="has no saved state"):
        train(folder, resume=True)
    assert json.loads((folder / "settings.json").read_text())["corpus"] == "reverse"


def test_what_was_written_after_the_state_is_cut(tmp_path, monkeypatch):
    """Lines are appended, not written anew; of a killed training those after its state go, also one cut short."""
    whole = []
    monkeypatch.setattr(
        run, "write_metrics", lambda path, rows, write=run.write_metrics: whole.append(1) or write(path, rows)
    )
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train(straight, "training.log_steps=1")
    assert len(read_metrics(straight / METRICS)) == 12 and len(whole) == 1
    with pytest.raises(Killed):
        train(broken, "training.log_steps=1", on_step=at_step(8, killed))  # a state of step 6 is there
    with (broken / METRICS).open("a") as file:
        file.write("9,0,0.1")
    assert [row["step"] for row in read_metrics(broken / METRICS)] == list(range(1, 9))
    seen = []
    train(broken, resume=True, on_step=lambda standing: seen.append(read_metrics(broken / METRICS)[-1]["step"]))
    assert seen == list(range(7, 13))
    same(straight, broken)


@pytest.mark.parametrize("stage", ["lock", "configuration", "all"])
def test_a_run_that_was_killed_before_its_first_save_begins_anew(stage, tmp_path):
    straight, folder = tmp_path / "straight", tmp_path / "run"
    train(straight)
    if stage == "all":
        with pytest.raises(Killed):
            train(folder, on_step=at_step(1, killed))
    folder.mkdir(exist_ok=True)
    (folder / ".lock").touch()
    if stage == "configuration":
        shutil.copy(straight / "config.toml", folder)
    wish = TINY if stage == "lock" else ()
    result = CliRunner().invoke(app, ["train", *wish, "--out", str(folder), "--resume"])
    assert result.exit_code == 0, result.output
    assert "stopped before its first save. The training begins anew." in " ".join(result.output.split())
    same(straight, folder)


def test_the_first_weights_go_with_a_state(tmp_path):
    """Or a training that was killed after its first validation would have weights and nothing to go on from."""
    with pytest.raises(Killed):
        train(tmp_path / "run", "training.save_steps=0", on_step=at_step(5, killed))
    assert (tmp_path / "run" / WEIGHTS).exists()
    assert train(tmp_path / "run", resume=True).progress.step == 12


def test_what_a_kill_inside_a_save_left_is_removed_by_the_next_start(tmp_path):
    folder = tmp_path / "run"
    train(folder, "training.steps=2")
    drafts = folder / ".regard-a1b2", folder / "state" / ".regard-c3d4"
    for draft in drafts:
        draft.write_bytes(b"half")
    result = CliRunner().invoke(app, ["train", "--out", str(folder), "--resume"])
    assert result.exit_code == 0, result.output
    assert not any(draft.exists() for draft in drafts)


def test_a_budget_in_epochs_ends_and_a_longer_one_goes_on(tmp_path):
    def bounded(standing):
        assert standing.step < 20, "epochs without end"

    epochs = ("training.steps=0", "training.schedule=constant")
    first = train(tmp_path / "a", *epochs, "training.epochs=1", on_step=bounded)
    assert (first.reason, first.progress.epoch, first.progress.place) == ("budget", 1, 0)
    again = train(tmp_path / "a", resume=True, on_step=bounded)  # nothing is left to do
    assert (again.reason, again.progress.step) == ("budget", first.progress.step)
    more = train(tmp_path / "a", "training.epochs=2", resume=True, on_step=bounded)
    assert (more.progress.epoch, more.progress.step) == (2, 2 * first.progress.step)
    train(tmp_path / "b", *epochs, "training.epochs=2", on_step=bounded)
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()


def test_another_corpus_is_refused_before_anything_is_written(tmp_path):
    train(tmp_path, "training.steps=2")
    before = (tmp_path / "settings.json").read_bytes()
    with pytest.raises(RegardError, match="another corpus"):
        prepare(read_config(None, (*TINY, "data.size=61")), tmp_path)
    assert (tmp_path / "settings.json").read_bytes() == before
