"""What is exported, how it loads, and that every example in a docstring runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys

import pytest
import torch

import regard as rg
from extras import needs_transformers
from imports import FILES, SOURCE, circle, imported_files, imports

WALKED = (m.name for m in pkgutil.walk_packages([str(SOURCE)], "regard."))
#: The compiled kernels end in .so as modules do, and are none.
MODULES = sorted(name for name in WALKED if "cli" not in name and not name.endswith(".libregard"))
LAYERS = [
    {"base", "version"},
    {"pieces", "attention"} | {"masks", "scores", "encodings", "biases", "normalizers", "selections", "transitions"},
    {"caches", "engine", "reference"},
    {"maps", "composites", "catalog", "attention_output", "call_options", "nn"},
    {"stats", "edits", "hf", "drawing", "diagnosis"},
    {"profiling", "attribution"},
    {"viewer", "cli", "types", "api", "testing"},
    {"lab"},
]
#: The layer of the public names of `regard`.
TOP = next(n for n, names in enumerate(LAYERS) if "api" in names)
#: The files that name the lab: the front door, and the table of its commands.
NAMES_LAB = ("regard", "regard.cli.lab")
#: The same inside packages, by name.
ROOMS = {
    "hf": [
        {"adapters", "names", "masks", "gguf", "token_labels"},
        {"attention_modules"},
        {"calls", "models"},
        {"operator_calls", "recurrent", "edited_calls", "output_projections"},
        {"compiled"},
        {"capture", "heads", "backend"},
        {"editing", "window_maps"},
        {"text_probes"},
        {"text_reader", "image_grids"},
        {"image_reader", "edit_effects", "generation_reader"},
        {"__init__"},
    ],
    "lab": [
        *({"data"}, {"models"}, {"decoding"}, {"evaluation"}, {"runs"}, {"training"}, {"report"}, {"comparison"}),
        *({"__init__"}, {"pages"}, {"commands"}),
    ],
}


def test_all_names_what_is_exported():
    assert len(rg.__all__) == len(set(rg.__all__))
    for name in rg.__all__:
        assert getattr(rg, name).__doc__, f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'attned'"):
        rg.attned  # noqa: B018


def test_importing_regard_does_not_import_torch():
    code = "import sys, regard; assert 'torch' not in sys.modules; regard.attend; assert 'torch' in sys.modules"
    heavy = "; assert not {'transformers', 'matplotlib', 'typer'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code + heavy], check=True)


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(m, marks=needs_transformers("5.15", "`register` imports it, which needs this version"))
        if m == "regard.hf.compiled"
        else m
        for m in MODULES
    ],
)
def test_examples_in_docstrings_run(module):
    torch.manual_seed(0)
    runner = doctest.DebugRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for docstring in doctest.DocTestFinder().find(importlib.import_module(module)):
        if docstring.examples:  # to run none, doctest asks the disk for every file that Python has read
            try:
                runner.run(docstring)
            except doctest.UnexpectedException as failure:
                raise failure.exc_info[1] from failure


@pytest.mark.parametrize("path", FILES.values(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_package_imports_only_from_the_layers_below(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    level = next((n for n, names in enumerate(LAYERS) if parts[0] in names), None)
    if level is None:
        assert parts in (("__init__",), ("__main__",))
        return
    for imported in {name.split(".")[1] for name in imports(path.read_text())} - {"__version__"}:
        above = next((n for n, names in enumerate(LAYERS) if imported in names), TOP)
        assert above <= level, f"{path.name} (layer {level}) imports regard.{imported} (layer {above})"
        assert {parts[0], imported} != {"engine", "catalog"}, "engine and catalog do not know each other"


@pytest.mark.parametrize(
    "path",
    sorted(path for package in ROOMS for path in (SOURCE / package).rglob("*.py")),
    ids=lambda p: str(p.relative_to(SOURCE)),
)
def test_a_room_of_a_package_imports_only_from_those_below(path):
    package, room = path.relative_to(SOURCE).with_suffix("").parts[:2]
    layers, inside = ROOMS[package], f"regard.{package}."
    level = next(n for n, names in enumerate(layers) if room in names)
    for imported in {name.split(".")[2] for name in imports(path.read_text()) if name.startswith(inside)}:
        front = next(n for n, names in enumerate(layers) if "__init__" in names)  # where public names are
        below = next((n for n, names in enumerate(layers) if imported in names), front)
        assert below < level or imported == room, f"{room} imports {inside}{imported}, which is not below it"


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("regard.lab")])
def test_nothing_outside_of_the_lab_imports_it(name):
    text = FILES[name].read_text()
    found = {each for each in imports(text) if re.match(r"regard\.lab\b", each)}
    found |= {node.value for node in ast.walk(ast.parse(text)) if is_module_of_the_lab(node)}
    assert not found or name in NAMES_LAB, f"{name} names {sorted(found)}"


def is_module_of_the_lab(node):
    """Whether a node is a string such as "regard.lab.pages"."""
    return isinstance(node, ast.Constant) and re.fullmatch(r"regard\.lab(\.\w+)*", str(node.value)) is not None


def test_the_tests_of_imports_see_functions_strings_and_circles():
    text = "import os\ndef show():\n    from regard.viewer import page\n    import_module('regard.hf').watch"
    assert imports(text) == {"regard.viewer.page", "regard.hf"}
    assert imports("importlib.import_module(f'regard.{name}')") == {"regard."}
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) and not circle({"a": {"b", "c"}, "b": {"c"}})


def test_no_file_imports_itself_through_others():
    assert not circle({name: imported_files(name) for name in FILES})


def test_the_house_keeps_its_rooms_small():
    """A file is a concept, up to about 800 lines; a lower bound cut concepts in pieces."""
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 800, f"{path} is longer than 800 lines"
