"""Masks that are given as tensors: an equal tensor becomes the same mask, and a changed one a new mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as rg
from drawn import examples
from regard import call_options
from regard.call_options import kept_masks
from regard.engine import ENGINES
from regard.engine.kept_plans import kept_plans


@pytest.fixture(autouse=True)
def no_masks():
    kept_masks._kept.clear()


def exact(query, key, value, mask):
    """softmax(q k / sqrt(D) + mask) v in float64; rows without a key give 0."""
    query, key, value = (t.double() for t in (query, key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return weights @ value, weights


CHANGES = {
    "in place": lambda mask: mask.logical_not_(),
    "of its data": lambda mask: mask.data.copy_(~mask),
    "of its memory": lambda mask: mask.numpy().__setitem__(..., ~mask.numpy()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("length", [20, 200])
def test_a_changed_mask_is_read_anew(change, length):
    """torch counts only the first of these changes."""
    q, k, v = torch.randn(3, 1, 2, length, 16)
    mask = torch.rand(length, length) < 0.5
    for _ in range(3):
        before = rg.attend(q, k, v, mask=mask)
    shown, expected = before.weights.dense(), exact(q, k, v, mask)
    torch.testing.assert_close(shown.double(), expected[1], atol=1e-5, rtol=0)
    CHANGES[change](mask)
    for _ in range(3):
        after = rg.attend(q, k, v, mask=mask)
        output, weights = exact(q, k, v, mask)
        torch.testing.assert_close(after.output.double(), output, atol=1e-4, rtol=0)
        torch.testing.assert_close(after.weights.dense().double(), weights, atol=1e-5, rtol=0)
    assert torch.equal(before.weights.dense(), shown)


@examples(60)
@given(
    st.sampled_from([(1, 1, 3, 5), (2, 4, 7, 7), (1, 2, 200, 200), (2, 2, 1, 9)]),
    st.sampled_from(["pairs", "keys", "heads", "entries"]),
    st.sampled_from([torch.bool, torch.float32, torch.float64]),
    st.integers(0, 2**31),
)
def test_repeated_calls_with_masks_agree_with_float64(sizes, kind, dtype, seed):
    (B, H, I, J), generator = sizes, torch.Generator().manual_seed(seed)
    shape = {"pairs": (1, 1, I, J), "keys": (B, 1, 1, J), "heads": (1, H, I, J), "entries": (B, 1, I, J)}[kind]
    for _ in range(2):
        mask = torch.rand(shape, generator=generator) < 0.7
        mask[..., 0] = True
        mask = (
            mask
            if dtype == torch.bool
            else torch.randn(shape, generator=generator, dtype=dtype).masked_fill(~mask, -torch.inf)
        )
        for _ in range(3):
            q, k, v = (torch.randn(B, H, n, 8, generator=generator) for n in (I, J, J))
            seen = rg.attend(q, k, v, mask=mask.clone())
            output, weights = exact(q, k, v, mask)
            torch.testing.assert_close(seen.output.double(), output, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(seen.weights.dense().double(), weights, atol=1e-5, rtol=0)


def test_an_equal_mask_is_read_once_and_its_plan_is_kept(monkeypatch):
    read, plan, made = call_options._read, rg.attention_output.engine_plan, []
    monkeypatch.setattr(call_options, "_read", lambda *given: made.append("mask") or read(*given))
    monkeypatch.setattr(rg.attention_output, "engine_plan", lambda *given: made.append("plan") or plan(*given))
    q, k, v = torch.randn(3, 1, 2, 200, 16)
    mask = torch.rand(200, 200) < 0.5
    for _ in range(4):
        rg.attend(q, k, v, mask=mask.clone())
    # a mask that comes once only leaves no plan, so the second call plans too
    assert made == ["mask", "plan", "plan"]


def test_few_masks_are_kept_and_the_latest_stay(monkeypatch):
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    for n in range(1, 30):
        rg.attend(q[:, :, :n], k[:, :, :n], v[:, :, :n], mask=torch.rand(n, n) < 0.9)
    assert [shape[0][0] for shape in kept_masks._kept] == list(range(30 - kept_masks.MOST, 30))
    monkeypatch.setattr(type(kept_masks), "MOST_BYTES", 3 * 30 * 30)
    for n in (30, 31, 32, 20):
        rg.attend(q[:, :, :n], k[:, :, :n], v[:, :, :n], mask=torch.rand(n, n) < 0.9)
    assert [shape[0][0] for shape in kept_masks._kept] == [31, 32, 20]
    before = dict(kept_masks._kept)
    monkeypatch.setattr(type(kept_masks), "MOST_BYTES", 39 * 40)
    rg.attend(q, k, v, mask=torch.rand(40, 40) < 0.9)
    assert kept_masks._kept == before and len(kept_plans) <= 128


@pytest.mark.parametrize("low", [-1.0, -1e9])
def test_additive_masks_may_be_mapped(low):
    """Inside torch.vmap no number can be read, so a number that hides its key is added as any other."""
    q, k, v = torch.randn(3, 1, 2, 5, 4).double()
    masks = torch.where(torch.rand(3, 5, 5) < 0.5, low, 0.25).double()
    found = torch.vmap(lambda mask: rg.attend(q, k, v, mask=mask, engine="dense").output)(masks)
    torch.testing.assert_close(found, torch.stack([exact(q, k, v, mask)[0] for mask in masks]))


def test_additive_masks_may_be_on_the_meta_device():
    q, k, v = torch.empty(3, 1, 2, 5, 4, device="meta")
    assert rg.attend(q, k, v, mask=torch.empty(5, 5, device="meta")).output.shape == q.shape


def test_a_mask_with_gradients_is_not_kept():
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    table = torch.zeros(5, 5, requires_grad=True)
    for _ in range(2):
        rg.attend(q, k, v, mask=table).output.sum().backward()
    assert not kept_masks._kept and table.grad is not None


@pytest.mark.parametrize("length", [20, 200])
@pytest.mark.parametrize("own", [rg.causal(), None], ids=["causal", "all"])
def test_hidden_keys_of_repeated_calls_have_no_effect(own, length):
    """The last key is NaN and infinite in turns, and only the last query, or none, may attend to it."""
    attention = rg.Attention(mask=own)
    mask = None if own is not None else torch.ones(length, length, dtype=torch.bool)
    if mask is not None:
        mask[:, -1] = False
    for wrong in (0.0, torch.nan, torch.inf, 0.0, torch.nan):
        q, k, v = torch.randn(3, 1, 2, length, 16)
        expected = attention(q, k, v, mask=mask, engine="reference").output[:, :, :-1]
        k[:, :, -1], v[:, :, -1] = wrong, wrong
        seen = attention(q, k, v, mask=mask)
        torch.testing.assert_close(seen.output[:, :, :-1], expected, atol=1e-5, rtol=1e-4)
        assert seen.weights[0, 0, length - 2].isfinite().all()


@pytest.mark.parametrize("length", [2, 3, 9])
def test_the_smallest_mask_with_the_sense_of_torchs_module_is_refused(length):
    x = torch.randn(1, 1, length, 4)
    with pytest.raises(rg.RegardError, match="mask=~mask"):
        rg.attend(x, x, x, mask=torch.ones(length, length, dtype=torch.bool).triu(1))


def test_a_plan_in_words_counts_the_pairs_of_all_heads_and_entries():
    query, key = torch.zeros(2, 6, 5, 4), torch.zeros(2, 3, 7, 4)
    assert "of 420 pairs are scored" in str(rg.plan(query, key, key, engine="dense"))
    assert "420 of 420 pairs are scored (100.00%)" in str(rg.plan(query, key, key, engine="dense"))


class KeysOfHeads(rg.masks.Mask):
    """Head h may attend to the keys of its parity."""

    keys_only = True

    def allowed(self, grid):
        return (grid.j + grid.h) % 2 == 0


@rg.reference.attends.register
def _(mask: KeysOfHeads, place):
    return np.broadcast_to((place.j + place.h) % 2 == 0, np.broadcast_shapes(place.i.shape, place.j.shape))


@pytest.mark.parametrize("num_key_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", [KeysOfHeads(), rg.causal() & KeysOfHeads()], ids=["keys", "earlier keys"])
@pytest.mark.parametrize("pieces", ["softmax", "sums"])
@torch.no_grad()
def test_a_mask_of_keys_may_differ_between_heads(pieces, mask, num_key_heads):
    sums = {"score": rg.scores.FeatureScore(), "normalizer": rg.normalizers.SumNormalizer()}
    attention = rg.Attention(**(sums if pieces == "sums" else {}), mask=mask)
    query, key, value = torch.randn(2, 4, 6, 3), *torch.randn(2, 2, num_key_heads, 7, 3)
    expected = attention(query, key, value, engine="reference").output
    refused = rg.plan(query, key, value, attention=attention).refused
    for engine in {"auto", *ENGINES} - {*refused}:
        torch.testing.assert_close(attention(query, key, value, engine=engine).output, expected)
