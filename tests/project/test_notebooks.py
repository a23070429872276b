"""The notebooks of examples/ are plain, have their outputs, run as a reader would run them, and say what is true."""

from __future__ import annotations

import ast
import base64
import json
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat comes with nbclient, of regard[dev]")
pytest.importorskip("nbclient", reason="nbclient, of regard[dev], runs notebooks")

import notebooks  # noqa: E402  of scripts/

ROOT = Path(__file__).parents[2]
#: What the prose of a notebook says of its numbers, as code for its last cell. tests/viewer/test_widget.py runs
#: looking.ipynb.
CLAIMS = {
    "bert": """
assert (layer, head) == (3, 1) and links.max() > 0.5
assert all(rows[3, 1, animal] > rows[3, 1, street] for rows in (tired, wide)), "the same noun in both sentences"
assert right.sum() < 12, "fewer heads than by chance follow the meaning"
roles = {(role.layer, role.head): role for role in table.labeled}
assert all(abs(roles[place].score - roles[place].null) < 0.1 for place in ((0, 2), (1, 8))), "places, not words"
assert roles[3, 11].null < roles[3, 11].score / 2 and len(sinks) > 18
assert torch.corrcoef(ranks)[0, 1] > chance.quantile(0.95)
assert words[keys[int(weight.argmax())]] == "[CLS]" and words[keys[int(effect.argmax())]] == "animal"
""",
    "smollm2": """
assert tokenizer.decode(written[0]).startswith(text + " Green")
assert on(0, text) > 0.3 > 0.1 > on(moved, front + text) and on(0, front + text) > 0.3, "the place, not the word"
assert all(found[place] > 10 * null[place] for place in order[:5]), "induction heads"
assert chosen[0] > whole / 2 > 0.1 > chosen[3], "one head is not enough, eight are"
assert random[:, 3].min() > whole - 0.1, "random heads do not matter"
assert "mixed" in str(attribution.test)
""",
    "dinov2": """
assert all(content[layer].mean() > 0.7 > 0.3 > place[layer].mean() for layer in (8, 11)), "content, not place"
assert beside(seen, 1)[1, 1] > 2 * beside(null, 1)[1, 1] > 20 / 257
assert beside(seen, -1)[2, 3] > 2 * beside(null, -1)[2, 3] > 20 / 257
assert moved(order[:32]) > 3 * max(random) and moved(order[-32:]) <= max(random)
sky = summary(seen, 11)[:, :5, 11:].sum((1, 2)) / summary(seen, 11).sum((1, 2))
assert sky[3] > 2 * sky[[0, 1, 2, 4, 5]].max(), "head 3 is on the background"
""",
}
STORED = [ROOT / "examples" / f"{name}.ipynb" for name in CLAIMS]


def code_of(path):
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def name_of(path):
    return path.stem


@pytest.mark.example
@pytest.mark.parametrize("path", STORED, ids=name_of)
def test_it_runs_and_what_it_says_is_true(path, tmp_path):
    pytest.importorskip("ipykernel")
    if missing := notebooks.missing_packages(path):
        pytest.skip(f"not installed: {', '.join(missing)}")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(CLAIMS[path.stem]))
    client = notebooks.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()


@pytest.mark.parametrize("path", STORED, ids=name_of)
def test_its_outputs_are_stored_and_small(path):
    """What GitHub shows: text and pictures. A widget needs a kernel, and a warning is of the machine that ran it."""
    outputs = [out for cell in json.loads(path.read_text())["cells"] for out in cell.get("outputs", [])]
    pictures = [base64.b64decode(out["data"]["image/png"]) for out in outputs if "image/png" in out.get("data", {})]
    assert len(pictures) >= 2 and all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert {kind for out in outputs for kind in out.get("data", {})} <= {"image/png", "text/plain"}
    assert {out["output_type"] for out in outputs} <= {"display_data", "execute_result", "stream"}
    assert all(out["name"] == "stdout" for out in outputs if out["output_type"] == "stream")
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize("path", STORED, ids=name_of)
def test_it_can_be_copied(path):
    """Short cells, no import of an internal module, and the first cell names each package that it needs."""
    for source in code_of(path):
        assert len(source.splitlines()) <= 25, source
        for node in ast.walk(ast.parse(source)):
            assert not isinstance(node, ast.NamedExpr)
            assert not isinstance(node, ast.ImportFrom) or not node.module.startswith("regard"), ast.unparse(node)
    first = nbformat.read(path, as_version=4).cells[0].source
    assert "pip install 'regard[demo]' notebook" in first
    for package in notebooks.NEEDS.get(path.stem, ()):
        assert package.replace("_", "-") in first, package


@pytest.mark.parametrize("path", STORED, ids=name_of)
def test_a_picture_of_it_stands_in_the_gallery(path):
    """The gallery shows the notebook as it is stored: `make notebooks`, then `python scripts/gallery.py`."""
    picture = ROOT / "docs" / "images" / f"notebook-{path.stem}.png"
    notebook = nbformat.read(path, as_version=4)
    assert picture.read_bytes() == notebooks.picture_of(notebook, notebooks.PICTURES[path.stem])
    assert f"](../examples/{path.name})" in (ROOT / "docs" / "gallery.md").read_text()
