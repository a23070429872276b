"""Tests are skipped only for packages that are missing; each command has one extra, and runs with it alone."""

from __future__ import annotations

import subprocess
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from extras import asked_for, distributions, is_missing, project_extras
from regard.base.errors import RegardError
from regard.cli.app import app
from regard.cli.extras import COMMANDS, extra_of
from regard.version import __version__
from warm import environment

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "install.md"


def test_only_a_missing_package_is_a_reason_to_skip(monkeypatch):
    monkeypatch.setattr("extras.not_installed", lambda: frozenset({"matplotlib"}))
    assert is_missing(RegardError("figures: matplotlib is not installed. pip install 'regard[demo]'"))
    assert not is_missing(
        RegardError("watch: transformers 5.0.0 has another interface; pip install 'transformers>=5.23'")
    )
    assert not is_missing(RegardError("attend: q has 3 heads"))
    assert is_missing(ModuleNotFoundError("", name="nowhere.inner"))
    assert not is_missing(ModuleNotFoundError("", name="regard.inner"))


@pytest.mark.parametrize(
    ("message", "distribution"),
    [("pip install 'regard[hf,lab]'", "transformers"), ("pip install zstandard. Or", "zstandard")],
)
def test_what_a_message_says_to_install(message, distribution):
    assert distribution in asked_for(message)


def test_no_test_is_left_out_for_a_module_of_the_repository():
    """Tests import some of scripts/, and what cannot be found there counts as a missing package."""
    assert {path.stem for path in PAGE.parents[2].glob("scripts/*.py") if find_spec(path.stem) is None} == set()


def test_every_command_has_one_extra_which_brings_the_command_line():
    assert set(COMMANDS) == set(typer.main.get_command(app).commands)
    for extra in COMMANDS.values():
        assert distributions("cli", project_extras()) <= distributions(extra, project_extras()), extra


@pytest.mark.parametrize("command", COMMANDS)
def test_the_installation_page_names_the_extra_of_a_command(command):
    rows = [
        [cell.strip() for cell in line.split("|")[2:4]] for line in PAGE.read_text().splitlines() if line[:1] == "|"
    ]
    where = {extra for uses, extra in rows if f"`regard {command}" in uses or f"`{command}`" in uses}
    assert f"`{extra_of(command, {'model': 'minilm'})}`" in where


@pytest.mark.parametrize("extra", ["demo", "lab"])
def test_what_a_command_of_this_extra_writes_can_be_viewed(extra):
    assert distributions("view", project_extras()) <= distributions(extra, project_extras())


#: Regard itself finds no package of `hidden`. Other packages do: they were installed beside them.
ALONE = """
import builtins
importing = builtins.__import__
def alone(name, globals=None, *rest, **named):
    if name.partition(".")[0] in {hidden} and (globals or {{}}).get("__name__", "").startswith("regard"):
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    return importing(name, globals, *rest, **named)
builtins.__import__ = alone
from regard.cli.main import main
main({arguments})
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "rope", "--length", "64"],
        ["analyze", "The cat sat because it was tired.", "--layers", "0", "--save", "seen", "--figures", "seen"],
        ["train", "--data", "copy", "--steps", "1", "--out", "run", "data.size=60", "model.width=8"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_runs_with_its_extra_alone(arguments, tmp_path, commands):
    extras = project_extras()
    used = set().union(*(distributions(extra, extras) for extra in ("demo", "lab", "corpus", "ray")))
    others = used - distributions(extra_of(arguments[0], {"model": "minilm"}), extras)
    hidden = {module for module, of in packages_distributions().items() if set(of) <= others}
    code = ALONE.format(hidden=hidden, arguments=arguments)
    command, settings = [commands / "python", "-c", code], environment(commands)
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=300)
    assert hidden and done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["rich", "typer"])
def test_torch_and_numpy_alone_answer_version_and_help(module, commands):
    """What `pip install regard` brings: the version, the extra of each command, and an error that names it."""
    hide = f"import sys; sys.modules[{module!r}] = None; from regard.cli.main import main; main(sys.argv[1:])"

    def answer(*arguments):
        command = [commands / "python", "-c", hide, *arguments]
        return subprocess.run(command, env=environment(commands), capture_output=True, text=True, timeout=120)

    assert answer("--version").stdout == f"regard {__version__}\n"
    for asked in (["--help"], []):
        said = answer(*asked)
        assert said.returncode == 0, said.stderr
        assert all(f"{name} " in said.stdout and f"regard[{extra}]" in said.stdout for name, extra in COMMANDS.items())
    refused = answer("train")
    assert refused.returncode == 1 and "pip install 'regard[lab]'" in refused.stderr
