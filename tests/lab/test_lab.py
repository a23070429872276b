"""The commands of the lab on small corpora of several scripts: what they say, count, refuse and leave out."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
import signal
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

import regard as rg
from regard import RegardError
from regard.cli.app import app
from regard.lab.data.words import cut
from regard.lab.decoding.alignment import align, write_pharaoh
from regard.lab.runs.run import CONFIG, SETTINGS, SOURCE, TARGET, load_run

pytest.importorskip("pydantic")
QUICK = ("--steps", "3", "model.width=8", "training.log_steps=1", "validation.sentences=2")
NOUNS = {"犬": "dog", "猫": "cat", "鳥": "bird", "魚": "fish", "先生": "teacher", "学生": "student", "子供": "child"}
VERBS = {"見る": "sees", "聞く": "hears", "待つ": "awaits", "追う": "chases", "助ける": "helps", "知る": "knows"}
PAIRS = [
    (f"the {a} {b} the {c}.", f"{x}は{z}を{y}。")
    for x, a in NOUNS.items()
    for y, b in VERBS.items()
    for z, c in NOUNS.items()
]


def regard(command, *arguments, status=0, **options):
    result = CliRunner().invoke(app, [command, *map(str, arguments)], env={"COLUMNS": "100"}, **options)
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result


def said(result):
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for side, name in enumerate(("text.en", "text.ja")):
        (folder / name).write_text("".join(pair[side] + "\n" for pair in PAIRS[:100]))
    return folder


@pytest.fixture(scope="module")
def japanese(texts):
    """A run from English to Japanese."""
    files = ("--source", texts / "text.en", "--target", texts / "text.ja")
    result = regard("train", *files, "--out", texts / "run", *QUICK, "validation.bleu_tokenizer=char")
    assert "BLEU counts tokens of sacrebleu's tokenizer char" in said(result)
    return texts / "run"


def test_japanese_is_measured_by_its_own_tokenizer_and_every_report_says_which(japanese, texts):
    assert load_run(japanese).bleu_tokenizer == "char"
    result = regard("evaluate", japanese, "--beam", "1")
    assert "tokenizer char" in result.stdout and "|tok:char|" in said(result).replace(" ", "")
    found = json.loads((japanese / "evaluation.json").read_text())
    assert found["tokenizer"] == "char" and {each["label"] for each in found["by_length"]} == {"1-5"}
    other = json.loads(regard("evaluate", japanese, "--beam", "1", "--bleu-tokenizer", "zh", "--json").stdout)
    assert other["tokenizer"] == "zh" and "|tok:zh|" in other["bleu"]["signature"]
    wrong = regard("evaluate", japanese, "--bleu-tokenizer", "jp", status=2)
    assert "sacrebleu has no tokenizer 'jp'" in said(wrong)


def test_a_comparison_counts_all_its_bleu_by_one_tokenizer(texts, tmp_path):
    from regard.lab.comparison.study import RETRIEVAL, STUDY, Entry, Study, open_study, read_study
    from regard.lab.comparison.trials import run_trial
    from regard.lab.report.folder import read_study as read_report
    from regard.lab.report.numbers import numbers
    from regard.lab.runs.config import read_config

    files = (f"data.source={texts / 'text.en'}", f"data.target={texts / 'text.ja'}")
    keys = ("training.steps=2", "model.width=8", "validation.bleu_tokenizer=char")
    study = Study("letters", read_config(overrides=[*files, *keys]), (Entry("none", "none"),))
    open_study(study, tmp_path / "c")
    assert run_trial(tmp_path / "c", "none", 1)
    about = json.loads((tmp_path / "c" / STUDY).read_text())
    assert about["bleu_tokenizer"] == "char" and read_study(tmp_path / "c").bleu_tokenizer == "char"
    report = numbers(read_report(tmp_path / "c"))
    assert report["tokenizer"] == "char" and "|tok:char|" in report["signature"]
    kept = (tmp_path / "c" / RETRIEVAL).read_text()
    open_study(read_study(tmp_path / "c"), tmp_path / "c")  # the same comparison
    assert (tmp_path / "c" / RETRIEVAL).read_text() == kept
    refused = regard("train", "--data", "copy", "--out", tmp_path / "c", *QUICK, status=2)
    assert "holds a comparison, whose vocabularies a run would overwrite" in said(refused)
    refused = regard("train", "--data", "copy", "--out", tmp_path / "c", "--resume", *QUICK, status=2)
    assert (tmp_path / "c" / SOURCE).exists() and "holds" in said(refused)


def test_links_of_japanese_count_words(japanese):
    command = ("translate", japanese, "the dog sees the cat.", "--beam", "1")
    plain = regard(*command).stdout.strip()
    text, links = regard(*command, "--align", "pharaoh").stdout.strip().split(" ||| ")
    assert text.split() == cut(plain)
    assert [int(link.split("-")[1]) for link in sorted(links.split(), key=lambda link: int(link.split("-")[1]))] == [
        *range(len(cut(plain)))
    ]


def test_pairs_that_are_given_are_aligned(japanese, tmp_path):
    pairs = [("the dog sees the cat.", "犬は猫を見る。"), ("", "猫"), ("the bird.", "鳥。"), ("a " * 1200, "猫")]
    for side, name in enumerate(("a", "b")):
        (tmp_path / name).write_text("".join(pair[side] + "\n" for pair in pairs))
    files = ("--source", tmp_path / "a", "--target", tmp_path / "b")
    result = regard("align", japanese, *files)
    run = load_run(japanese)
    tokenizers = run.source_tokenizer, run.target_tokenizer
    expected = []
    for source, target in pairs[::2]:
        (found,) = align(run.model, tokenizers, [tokenizers[0].encode(source)], [tokenizers[1].encode(target)])
        assert found.source == tuple(source.split()) and found.target == tuple(cut(target))
        expected.append(write_pharaoh(found.links()))
    assert result.stdout.splitlines() == [expected[0], "", expected[1], ""]
    assert "2 pairs have no links, because a side is empty or has more than 1,000 pieces: line 2, 4" in said(result)
    rows = [
        line.split(" ||| ") for line in regard("align", japanese, *files, "--words", "--batch", "1").stdout.splitlines()
    ]
    assert rows[0] == [pairs[0][0], " ".join(cut(pairs[0][1])), expected[0]] and rows[1] == ["", "", ""]
    (tmp_path / "b").write_text("猫\n")
    short = regard("align", japanese, *files, status=2)
    assert "b ends after 1 lines and the other file goes on" in said(short)
    assert "no reading 'outputs'" in said(regard("align", japanese, *files, "--reading", "outputs", status=2))


@pytest.mark.parametrize("name", [SOURCE, TARGET, CONFIG])
def test_a_run_that_was_changed_by_hand_is_refused(japanese, tmp_path, name):
    run = shutil.copytree(japanese, tmp_path / "run")
    if name == CONFIG:
        text = (run / CONFIG).read_text()
        (run / CONFIG).write_text("# another comment\r\n" + text.replace("\n", "\r\n"))
        regard("translate", run, "the dog")  # the same keys
        (run / CONFIG).write_text(text.replace("beam = 5", "beam = 4"))
    else:  # as large as it was
        data = (run / name).read_bytes()
        (run / name).write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(RegardError, match=rf"{re.escape(name)} changed after the run was written"):
        load_run(run)
    for command, *arguments in (("translate", run, "x"), ("train", "--out", run, "--resume", "--steps", "4")):
        assert f"{name} changed after the run was written" in said(regard(command, *arguments, status=2))
    settings = json.loads((run / SETTINGS).read_text())
    (run / SETTINGS).write_text(json.dumps({key: value for key, value in settings.items() if key != "sums"}))
    if name == CONFIG:
        load_run(run)  # a run that was written before there were sums


def test_going_on_says_what_it_changes_in_the_configuration(japanese, tmp_path):
    run = shutil.copytree(japanese, tmp_path / "run")
    result = regard("train", "--out", run, "--resume", "--steps", "4", "training.learning_rate=0.001")
    assert "training.learning_rate was 'auto' and is now 0.001" in said(result)
    assert "training.steps was 3 and is now 4" in said(result) and said(result).count("and is now") == 2
    assert "learning_rate = 0.001" in (run / CONFIG).read_text()
    load_run(run)
    assert "and is now" not in said(regard("train", "--out", run, "--resume"))


def test_a_pair_of_too_many_pieces_is_left_out_of_training_and_of_perplexity(tmp_path):
    """Its batch would be as wide as it is, in every row."""
    from regard.lab.runs.config import make_config
    from regard.lab.training.preparation import prepare

    lines = [f"w{n} x y\tw{n} z" for n in range(60)]
    long = [n for n in range(60) if n % 12 == 5]
    for n in long:
        lines[n] = f"w{n} {''.join(random.Random(n).choices('abcdefghij', k=4000))}\tw{n}"
    (tmp_path / "pairs.tsv").write_text("\n".join(lines))
    sections = {"data": {"corpus": str(tmp_path / "pairs.tsv")}, "tokenizer": {"source_size": 60, "target_size": 40}}
    prepared = prepare(make_config(sections | {"model": {"width": 8}}), tmp_path / "run")
    batches = prepared.task.epochs(0)
    assert max(max(batch.source.shape[1], batch.target.shape[1]) for batch in [*batches, *prepared.task.valid]) <= 1001
    from regard.lab.training.preparation import read_corpus

    whole = read_corpus(prepared.task.config.data)
    left_out = [pair.id for pair in whole.train + whole.valid if len(pair.source) > 1000]
    assert (
        left_out and f"{len(left_out)} of more than 1,000 pieces ({', '.join(left_out)})" in prepared.corpus.describe()
    )
    assert load_settings(tmp_path / "run")["hash"] == whole.hash, "what may be tested on is the whole corpus'"


def load_settings(run):
    return json.loads((run / SETTINGS).read_text())


@pytest.mark.parametrize("measure", ["bleu", "perplexity"])
def test_the_bar_of_a_training_fits_80_columns_and_tells_the_time_on_the_wall(monkeypatch, measure):
    from regard.lab.commands import train
    from regard.lab.runs.config import Config
    from regard.lab.training import stream
    from regard.lab.training.schedule import Plateau

    seconds = iter([1000.0, 1000.0 + 1800, 1000.0 + 3000])
    monkeypatch.setattr(stream.TimeLeft.__init__, "__defaults__", (lambda: next(seconds),))
    rows = [{"valid_loss": 1.0, measure: 99.94}]
    console = Console(width=80, force_terminal=True, file=io.StringIO(), legacy_windows=False)
    with train._bar(console, Config()) as show:
        for share in (0.2, 0.5, 0.75):  # half the budget is used in 50 minutes of the wall, and 10 of a processor
            progress = stream.TrainingProgress(
                plateau=Plateau(3, 0.5), share=share, step=99_995, seconds=600, rows=rows
            )
            progress.tokens = 99_999 * 600
            show(progress)
    text = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue()).split())
    name = {"bleu": "BLEU 99.9", "perplexity": "perplexity 99.94"}[measure]
    assert re.search(rf"75% step 99,995 \| 99,999 tokens/s \| 22:44 min left \| {name}", text), text[-300:]


def test_a_run_of_a_long_test_line_is_evaluated_without_it(japanese, tmp_path):
    from regard.lab.data import Pair
    from regard.lab.evaluation.scores import evaluate, perplexity

    run = load_run(japanese)
    pairs = [Pair("the dog.", "犬。"), Pair("the cat.", "猫" * 3000)]
    found = evaluate(run, pairs)
    assert found.perplexity == pytest.approx(perplexity(run, pairs[:1])) and found.num_sentences == 2
    assert evaluate(run, pairs[1:]).perplexity is None


def test_ctrl_c_while_the_command_line_ends_shows_no_traceback():
    code = (
        "import os, signal, sys, threading\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from regard.cli.main import main\n"
        "threading._register_atexit(os.kill, os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['regard', '--version']\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert result.stdout.startswith("regard ") and result.stderr == "" and result.returncode == -signal.SIGINT


def test_a_second_ctrl_c_stops_at_once_and_says_how_to_go_on(tmp_path, monkeypatch):
    from lightning.pytorch import Trainer

    monkeypatch.setattr(Trainer, "fit", lambda *arguments: sys.exit(1))  # as Lightning does then
    wish = ("--data", "copy", "data.size=40", "tokenizer.kind=words", *QUICK, "--out", tmp_path / "run")
    result = regard("train", *wish, status=130)
    assert "Stopped at once" in result.output and "--resume" in result.output


@pytest.mark.parametrize("more", [(), ("--ranks", "4")])
def test_a_length_that_no_machine_holds_is_refused(more):
    result = regard("plan", "masked", "--length", "99999999999999", *more, status=2)
    assert "99,999,999,999,999 tokens need" in said(result) and "Give a smaller --length" in said(result)


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--data", "{0}/few.tsv", "--out", "{0}/run"),
        ("data", "{0}/few.tsv"),
        ("train", "--data", "{0}/rows.jsonl", "--out", "{0}/run"),
        ("train", "--data", "copy", "data.size=40", "tokenizer.kind=words", "training.tokens=2", "--out", "{0}/run"),
        ("train", "--data", "copy", "decoding.max_length=3", "decoding.min_length=4", "--out", "{0}/run"),
    ],
)
def test_a_mistake_is_told_in_the_words_of_the_command_line(tmp_path, arguments):
    """No argument of Python's, as in valid=; keys are section.key, options --name."""
    (tmp_path / "few.tsv").write_text("a\tb\n" * 3)
    (tmp_path / "rows.jsonl").write_text('{"x": "a", "target": "b"}\n')
    result = regard(*(part.format(tmp_path) for part in arguments), status=2)
    assert not re.search(r"(?<![\w.])[a-z_]+=", result.output), result.output


@pytest.mark.parametrize(
    "name",
    [
        "corpus_of",
        "evaluate_run",
        "compare_runs",
        "make_config",
        "make_study",
        "read_config",
        "train",
        "compare",
        "resume_training",
        "load_run",
        "load_pretrained",
        "pretrained_runs",
    ],
)
def test_a_function_of_the_lab_refuses_values_of_another_type(name):
    """In words that name the function and the argument; they once ended in an error of an attribute or of a path."""
    for wrong in (5, [1], object()):
        with pytest.raises(rg.RegardError, match=rf"^{name}[(:]"):
            getattr(rg.lab, name)(wrong)
