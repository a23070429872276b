"""Every reduction by everything that computes it: the results are those of its definition on dense float64 weights.

The rows are `some_reductions` of exact_reductions.py, the columns `BACKENDS` of reduction_backends.py.
"""

from __future__ import annotations

import functools

import pytest
import torch

from exact_reductions import some_reductions
from reduction_backends import BACKENDS, kind_of, plain, reductions_of

KINDS = sorted({*map(kind_of, some_reductions(1, 1, 9, 9)), "SignedMass", "Allowed"})
faults_of = functools.cache(lambda backend: BACKENDS[backend].faults())


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=pytest.mark.xdist_group(f"reductions, {name}")) for name in BACKENDS]
)
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_the_definition(kind, backend):
    faults = faults_of(backend)
    assert not faults.get(kind), "\n".join(faults[kind])


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
