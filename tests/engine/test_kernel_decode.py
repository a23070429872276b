"""Few queries on the kernels, which read keys and values once in their own layout: against float64 on the dense engine.

A call is split into parts of 1,024 keys, read 256 and 16 at a time; the sizes here lie beside these numbers.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as rg
from drawn import examples
from kernels import VARIANTS, needs_kernel
from regard.engine.kernel import attention, library, running

pytestmark = needs_kernel
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=VARIANTS)
def level(request, monkeypatch):
    monkeypatch.setenv(library.SETTING, request.param)


@pytest.fixture
def functions(monkeypatch):
    """The functions of the library that are called."""
    names = []

    def run_in(workspace, library, name, call):
        names.append(name)
        running.run_in(workspace, library, name, call)

    monkeypatch.setattr(attention, "run_in", run_in)
    return names


def drawn_tensors(B, H, G, I, J, D, E, dtype=torch.float32):
    return [torch.randn(shape).to(dtype) for shape in ((B, H, I, D), (B, G, J, D), (B, G, J, E))]


def compare(mechanism, tensors, **options):
    """Outputs and log-sum-exp against float64, within the rounding of sums in float32 and of the output."""
    with torch.no_grad():
        found = mechanism(*tensors, engine="kernel", **options)
        exact = mechanism(*(t.double() for t in tensors), engine="dense", **options)
    eps = torch.finfo(tensors[2].dtype).eps
    torch.testing.assert_close(found.output.double(), exact.output, rtol=max(0.51 * eps, 2e-5), atol=1e-5)
    torch.testing.assert_close(
        found.weights.row_statistic[0].double(), exact.weights.row_statistic[0], rtol=1e-5, atol=1e-5
    )
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("J", [1, 2, 15, 17, 256, 257, 1023, 1025, 2500])
def test_shared_keys_of_every_length(level, functions, J, dtype):
    compare(rg.Attention(), drawn_tensors(2, 32, 8, 1, J, 128, 128, dtype))
    assert functions == ["decode"]


@pytest.mark.parametrize("widths", [(1, 1), (3, 130), (16, 8), (64, 100), (80, 256), (200, 64)])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 2), (7, 1), (12, 1)])
def test_heads_and_widths(level, heads, widths):
    H, G = heads
    compare(rg.Attention(), drawn_tensors(1, H, G, 1, 300, *widths))


STRIDES = {
    "tokens before heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "channels apart": lambda t: torch.stack([t, t + 1], -1)[..., 0],
    "tokens along channels": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "a slice of a buffer": lambda t: torch.cat([t, t.new_full(t.shape, torch.nan)], 2)[:, :, : t.shape[2]],
    "heads are one": lambda t: t[:, :1].expand(t.shape),
    "tokens are one": lambda t: t[:, :, :1].expand(t.shape),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strides", STRIDES)
def test_strides(level, strides, dtype):
    tensors = drawn_tensors(2, 4, 2, 2, 600, 32, 48, dtype)
    compare(rg.Attention(), [STRIDES[strides](t) for t in tensors])


PIECES = {
    "causal": lambda: {"mask": rg.causal()},
    "window": lambda: {"mask": rg.causal() & rg.window(700)},
    "narrow window": lambda: {"mask": rg.causal() & rg.window(5)},
    "window and first tokens": lambda: {"mask": rg.causal() & (rg.window(50) | rg.masks.prefix(4))},
    "documents": lambda: {"mask": rg.causal() & rg.documents([1200, 897, 3])},
    "padding": lambda: {"mask": rg.padding([2100, 3])},
    "nothing allowed in an entry": lambda: {"mask": rg.padding([0, 1500])},
    "every third key forbidden": lambda: {"mask": rg.mask_mod(lambda b, h, i, j: (7 * i + j) % 3 > 0)},
    "a mask of each head": lambda: {"mask": rg.mask_tensor(torch.rand(1, 4, 3, 2100) < 0.5)},
    "dilated": lambda: {"mask": rg.masks.dilated(3, 40)},
    "ALiBi": lambda: {"bias": rg.ALiBi(4), "mask": rg.causal()},
    "T5 under a cap": lambda: {"bias": (rg.biases.T5Bias(4), rg.biases.Softcap(2.0))},
    "ALiBi over a cap": lambda: {"bias": (rg.biases.Softcap(2.0), rg.ALiBi(4))},
    "sink": lambda: {"normalizer": rg.normalizers.Softmax(sink=0.5), "mask": rg.causal()},
    "learned sinks": lambda: {"normalizer": rg.normalizers.LearnedSink(4)},
    "temperature": lambda: {"normalizer": rg.normalizers.Softmax(temperature=3.0)},
}


@pytest.mark.parametrize("pieces", PIECES)
def test_masks_biases_and_sinks(level, functions, pieces):
    found = compare(rg.Attention(**PIECES[pieces]()), drawn_tensors(2, 4, 2, 3, 2100, 32, 32))
    assert functions == ["decode"]
    if pieces == "nothing allowed in an entry":
        assert torch.equal(found.output[0], torch.zeros(4, 3, 32))


CACHES = {
    "growing": (rg.GrowingCache, rg.causal()),
    "window": (rg.GrowingCache, rg.causal() & rg.window(40)),
    "ring": (lambda: rg.caches.RingCache(50), rg.causal()),
    "ring with first tokens": (lambda: rg.caches.RingCache(50, sinks=2), rg.causal()),
}


@torch.no_grad()
@pytest.mark.parametrize("cache", CACHES)
def test_decoding_with_a_cache(level, functions, cache):
    """A text of 100 tokens, then one token at a time, then 2: the dense engine in float64 sees the same."""
    make, mask = CACHES[cache]
    mechanism, ours, exact = rg.Attention(mask=mask), make(), make()
    for length in (100, *[1] * 8, 2):
        tensors = drawn_tensors(1, 8, 2, length, length, 32, 32)
        found = mechanism(*tensors, cache=ours, engine="kernel")
        wanted = mechanism(*(t.double() for t in tensors), cache=exact, engine="dense")
        torch.testing.assert_close(found.output.double(), wanted.output, rtol=2e-5, atol=1e-5)
        ours, exact = found.cache, wanted.cache
    assert functions == ["forward"] + ["decode"] * 9


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite(level, value):
    """A forbidden key changes nothing, an allowed one makes the row NaN if the dense engine says so."""
    query, key, value_ = drawn_tensors(1, 4, 2, 1, 1100, 16, 16)
    key[0, 0, 1050, 3] = value
    with torch.no_grad():
        found, exact = (rg.Attention()(query, key, value_, engine=engine).output for engine in ("kernel", "dense"))
        torch.testing.assert_close(found, exact, equal_nan=True, rtol=2e-5, atol=1e-5)
    compare(rg.Attention(mask=rg.padding([1050])), [query, key, value_])


@torch.no_grad()
@pytest.mark.parametrize("pieces", ["causal", "documents", "padding"])
def test_the_number_of_threads_changes_no_bit(monkeypatch, pieces):
    monkeypatch.setattr(running, "WORTH_A_THREAD", 1)
    mechanism, tensors = rg.Attention(**PIECES[pieces]()), drawn_tensors(2, 4, 2, 3, 2100, 32, 32)
    threads, outputs = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3, 7):
            torch.set_num_threads(number)
            outputs += [mechanism(*tensors, engine="kernel").output for _ in range(5)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(outputs[0], other) for other in outputs)


def test_many_rows_and_gradients_use_packed_keys(functions):
    few = attention.FEW_ROWS
    for rows, gradients, name in ((few, False, "decode"), (few + 1, False, "forward"), (1, True, "forward")):
        query, key, value = drawn_tensors(1, 2, 2, rows, 40, 16, 16)
        rg.Attention()(query.requires_grad_(gradients), key, value, engine="kernel")
        assert functions.pop() == name
    assert functions == []


@pytest.mark.parametrize("queries", [5, 13, 24])
def test_many_rows_of_few_heads(level, functions, queries):
    compare(rg.Attention(mask=rg.causal() & rg.window(300)), drawn_tensors(1, 4, 2, queries, 1100, 48, 32))
    assert functions == ["decode"]


def test_a_plan_holds_the_parts_and_no_packed_keys():
    """Every 1,024 keys of a row leave their weighted values and two numbers, in float32; a row a log-sum-exp."""
    cost = rg.plan(*drawn_tensors(2, 8, 2, 3, 2049, 16, 24), attention=rg.Attention(), engine="kernel").cost
    assert cost.bytes == 4 * 2 * 8 * 3 * (3 * (24 + 2) + 1)


@examples(60)
@given(data=st.data())
def test_drawn_sizes(data):
    def size(largest):
        return data.draw(st.integers(1, largest))

    B, G, R, E, J = size(2), size(2), size(5), size(70), size(1300)
    D = data.draw(st.integers(1, 70) | st.sampled_from([32, 64, 96, 128]))  # whole registers of bfloat16
    queries = size(3)
    dtype, name = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(VARIANTS))
    mask = data.draw(st.sampled_from([None, rg.causal(), rg.window(33), rg.causal() & rg.window(300)]))
    with mock.patch.dict(os.environ, {library.SETTING: name}):
        compare(rg.Attention(mask=mask), drawn_tensors(B, R * G, G, queries, J, D, E, dtype))
