"""Any pieces together, up to 600 tokens and in blocks of their real size; the NumPy reference decides."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import regard as rg
from drawn import CLOSE, examples, problems
from regard.engine.plan import plan
from regard.reference import reference

pytestmark = pytest.mark.filterwarnings("ignore:attend.*whole plan")  # which rests on the pieces drawn
LONGEST = 600
drawn = examples(25)


@drawn
@given(st.data())
@pytest.mark.parametrize("kernel", [False, True], ids=["softmax-like", "kernel"])
def test_long_rows_follow_the_reference(kernel, data):
    problem = data.draw(problems(kernel, LONGEST))
    output, weights = (torch.from_numpy(a) for a in reference(problem))
    inputs = (problem.attention, problem.query, problem.key, problem.value)
    row = data.draw(st.integers(0, problem.sizes.I - 1))
    with torch.no_grad():
        for engine in {"blocked", "linear"} - set(plan(problem).refused):
            seen = inputs[0](*inputs[1:], positions=problem.positions, engine=engine)
            torch.testing.assert_close(seen.output, output, **CLOSE)
            torch.testing.assert_close(seen.weights[:, :, row], weights[:, :, row], **CLOSE)


@drawn
@given(st.data())
def test_any_pieces_in_chunks_through_a_cache_follow_the_reference(data):
    problem = data.draw(problems(longest=LONGEST, equal=True))
    mask = problem.attention.mask
    attention = problem.attention.with_mask(rg.causal() if mask is None else rg.causal() & mask)
    n, cache, parts = problem.sizes.I, rg.GrowingCache(), []
    edges = data.draw(st.lists(st.integers(1, n), max_size=4, unique=True))
    with torch.no_grad():
        try:
            for start, stop in pairwise(sorted({0, *edges, n})):
                chunk = (x[:, :, start:stop] for x in (problem.query, problem.key, problem.value))
                seen = attention(*chunk, cache=cache)
                cache = seen.cache
                parts.append(seen.output)
        except rg.RegardError:  # a mask of whole texts refuses their beginnings
            assume(False)
    whole = torch.from_numpy(reference(replace(problem, attention=attention))[0])
    torch.testing.assert_close(torch.cat(parts, 2), whole, **CLOSE)
