"""What type checkers see: a user's script without errors, every public name, and an error for a misspelt one."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections import defaultdict
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

import pytest

import catalog_types
import regard as rg
from imports import SOURCE
from regard.base.other_libraries import INNER_ROOMS, ROOMS

ROOT = SOURCE.parents[1]

SCRIPT = (Path(__file__).parents[1] / "tools" / "typed_script.py").read_text()
#: Each line is a mistake that a checker must report.
MISTAKES = """\
import regard as rg
print(rg.atend)
print(rg.nn.MultiHeadAttentio)
print(rg.lab.data.load_corpu)
print(rg.lab.trai)
print(rg.viewer.write_pag)
print(rg.mechanism("rope").build(wdth=8))
print(rg.mechanism("rope").biuld)
print(rg.attend(1, 2, 3, engine=4))
print(rg.window(size="3"))
print(rg.attend)  # no mistake
"""
#: The last line is a mistake.
STATISTICS = """\
from torch import Tensor
import regard as rg
def right(weights: rg.AttentionMap) -> tuple[Tensor, rg.maps.RowLinks]:
    return weights.summarize(rg.maps.Entropy(), rg.maps.TopLinks(1))
def wrong(weights: rg.AttentionMap) -> tuple[rg.maps.RowLinks, Tensor]:
    return weights.summarize(rg.maps.Entropy(), rg.maps.TopLinks(1))
"""
MODES = ("basic", "strict")  # of pyright
#: mypy reads torch for a minute, so it takes torch's types for Any. It checks all names of Regard.
MYPY = """\
[mypy]
strict = True
disallow_subclassing_any = False
[mypy-torch.*,numpy.*,transformers.*,lightning.*,pydantic.*,matplotlib.*]
follow_imports = skip
"""


def all_names():
    """One line for each public name."""
    lines = [f"rg.{name}" for name in rg.__all__]
    for package in (*ROOMS, *INNER_ROOMS):
        lines += [f"rg.{package}.{name}" for name in attrgetter(package)(rg).__all__]
    return "\n".join(["import regard as rg", *(f"print({line})" for line in lines)])


def written(folder, settings, end=""):
    """The scripts of a user, each with this end, in a folder with the settings of a checker."""
    texts = {"script": SCRIPT, "mistakes": MISTAKES, "names": all_names(), "statistics": STATISTICS}
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text + end)
    for name, text in settings.items():
        (folder / name).write_text(text)
    return texts


def mistakes():
    """The numbers of the lines of MISTAKES that are wrong."""
    return set(range(2, len(MISTAKES.splitlines())))


def test_the_typed_script_runs(capsys):
    runpy.run_path(str(Path(__file__).parents[1] / "tools" / "typed_script.py"), run_name="__main__")
    assert "window(size=0)" in capsys.readouterr().out


@pytest.fixture(scope="module")
def errors_of_pyright(tmp_path_factory):
    """mode -> file -> the lines with errors. One process reads torch and Regard for both modes."""
    folder = tmp_path_factory.mktemp("pyright")
    packages = folder / "venv" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    installed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "installed.pth").write_text("\n".join([str(SOURCE.parent), *installed]))
    settings = {"venvPath": ".", "venv": "venv", "typeCheckingMode": "off", "include": [*MODES]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    for mode in MODES:
        (folder / mode).mkdir()
        num_texts = len(written(folder / mode, {}, f"\n# pyright: {mode}\n"))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--project", str(folder)]
    done = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    assert done["summary"]["filesAnalyzed"] == len(MODES) * num_texts
    found = {mode: defaultdict(set) for mode in MODES}
    for entry in done["generalDiagnostics"]:
        if entry["severity"] == "error":
            file = Path(entry["file"])
            found[file.parent.name][file.stem].add(entry["range"]["start"]["line"] + 1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_pyright_accepts_a_users_script_and_every_public_name_and_reports_every_mistake(errors_of_pyright, mode):
    assert errors_of_pyright[mode] == {"mistakes": mistakes(), "statistics": {6}}


@pytest.mark.slow
def test_mypy_accepts_a_users_script_and_every_public_name_and_reports_every_mistake(tmp_path):
    if find_spec("mypy") is None:
        pytest.skip("mypy is not installed; `make install` installs it")
    texts = written(tmp_path, {"mypy.ini": MYPY})
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", *(f"{name}.py" for name in texts)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    found = defaultdict(set)
    for name, line in re.findall(r"^(\w+)\.py:(\d+): error: ", done.stdout, re.M):
        found[name].add(int(line))
    assert found == {"mistakes": mistakes()}, done.stdout  # `statistics` has no mistake where a Tensor is Any


def test_types_are_shipped_and_the_stub_of_the_catalog_is_current():
    assert (SOURCE / "py.typed").exists()
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"] == {
        "packages": ["src/regard"],
        "hooks": {"custom": {}},  # hatch_build.py
    }
    remedy = "run python scripts/catalog_types.py"
    assert catalog_types.STUB.read_text() == catalog_types.stub(), remedy


def test_type_checkers_read_every_room():
    """They do not follow `__getattr__`, so `regard/__init__.py` names each room for them."""
    text = (SOURCE / "__init__.py").read_text()
    assert all(f"from regard import {room} as {room}\n" in text for room in ROOMS)


def test_dir_lists_the_rooms_and_every_public_name():
    assert set(dir(rg)) == {*rg.__all__, "__version__"}
    for package in (*ROOMS, *INNER_ROOMS):
        assert set(attrgetter(package)(rg).__all__) <= set(dir(attrgetter(package)(rg)))
