"""`regard lecture` writes the file of `write_lecture`, and explains wrong names."""

from typer.testing import CliRunner

from regard.cli.app import app
from regard.viewer.lecture import LECTURES, write_lecture


def test_the_command_writes_a_lecture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["lecture", "rope"]).output.strip() == "rope.html"
    shown = CliRunner().invoke(app, ["lecture", "steps", "-o", str(tmp_path / "first.html")])
    assert shown.exit_code == 0 and shown.output.strip() == str(tmp_path / "first.html")
    assert (tmp_path / "first.html").read_text() == write_lecture(tmp_path / "again.html", "steps").read_text()
    for arguments, message in (
        (["step"], "there is no lecture 'step'. Did you mean 'steps'?"),
        (["steps", "-o", "steps.pdf"], "steps.pdf does not end in .html"),
        (["../steps"], "there is no lecture '../steps'"),
    ):
        refused = CliRunner().invoke(app, ["lecture", *arguments])
        assert refused.exit_code == 2 and message in refused.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.html", "first.html", "rope.html"]


def test_help_names_every_lecture():
    assert all(name in CliRunner().invoke(app, ["lecture", "--help"]).output for name in LECTURES)
