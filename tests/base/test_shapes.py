"""What the rest computes with: indices, slices, and tensors on their way between devices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as rg
from regard.base.shapes import as_slice, known_none, pick, spread_indices, tensor_of_array, to_host
from regard.engine.plan import ENGINES


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another device."""

    device = property(lambda self: torch.device("meta"))


def test_tensors_of_a_device_arrive_on_the_host_as_they_were():
    """Of every dtype, shape and memory layout, and all in one copy."""
    table = torch.randn(3, 4, dtype=torch.float64)
    sent = [table, table.T, table[:, 1], table[:0], table[0, 0], torch.tensor([5]).expand(7), torch.tensor(-1)]
    sent += [torch.randn(5)[::2], torch.randn(2, 3).bfloat16(), torch.tensor([[True], [False]])]
    assert all(found is x for found, x in zip(to_host(*sent), sent, strict=True))
    copies, arrived = [], to_host(*(x.as_subclass(Elsewhere) for x in sent))
    for found, x in zip(arrived, sent, strict=True):
        found = found.as_subclass(torch.Tensor)
        assert found.dtype == x.dtype and found.equal(x)
        copies.append(found.untyped_storage().data_ptr())
    assert len(set(copies)) == 1


@given(st.lists(st.integers(0, 6), max_size=5), st.lists(st.integers(0, 6), max_size=5))
def test_picked_entries_and_heads_are_those_at_the_indices(batch, head):
    x = torch.randn(7, 7, 2)
    b, h = (torch.tensor(index, dtype=torch.int64) for index in (batch, head))
    picked = pick(x, b, h)
    assert picked.equal(x[b][:, h])
    slices = [as_slice(index) for index in (b, h)]
    for found, index in zip(slices, (batch, head), strict=True):
        assert (found is not None) == bool(index and index == list(range(index[0], index[0] + len(index))))
        assert found is None or list(range(7))[found] == index
    if None not in slices:
        assert picked.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@given(st.integers(1, 50), st.integers(1, 50))
def test_spread_indices_reach_from_the_first_to_the_last_and_leave_even_gaps(size, count):
    indices = spread_indices(size, count)
    assert len(indices) == min(size, count) and indices[0] == 0 and (count == 1 or indices[-1] == size - 1)
    gaps = indices.diff()
    assert not len(gaps) or (gaps.min() >= 1 and gaps.max() - gaps.min() <= 1)


UNUSUAL = {
    "sparse": lambda x: x.to_sparse(),
    "complex": lambda x: x.to(torch.complex64),
    "of 8-bit floats": lambda x: x.to(torch.float8_e4m3fn),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_tensors_of_unusual_kinds_are_refused_by_their_kind(kind):
    unusual, q = UNUSUAL[kind](torch.full((1, 1, 4, 4), 0.25)), torch.randn(1, 1, 4, 8)
    calls = (lambda: rg.attend(q, q, q, mask=unusual), lambda: rg.maps.DenseMap(unusual), lambda: rg.findings(unusual))
    for call in calls:
        with pytest.raises(rg.RegardError, match=f"is {kind}"):
            call()


ODD = UNUSUAL | {
    "sparse (": lambda x: x[0, 0].to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor(list(x[0])),
    "nested (": lambda x: torch.nested.nested_tensor(list(x[0]), layout=torch.jagged),
    "of the layout of MKL-DNN": lambda x: x.to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore:.*(quantize_per_tensor|[Nn]ested|Sparse CSR)")
@pytest.mark.parametrize("kind", ODD)
def test_a_call_with_tensors_of_an_unusual_kind_names_them(kind, recwarn):
    """Or it computes, where torch does: no error is one of torch."""
    try:
        unusual = ODD[kind](torch.rand(1, 2, 4, 8))
    except RuntimeError:
        pytest.skip("this torch makes no such tensor")
    usual = torch.rand(1, 2, 4, 8)
    calls = [
        *(lambda engine=engine: rg.attend(unusual, unusual, unusual, engine=engine) for engine in ("auto", *ENGINES)),
        lambda: rg.attend(usual, unusual, usual),
        lambda: rg.attend(usual, usual, unusual),
        lambda: rg.Attention()(unusual, usual, usual),
        lambda: rg.attend(usual, usual, usual, scale=unusual),
        lambda: rg.plan(unusual, unusual, unusual),
        lambda: rg.scaled_dot_product_attention(unusual, unusual, unusual),
        lambda: rg.heatmap(unusual),
        lambda: rg.show(unusual),
    ]
    refused = 0
    for call in calls:
        try:
            call()
        except rg.RegardError:
            refused += 1
    assert refused >= len(calls) // 2


def test_indices_are_spread_to_the_last_one_of_many():
    assert spread_indices(30_000_000, 64)[[0, -1]].tolist() == [0, 29_999_999]


@pytest.mark.parametrize("options", [{"scale": 10**400}, {"dropout_p": 10**400}])
def test_numbers_that_no_float_holds_are_refused(options):
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(rg.RegardError, match=f"attend\\({next(iter(options))}"):
        rg.attend(q, q, q, **options)


def test_flags_are_known_to_be_unset_where_their_numbers_can_be_read():
    """Then a pass over the scores is left out, which empty rows need."""
    none, one = torch.zeros(2, 3, dtype=torch.bool), torch.eye(2, 3, dtype=torch.bool)
    assert known_none(none) and known_none(none[:0]) and not known_none(one) and not known_none(none.to("meta"))
    found = []
    torch.vmap(lambda flags: found.append(known_none(flags)) or flags)(none)
    assert found == [False]


@pytest.mark.parametrize(
    "array", [np.array(2.5), np.zeros((0, 3)), np.arange(6.0).reshape(2, 3)[::-1, ::-1].T], ids=str
)
def test_an_array_becomes_a_tensor_of_its_numbers(array):
    """Of no axis, of no number, and with negative strides."""
    assert tensor_of_array(array).tolist() == array.tolist()
