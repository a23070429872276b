"""Every reduction by everything that computes it: the results are those of its definition on dense float64 weights.

The rows are `some_reductions` of exact_reductions.py, the columns `BACKENDS` of reduction_backends.py.
"""

from __future__ import annotations

import functools

import pytest
import torch

from exact_reductions import some_reductions
from reduction_backends import BACKENDS, kind_of, plain, reductions_of
from regard.maps.compiled_reductions import _PARTS_OF
from regard.maps.reductions import averaged, cells, coarser

KINDS = sorted({*map(kind_of, some_reductions(1, 1, 9, 9)), "SignedMass", "Allowed"})
faults_of = functools.cache(lambda backend: BACKENDS[backend].faults())


def on_one_worker(backend, *values):
    """The faults of a backend are found once, for all of its kinds."""
    group = pytest.mark.xdist_group(f"reductions, {backend}")
    return pytest.param(*values, backend, marks=group, id="-".join((*values, backend)))


@pytest.mark.parametrize(
    ("kind", "backend"),
    [on_one_worker(name, kind) for kind in KINDS for name in BACKENDS if kind not in BACKENDS[name].lacks],
)
def test_results_are_those_of_the_definition(kind, backend):
    faults = faults_of(backend)
    assert kind in faults, (
        f"{kind} is computed of no map of the backend {backend!r}. If this is right (none of these maps has shares, or "
        "all have signs), name it in `lacks` of this backend: BACKENDS in tests/tools/reduction_backends.py."
    )
    assert not faults[kind], "\n".join(faults[kind])


@pytest.mark.parametrize("backend", [on_one_worker(name) for name, backend in BACKENDS.items() if backend.lacks])
def test_a_backend_computes_no_kind_that_it_is_said_to_lack(backend):
    assert not {*BACKENDS[backend].lacks} & {*faults_of(backend)}


def test_the_table_has_every_kind_that_the_kernels_compute():
    """`Sum` is that of a tensor: test_map_tensors.py."""
    known = {kind.__name__ for kind in _PARTS_OF if kind.__module__.startswith("regard.")} - {"Sum"}
    assert known <= {*KINDS}, (
        f"tests/tools/exact_reductions.py: add the definition of {sorted(known - {*KINDS})}, and one in some_reductions"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_disjoint_tiles_merge(kind, small_blocks):
    with torch.no_grad():
        weights, _ = plain()
    for reduction in (each for each in reductions_of(weights) if kind_of(each) == kind):
        whole, *parts = (reduction.init(weights.shape, torch.device("cpu")) for _ in range(3))
        for number, tile in enumerate(weights.tiles()):
            reduction.add(whole, tile)
            reduction.add(parts[number % 2], tile)
        results = (reduction.finish(state) for state in (whole, reduction.merge(*parts)))
        torch.testing.assert_close(*(tuple(result) for result in results))


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("num_rows", [29, 32, 33])
def test_coarser_cells_are_those_of_the_weights(num_rows, steps):
    """Also of some rows of cells, of which the last may have fewer queries."""
    weights, level = torch.rand(1, 2, num_rows, 27), 1
    size = 1 << level
    pooled = averaged(cells(weights, size)[0], size, num_rows), cells(weights, size)[1]
    whole = size << steps
    expected = averaged(cells(weights, whole)[0], whole, num_rows), cells(weights, whole)[1]
    assert all(
        one.equal(each[0, 1]) for one, each in zip(cells(weights[0, 1], whole), cells(weights, whole), strict=True)
    )
    for first in (0, 4, 8):
        part = tuple(x[:, :, first:] for x in pooled)
        found = coarser(part, steps, level, num_rows, first)
        for mine, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, exact[:, :, first >> steps :])
