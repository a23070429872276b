"""`regard data`, as a user sees it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from regard.base.errors import RegardError
from regard.cli.app import app


@pytest.fixture
def regard(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        return CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)

    return run


def test_corpora_are_listed(regard):
    said = regard().output
    for name in ("copy", "reverse", "grammar", "bible-en-fr", "bible-en-es", "bible-en-de", "bible-en-it"):
        assert name in said
    assert said.count("embedded") == 1 and "regard data en-es" in said


def test_samples_and_counts_are_shown(regard):
    said = regard("bible-en-fr", "--show", 1, "--max-words", 15).output
    assert "In the beginning God created the heavens and the earth." in said and "GEN 1:1" in said
    assert "longer than 15 words" in said and "sha256" in said and "15 at most" in said
    assert "0 repeated" not in said


def test_files_of_ones_own(regard, tmp_path):
    for name, word in (("a.en", "dog"), ("a.fr", "chien")):
        (tmp_path / name).write_text("".join(f"{word} {n}\n" for n in range(30)))
    said = regard(tmp_path / "a.en", tmp_path / "a.fr").output
    assert "24 training, 3 validation, 3 test pairs" in said and "chien" in said


def test_the_embedded_pair_needs_no_network(regard, monkeypatch):
    def fetch(*_):
        raise AssertionError("fetched")

    monkeypatch.setattr("regard.lab.commands.data.fetch_wheel", fetch)
    assert "bible-fr-en" in regard("fr-en", "--show", 0).output
    with pytest.raises(AssertionError, match="fetched"):
        regard("fr-en", "--max-words", 30)


def test_mistakes_are_one_line(regard, monkeypatch):
    def fetch(*_):
        raise RegardError("data: pip could not fetch it")

    monkeypatch.setattr("regard.lab.commands.data.fetch_wheel", fetch)
    for arguments, words in (
        (["bibel-en-fr"], "Did you mean"),
        (["en-xx"], "no edition for 'xx'"),
        (["en-es"], "pip could not fetch it"),
        (["nothing.tsv"], "no file nothing.tsv"),
    ):
        result = regard(*arguments)
        assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output
