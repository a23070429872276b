"""Tensors that are no masks: the error says what their numbers mean, and the code in it gives the right attention."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch
from torch.nn import functional as F

import regard as rg
from regard.pieces.mask_conventions import _evidence, hides, means_may_not_attend

B, H, N, D = 2, 2, 6, 4
ALLOWED = torch.ones(N, N).tril().bool()
BAND = ALLOWED & (torch.arange(N)[:, None] - torch.arange(N) < 3)
REAL = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
PADDED = ALLOWED & REAL[:, None, None]
AROUND = (torch.arange(N)[:, None] - torch.arange(N)).abs() < 3
#: Masks with a sense that their shape shows; True = may attend.
SHOWN = {"causal": ALLOWED, "band": BAND, "around": AROUND, "causal and padding": PADDED, "keys": REAL[:, None, None]}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)


def lowest(dtype):
    return torch.finfo(dtype).min


def additive(allowed, number, dtype=torch.float32):
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, number)


#: How tutorials write each of these masks.
WRITTEN = {
    **{f"1 = may attend, {dtype}": lambda allowed, dtype=dtype: allowed.to(dtype) for dtype in DTYPES},
    **{f"1 = may not attend, {dtype}": lambda allowed, dtype=dtype: (~allowed).to(dtype) for dtype in DTYPES},
    "-inf": lambda allowed: additive(allowed, -torch.inf),
    "-1e9": lambda allowed: (1.0 - allowed.float()) * -1e9,
    "-1e4 in half precision": lambda allowed: additive(allowed, -1e4, torch.float16),
    "the lowest number": lambda allowed: (1.0 - allowed.float()) * lowest(torch.float32),
    "the lowest bfloat16": lambda allowed: additive(allowed, lowest(torch.bfloat16), torch.bfloat16),
}
#: Where a user may put the tensor.
PLACES = {
    "mask_tensor": rg.mask_tensor,
    "the slot": lambda mask: rg.Attention(mask=mask),
    "a composition": lambda mask: rg.window(9) & mask,
    "a call of the module": lambda mask: rg.nn.MultiHeadAttention(8, 2)(torch.randn(B, N, 8), mask=mask),
}


def error_of(function, mask):
    with pytest.raises(rg.RegardError) as raised:
        function(mask)
    return str(raised.value)


def remedies(text):
    """The calls of `regard.mask_tensor` or `regard.padding` in a message, in their order."""
    return re.findall(r"regard\.(?:mask_tensor|padding)\(.*?\)(?= \(\d)", text)


def typed(code, mask):
    return eval(code, {"regard": rg, "mask": mask})


def expected(q, allowed):
    return F.scaled_dot_product_attention(q, q, q, attn_mask=allowed)


def check_first_remedy(place, written, name):
    mask, q = WRITTEN[written](SHOWN[name]), torch.randn(B, H, N, D)
    said = error_of(PLACES[place], mask)
    first = remedies(said)[0]
    seen = rg.Attention(mask=typed(first, mask))(q, q, q)
    torch.testing.assert_close(seen.output, expected(q, SHOWN[name]))
    assert f"{first} ({int(SHOWN[name].sum())} of {mask.numel()} True)" in said


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("name", SHOWN)
def test_the_first_remedy_as_typed_gives_the_attention_that_was_meant(name, written):
    check_first_remedy("mask_tensor", written, name)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SHOWN)
def test_a_tensor_in_any_place_is_read_in_the_same_way(name, place):
    check_first_remedy(place, "1 = may not attend, torch.float32", name)


@pytest.mark.parametrize("written", WRITTEN)
def test_padding_of_keys_as_typed_gives_the_attention_that_was_meant(written):
    q = torch.randn(B, H, N, D)
    for mask in (WRITTEN[written](REAL), WRITTEN[written](REAL)[:, None, None]):
        first = remedies(error_of(rg.padding, mask))[0]
        seen = rg.Attention(mask=typed(first, mask))(q, q, q)
        torch.testing.assert_close(seen.output, expected(q, REAL[:, None, None]))


@pytest.mark.parametrize("axes", [(), (1,), (1, 1)])
def test_padding_takes_the_axes_that_lectures_give_it(axes):
    q = torch.randn(B, H, N, D)
    seen = rg.Attention(mask=rg.padding(REAL.view(B, *axes, N)))(q, q, q)
    torch.testing.assert_close(seen.output, expected(q, REAL[:, None, None]))


def test_padding_given_as_a_mask_of_pairs_names_the_padding():
    mask, q = REAL[:, None, None], torch.randn(B, H, N, D)
    attention = rg.Attention(mask=rg.causal() & rg.mask_tensor(mask))
    code = re.search(r"regard\.padding\(mask\)", error_of(lambda x: attention(x, x, x), q))[0]
    seen = rg.Attention(mask=rg.causal() & typed(code, mask))(q, q, q)
    torch.testing.assert_close(seen.output, expected(q, mask & torch.ones(N, N).tril().bool()))


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 3, 7), (2, 1, 3, 7), (2, 3, 1, 7)])
def test_padding_refuses_a_row_for_each_query_or_head(shape):
    assert "expected integer lengths" in error_of(rg.padding, torch.ones(shape, dtype=torch.bool))


def test_a_mask_without_an_axis_of_heads_gets_one():
    mask, q = PADDED[:, 0].float(), torch.randn(B, H, N, D)
    first = remedies(error_of(rg.mask_tensor, mask))[0]
    torch.testing.assert_close(rg.Attention(mask=typed(first, mask))(q, q, q).output, expected(q, PADDED))


#: Each is right as it is and reversed: nothing in it shows which.
SILENT = {
    "half of the keys": torch.tensor([[1, 1, 1, 0, 0, 0]] * N),
    "all others": 1 - torch.eye(N),
    "only itself": torch.eye(N),
    "the past without itself": torch.ones(N, N).tril(-1),
    "the future with itself": torch.ones(N, N).triu(),
    "random": torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0]]),
}


@pytest.mark.parametrize("name", SILENT)
def test_both_senses_are_offered_where_the_numbers_show_none(name):
    mask = SILENT[name].float()
    said = error_of(rg.mask_tensor, mask)
    assert "nothing shows which of them" in said
    kept, reversed_ = (typed(code, mask).tensor for code in remedies(said))
    assert torch.equal(kept, mask == 1) and torch.equal(reversed_, mask == 0)
    assert said.index("If 1 = may attend") < said.index("If 1 = may not attend")
    assert f"({int(mask.sum())} of {mask.numel()} True)" in said


def test_the_other_sense_follows_the_sense_that_was_found():
    for mask, order in ((ALLOWED.float(), (True, False)), ((~ALLOWED).float(), (False, True))):
        codes = remedies(error_of(rg.mask_tensor, mask))
        assert [torch.equal(typed(code, mask).tensor, mask == 1) for code in codes] == list(order)


def test_a_square_of_padding_is_not_read_as_pairs():
    """Two texts of two tokens: a triangle by chance. One text has no padding."""
    assert remedies(error_of(rg.padding, torch.tensor([[0.0, 0.0], [1.0, 0.0]])))[0] == "regard.padding(mask == 0)"
    assert remedies(error_of(rg.padding, torch.tensor([[1.0, 1.0], [0.0, 1.0]])))[0] == "regard.padding(mask.bool())"


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.randn(4, 4), "numbers from .* a bias: regard.biases.LearnedTable"),
        (torch.tensor([[0.0, -5.0], [0.0, 0.0]]), "numbers from -5 to 0.* a bias"),
        ((1 - ALLOWED.float()) * -torch.inf, "NaN"),
        (ALLOWED.float().to("meta"), r"regard\.mask_tensor\(mask\.bool\(\)\) if 1 = may attend"),
        (torch.ones(0, 3), r"mask == 0"),
        (ALLOWED.cfloat(), r"mask == 0"),
    ],
    ids=["scores", "penalties", "NaN", "no numbers", "no rows", "complex"],
)
def test_other_tensors_are_told_what_they_are(mask, message):
    assert re.search(message, error_of(rg.mask_tensor, mask))


def test_lengths_as_floats_are_told_to_be_integers():
    mask = torch.tensor([3.0, 2.0])
    said = error_of(rg.padding, mask)
    assert "regard.padding(mask.long())" in said and "bias" not in said


def test_a_boolean_tensor_is_offered_both_ways_round():
    said = error_of(lambda mask: rg.Attention(mask=mask), ALLOWED)
    assert "regard.mask_tensor(mask) if True = may attend" in said
    assert "regard.mask_tensor(~mask) if True = may not attend" in said


def test_a_boolean_tensor_of_keys_is_padding():
    mask, q = REAL[:, None, None], torch.randn(B, H, N, D)
    said = error_of(lambda mask: rg.Attention(mask=mask), mask)
    code = re.search(r"regard\.padding\(.*?\)(?= if True = real)", said)[0]
    torch.testing.assert_close(rg.Attention(mask=typed(code, mask))(q, q, q).output, expected(q, mask))


def test_numbers_hide_their_keys_if_there_is_but_one_beside_0_or_if_they_are_far_below():
    """A bias may have numbers like -1e4 that are no mask: it has others too. -1e8 below the row's largest is none."""
    mask, bias = torch.tensor([[0.0, -1e4], [0.0, 0.0]]), torch.tensor([[0.0, -1e4], [-3.0, 0.0]])
    assert hides(mask).tolist() == [[False, True], [False, False]]
    assert not hides(bias).any() and not hides(torch.tensor([[0.0, -9999.0]])).any()
    assert hides(torch.tensor([[-3.0, -1.1e8, -0.9e8]])).tolist() == [[False, True, False]]


