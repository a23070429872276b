"""The support matrix: the page has the tables of the record, the record the rows of the script; some are tried."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
support = pytest.importorskip("support")
gallery = pytest.importorskip("gallery")


@pytest.fixture(scope="module")
def record():
    return json.loads(support.RECORD.read_text())


def test_the_page_has_the_tables_of_the_record(record):
    page = support.PAGE.read_text()
    assert support.with_tables(page, record) == page
    assert "not tried" in page and "| tried |" in page


def test_the_record_has_the_rows_of_the_script_and_says_nothing_of_what_cannot_be_tried(record):
    assert list(record) == ["packages", *(row.key for row in support.ROWS)]
    assert all(record[row.key] == {} for row in support.ROWS if row.build is None)
    assert all(set(record[row.key]) - {"versions"} == set(row.actions) for row in support.ROWS if row.build)


@pytest.mark.parametrize("name", ["your own softmax(QK')V", "nn.Transformer"])
def test_a_row_is_what_the_record_says(name, record):
    (row,) = [row for row in support.ROWS if row.name == name]
    assert {action: support.outcome(row, action) for action in row.actions} == record[row.key]


def test_a_try_that_does_not_hold_is_no_success():
    """A model whose output changes from call to call is not "the same bit for bit"."""
    import torch

    model, _ = support.own()
    row = support.Row("none", "noisy", lambda: (model, lambda model: model(torch.randn(1, 6, 32))))
    assert support.outcome(row, "watch") == "no: the outputs differ"
    assert support.outcome(row, "edit") == "no: the model was not as before"


def test_thumbnails_are_those_of_the_gallery_and_small():
    named = set(gallery.NAMED.findall((ROOT / "docs/gallery.md").read_text()))
    assert named == {path.name for path in gallery.THUMBNAILS.glob("*.png")}
    assert all((gallery.IMAGES / name).exists() for name in named)
    assert all((gallery.THUMBNAILS / name).stat().st_size <= gallery.LARGEST for name in named)
