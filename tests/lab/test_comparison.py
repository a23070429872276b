"""Comparisons: a stopped trial ends in the same numbers, one that dies stops no other, folders are not mixed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("pydantic")
pytest.importorskip("sacrebleu")

from regard import lab
from regard.base.errors import RegardError
from regard.lab.commands.study import StudyOptions, command_of, seeds_of, study_of
from regard.lab.commands.train import TrainOptions, _options
from regard.lab.comparison import pruning, run_evaluation, trials, workers
from regard.lab.comparison import study as comparison
from regard.lab.comparison.curves import curves
from regard.lab.comparison.study import Entry, check_study, open_study, read_study
from regard.lab.comparison.sweeps import SWEEPS
from regard.lab.comparison.trials import run_trial
from regard.lab.data import nearest_pairs
from regard.lab.evaluation.scores import Evaluation
from regard.lab.runs.config import read_config
from regard.lab.runs.run import load_run
from regard.lab.training import preparation

TINY = ("model.width=16", "data.size=60", "validation.sentences=4")


def tiny(steps=6, systems="none,bahdanau", **options):
    return study_of(StudyOptions(TINY, data="grammar", systems=systems, steps=steps, **options))


def read(path):
    return json.loads(path.read_text())


def test_a_name_of_any_character_is_an_override():
    name = "".join(map(chr, range(1, 256)))
    (line, *_) = _options(TrainOptions(data=name))
    assert read_config(overrides=[line]).data.corpus == name


# What is compared


def test_defaults_are_the_seven_systems_with_the_recipe_and_one_budget():
    study = study_of(StudyOptions())
    labels = ["none", "bahdanau", "luong_dot", "luong_general", "luong_concat", "hybrid", "transformer"]
    assert [entry.label for entry in study.systems] == labels
    config = study.config
    assert (config.model.width, config.training.sentences, config.training.label_smoothing) == (128, 32, 0.1)
    assert config.training.budget == ("minutes", 4.0)
    assert "Equal time" in study.equal and "not counted" in study.equal


def test_presets_yield_to_what_is_said():
    quick = study_of(StudyOptions(preset="quick", systems="none,hybrid", seeds="2", steps=9))
    assert [entry.label for entry in quick.systems] == ["none", "hybrid"]
    assert (quick.seeds, quick.config.training.budget) == ((1, 2), ("steps", 9.0))
    assert (quick.config.data.corpus, quick.config.model.width) == ("grammar", 64)
    assert study_of(StudyOptions(preset="quick", data="bible-en-fr")).config.data.corpus == "bible-en-fr"
    assert (
        study_of(StudyOptions(preset="quick")).seeds
        == study_of(StudyOptions(preset="quick", heads="1,4")).seeds
        == (1, 2, 3)
    )
    assert study_of(StudyOptions(preset="quick")).config.training.budget[0] == "steps", (
        "the same result on a busy machine"
    )
    heads = study_of(StudyOptions(preset="quick", heads="1,4,8,16"))
    assert [entry.settings["num_heads"] for entry in heads.systems] == [1, 4, 8, 16]
    assert (heads.config.data.corpus, heads.config.model.width, heads.config.training.steps) == ("grammar", 64, 600)
    full = study_of(StudyOptions(preset="full"))
    assert len(full.trials(folder := comparison.Path("x"))) == 21
    assert full.trials(folder)[7].seed == 2, "all systems with one seed come before any with the next"


@pytest.mark.parametrize("sweep", SWEEPS)
def test_sweeps_change_one_thing_and_every_variant_can_be_built(sweep):
    study = study_of(StudyOptions(**{sweep: True if sweep in ("prune", "scaled") else ",".join(SWEEPS[sweep])}))
    check_study(study)
    configs = [study.config_of(entry, 1) for entry in study.systems]
    for config in configs:
        assert config.data == configs[0].data and config.training == configs[0].training
        assert config.model.system == "transformer"
    assert len({json.dumps(config.model.model_dump()) for config in configs}) == len(SWEEPS[sweep])


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_sweep_has_three_seeds_unless_told(sweep):
    value = True if sweep in ("prune", "scaled") else ",".join(SWEEPS[sweep])
    assert study_of(StudyOptions(**{sweep: value})).seeds == (1, 2, 3)
    assert study_of(StudyOptions(**{sweep: value}, seeds="1,")).seeds == (1,)
    assert study_of(StudyOptions()).seeds == (1,)


@pytest.mark.parametrize(
    "wish, said",
    [
        (StudyOptions(systems="none,bahdanu"), "Did you mean 'bahdanau'"),
        (StudyOptions(systems="none,none"), "none cannot be compared"),
        (StudyOptions(preset="quik"), "Did you mean 'quick'"),
        (StudyOptions(heads="1,3"), "the number of heads must divide 128"),
        (StudyOptions(heads="many"), "Give whole numbers"),
        (StudyOptions(heads="1", positions="rope"), "two questions"),
        (StudyOptions(positions="ropes"), "Did you mean 'rope'"),
        (StudyOptions(heads="2", systems="transformer,hybrid"), "changes one system"),
        (StudyOptions(minutes=1.0, steps=2), "cannot both be the budget"),
        (StudyOptions(seeds="some"), "how many, as 3"),
        (StudyOptions(seeds="1,1"), "each seed once"),
        (StudyOptions(source=comparison.Path("a.en")), "belong together"),
        (StudyOptions(("model.widht=3",)), "Did you mean 'width'"),
    ],
)
def test_mistakes_are_refused_before_anything_is_trained(wish, said):
    with pytest.raises(RegardError, match=said):
        check_study(study_of(wish))


def test_seeds_are_a_number_or_a_list():
    assert seeds_of("3") == (1, 2, 3)
    assert seeds_of("4, 2") == (4, 2)


def test_the_command_says_all_that_was_said(tmp_path):
    wish = StudyOptions(("model.width=64",), data="grammar", heads="1,2", minutes=0.5, train_words=9)
    command = command_of(wish, tmp_path)
    for word in ("--data grammar", "--heads 1,2", "--minutes 0.5", "--train-words 9", "model.width=64", str(tmp_path)):
        assert word in command


def test_training_short_leaves_the_test_long():
    study = tiny(train_words=7)
    whole, short = replace(study, train_words=None).corpus(), study.corpus()
    assert max(pair.words for pair in (*short.train, *short.valid)) <= 7 < max(pair.words for pair in short.test)
    assert short.test == whole.test and short.hash != whole.hash
    left_out = len(whole.train) + len(whole.valid) - len(short.train) - len(short.valid)
    assert left_out in short.skipped.values()


# The folder


def test_near_duplicates_can_be_left_out_of_the_test_alone(tmp_path):
    lines = [f"x{n} y{n} z{n}\tu{n}" if n % 2 else f"a b c d {n}\tv{n}" for n in range(80)]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines))
    wish = StudyOptions((*TINY, "tokenizer.kind=words"), data=str(tmp_path / "pairs.tsv"), steps=4)
    whole, strict = (study_of(replace(wish, without_near=flag)) for flag in (False, True))
    all_pairs, kept = whole.corpus(), strict.corpus()
    assert kept.train == all_pairs.train and kept.valid == all_pairs.valid
    similar = nearest_pairs([pair.source for pair in kept.train], [pair.source for pair in all_pairs.test]).similarity
    assert kept.test == tuple(pair for pair, each in zip(all_pairs.test, similar, strict=True) if each <= 0.5)
    assert 0 < len(kept.test) < len(all_pairs.test)
    folder = tmp_path / "out"
    open_study(strict, folder)
    assert read_study(folder).without_near
    assert read(folder / "comparison.json")["left_out"] == {
        "of test too near to training": len(all_pairs.test) - len(kept.test)
    }
    assert read(folder / "test.json")["sources"] == [pair.source for pair in kept.test]
    with pytest.raises(RegardError, match="without_near was True, now False"):
        open_study(whole, folder)


@pytest.mark.parametrize(("corpus", "kind"), [("grammar", "words"), ("bible-en-fr", "bpe")])
def test_a_comparison_names_its_kind_of_tokenizer(corpus, kind):
    """Comparisons of older versions name it, too, so they go on with the command that began them."""
    assert study_of(StudyOptions(data=corpus)).config.tokenizer.kind == kind
    assert study_of(StudyOptions(("tokenizer.kind=unigram",), data=corpus)).config.tokenizer.kind == "unigram"


def test_a_comparison_begun_before_a_key_existed_goes_on(tmp_path):
    open_study(tiny(), tmp_path)
    data = read(tmp_path / "comparison.json")
    del data["without_near"], data["left_out"], data["config"]["decoding"]["no_repeat"]
    (tmp_path / "comparison.json").write_text(json.dumps(data))
    open_study(tiny(), tmp_path)
    study = read_study(tmp_path)
    assert study == replace(tiny(), bleu_tokenizer=study.bleu_tokenizer)
    open_study(study, tmp_path)


def test_a_folder_goes_on_with_the_same_comparison_and_refuses_another_by_name(tmp_path):
    study = tiny()
    open_study(study, tmp_path / "a")
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    open_study(study, tmp_path / "a", command="another")
    assert {path: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    assert read_study(tmp_path / "a") == replace(study, bleu_tokenizer="13a")
    for other, named in (
        (replace(study, seeds=(1, 2)), r"seeds was \[1\], now \[1, 2\]"),
        (tiny(steps=7), "training.steps was 6"),
        (tiny(systems="none,hybrid"), r"systems was \['none', 'bahdanau'\]"),
        (replace(study, systems=(study.systems[0], Entry("bahdanau", "bahdanau", {"layers": 2}))), "other settings"),
    ):
        with pytest.raises(RegardError, match=named):
            open_study(other, tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("precious")
    with pytest.raises(RegardError, match="is not a comparison"):
        open_study(study, tmp_path / "b")


def test_the_hardware_of_a_comparison_over_a_cluster_is_that_of_the_cluster(tmp_path, monkeypatch):
    nodes = [{"Alive": True}, {"Alive": True}, {"Alive": False}]
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 96.0}, nodes=lambda: nodes)
    monkeypatch.setattr("regard.lab.comparison.processes.cluster", lambda operation: nullcontext(ray))
    at_a_time = []
    monkeypatch.setattr(lab.Comparison, "run", lambda _, count, *others: at_a_time.append(count))
    for processes, count in ((None, 96), (5, 5)):
        lab.compare(tiny(), tmp_path / str(processes), processes=processes, engine="ray")
        hardware = read(tmp_path / str(processes) / comparison.STUDY)["hardware"]
        assert hardware == {"machines": 2, "cores": 96, "processes": count, "threads_per_process": 1}
    assert at_a_time == [96, 5]


def test_a_folder_whose_vocabularies_could_not_be_learned_is_free_again(tmp_path):
    wish = StudyOptions((*TINY, "tokenizer.target_size=99999"), data="grammar", systems="none", steps=6)
    with pytest.raises(RegardError, match="vocabulary of 99999"):
        open_study(study_of(wish), tmp_path)
    assert not list(tmp_path.iterdir())
    open_study(tiny(), tmp_path)


def test_a_comparison_of_another_version_is_refused(tmp_path):
    open_study(tiny(), tmp_path)
    data = read(tmp_path / "comparison.json")
    (tmp_path / "comparison.json").write_text(json.dumps(data | {"version": 0}))
    with pytest.raises(RegardError, match="version 0"):
        read_study(tmp_path)


def test_the_retrieval_baseline_copies_what_it_has_seen():
    corpus = tiny().corpus()
    seen = comparison.retrieval(replace(corpus, test=corpus.train[:5]))
    assert seen["bleu"] == pytest.approx(100) and seen["similarities"] == [1.0] * 5
    assert seen["novel"] == 0 and seen["bleu_novel"] is None


# A trial


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A comparison of two systems, and what each of its trials told."""
    folder, told = tmp_path_factory.mktemp("whole"), {}
    open_study(tiny(), folder)
    for label in ("none", "bahdanau"):
        words = told.setdefault(label, [])
        assert run_trial(folder, label, 1, lambda state, words=words, **numbers: words.append((state, numbers)))
    return folder, told


