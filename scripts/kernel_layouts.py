"""Writes the structures and numbers of kernels/ that Python reads to engine/kernel/layouts.py: `make kernels`.

    python scripts/kernel_layouts.py

The text is committed, so that Regard can be imported where the kernels are not built.
"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).parent.parent
LAYOUTS = ROOT / "src" / "regard" / "engine" / "kernel" / "layouts.py"
#: The source of each structure and of each number.
STRUCTURES = {
    "Call": "regard.h",
    "Statistics": "cells.h",
    "Similarity": "similarity.c",
    "Choice": "chosen.h",
    "Index": "index.c",
    "Greatest": "greatest.c",
    "Sums": "sums.c",
    "Recurrence": "recurrence.h",
    "Transport": "transport.c",
    "Rotation": "rotate.c",
}
NUMBERS = {
    **dict.fromkeys(("INTERFACE_VERSION", "TILE_QUERIES", "PART_KEYS", "MARGIN", "CLIPPED_MARGIN"), "regard.h"),
    "CHUNK": "recurrence.h",
    "FEW": "recurrence.c",
    **dict.fromkeys(("MOST_ROWS", "SPARE_KEYS"), "chosen.h"),
}


def text_of(source: str) -> str:
    """A source without its comments."""
    return re.sub(r"/\*.*?\*/", "", (ROOT / "kernels" / source).read_text(), flags=re.DOTALL)


def fields_of(structure: str) -> list[tuple[str, str]]:
    """The type and the name of each field of a structure; a pointer to anything is a "pointer"."""
    found = re.search(rf"typedef struct \{{([^}}]*)\}} {structure};", text_of(STRUCTURES[structure]))
    assert found, f"{STRUCTURES[structure]} has no structure {structure}"
    fields = []
    for declaration in found[1].split(";")[:-1]:
        kind, names = re.fullmatch(r"\s*(?:const )?(\w+) (.*)", declaration, re.DOTALL).groups()  # type: ignore[union-attr]
        fields += [("pointer" if star else kind, name) for star, name in re.findall(r"(\*?)(\w+)", names)]
    return fields


def layouts() -> str:
    """The text of layouts.py."""
    lines = [
        '"""The structures and numbers of kernels/ that Python reads. Written by `make kernels`; do not edit."""',
        "",
        "from __future__ import annotations",
        "",
    ]
    for name, source in NUMBERS.items():
        number = re.search(rf"#define {name} (\d+)", text_of(source))
        assert number, f"{source} has no number {name}"
        lines.append(f"{name} = {number[1]}")
    lines += ["", "#: The fields of each structure in their order, by their types.", "LAYOUTS = {"]
    for structure in STRUCTURES:
        lines.append(f'    "{structure}": (')
        for kind, fields in groupby(fields_of(structure), lambda field: field[0]):
            lines += [f'        ("{kind}", "{part}"),' for part in wrap(" ".join(name for _, name in fields), 95)]
        lines.append("    ),")
    return "\n".join([*lines, "}", ""])


if __name__ == "__main__":
    LAYOUTS.write_text(layouts())
