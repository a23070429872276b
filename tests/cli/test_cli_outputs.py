"""Where a command cannot write is said before its work: no model is loaded, no corpus read, nothing measured."""

from __future__ import annotations

import socket

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")

from regard.cli.app import app
from regard.hf.text_reader import TextReader


class WorkHasBegun(Exception):
    pass


def begun(*_, **__):
    raise WorkHasBegun


@pytest.fixture(autouse=True)
def work(monkeypatch):
    """Every command stops where its work begins."""
    monkeypatch.setattr(TextReader, "load", staticmethod(begun))
    monkeypatch.setattr("regard.lab.pages.open_folder", begun)
    monkeypatch.setattr("regard.lab.commands.data.fetch_wheel", begun)


@pytest.fixture
def place(tmp_path):
    (tmp_path / "file").write_text("text\n")
    (tmp_path / "folder").mkdir()
    return tmp_path


def run(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def refused(*arguments, **options):
    result = run(*arguments, **options)
    assert result.exit_code == 2 and result.stdout == "", (result.exception, result.output)
    return " ".join(result.stderr.split())


WRITERS = [
    ("analyze", "hello", "--save"),
    ("analyze", "hello", "--figures"),
    ("analyze", "{file}", "--corpus", "--save"),
    ("demo", "--out"),
    ("train", "--data", "copy", "--steps", "1", "--out"),
    ("compare", "--data", "copy", "--steps", "1", "--out"),
]


@pytest.mark.parametrize("writer", WRITERS, ids=" ".join)
@pytest.mark.parametrize("name", ["file", "file/inside", "file/in/side", "x" * 300])
def test_a_folder_that_cannot_be_is_refused_before_the_work(writer, name, place):
    arguments = [part.format(file=place / "file") for part in writer]
    said = refused(*arguments, place / name)
    assert "Give" in said and (place / "file").read_text() == "text\n"
    assert sorted(path.name for path in place.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("writer", WRITERS[:4], ids=" ".join)
def test_a_folder_that_may_not_be_written_is_refused_before_the_work(writer, place, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("regard.cli.outputs.tempfile.TemporaryDirectory", denied)
    arguments = [part.format(file=place / "file") for part in writer]
    assert "cannot be written to: Permission denied" in refused(*arguments, place / "folder")


@pytest.mark.parametrize("writer", WRITERS[:4], ids=" ".join)
@pytest.mark.parametrize("name", ["folder", "new", "new/inside"])
def test_a_folder_that_can_be_is_not_refused_and_not_made(writer, name, place):
    arguments = [part.format(file=place / "file") for part in writer]
    assert isinstance(run(*arguments, place / name).exception, WorkHasBegun)
    assert sorted(path.name for path in place.iterdir()) == ["file", "folder"] and not any((place / "folder").iterdir())


def test_without_matplotlib_figures_are_refused_before_the_work(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr("regard.cli.outputs.find_spec", lambda name: None)
    assert "matplotlib is not installed. pip install" in refused("analyze", "hello", "--figures", "new")


def test_a_port_that_is_taken_is_told_before_a_page_is_opened(place):
    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot be used" in refused("view", place, "--port", taken.getsockname()[1])
    assert "needs --token" in refused("view", place, "--host", "0.0.0.0", "--token", "short")
    assert isinstance(run("view", place, "--port", 0).exception, WorkHasBegun)


def test_a_cache_that_cannot_be_is_refused_before_the_verses_are_fetched(place, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(place / "file"))
    assert "that is a file" in refused("data", "en-es")
