"""`weights[index]` is `weights.dense()[index]` for every index expression of torch, and reads no more than it needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as rg
from drawn import examples
from map_kinds import NAMES, map_of, plain
from regard.maps import attention_map

pytestmark = pytest.mark.usefixtures("small_blocks")


@st.composite
def expressions(draw, shape):
    """An index expression for a tensor of this shape. Most of its index tensors broadcast."""
    block = draw(st.sampled_from([(2,), (1,), (0,), (2, 3), (3,)]))
    parts, axis = [], 0
    while axis < len(shape):
        kind = draw(st.sampled_from(["slice", "integer", "tensor", "flags", "none"]))
        if kind == "none":
            parts.append(None)
            continue
        num_axes = draw(st.sampled_from([1, 1, 1, 2, 4])) if kind == "flags" else 1
        parts.append(draw(one_part(kind, shape[axis : axis + num_axes], block)))
        axis += num_axes
    first, last = sorted((draw(st.integers(0, len(parts))), draw(st.integers(0, len(parts)))))
    if draw(st.booleans()):
        return tuple(parts[:last])
    return (*parts[:first], ..., *parts[last:])


@st.composite
def one_part(draw, kind, sizes, block):
    """Integers as each library writes them, slices with steps, lists and tensors of places, booleans of some axes."""
    size, ends = sizes[0], st.one_of(st.none(), st.integers(-sizes[0] - 2, sizes[0] + 2))
    if kind == "slice" or 0 in sizes:
        return slice(draw(ends), draw(ends), draw(st.sampled_from([None, 1, 2, 3])))
    place = st.integers(-size, size - 1)
    if kind == "integer":
        return draw(st.sampled_from([int, np.int64, torch.tensor]))(draw(place))
    if kind == "tensor":
        shown = draw(st.sampled_from([block, block[-1:], (1,)]))
        places = torch.tensor([draw(place) for _ in range(np.prod(shown))], dtype=torch.long).reshape(shown)
        return draw(st.sampled_from([places, places.int(), places.numpy(), places.tolist()]))
    flags = torch.zeros(sizes, dtype=torch.bool)
    flags.view(-1)[torch.randperm(flags.numel())[: draw(st.sampled_from([1, block[-1]]))]] = True
    if flags.ndim > 1:  # with `...` torch miscounts the axes of arrays and lists of booleans
        return flags
    return draw(st.sampled_from([flags, flags.numpy(), flags.tolist()]))


def without_ellipsis(index, num_axes):
    """The same index with slices in place of `...`, because old versions of torch miscount the axes of booleans."""
    place = next((n for n, part in enumerate(index) if part is ...), None)
    if place is None:
        return index
    rest = [part for part in index if part is not ... and part is not None]
    taken = sum(part.ndim if getattr(part, "dtype", None) == torch.bool else 1 for part in rest)
    return (*index[:place], *[slice(None)] * (num_axes - taken), *index[place + 1 :])


@examples(60)
@given(st.data())
def test_an_index_selects_what_it_selects_of_the_dense_tensor(data):
    weights = map_of(data.draw(st.sampled_from(NAMES)))
    dense = weights.dense()
    index = data.draw(expressions(dense.shape))
    try:
        expected = dense[without_ellipsis(index, dense.ndim)]
    except IndexError:  # shapes that do not broadcast
        with pytest.raises(rg.RegardError):
            weights[index]
        return
    torch.testing.assert_close(weights[index], expected)


def test_pairs_are_read_without_the_rectangle_around_them(monkeypatch):
    """A diagonal of a map with 2^28 weights: 64 MiB of weights are never formed, and the numbers are those of rows."""
    n, largest = 1 << 14, 0
    x = torch.randn(1, 1, n, 4)
    weights, diagonal = rg.Attention(mask=rg.causal())(x, x, x).weights, torch.arange(n)
    monkeypatch.setattr(attention_map, "WORKSPACE", 1 << 22)
    read = type(weights)._weights

    def counted(self, rows, cols):
        nonlocal largest
        tile = read(self, rows, cols)
        largest = max(largest, tile.numel() * 4)
        return tile

    monkeypatch.setattr(type(weights), "_weights", counted)
    found = weights[0, 0, diagonal, diagonal]
    assert found.shape == (n,) and 0 < largest <= 1 << 22
    for place in (0, 1, 777, n - 1):
        torch.testing.assert_close(found[place], weights[0, 0, place, place])


@pytest.mark.parametrize("kind", ["reversed", "read-only", "of another byte order"])
def test_an_array_of_numpy_may_be_one_whose_memory_no_tensor_can_have(kind):
    """For example `np.argsort(x)[::-1]`, whose strides are negative."""

    def as_kind(numbers):
        array = np.asarray(numbers)
        if kind == "reversed":
            return np.flip(np.flip(array).copy())
        if kind == "of another byte order":
            return array.astype(array.dtype.newbyteorder())
        array.flags.writeable = False
        return array

    weights, backward = plain(), [3, 2, 1, 0]
    dense, keys = weights.dense(), [n % 5 for n in range(weights.shape[2])]
    assert torch.equal(weights[:, 0, as_kind(backward)], dense[:, 0, backward])
    assert torch.equal(weights.tile(rows=as_kind(backward)), dense[:, :, backward])
    assert torch.equal(weights.at_keys(as_kind(keys)), weights.at_keys(keys))
    assert (weights == as_kind(dense.numpy().copy())).all()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((0, 0, [0, 1], [0, 1, 2]), r"shapes \(2,\), \(3,\) do not broadcast.*tile\(rows=queries, cols=keys\)"),
        ((0, 0, torch.ones(4, 4, dtype=torch.bool)), r"booleans of shape \(4, 4\).*sizes \(9, 11\)"),
        (torch.zeros(2, dtype=torch.uint8), "uint8, which torch reads as booleans"),
        ((0,) * 5, "has 4 axes .* got 5 indices"),
        ((..., 0, ...), "got 3 indices"),
        ((None, 0, [3]), "head 3 is out of range; the size of this axis is 3"),
        ((0, 0.5), "the head index must be"),
        (True, "the batch index must be"),
    ],
)
def test_a_wrong_index_is_explained(index, message):
    with pytest.raises(rg.RegardError, match=message):
        plain()[index]


def test_a_selection_beyond_the_budget_is_refused_before_it_is_read():
    x = torch.randn(1, 8, 8192, 4)
    weights = rg.Attention(mask=rg.causal() & rg.window(8))(x, x, x).weights
    places = torch.zeros(1 << 15, dtype=torch.long)
    with pytest.raises(rg.RegardError, match=r"takes .* MiB, the budget is 1,024 MiB"):
        weights[:, :, places, places[:, None]]


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_few_pairs_are_read_as_one_tile(count, monkeypatch):
    weights, rows, tiles = plain(), torch.arange(count), []
    expected, read = weights.dense()[0, 0, rows, rows], type(weights).tile
    monkeypatch.setattr(
        type(weights), "tile", lambda self, *given, **more: tiles.append(1) or read(self, *given, **more)
    )
    torch.testing.assert_close(weights[0, 0, rows, rows], expected)
    assert len(tiles) <= 1


def test_places_of_axes_that_are_apart_stay_where_the_first_axis_is():
    weights, rows, cols = plain(), torch.tensor([0, 1, 1]), torch.tensor([3, 0, 2])
    dense = weights.dense()
    for index in ((slice(None), rows % dense.shape[1], slice(None), cols), (rows * 0, slice(None), cols)):
        torch.testing.assert_close(weights[index], dense[index])
