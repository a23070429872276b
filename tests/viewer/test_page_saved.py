"""Edited and damaged saved runs: refused in words when they are opened, before a server starts."""

from __future__ import annotations

import copy
import json
import math
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import regard as rg
from pages import reading, told, translation
from regard.base.errors import RegardError
from regard.viewer import Sheet, load_run, save_run
from regard.viewer.answers import Answers
from regard.viewer.page import payload

safetensors = pytest.importorskip("safetensors.torch")

DEEP = 100_000


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    charts = [{"title": "BLEU", "x": "step", "y": "BLEU", "series": [{"name": "a", "points": [[0, 1.0], ["b", 2]]}]}]
    sheets = [Sheet.of(told(reading(mask=rg.causal())), charts=charts), Sheet.of(translation(), gold=[(0, 4, True)])]
    return save_run(tmp_path_factory.mktemp("saved") / "run", sheets)


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def changed(path, change):
    """A JSON file whose data `change` changes in place."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def refused(folder, *words):
    with pytest.raises(RegardError) as error:
        load_run(folder)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_what_was_saved_is_opened(run):
    assert len(load_run(run)) == 2


@pytest.mark.parametrize("name", ["manifest.json", "text-0/tokens.json", "text-1/statistics.json"])
@pytest.mark.parametrize("text", ["[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" * DEEP])
def test_deep_nests_are_refused(run, name, text):
    (run / name).write_text(text)
    refused(run, name, "cannot be read")


def test_a_nest_that_can_be_read_but_not_sent_is_refused(run):
    """What Python's reader of JSON takes, its writer may not."""
    inside = "[" * 900 + "]" * 900
    path = run / "text-0/statistics.json"
    path.write_text(path.read_text().rstrip().removesuffix("}") + f', "more": {inside}}}')
    try:
        load_run(run)
    except RegardError as error:
        assert "cannot be" in str(error)