def test_a_trial_leaves_a_run_its_test_and_what_it_looks_at(whole):
    folder, told = whole
    test = read(folder / "test.json")
    for label in ("none", "bahdanau"):
        path = folder / "trials" / f"{label}-1"
        run, looking, data = load_run(path), read(path / "looking.json"), read(path / "evaluation.json")
        assert len(data.pop("translations")) == len(test["references"])
        measured = Evaluation.from_json(data)
        assert measured.perplexity is not None and measured.novel is not None
        assert looking["parameters"] == sum(weight.numel() for weight in run.model.parameters())
        assert read(path / "trained.json")["steps"] == 6
        assert looking["peak_memory_mib"] >= read(path / "trained.json")["memory_before_mib"] > 0
        assert [state for state, _ in told[label]][-1] == "finished"
        assert {"preparing", "training", "inspecting", "testing"} <= {state for state, _ in told[label]}


def test_without_attention_there_is_a_gradient_and_nothing_to_align(whole):
    none, bahdanau = (read(whole[0] / "trials" / name / "looking.json") for name in ("none-1", "bahdanau-1"))
    assert none["alignments"] == [] and none["entropy"] is None
    assert bahdanau["alignments"] and bahdanau["entropy"] > 0
    for one in (none, bahdanau):
        relative = [value for value in one["gradient"]["relative"] if value is not None]
        assert min(relative) >= 0 and 0.5 < sum(relative) / len(relative) < 2
    for one in bahdanau["alignments"]:
        weights = torch.tensor(one["weights"])
        assert weights.shape == (len(one["target"]), len(one["source"]))
        assert (weights >= 0).all() and (weights.sum(1) <= 1.001).all()
        assert all(s < len(one["source"]) and t < len(one["target"]) for s, t in one["gold"])


