"""The front door: few names, each in one room, and an answer for every name that is not there."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import defaultdict
from operator import attrgetter
from types import ModuleType

import pytest

import regard as rg
from imports import FILES, SOURCE
from public_names import PUBLIC
from regard.base.other_libraries import INNER_ROOMS, ROOMS
from regard.pieces.piece import Piece


def names_of_the_source():
    """Every public name of a class, function, constant or room in src."""
    names = set(ROOMS)
    for path in FILES.values():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def has(name):
    """Whether `regard` yields the name; a file of the package, which Python adds once it is imported, is no name."""
    value = getattr(rg, name, None)
    return value is not None and (name in ROOMS or not isinstance(value, ModuleType))


def test_the_top_level_has_at_most_sixty_names(monkeypatch):
    # the answer for a missing name is composed in milliseconds; of these thousands nobody reads it
    monkeypatch.setattr(rg, "missing_here", lambda room, name, public: AttributeError(name))
    yielded = {name for name in names_of_the_source() if has(name)}
    yielded -= {"INNER_ROOMS", "ROOMS", "importers", "missing_here"}  # which `regard/__init__.py` imports for itself
    assert yielded == set(rg.__all__) and len(yielded) <= 60


@pytest.mark.parametrize("room", [*ROOMS, *INNER_ROOMS])
def test_a_room_has_at_most_forty_names_and_each_is_there(room):
    module = attrgetter(room)(rg)
    names = module.__all__
    assert len(set(names)) == len(names) <= 40
    assert all(module.__dict__.get(name) is not None or getattr(module, name) for name in names)
    assert importlib.import_module(f"regard.{room}").__doc__


def test_every_piece_has_a_line_that_checks_it_by_hand():
    text = (SOURCE.parents[1] / "docs" / "development" / "pieces.md").read_text()
    pieces = [piece for piece in PUBLIC.values() if inspect.isclass(piece) and issubclass(piece, Piece)]
    without = [p.__name__ for p in pieces if not inspect.isabstract(p) and not re.search(rf"\b{p.__name__}\b", text)]
    assert not without, f"docs/development/pieces.md: write a line for {without}"


def test_no_two_names_differ_by_case_alone():
    spelled = defaultdict(set)
    for name in PUBLIC:
        spelled[name.replace("_", "").lower()].add(name)
    assert [names for names in spelled.values() if len(names) > 1] == []
    for room in (rg.nn, rg.lab.data, rg.lab, rg.viewer):
        assert len({name.replace("_", "").lower() for name in room.__all__}) == len(room.__all__)


def test_a_name_of_a_room_is_one_object_everywhere():
    for room in ROOMS:
        for name in getattr(rg, room).__all__:
            if name in rg.__all__:
                assert getattr(rg, name) is getattr(getattr(rg, room), name)


#: Names of before the rooms -> a part of the answer.
BEFORE = {
    "Fold": "rg.maps.Reduction",
    "KernelScore": "rg.scores.FeatureScore",
    "Patch": "rg.edits.ActivationPatch",
    "Steer": "rg.edits.AddToScores",
    "where": "rg.Where",
    "Edits": "rg.edits.EditSequence",
    "Links": "rg.maps.RowLinks",
    "MatrixMap": "rg.maps.DenseMap",
    "Beyond": "rg.maps.MassWhere",
    "divergence": "rg.maps.Divergence",
    "differences": "rg.stats.text_differences",
    "explain": "rg.plan",
    "Entropy": "rg.maps.Entropy",
    "prefix": "rg.masks.prefix",
    "Positions": "rg.types.Positions",
    "Softmax": "rg.normalizers.Softmax",
    "edit_effect": "rg.hf.edit_effect",
    "Position": "rg.encodings.Encoding",
    "seq2seq": "rg.lab",
    "data": "rg.lab.data",
    "load_corpus": "rg.lab.data.load_corpus",
    "beam_search": "rg.lab.beam_search",
}


@pytest.mark.parametrize("name", BEFORE)
def test_a_name_of_before_answers_with_its_place(name):
    with pytest.raises(AttributeError) as error:
        getattr(rg, name)
    assert BEFORE[name] in str(error.value)
