"""Runs the notebooks of examples/ and writes their outputs into them: `make notebooks`.

A widget needs a running kernel, so of its outputs only the picture is kept: GitHub and every editor show it.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"
WIDGET = "application/vnd.jupyter.widget-view+json"


def main() -> None:
    """Run each notebook in its folder and write it again."""
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=600, store_widget_state=False, resources=_in(path.parent)).execute()
        nbformat.write(as_stored(notebook), path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


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


def _in(folder: Path) -> dict[str, dict[str, str]]:
    return {"metadata": {"path": str(folder)}}


if __name__ == "__main__":
    main()
