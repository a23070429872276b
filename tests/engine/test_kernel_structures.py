"""The structures and numbers that Python passes to the compiled kernels are those of their sources, field by field."""

from __future__ import annotations

import re
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path

import pytest

from regard.engine.kernel import attention, recurrence, structures
from regard.engine.kernel.recurrence import Recurrence
from regard.engine.kernel.rotation import Rotation
from regard.engine.kernel.similarity import SimilarityFields
from regard.engine.kernel.statistics import StatisticsFields
from regard.engine.kernel.sums import Sums
from regard.engine.kernel.transport import Transport

KERNELS = Path(__file__).parents[2] / "kernels"
TYPES = {"int64_t": c_int64, "float": c_float, "Tensor": structures.TensorFields}


def text_of(name):
    """A source without its comments."""
    return re.sub(r"/\*.*?\*/", "", (KERNELS / name).read_text(), flags=re.DOTALL)


def fields_of(source, structure):
    """(name, type) of each field of a structure in C."""
    body = re.search(rf"typedef struct \{{([^}}]*)\}} {structure};", text_of(source))[1]
    for declaration in body.split(";")[:-1]:
        kind, names = re.fullmatch(r"\s*(?:const )?(\w+) (.*)", declaration, re.DOTALL).groups()
        for star, name, length in re.findall(r"(\*?)(\w+)(?:\[(\d+)\])?", names):
            yield name, c_void_p if star else TYPES[kind] * int(length) if length else TYPES[kind]


@pytest.mark.parametrize(
    ("source", "name", "structure"),
    [
        ("regard.h", "Call", structures.KernelCall),
        ("regard.h", "Tensor", structures.TensorFields),
        ("rotate.c", "Rotation", Rotation),
        ("cells.h", "Statistics", StatisticsFields),
        ("similarity.c", "Similarity", SimilarityFields),
        ("sums.c", "Sums", Sums),
        ("recurrence.h", "Recurrence", Recurrence),
        ("transport.c", "Transport", Transport),
    ],
)
def test_a_structure_has_the_fields_of_its_source_in_the_same_order(source, name, structure):
    assert list(structure._fields_) == list(fields_of(source, name))


def test_the_numbers_are_those_of_the_header():
    header = text_of("regard.h")
    for name in ("TILE_QUERIES", "PART_KEYS", "MARGIN", "CLIPPED_MARGIN"):
        assert int(re.search(rf"#define {name} (\d+)", header)[1]) == getattr(structures, name)
    for dtype, number in structures.DTYPES.items():
        assert f"{str(dtype).removeprefix('torch.').upper()} = {number}" in header


def test_the_sizes_of_chunks_are_those_of_the_sources():
    for source, name in (("recurrence.h", "CHUNK"), ("recurrence.c", "FEW")):
        assert int(re.search(rf"#define {name} (\d+)", text_of(source))[1]) == getattr(recurrence, name)


def test_the_lanes_are_those_of_the_vectors():
    lanes = dict(re.findall(r"#(?:el)?if defined\((\w+)\)\n#define LANES (\d+)", text_of("vector.h")))
    assert {name: int(lanes[macro]) for name, macro in (("avx512", "__AVX512F__"), ("avx2", "__AVX__"))} == {
        name: count for name, count in attention.LANES.items() if name != "baseline"
    }
    assert int(lanes["__aarch64__"]) == attention.LANES["baseline"]
