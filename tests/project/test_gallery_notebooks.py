"""The notebooks of the gallery: each cell has the outputs of its block of the page, and of no other."""

from __future__ import annotations

import base64
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

HOOK = Path(__file__).parents[2] / "docs" / "hooks" / "gallery_outputs.py"
spec = spec_from_file_location("gallery_outputs", HOOK)
hook = module_from_spec(spec)
spec.loader.exec_module(hook)

FENCE = "`" * 3
PAGE = f"""# A title

{FENCE}{{.python }}
x = 1

{FENCE}

{FENCE}{{.python }}
print(x)
print(x + 1)
{FENCE}

Out:
{{: .mkd-glr-script-out }}

{FENCE}{{.shell .mkd-glr-script-out-disp }}
1
2

{FENCE}

Some text.

{FENCE}{{.python }}
plt.show()
{FENCE}

![a figure](./images/mkd_glr_x_001.png){{: .mkd-glr-single-img srcset="../images/mkd_glr_x_001.png"}}
"""


def notebook(*sources):
    return {"cells": [{"cell_type": "code", "source": [source], "outputs": []} for source in sources]}


def test_outputs_go_to_their_cells(tmp_path):
    (tmp_path / "mkd_glr_x_001.png").write_bytes(b"a picture")
    cells = hook.with_outputs(notebook("%matplotlib inline", "x = 1", "print(x)", "plt.show()"), PAGE, tmp_path)[
        "cells"
    ]
    assert [len(cell["outputs"]) for cell in cells] == [0, 0, 1, 1]
    assert cells[2]["outputs"][0] == {"output_type": "stream", "name": "stdout", "text": "1\n2\n"}
    assert base64.b64decode(cells[3]["outputs"][0]["data"]["image/png"]) == b"a picture"


def test_another_page_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a notebook has 1 cells of code, and its page 3 blocks"):
        hook.with_outputs(notebook("x = 1"), PAGE, tmp_path)