def test_a_finished_trial_is_not_run_again(whole, monkeypatch):
    monkeypatch.setattr(trials, "_trained", lambda *_: pytest.fail("it was trained again"))
    assert run_trial(whole[0], "none", 1)


def test_a_trial_that_was_stopped_ends_in_the_same_weights(whole, tmp_path, monkeypatch, heard_signals):
    monkeypatch.setattr(trials, "OFTEN", 0.0)
    open_study(tiny(), tmp_path)

    def stop(state, **numbers):
        if state == "training" and numbers["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    path = tmp_path / "trials" / "bahdanau-1"
    assert not run_trial(tmp_path, "bahdanau", 1, stop)
    assert not (path / "trained.json").exists() and not (path / "evaluation.json").exists()
    assert run_trial(tmp_path, "bahdanau", 1)
    there = whole[0] / "trials" / "bahdanau-1"
    for name in ("model.safetensors", "source.tokenizer"):
        assert (path / name).read_bytes() == (there / name).read_bytes()
    assert read(path / "evaluation.json")["hypotheses"] == read(there / "evaluation.json")["hypotheses"]


def test_a_trial_takes_the_vocabularies_of_its_comparison(tmp_path, monkeypatch):
    open_study(tiny(), tmp_path)
    monkeypatch.setattr(preparation, "learn_tokenizer", lambda *_: pytest.fail("a vocabulary was learned again"))
    assert run_trial(tmp_path, "none", 1)
    for name in ("source.tokenizer", "target.tokenizer"):
        assert (tmp_path / "trials" / "none-1" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_a_changed_corpus_is_noticed(tmp_path):
    open_study(tiny(), tmp_path)
    data = read(tmp_path / "comparison.json")
    (tmp_path / "comparison.json").write_text(json.dumps(data | {"data_hash": "0"}))
    with pytest.raises(RegardError, match="has changed"):
        run_trial(tmp_path, "none", 1)


def test_pruning_removes_heads_in_three_orders_and_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(pruning, "SHARES", (0.0, 0.5, 1.0))
    study = study_of(StudyOptions((*TINY, "model.num_heads=2", "model.layers=1"), data="grammar", prune=True, steps=4))
    open_study(study, tmp_path)
    assert run_trial(tmp_path, "transformer", 1)
    found = read(tmp_path / "trials" / "transformer-1" / "pruning.json")
    assert found["heads"] == 6 and [one["role"] for one in found["single"]] == [
        role for role in ("encoder", "decoder", "cross") for _ in range(2)
    ]
    ends = {(one["share"], one["bleu"]) for one in found["points"] if one["share"] != 0.5}
    assert len(ends) == 2 and (0.0, found["bleu"]) in ends, "orders agree on no head and on all heads"
    assert [one["removed"] for one in found["points"]] == [0] * 3 + [3] * 3 + [6] * 3


def test_curves_of_seeds_that_end_at_different_steps_ascend():
    ends = [500, 1000, 1100], [500, 1000, 1050]
    runs = [
        SimpleNamespace(metrics=[{"step": n, "bleu": n / 100} for n in steps], evaluation=None, pruning={})
        for steps in ends
    ]
    (curve,) = curves({"hybrid": runs})
    assert curve["series"][0]["points"] == [[n, n / 100] for n in (500, 1000, 1050, 1100)]


# As a program calls it


def test_a_program_reads_a_comparison_and_evaluates_its_runs_again(whole, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / "c")
    found = lab.compare(tiny(), folder)  # all trials are finished, so none is run again
    assert found.num_finished == 2 and not found.unfinished and lab.Comparison.read(folder).num_finished == 2
    runs = [load_run(folder / "trials" / f"{label}-1") for label in ("none", "bahdanau")]
    for run, (label, (before,)) in zip(runs, found.evaluations().items(), strict=True):
        assert run.path.name == f"{label}-1"
        again = lab.evaluate_run(run, beam=1)
        assert (again.hypotheses, again.bleu) == (before.hypotheses, before.bleu)
    first = lab.PairSelection("valid", first=3)
    compared = lab.compare_runs(*runs, first, beam=1)
    assert [each.num_sentences for each in compared.evaluations] == [3, 3]
    assert compared.evaluations[1].hypotheses == lab.evaluate_run(runs[1], first, beam=1).hypotheses
    assert compared.paired.bleu == pytest.approx(tuple(each.bleu.score for each in compared.evaluations))
    assert found.report().exists()


def test_runs_of_different_corpora_are_refused_before_a_sentence_is_translated(whole, monkeypatch):
    runs = [load_run(whole[0] / "trials" / f"{label}-1") for label in ("none", "bahdanau")]
    corpus = run_evaluation.corpus_of(runs[0])
    corpora = {runs[0].path: corpus, runs[1].path: replace(corpus, train=corpus.train[1:])}
    monkeypatch.setattr(run_evaluation, "corpus_of", lambda run: corpora[run.path])
    monkeypatch.setattr(run_evaluation, "evaluate", lambda *_, **__: pytest.fail("a run was evaluated"))
    with pytest.raises(RegardError, match="trained on different corpora"):
        lab.compare_runs(*runs)


def test_a_program_trains_and_continues(tmp_path):
    config = tiny().config_of(Entry("bahdanau", "bahdanau"), seed=1)
    lines = []
    trained = lab.train(config, tmp_path / "run", on_step=lambda standing: lines.append(standing.step))
    assert lines == [*range(1, 7)] and trained.outcome.reason == "budget"
    with pytest.raises(RegardError, match="already holds a run"):
        lab.train(config, tmp_path / "run")
    weights = trained.model.state_dict()
    for name, weight in load_run(tmp_path / "run").model.state_dict().items():
        assert torch.equal(weight, weights[name])
    changes = []
    more = lab.resume_training(
        tmp_path / "run", ["training.steps=8"], on_start=lambda prepared: changes.append(prepared.changes)
    )
    assert more.outcome.progress.step == 8 and changes == [{"training.steps": (6, 8)}]


# Trials side by side

FAKE = """
    import json, os, pathlib, signal, sys, time
    folder, label, seed = sys.argv[1:]
    path = pathlib.Path(folder) / "trials" / f"{label}-{seed}"
    def tell(**said):
        print(json.dumps(said), flush=True)
    signal.signal(signal.SIGTERM, lambda *_: (path / "saved").touch() or sys.exit(130))
    tell(state="training", step=1, share=0.5, left=1.0, loss=2.0, bleu=None)
    (path / "threads").write_text(os.environ["OMP_NUM_THREADS"])
    if label == "hybrid":
        print("Traceback", "ZeroDivisionError: division by zero", sep="\\n", file=sys.stderr)
        sys.exit(1)
    if label == "luong_dot":
        os.kill(os.getpid(), signal.SIGKILL)
    if label == "transformer":
        time.sleep(600)
    (path / "evaluation.json").write_text(json.dumps({"bleu": {"score": 7.5}}))
"""


@pytest.fixture
def race(tmp_path, monkeypatch):
    """Trials whose processes only pretend, by the names of their systems."""
    script = tmp_path / "fake.py"
    script.write_text(textwrap.dedent(FAKE))
    monkeypatch.setattr(workers, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(workers, "PAUSE", 0.02)

    def made(*names, seeds=(1,)):
        study = study_of(StudyOptions(systems=",".join(names), seeds=",".join(map(str, [*seeds, ""]))))
        return tmp_path, workers.progress_of(study.trials(tmp_path))

    return made


def test_compare_runs_the_trials_that_wait(race, tmp_path):
    race("none")  # only replaces the processes
    seen = []
    found = lab.compare(tiny(), tmp_path / "c", processes=2, show=lambda: seen.append(1))
    assert found.num_finished == 2 and seen


def test_one_that_dies_is_reported_and_the_others_go_on(race):
    folder, progress = race("hybrid", "luong_dot", "none", "bahdanau")
    workers.run_trials(folder, progress, 2)
    assert [one.state for one in progress] == ["failed", "failed", "finished", "finished"]
    assert progress[0].message == "ZeroDivisionError: division by zero" and "Traceback" in progress[0].log.read_text()
    assert "SIGKILL" in progress[1].message and "memory" in progress[1].message
    assert progress[2].numbers["bleu"] == 7.5 and progress[2].numbers["step"] == 1
    assert (folder / "trials" / "none-1" / "threads").read_text() == "1"
    assert [one.state for one in workers.progress_of([one.trial for one in progress])] == [
        *["waiting"] * 2,
        *["finished"] * 2,
    ], "what failed is tried again, what is finished is not"


def test_no_more_run_at_a_time_than_asked_for(race):
    folder, progress = race("none", "bahdanau", "luong_general", "luong_concat", seeds=(1, 2))
    at_once = []
    workers.run_trials(
        folder, progress, 3, lambda: at_once.append(sum(one.state in ("preparing", "training") for one in progress))
    )
    assert max(at_once) <= 3 and {one.state for one in progress} == {"finished"}


def test_an_interrupt_stops_all_after_they_saved(race):
    folder, progress = race("transformer", "none", seeds=(1, 2))
    stopped = threading.Event()

    def show():
        training = [one for one in progress if one.state == "training" and one.trial.entry.name == "transformer"]
        if len(training) == 2 and not stopped.is_set():
            stopped.set()
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        workers.run_trials(folder, progress, 2, show)
    assert time.monotonic() - start < 300
    states = {one.trial.name: one.state for one in progress}
    assert states["transformer-1"] == states["transformer-2"] == "stopped"
    assert (folder / "trials" / "transformer-1" / "saved").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_polite_kill_stops_all_after_they_saved(race, number, heard_signals):
    folder, progress = race("transformer", "none")
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    def show():
        if progress[0].state == "training" and not (folder / "trials" / "transformer-1" / "saved").exists():
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt):
        workers.run_trials(folder, progress, 2, show)
    assert progress[0].state == "stopped" and (folder / "trials" / "transformer-1" / "saved").exists()
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


@pytest.mark.example
def test_the_command_compares_reports_and_is_done(tmp_path):
    from typer.testing import CliRunner

    from regard.cli.app import app

    def command(*arguments):
        return CliRunner().invoke(app, ["compare", *arguments, "--out", str(tmp_path / "c")])

    what = ["--data", "grammar", "--systems", "none,bahdanau", "--steps", "6", *TINY]
    first = command(*what)
    assert first.exit_code == 0, first.output
    assert first.output.count("after 6 steps") == 2
    for name in ("report.md", "report.html", "report.json"):
        assert (tmp_path / "c" / name).stat().st_size > 0
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "c" / "trials").rglob("*") if path.is_file()}
    again = command()
    assert again.exit_code == 0 and "finished already" in again.output
    assert made == {path: path.stat().st_mtime_ns for path in (tmp_path / "c" / "trials").rglob("*") if path.is_file()}
    other = command("--data", "grammar", "--systems", "none,bahdanau", "--steps", "7", *TINY)
    assert other.exit_code == 2 and "training.steps was 6" in other.output
