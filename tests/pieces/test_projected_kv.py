"""Keys that outlive a call: what single queries and reordered rows read is what `attend` over the whole reads."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.nn import MultiHeadAttention

B, J, C, H = 3, 6, 8, 2
MASKS = {
    "none": lambda: None,
    "lengths": lambda: rg.padding([6, 3, 1]),
    "real keys": lambda: rg.padding(torch.tensor([[1] * 6, [0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 1, 1]]).bool()),
    "a row for each": lambda: rg.mask_tensor(torch.rand(B, 1, J, J) < 0.7),
    "a predicate of the entry": lambda: rg.mask_mod(lambda b, h, i, j: j > b),
    "and": lambda: rg.padding([6, 3, 2]) & rg.mask_mod(lambda b, h, i, j: (j + b + h) % 2 == 0),
    "or": lambda: rg.padding([5, 1, 2]) | rg.masks.prefix(1),
    "not": lambda: ~rg.padding([5, 3, 0]),
    "the same for all": lambda: rg.window(3) | rg.masks.global_tokens([0]),
}
INDEX = torch.tensor([2, 0, 0, 1, 2])


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


@pytest.mark.parametrize("own", [False, True], ids=["of the keys", "of the attention"])
@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("name", MASKS)
def test_reordered_rows_keep_their_masks(name, length, own):
    """Keys of a batch, repeated and reordered as a beam search does, read as each row did before."""
    mask, x, y = MASKS[name](), torch.randn(B, length, C).double(), torch.randn(B, J, C).double()
    attention = MultiHeadAttention(C, H, attention=rg.Attention(mask=mask if own else None)).double()
    keys = attention.keys(y, mask=None if own else mask)
    expected = attention(x, y, mask=None if own else mask).output[INDEX]
    for selected in (keys.select(INDEX), rg.nn.select_rows((keys, 1), INDEX)[0]):
        close(attention(x[INDEX], selected).output, expected)
        with rg.watch(attention):
            close(attention(x[INDEX], selected).output, expected)
    again = torch.tensor([1, 4])
    close(attention(x[INDEX][again], keys.select(INDEX).select(again)).output, expected[again])


@pytest.mark.parametrize("name", MASKS)
def test_rows_that_share_keys_keep_their_masks(name):
    mask, x, y = MASKS[name](), torch.randn(5, 1, C).double(), torch.randn(B, J, C).double()
    attention, rows = MultiHeadAttention(C, H).double(), rg.nn.Rows.of(torch.tensor([0, 0, 2, 2, 2]))
    expected = torch.cat(
        [
            attention(x[row : row + 1].expand(B, 1, C), y, mask=mask).output[b][None]
            for row, b in enumerate((0, 0, 2, 2, 2))
        ]
    )
    close(attention(x, attention.keys(y, mask=mask).shared(rows)).output, expected)


@pytest.mark.parametrize("mask", [rg.causal(), rg.causal() & rg.window(4), rg.window(2), rg.masks.prefix(2)], ids=repr)
@pytest.mark.parametrize("start", range(J + 1))
def test_a_single_query_at_any_position_sees_what_its_mask_allows(mask, start):
    """Also one that stands before the last keys, as where a prompt is scored again: it never sees a later key."""
    attention = MultiHeadAttention(C, H, attention=rg.Attention(mask=mask)).double()
    x, y = torch.randn(2, 1, C).double(), torch.randn(2, J, C).double()
    allowed = mask.allowed(rg.types.Grid.whole(rg.types.Positions.of(start, 1, J), 1, 1, 1)).expand(1, 1, 1, J)
    q, k, v = (
        p(z).unflatten(-1, (H, -1)).transpose(1, 2)
        for p, z in ((attention.query, x), (attention.key, y), (attention.value, y))
    )
    scores = (q @ k.mT / 2).masked_fill(~allowed, -torch.inf)
    mixed = scores.softmax(-1).nan_to_num() @ v
    close(attention(x, attention.keys(y), start=start).output, attention.output(mixed.transpose(1, 2).flatten(2)))


def test_a_vector_of_real_tokens_may_be_longer_than_the_keys():
    """As that of a whole sequence is while it is decoded; an entry may have real tokens behind the keys alone."""
    real = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1]]).bool()
    attention, x, y = MultiHeadAttention(C, H).double(), torch.randn(B, 1, C).double(), torch.randn(B, J, C).double()
    for rows in (slice(0, 2), slice(0, B)):
        short, long = (attention(x[rows], y[rows], mask=rg.padding(r)).output for r in (real[rows, :J], real[rows]))
        close(long, short)


def test_masks_of_other_sizes_are_refused_by_single_queries_too():
    attention, x, y = MultiHeadAttention(C, H), torch.randn(2, 1, C), torch.randn(2, J, C)
    for mask in (rg.padding([3]), rg.padding(torch.ones(3, J).bool()), rg.mask_tensor(torch.ones(3, 1, 1, J).bool())):
        with pytest.raises(rg.RegardError, match="used with a batch of 2"):
            attention(x, y, mask=mask)
    with pytest.raises(rg.RegardError, match="covers keys 0 to 3, this call has keys 0 to 5"):
        attention(x, y, mask=rg.padding(torch.ones(2, 4).bool()))


def decoder_of_one_state():
    torch.manual_seed(3)
    bridge = rg.nn.CrossAttention(rg.mechanism("bahdanau").build(8, 6, 16), 8, 6)
    return bridge, torch.randn(2, 1, 8), torch.randn(2, 5, 6)


def test_the_map_of_a_single_query_is_that_of_its_call():
    """It is made when it is asked for, and refused after a change in place, as any other map."""
    bridge, state, source = decoder_of_one_state()
    late, early = (bridge(state, bridge.keys(source)) for _ in range(2))
    expected = early.weights.dense()
    close(late.weights.dense(), expected)
    unread = bridge(state, bridge.keys(source))
    with torch.no_grad():
        bridge.attention.score.direction.mul_(2)
    with pytest.raises(rg.RegardError, match="changed in place"):
        _ = unread.weights


@pytest.mark.parametrize("is_learning", [True, False])
def test_the_map_of_a_single_query_has_gradients_if_its_call_had(is_learning):
    bridge, state, source = decoder_of_one_state()
    with torch.set_grad_enabled(is_learning):
        seen = bridge(state, bridge.keys(source))
    with torch.set_grad_enabled(not is_learning):
        weights = seen.weights
    assert weights.requires_grad == is_learning


def test_a_query_after_the_last_key_asks_no_causal_mask(monkeypatch):
    """It sees every key, whatever score compares them."""
    score = rg.scores.Additive(C // H, C // H, hidden=3)
    attention = MultiHeadAttention(C, H, attention=rg.Attention(score, mask=rg.causal())).double()
    x, y = torch.randn(B, 1, C).double(), torch.randn(B, J, C).double()
    expected = attention(x, y).output
    keys = attention.keys(y)
    attention(x, keys)
    monkeypatch.setattr(type(rg.causal()), "allowed", lambda *given: pytest.fail("the mask was asked"))
    close(attention(x, keys).output, expected)
