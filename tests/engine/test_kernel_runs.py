"""Long windows: a run of tiles packs its own keys. Parts of the backward pass, and large pages of large memory."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from kernels import every_level, needs_kernel
from regard.engine.kernel import running

pytestmark = [needs_kernel, every_level]
#: Longer than twice a run of 16 tiles of 96 queries and its window.
LENGTH = 3600
WINDOWS = {
    "causal": lambda: rg.causal() & rg.window(40),
    "both sides": lambda: rg.window(70),
    "one key": lambda: rg.causal() & rg.window(1),
    "documents": lambda: rg.causal() & rg.window(100) & rg.documents([1000, 2505, 95]),
}


def allowed(mask, query):
    """Whether queries at these positions may attend to each key, by the definition of the masks."""
    step = query[:, None] - torch.arange(LENGTH)
    document = torch.bucketize(torch.arange(LENGTH), torch.tensor([1000, 3505]), right=True)
    return {
        "causal": (step >= 0) & (step < 40),
        "both sides": step.abs() < 70,
        "one key": step == 0,
        "documents": (step >= 0) & (step < 100) & (document[query][:, None] == document),
    }[mask]


#: The same numbers in other memory or another dtype: values are read where they are only if their rows are contiguous.
LAYOUTS = {
    "contiguous": lambda t: t,
    "heads beside each other": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "bfloat16": lambda t: t.bfloat16(),
}


@pytest.mark.parametrize("num_queries", [LENGTH, 3001])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", WINDOWS)
def test_a_long_window_is_the_softmax_of_its_pairs(level, mask, layout, num_queries):
    torch.manual_seed(3)
    shapes = (2, 4, LENGTH, 20), (2, 2, LENGTH, 20), (2, 2, LENGTH, 16)
    query, key, value = (LAYOUTS[layout](torch.randn(shape)) for shape in shapes)
    position = torch.cat([torch.arange(LENGTH - num_queries, LENGTH, 61), torch.tensor([LENGTH - 1])])
    found = rg.attend(query[:, :, -num_queries:], key, value, mask=WINDOWS[mask](), engine="kernel").output
    for entry, head in ((0, 0), (1, 3)):
        scores = query[entry, head, position].double() @ key[entry, head // 2].double().T / 20**0.5
        expected = (
            scores.masked_fill(~allowed(mask, position), -torch.inf).softmax(1) @ value[entry, head // 2].double()
        )
        own = found[entry, head, position - LENGTH + num_queries].double()
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-5 if value.dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("heads", [1, 3, 8, 11])
def test_gradients_do_not_depend_on_the_parts_of_the_work(level, heads):
    """Few heads have several sums for each key, eight have one, which is the gradient as it is."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, heads, 400, width, requires_grad=True) for width in (20, 20, 9))
    along, step = torch.randn(1, heads, 400, 9), torch.arange(400)[:, None] - torch.arange(400)
    output = rg.attend(q, k, v, mask=rg.causal() & rg.window(30), engine="kernel").output
    scores = (q.double() @ k.double().mT / 20**0.5).masked_fill((step < 0) | (step >= 30), -torch.inf)
    expected = torch.autograd.grad(scores.softmax(-1) @ v.double(), (q, k, v), along.double())
    for found, right in zip(torch.autograd.grad(output, (q, k, v), along), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=2e-5)


def test_runs_do_not_depend_on_the_number_of_threads(level):
    torch.manual_seed(4)
    q, k, v = (torch.randn(1, 2, 2 * LENGTH, 32) for _ in range(3))
    before, found = torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(rg.attend(q, k, v, mask=rg.causal() & rg.window(64), engine="kernel").output)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_large_memory_asks_for_large_pages(level, monkeypatch):
    asked = []
    monkeypatch.setattr(running, "_madvise", lambda: lambda *arguments: asked.append(arguments))
    small, large = (running.empty(running.FRESH_BYTES // 4 + n) for n in (-1, 0))
    ((first, num_bytes, advice),) = asked
    assert advice == 14  # MADV_HUGEPAGE of linux/mman.h
    assert large.data_ptr() <= first < large.data_ptr() + 65536
    assert first + num_bytes == large.data_ptr() + large.nbytes
    assert small.data_ptr() != first
