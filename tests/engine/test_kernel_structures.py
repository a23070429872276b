"""The structures and numbers that Python passes to the compiled kernels are those of their sources, field by field."""

from __future__ import annotations

import re
from ctypes import c_int64, c_void_p

from kernel_layouts import LAYOUTS, layouts, text_of
from regard.engine.kernel import attention, structures
from regard.engine.kernel.recurrence import Recurrence
from regard.engine.kernel.rotation import Rotation
from regard.engine.kernel.similarity import SimilarityFields
from regard.engine.kernel.statistics import StatisticsFields
from regard.engine.kernel.sums import Sums
from regard.engine.kernel.transport import Transport


def test_the_layouts_are_those_of_the_sources():
    assert LAYOUTS.read_text() == layouts(), "a structure of kernels/ has changed: run make kernels"


def test_every_structure_that_is_passed_is_laid_out_and_a_tensor_is_that_of_its_source():
    kinds = structures.KernelCall, Rotation, StatisticsFields, SimilarityFields, Sums, Recurrence, Transport
    assert [[*kind._fields_] for kind in kinds] == [
        [*structures.fields_of(kind.__name__.removesuffix("Fields").removeprefix("Kernel"))] for kind in kinds
    ]
    body = re.search(r"typedef struct \{([^}]*)\} Tensor;", text_of("regard.h"))[1]
    assert body.split() == ["void", "*data;", "int64_t", "strides[4];", "int64_t", "dtype;"]
    assert structures.TensorFields._fields_ == (("data", c_void_p), ("strides", c_int64 * 4), ("dtype", c_int64))


def test_the_numbers_of_dtypes_are_those_of_the_header():
    for dtype, number in structures.DTYPES.items():
        assert f"{str(dtype).removeprefix('torch.').upper()} = {number}" in text_of("regard.h")


def test_the_lanes_are_those_of_the_vectors():
    lanes = dict(re.findall(r"#(?:el)?if defined\((\w+)\)\n#define LANES (\d+)", text_of("vector.h")))
    assert {name: int(lanes[macro]) for name, macro in (("avx512", "__AVX512F__"), ("avx2", "__AVX__"))} == {
        name: count for name, count in attention.LANES.items() if name != "baseline"
    }
    assert int(lanes["__aarch64__"]) == attention.LANES["baseline"]