NAMES = ["manifest.json", "text-0/tokens.json", "text-0/statistics.json", "text-0/layer-01.safetensors"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("instead", [None, "folder", b"", b"{", b"\xff\xfe\x00", b"null", b"[]"])
def test_files_that_are_missing_or_something_else_are_refused(run, name, instead):
    (run / name).unlink()
    if instead == "folder":
        (run / name).mkdir()
    elif instead is not None:
        (run / name).write_bytes(instead)
    refused(run, name)


def test_a_text_that_is_a_file_is_refused(run):
    shutil.rmtree(run / "text-0")
    (run / "text-0").write_text("")
    refused(run, "text-0")


@pytest.mark.parametrize(
    "folder", ["..", "../run/text-0", "/etc", "text-0/../text-1", ".", "", "text-0/", "text-0\0", "..\\text-0", 0, None]
)
def test_names_outside_the_folder_are_refused(run, folder):
    changed(run / "manifest.json", lambda data: data["texts"][0].update(folder=folder))
    refused(run, "manifest.json", "a name in this folder")


def test_a_folder_beside_the_run_is_not_read(run):
    """`..` was followed: the folder above was read as a text."""
    for path in (run / "text-0").iterdir():
        shutil.copy(path, run.parent / path.name)
    changed(run / "manifest.json", lambda data: data["texts"][0].update(folder=".."))
    refused(run, "manifest.json")


@pytest.mark.parametrize("layers", [-1, 0, 3, 10**12, True, 1.0, "2", None])
def test_numbers_of_layers_that_are_none_are_refused(run, layers):
    changed(run / "manifest.json", lambda data: data["texts"][0].update(layers=layers))
    refused(run, "layer" if layers == 3 else "manifest.json")


EDITS = {
    "NaN": ("statistics", lambda d: d["layers"][0]["heads"][0]["values"].update(entropy=math.nan), "finite number"),
    "infinity": ("statistics", lambda d: d["layers"][1]["heads"][2]["offsets"].__setitem__(3, -math.inf), "offsets[3]"),
    "a huge number": ("statistics", lambda d: d["layers"][0]["heads"][0]["received"].__setitem__(0, 10**400), "finite"),
    "half a character": ("tokens", lambda d: d["tokens"].__setitem__(0, "\ud800"), "cannot be sent"),
    "a token too few": ("tokens", lambda d: d["tokens"].pop(), "tokens has 14 entries, and the maps 15"),
    "tokens of numbers": ("tokens", lambda d: d.update(tokens=list(range(15))), "tokens[0] must be a text"),
    "no title": ("tokens", lambda d: d.pop("title"), "title is missing"),
    "special beyond": ("tokens", lambda d: d["special"].append(15), "special names 15"),
    "queries of another size": ("tokens", lambda d: d.update(queries=["a"]), "queries has 1"),
    "a layer too few": ("statistics", lambda d: d["layers"].pop(), "layers has 1"),
    "a head too many": ("statistics", lambda d: d["layers"][0]["heads"].append(d["layers"][0]["heads"][0]), "heads"),
    "start beyond": ("statistics", lambda d: d["start"].update(layer=7), "start.layer names 7"),
    "start before": ("statistics", lambda d: d["start"].update(layer=-1, head=-1), "start.layer names -1"),
    "an unknown role": ("statistics", lambda d: d["layers"][1]["heads"][1]["roles"][0].update(kind="x"), "previous"),
    "half a picture": ("statistics", lambda d: d["layers"][0]["heads"][0].update(thumbnail="AAAA"), "thumbnail"),
    "no picture": ("statistics", lambda d: d["layers"][0]["heads"][0].update(thumbnail="!!"), "thumbnail"),
    "a link nowhere": ("statistics", lambda d: d["layers"][0]["heads"][0].update(strongest=[99, 0, 1]), "query"),
    "other statistics": ("statistics", lambda d: d["layers"][0]["heads"][1].update(values={}), "values"),
    "places too few": ("statistics", lambda d: d["places"].pop(), "places"),
    "gold of words": ("statistics", lambda d: d.update(gold=[["a", "b", True]]), "gold[0][0]"),
    "a chart without points": ("statistics", lambda d: d["charts"][0]["series"][0].pop("points"), "points"),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_edited_texts_are_refused(run, edit):
    name, change, word = EDITS[edit]
    changed(run / "text-0" / f"{name}.json", change)
    refused(run, "text-0", "was edited", word)


def test_maps_of_another_text_are_refused(run):
    shutil.copy(run / "text-1/layer-00.safetensors", run / "text-0/layer-01.safetensors")
    refused(run, "text-0", "layer 1")


def test_a_long_text_without_its_cells_is_refused(tmp_path):
    """Its top levels would be computed from all weights: gigabytes."""
    folder = save_run(tmp_path, [Sheet.of(reading(length=1_100, layers=1, heads=1, width=2))])
    cells = folder / "text-0/cells-00.safetensors"
    safetensors.save_file({"mean": torch.zeros(1, 3, 3), "max": torch.zeros(1, 3, 3)}, cells)
    refused(folder, "cells of layer 0")
    safetensors.save_file({"mean": torch.zeros(1, 3, 3)}, cells)
    refused(folder, "cells-00")
    cells.unlink()
    refused(folder, "cells of layer 0")


def header_of(path):
    with safetensors.safe_open(path, "pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def with_header(path, text, **facts):
    about, tensors = header_of(path)
    safetensors.save_file(tensors, path, about | {"map": text} | facts)


@pytest.mark.parametrize("text", ["[" * DEEP + "]" * DEEP, "null", "[]", '{"pieces": 1}', "{"])
def test_headers_that_name_no_map_are_refused(run, text):
    with_header(run / "text-0/layer-00.safetensors", text)
    refused(run, "layer-00.safetensors", "damaged")


@pytest.mark.parametrize("version", ["x", "", "99", "-1", "9" * 5_000])
def test_versions_that_are_none_are_refused(run, version):
    path = run / "text-0/layer-00.safetensors"
    with_header(path, header_of(path)[0]["map"], version=version)
    refused(run, "no map of version 3")


# Drawn edits: any part of any file becomes something else. What is opened then answers everything.

VALUES = [None, True, -1, 0, 3, 10**12, 1.5, math.nan, -math.inf, "", "x", "\ud800", [], {}, ["a"], [[1]], {"a": 1}]


def parts_of(data, path=()):
    """The paths of all parts of JSON."""
    yield path
    for name, part in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from parts_of(part, (*path, name))


def replaced(data, path, value):
    data = copy.deepcopy(data)
    if not path:
        return value
    part = data
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return data


def answers_everything(sheets):
    answers = Answers(sheets)
    answers.answer("texts")
    payload(sheets)
    for text, sheet in enumerate(sheets):
        answers.answer(f"text/{text}")
        for layer, weights in enumerate(sheet.maps):
            _, H, I, J = weights.shape
            for path in (f"rows/{text}/{layer}/{I - 1}", f"columns/{text}/{layer}/{J - 1}"):
                assert len(answers.answer(path)) in (H * I * 4, H * J * 4)
            answers.answer(f"tile/{text}/{layer}/{H - 1}/1/0/0/mean")


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_drawn_edits_are_refused_or_harmless(saved, tmp_path_factory, data):
    run = shutil.copytree(saved, tmp_path_factory.mktemp("drawn") / "run")
    name = data.draw(st.sampled_from(NAMES))
    path, is_layer = run / name, name.endswith("safetensors")
    before = json.loads(header_of(path)[0]["map"] if is_layer else path.read_text())
    place = data.draw(st.sampled_from(list(parts_of(before))))
    after = json.dumps(replaced(before, place, data.draw(st.sampled_from(VALUES))))
    with_header(path, after) if is_layer else path.write_text(after)
    try:
        sheets = load_run(run)
    except RegardError as error:
        assert len(str(error)) > 20
    else:
        answers_everything(sheets)
    shutil.rmtree(run)


def test_view_tells_it_before_a_server_starts(run, monkeypatch):
    testing = pytest.importorskip("typer.testing")
    from regard.cli.app import app

    monkeypatch.setattr("regard.viewer.server.serve", lambda *_: pytest.fail("a server was started"))
    (run / "text-0/statistics.json").write_text("[" * DEEP)
    result = testing.CliRunner().invoke(app, ["view", str(run), "--port", "0"])
    assert result.exit_code == 2 and "cannot be read" in " ".join(result.stderr.split())
