"""`regard translate` and `regard evaluate` on a run that was made here and hardly trained."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from regard.cli.app import app
from regard.lab.decoding.alignment import write_pharaoh
from regard.lab.decoding.translation import TranslationOptions, translate
from regard.lab.evaluation.scores import Evaluation
from regard.lab.runs.run import WEIGHTS, load_run, save_weights
from warm import environment

pytest.importorskip("pydantic")
runner = CliRunner()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of the grammar with fresh weights, that say something."""
    from regard.lab.runs.config import make_config
    from regard.lab.training.preparation import prepare

    folder = tmp_path_factory.mktemp("runs")
    for system in ("bahdanau", "none"):
        sections = {"data": {"corpus": "grammar", "size": 60}, "tokenizer": {"kind": "words"}}
        sections |= {"model": {"system": system, "width": 8}, "decoding": {"max_length": 6, "beam": 2, "min_length": 2}}
        prepared = prepare(make_config(sections), folder / system)
        with torch.no_grad():
            for name, weight in prepared.task.model.named_parameters():
                weight.mul_(2 if "embedding" in name else 6)  # fresh weights say the same to everything
        save_weights(prepared.task.model, {}, folder / system / WEIGHTS, {})
    return folder


def run(*arguments, status=0, stdin=None):
    result = runner.invoke(app, [str(each) for each in arguments], input=stdin, env={"COLUMNS": "100"})
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result


def expected(folder, lines, **options):
    found = load_run(folder)
    return list(translate(found.model, *tokenizers(found), lines, TranslationOptions(found.search(), **options)))


def tokenizers(found):
    return found.source_tokenizer, found.target_tokenizer


LINES = ["the dog sees a cat", "", "my red old clever bird", "the child"]


def test_line_for_line_from_text_file_and_standard_input(runs, tmp_path):
    texts = [each.text for each in expected(runs / "bahdanau", LINES)]
    assert len(set(texts)) > 2
    content = "\r\n".join(LINES)
    (tmp_path / "lines").write_bytes(b"\xef\xbb\xbf" + content.encode())
    for given in ((tmp_path / "lines",), ("\n".join(LINES),), ("-",), ()):
        result = run("translate", runs / "bahdanau", *given, stdin=content)
        assert result.stdout.split("\n")[:-1] == texts
        assert "1 of 4 lines were empty" in result.stderr


def test_alignments_and_n_best(runs):
    aligned = expected(runs / "bahdanau", LINES[:1], reading="input")[0]
    result = run("translate", runs / "bahdanau", LINES[0], "--align", "pharaoh", "--reading", "input")
    links = " ".join(f"{i}-{j}" for i, j in sorted(aligned.alignment.links()))
    assert result.stdout == f"{aligned.text} ||| {links}\n"
    shown = run("translate", runs / "bahdanau", LINES[0], "--align", "show").stdout
    assert "target word at the step that predicts it" in " ".join(shown.split())
    best = run("translate", runs / "bahdanau", "the dog", "--n-best", "2").stdout.splitlines()
    assert [line.split(" ||| ")[0] for line in best] == ["0", "0"]
    scores = [float(line.split(" ||| ")[2]) for line in best]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--align", "pharao", "x"], "--align pharao is not known"),
        (["--n-best", "3", "x"], "a beam of 3 or more"),
        (["x", "y"], "Put a text of several words in quotes"),
        (["--align", "show", "--reading", "outputs", "x"], "no reading 'outputs'"),
        (["/"], "is a folder"),
        (["--beam", "100000", "x"], "a beam of 100,000 is too wide. The most is 1,000"),
        (["--length-penalty", "nan", "x"], "length_penalty must be a number from -10 to 10, got nan"),
        (["--length-penalty", "-1e9", "x"], "from -10 to 10"),
        (["--length-penalty", "inf", "x"], "from -10 to 10"),
        (["missing.fr"], "there is no file missing.fr"),
        (["texts/missing"], "echo TEXT | regard translate RUN"),
        (["two words.txt"], "there is no file two words.txt"),
    ],
)
def test_what_is_asked_wrongly(runs, arguments, said):
    result = run("translate", runs / "bahdanau", *arguments, status=2)
    assert said in " ".join(result.stderr.split()) and result.stdout == ""
    assert not re.search(r"\b\w+=", result.stderr), "an option is named as it is on the command line"