@pytest.mark.parametrize("shape", [(5,), (2, 5), (3, 1, 5), (2, 1, 3, 5), (1, 5, 1, 4)])
@pytest.mark.parametrize("has_pairs", [False, True])
def test_a_row_without_a_key_shows_the_sense_of_ones_and_zeros(shape, has_pairs):
    """Rows are those of the last axis: a query needs a key. No shape here is square."""
    for seed in range(40):
        value = (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < seed % 4 / 3).int()
        rows = value.flatten(0, -2).tolist() if len(shape) > 1 else [value.tolist()]
        has_empty, has_full = ([bit] * shape[-1] in rows for bit in (0, 1))
        found = _evidence(value, has_pairs)
        if has_empty == has_full:
            assert found is None
        else:
            assert found is not None and found[1] is has_full and f"all {int(has_full)}" in found[0]


def test_only_a_square_of_all_later_keys_means_may_not_attend():
    """Of every boolean matrix of up to 3 x 3: one key shows no sense, and a tensor without numbers shows nothing."""
    for rows, columns in product(range(4), repeat=2):
        for flags in product((False, True), repeat=rows * columns):
            mask = torch.tensor(flags, dtype=torch.bool).view(1, 1, rows, columns)
            is_later = rows == columns > 1 and all(
                mask[0, 0, i, j] == (j > i) for i in range(rows) for j in range(rows)
            )
            assert means_may_not_attend(mask) is means_may_not_attend(mask[0, 0]) is is_later
    assert not means_may_not_attend(torch.ones(1, 1, 2, 2, dtype=torch.bool, device="meta"))
