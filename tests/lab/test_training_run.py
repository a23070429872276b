"""`regard train` from files to translations, and the folder it leaves."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from regard import RegardError
from regard.cli.app import app
from regard.lab.decoding.search import greedy
from regard.lab.runs.run import (
    ENVIRONMENT,
    METRICS,
    PRETRAINED,
    SETTINGS,
    SOURCE,
    TARGET,
    WEIGHTS,
    load_pretrained,
    load_run,
    named_weights,
    pretrained_runs,
    save_weights,
)
from regard.lab.training.preparation import learn_tokenizer

QUICK = ("--steps", "3", "model.width=8", "training.log_steps=1", "validation.sentences=2")


def regard(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    words = ("un", "deux", "trois", "vent", "mer", "nuit", "jour", "eau")
    lines = [" ".join(words[(3 * n + k * k) % 8] for k in range(2 + n % 5)) for n in range(60)]
    lines = list(dict.fromkeys(lines))
    (folder / "text.fr").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "text.en").write_text("".join(f"{line[::-1]}\n" for line in lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def folder(texts):
    out = texts / "run"
    result = regard("--source", texts / "text.fr", "--target", texts / "text.en", "--out", out, *QUICK)
    assert result.exit_code == 0, result.output
    assert f"regard translate {out}" in result.output.replace("\n", "")
    return out


def test_two_files_become_a_folder_that_translates(folder, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in (WEIGHTS, SETTINGS, SOURCE, TARGET):  # nothing else is needed
        shutil.copy(folder / name, alone)
    texts = []
    for path in (folder, alone):
        run = load_run(path)
        assert not run.model.training
        ids = torch.tensor([[*run.source_tokenizer.encode("un deux"), 3]])
        texts.append(run.target_tokenizer.decode(greedy(run.model, ids)[0][0].tokens))
    assert texts[0] == texts[1]
    run = load_run(folder)
    assert run.config["training"]["steps"] == 3 and [row["step"] for row in run.metrics] == [1, 2, 3]
    assert run.metrics[-1]["bleu"] is not None and run.settings["source_language"] == "source"


def test_the_folder_names_no_machine_and_no_person(folder):
    import platform

    said = (folder / ENVIRONMENT).read_text() + (folder / SETTINGS).read_text()
    for private in (platform.node(), str(folder.parent)):
        assert not private or private not in said
    assert set(json.loads((folder / ENVIRONMENT).read_text())) == {
        "regard",
        "python",
        "system",
        "machine",
        "threads",
        "packages",
    }


def test_a_run_is_never_written_over(folder, texts):
    files = "--source", texts / "text.fr", "--target", texts / "text.en"
    result = regard(*files, "--out", folder, *QUICK)
    assert result.exit_code == 2 and "already holds a run" in result.output and "--resume" in result.output


def test_two_trainings_do_not_share_a_folder(folder, texts, tmp_path):
    from regard.lab.runs.guards import alone

    files = "--source", texts / "text.fr", "--target", texts / "text.en"
    for run, wish in ((tmp_path / "new", files), (folder, ("--resume",))):
        with alone(run, "train"):
            result = regard(*wish, "--out", run, *QUICK)
        assert result.exit_code == 2 and "another process is working" in " ".join(result.output.split())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("reason", ["interrupted", "budget"])
def test_a_training_of_seconds_is_not_0_minutes(reason, tmp_path, capsys):
    from rich.console import Console

    from regard.lab.commands.train import _conclude

    _conclude(Console(width=200), tmp_path, reason, SimpleNamespace(rows=[], seconds=2.6, step=60))
    said = capsys.readouterr().out
    assert "0:03 min" in said and "minutes" not in said


def test_a_clock_has_no_sixtieth_second():
    from regard.lab.commands.train import clock

    assert [clock(seconds) for seconds in (59.4, 59.6, 119.7, 3599.6)] == ["0:59 min", "1:00 min", "2:00 min", "1:00 h"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--steps", "3", "--epochs", "1"), "--steps and --epochs cannot both be the budget"),
        (("a.toml", "b.toml"), "a.toml and b.toml cannot both"),
        (("--resume",), "Name its folder with --out"),
        (("--data", "reverse", "--source", "x"), "two corpora"),
        (("--source", "x"), "two files that belong together"),
        (("--data", "reverze", "--out", "{}"), "there is no corpus"),
        (
            ("--data", "reverse", "--system", "bahdanaw", "tokenizer.kind=words", "--out", "{}"),
            "Did you mean 'bahdanau'",
        ),
        (("--data", "reverse", "model.options.cel=gru", "tokenizer.kind=words", "--out", "{}"), "Did you mean 'cell'"),
        (("model.wdth=4",), "Did you mean 'width'"),
        (("model.options.width=4",), "options.width is not an option of a system. Set model.width"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing(arguments, said, tmp_path):
    result = regard(*(part.format(tmp_path / "run") for part in arguments))
    assert result.exit_code == 2 and said in " ".join(result.output.split()), result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("corpus", "words"), [("copy", 26), ("reverse", 26), ("grammar", None)])
def test_generated_corpora_are_trained_at_their_defaults(corpus, words, tmp_path):
    """Each letter is one entry of the vocabulary, beside the four special ones."""
    result = regard("--data", corpus, *QUICK, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    printed = " ".join(result.output.split())
    assert f"{corpus}: 18000 training, 1000 validation, 1000 test pairs." in printed
    assert words is None or f"vocabularies of {words + 4} and {words + 4};" in printed
    run = load_run(tmp_path / "run")
    assert run.source_tokenizer.pieces(run.source_tokenizer.encode("a")) == ["a"]
    translated = CliRunner().invoke(app, ["translate", str(tmp_path / "run"), "a"])
    assert translated.exit_code == 0, translated.output


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("num_letters", [2, 3, 10, 26, 200])
def test_any_corpus_has_a_vocabulary_by_default(kind, num_letters):
    """Words of one letter allow few sizes, and none of `SIZES` may be among them."""
    draw = random.Random(num_letters)
    sentences = [" ".join(chr(0x4E00 + draw.randrange(num_letters)) for _ in range(9)) for _ in range(400)]
    tokenizer = learn_tokenizer(sentences, kind, "auto")
    assert [tokenizer.decode(tokenizer.encode(sentence)) for sentence in sentences] == sentences


def test_the_template_is_printed_and_can_be_trained_with(tmp_path):
    result = CliRunner().invoke(app, ["train", "--template"])
    assert result.exit_code == 0 and result.output.startswith("# ")
    (tmp_path / "config.toml").write_text(result.output)
    wish = (tmp_path / "config.toml", "--data", "copy", "data.size=40", "tokenizer.kind=words", *QUICK)
    assert regard(*wish, "--out", tmp_path / "run", "training.tokens=60", "training.precision=bfloat16").exit_code == 0
    again = regard("--out", tmp_path / "run", "--resume", "--steps", "5")
    assert again.exit_code == 0, again.output
    assert [row["step"] for row in load_run(tmp_path / "run").metrics] == [1, 2, 3, 4, 5]


def test_ctrl_c_leaves_a_whole_run_and_says_how_to_go_on(tmp_path):
    folder = tmp_path / "run"

    def interrupt():
        while not (folder / METRICS).exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    wish = ("--data", "copy", "data.size=40", "tokenizer.kind=words", *QUICK, "--steps", 10**9, "--out", folder)
    result = regard(*wish)
    thread.join()
    assert result.exit_code == 130, result.output
    assert f"regard train --out {folder} --resume" in result.output.replace("\n", "")
    assert load_run(folder).metrics


def test_tensorboard_gets_what_the_table_gets(tmp_path):
    pytest.importorskip("tensorboard")
    wish = ("--data", "copy", "data.size=40", "tokenizer.kind=words", *QUICK, "training.tensorboard=true")
    result = regard(*wish, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    (events,) = (tmp_path / "run" / "tensorboard").glob("events*")
    assert b"train_loss" in events.read_bytes() and b"bleu" in events.read_bytes()


def test_truncated_and_foreign_files_are_named(folder, tmp_path):
    for name in (WEIGHTS, SETTINGS, SOURCE, METRICS):
        broken = tmp_path / name
        shutil.copytree(folder, broken)
        (broken / name).write_bytes((broken / name).read_bytes()[:-40])
        with pytest.raises(RegardError, match=name) if name != METRICS else pytest.raises(RegardError):
            load_run(broken)
            (broken / name).write_text("step,epoch\n1,x\n")
            load_run(broken)
    for name in (WEIGHTS, SETTINGS, TARGET):
        missing = tmp_path / f"no-{name}"
        shutil.copytree(folder, missing)
        (missing / name).unlink()
        with pytest.raises(RegardError, match=name):
            load_run(missing)
    old = tmp_path / "old"
    shutil.copytree(folder, old)
    settings = json.loads((old / SETTINGS).read_text())
    (old / SETTINGS).write_text(json.dumps(settings | {"format": 0, "regard": "0.0.1"}))
    with pytest.raises(RegardError, match=r"written by regard 0\.0\.1 in format 0"):
        load_run(old)
    (old / SETTINGS).write_text(json.dumps(settings | {"model": {**settings["model"], "width": 16}}))
    with pytest.raises(RegardError, match="weights of another model"):
        load_run(old)
    with pytest.raises(RegardError, match="not the folder of a run"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(RegardError, match="no model 'klingon'"):
        load_pretrained("klingon")


def test_runs_of_the_package_share_tokenizers_and_other_runs_have_their_own(folder, tmp_path, monkeypatch):
    box = tmp_path / "box"
    monkeypatch.setattr("regard.lab.runs.run.PRETRAINED", box)
    for parent in (box, tmp_path / "other"):
        shutil.copytree(folder, parent / "a")
        for name in (SOURCE, TARGET):
            (parent / "a" / name).rename(parent / name)
    ids = load_run(folder).source_tokenizer.encode("un deux")
    assert pretrained_runs() == ["a"] and load_pretrained("a").source_tokenizer.encode("un deux") == ids
    with pytest.raises(RegardError, match=f"other/a/{SOURCE} is missing"):
        load_run(tmp_path / "other" / "a")
    shutil.copy(folder / TARGET, box / SOURCE)
    with pytest.raises(RegardError, match=f"{SOURCE} changed after the run was written"):
        load_pretrained("a")
    shutil.copy(folder / SOURCE, box / "a" / SOURCE)  # its own comes first
    assert load_pretrained("a").source_tokenizer.encode("un deux") == ids


def test_the_package_holds_no_large_file_twice():
    files = [path for path in PRETRAINED.parents[1].rglob("*") if path.is_file() and path.suffix != ".pyc"]
    sums = Counter(hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.stat().st_size > 1000)
    assert len(pretrained_runs()) > 1 and max(sums.values()) == 1


def test_half_precision_weights_are_read_into_the_model(folder, tmp_path):
    half = tmp_path / "half"
    shutil.copytree(folder, half)
    run = load_run(folder)
    weights = {name: value.half() for name, value in named_weights(run.model).items()}
    save_weights(run.model, weights, half / WEIGHTS, {})
    again = load_run(half)
    for name, value in named_weights(again.model).items():
        assert value.dtype == torch.float32 and torch.equal(value, weights[name].float())