@pytest.mark.parametrize("text", ["Go on.", "dogs and/or cats", "3.14", "the", "what?", "He said so. a.m."])
def test_texts_are_not_taken_for_files(runs, text):
    assert len(run("translate", runs / "bahdanau", text).stdout.splitlines()) == 1


def test_runs_and_input_that_cannot_be_used(runs, tmp_path):
    assert "has no attention" in run("translate", runs / "none", "x", "--align", "show", status=2).stderr
    assert "give a run and one text" in run("translate", status=2).stderr
    assert "not the folder of a run" in run("translate", tmp_path / "nothing", "x", status=2).stderr
    assert "There is no model" in run("translate", "--model", "bahdanau-en-xx", "x", status=2).stderr
    (tmp_path / "settings.json").write_text("{")
    for line in (
        ("translate", tmp_path, "x"),
        ("evaluate", tmp_path),
        ("align", tmp_path, "--source", "a", "--target", "b"),
    ):
        assert run(*line, status=2).stderr.startswith(f"{line[0]}: "), line
    assert run("translate", tmp_path / "nothing", "x", status=2).stderr.startswith("translate: ")
    wrong = run("translate", runs / "bahdanau", "-", stdin=b"the dog\nca\xff\n", status=2)
    assert "line 2 of standard input is not UTF-8 text (byte 3 of the line is 0xff)" in " ".join(wrong.stderr.split())
    assert wrong.stdout.splitlines() == [expected(runs / "bahdanau", ["the dog"])[0].text], "the good line before it"


@pytest.mark.parametrize("pack", [gzip.compress, bytes])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_lines_are_read_from_packed_files_and_streams(runs, tmp_path, pack, encoding):
    texts = [each.text for each in expected(runs / "bahdanau", LINES)]
    (tmp_path / "lines").write_bytes(content := pack("\n".join(LINES).encode(encoding)))
    assert run("translate", runs / "bahdanau", tmp_path / "lines").stdout.splitlines() == texts
    assert run("translate", runs / "bahdanau", "-", stdin=content).stdout.splitlines() == texts


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("baem = 3", "no key decoding.baem. Did you mean 'beam'"),
        ('beam = "3"', "beam must be a whole number"),
        ('length_penalty = "1"', "length_penalty must be a number"),
    ],
)
def test_a_mistake_in_the_configuration_of_a_run_is_named(runs, tmp_path, line, said):
    shutil.copytree(runs / "bahdanau", tmp_path / "run")
    (tmp_path / "run" / "config.toml").write_text(f"[decoding]\n{line}\n")
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    del settings["sums"]  # of a run that was written before there were any
    (tmp_path / "run" / "settings.json").write_text(json.dumps(settings))
    assert said in " ".join(run("translate", tmp_path / "run", "the dog", status=2).stderr.split())


def test_evaluate_leaves_what_the_report_of_a_comparison_is_made_of(runs, tmp_path):
    shutil.copytree(runs / "bahdanau", tmp_path / "run")
    for name in ("trained.json", "evaluation.json"):
        (tmp_path / "run" / name).write_text("{}")
    run("evaluate", tmp_path / "run", "--beam", "1")
    assert (tmp_path / "run" / "evaluation.json").read_text() == "{}"
    assert (tmp_path / "run" / "evaluation-test.json").exists()


def test_near_duplicates_are_left_out_and_counted(runs, tmp_path):
    from regard.lab.runs.config import make_config
    from regard.lab.training.preparation import prepare

    lines = [f"x{n} y{n} z{n}\tu{n}" if n % 2 else f"a b c d {n}\tv{n}" for n in range(80)]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines))
    sections = {"data": {"corpus": str(tmp_path / "pairs.tsv")}, "tokenizer": {"kind": "words"}, "model": {"width": 8}}
    prepared = prepare(make_config(sections), tmp_path / "run")
    save_weights(prepared.task.model, {}, tmp_path / "run" / WEIGHTS, {})
    whole = json.loads(run("evaluate", tmp_path / "run", "--json").stdout)
    part = json.loads(run("evaluate", tmp_path / "run", "--json", "--without-near").stdout)
    near = sum(each["count"] for each in whole["by_similarity"] if each["label"].startswith("near-duplicate"))
    assert 0 < near == part["left_out"] == whole["num_sentences"] - part["num_sentences"] and whole["left_out"] == 0
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["left_out"] == 0
    assert f"left out {near} " in " ".join(run("evaluate", tmp_path / "run", "--without-near").stdout.split())


def test_a_line_is_translated_before_the_next_is_there(runs, commands):
    command = [commands / "regard", "translate", str(runs / "bahdanau")]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, env=environment(commands), **pipes)
    with process:
        assert process.stdin is not None and process.stdout is not None
        for line in (LINES[0], LINES[2]):
            process.stdin.write(f"{line}\n".encode())
            process.stdin.flush()
            assert process.stdout.readline().decode().strip() == expected(runs / "bahdanau", [line])[0].text
        process.stdin.close()
        assert process.wait(600) == 0


def test_evaluate_writes_what_it_prints(runs):
    result = run("evaluate", runs / "bahdanau", "--against", runs / "none")
    assert "BLEU, copied" in result.stdout and "alignment error" in result.stdout and "p = " in result.stdout
    found = Evaluation.from_json(json.loads((runs / "bahdanau" / "evaluation.json").read_text()))
    assert f"{found.bleu.score:.2f}" in result.stdout and found.search["beam"] == 2
    assert (runs / "none" / "evaluation.json").exists()
    again = json.loads(run("evaluate", runs / "bahdanau", "--split", "valid", "--first", "2", "--json").stdout)
    assert again["num_sentences"] == 2 and (runs / "bahdanau" / "evaluation-valid.json").exists()
    assert "no split 'tset'" in run("evaluate", runs / "bahdanau", "--split", "tset", status=2).stderr


def test_n_best_lists_number_every_line_keep_links_repeat_nothing_and_mark_what_was_cut(runs):
    found = load_run(runs / "bahdanau")
    result = run("translate", runs / "bahdanau", "\n".join(LINES), "--beam", "6", "--n-best", "6", "--align", "pharaoh")
    rows = [line.split(" ||| ") for line in result.stdout.splitlines()]
    assert {int(row[0]) for row in rows} == set(range(len(LINES))), "an empty line has its number"
    assert [row for row in rows if row[0] == "1"] == [["1", "", "nan", ""]]
    wanted = TranslationOptions(replace(found.search(), beam=6, n_best=6), reading="output")
    for number, each in enumerate(translate(found.model, *tokenizers(found), LINES, wanted)):
        mine = [row for row in rows if int(row[0]) == number and row[1]]
        assert [row[1] for row in mine] == list(each.texts) and len(set(each.texts)) == len(each.texts)
        assert [row[3] for row in mine] == [write_pharaoh(alignment.links()) for alignment in each.alignments]
        assert [row[4:] == ["cut"] for row in mine] == [not hypothesis.ended for hypothesis in each.hypotheses]
    assert any(row[4:] for row in rows) and "reached their maximum length: line 1" in result.stderr


def test_texts_that_different_tokens_spell_are_printed_once(runs):
    found = load_run(runs / "bahdanau")
    found.target_tokenizer.decode = lambda ids: "same"
    (each,) = translate(
        found.model, *tokenizers(found), ["the dog"], TranslationOptions(replace(found.search(), beam=3, n_best=3))
    )
    assert each.texts == ("same",) and len(each.hypotheses) == 1
    (best,) = translate(
        found.model, *tokenizers(found), ["the dog"], TranslationOptions(replace(found.search(), beam=3))
    )
    assert each.hypotheses == best.hypotheses


def test_lines_of_unknown_pieces_are_named_with_their_number(runs):
    lines = ["吾輩は猫である", expected_words(runs, 2), "吾輩 は", f"{expected_words(runs, 1)} 猫"]
    result = run("translate", runs / "bahdanau", "-", stdin="\n".join(lines) + "\n")
    said = " ".join(result.stderr.split())
    assert "3 of 4 lines" in said
    assert "line 1: 1 of 1 pieces; line 3: 2 of 2 pieces; line 4: 1 of 2 pieces." in said
    known = run("translate", runs / "bahdanau", "-", stdin=lines[1] + "\n")
    assert "unknown" not in known.stderr


def expected_words(runs, count):
    """Words that the tokenizer of the run knows."""
    tokenizer = load_run(runs / "bahdanau").source_tokenizer
    return tokenizer.decode(list(range(4, 4 + count)))
