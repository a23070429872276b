"""Tensors of a call by name: a piece names them, `attend` checks and passes them, caches keep them beside the keys."""

from typing import ClassVar

import pytest
import torch

import regard as rg


class Forget(rg.biases.AdditiveBias):
    """sum of log_forget over j < t <= i, as forgetting attention has it."""

    needs: ClassVar = {"log_forget": "B H J"}

    def prepare(self, query, key, positions, log_forget):
        sums = log_forget.cumsum(-1)[..., None].expand(query.shape[0], query.shape[1], -1, 1)
        first = positions.start - positions.keys.intervals[0][0]
        return sums[:, :, first : first + query.shape[2]], sums

    def term(self, grid, rows, cols):
        return rows - cols.mT


FORGETTING = rg.Attention(bias=Forget(), mask=rg.causal())


def drawn(length=9, heads=4, key_heads=2, batch=2):
    torch.manual_seed(length)
    q = torch.randn(batch, heads, length, 8, dtype=torch.float64)
    k, v = torch.randn(2, batch, key_heads, length, 8, dtype=torch.float64)
    return q, k, v, -torch.rand(batch, heads, length, dtype=torch.float64)


def by_hand(q, k, v, log_forget):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    n = q.shape[2]
    scores = q @ k.mT / 8**0.5
    for i in range(n):
        for j in range(n):
            decay = log_forget[:, :, j + 1 : i + 1].sum(-1)
            scores[:, :, i, j] = scores[:, :, i, j] + decay if j <= i else -torch.inf
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("engine", ["dense", "blocked", "auto"])
def test_a_bias_takes_a_tensor_of_the_call(engine):
    q, k, v, log_forget = drawn()
    log_forget.requires_grad_()
    seen = FORGETTING(q, k, v, engine=engine, log_forget=log_forget)
    expected = by_hand(q, k, v, log_forget)
    torch.testing.assert_close(seen.output, expected)
    torch.testing.assert_close(seen.weights.dense() @ v.repeat_interleave(2, 1), expected.detach())
    gradients = [torch.autograd.grad(x.square().sum(), log_forget)[0] for x in (seen.output, expected)]
    torch.testing.assert_close(*gradients)
    assert "bias" in str(rg.plan(q, k, v, attention=FORGETTING, log_forget=log_forget))


def test_a_repeated_call_reads_its_own_tensor():
    q, k, v, log_forget = drawn()
    with torch.no_grad():
        for factor in (1.0, 2.0):
            seen = FORGETTING(q, k, v, log_forget=factor * log_forget)
            torch.testing.assert_close(seen.output, by_hand(q, k, v, factor * log_forget))


@pytest.mark.parametrize("cuts", [(9,), (4, 5), (1,) * 9, (3, 0, 6)])
def test_a_cache_keeps_the_tensors_of_earlier_keys(cuts):
    q, k, v, log_forget = drawn()
    cache, outputs, at = rg.GrowingCache(), [], 0
    for size in cuts:
        part = slice(at, at := at + size)
        new = (x[:, :, part] for x in (q, k, v))
        seen = FORGETTING(*new, cache=cache, log_forget=log_forget[:, :, part])
        outputs.append(seen.output)
        cache = seen.cache
    torch.testing.assert_close(torch.cat(outputs, 2), by_hand(q, k, v, log_forget))


def test_one_entry_serves_all_batch_entries_and_one_head_serves_its_group():
    q, k, v, log_forget = drawn()
    of_groups = log_forget[:1, :2]
    seen = FORGETTING(q, k, v, log_forget=of_groups)
    everywhere = of_groups.repeat_interleave(2, 1).expand(2, -1, -1)
    torch.testing.assert_close(seen.output, by_hand(q, k, v, everywhere))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"Forget needs a tensor for each call: attend\(..., log_forget=...\) of shape \(B, H, J\) = \(2, 4, 9\)"),
        ({"log_forget": torch.zeros(2, 4, 8)}, r"shape \(B, H, J\) = \(2, 4, 9\), got \(2, 4, 8\)"),
        ({"log_forget": torch.zeros(2, 3, 9)}, r"got \(2, 3, 9\)"),
        ({"log_forget": 0.5}, "log_forget must be a torch.Tensor, got float"),
        ({"log_forgets": torch.zeros(2, 4, 9)}, "unexpected keyword argument 'log_forgets'.*Did you mean 'log_forget'"),
        ({"causal": True}, r"unexpected keyword argument 'causal'.*it is called is_causal"),
    ],
)
def test_a_wrong_tensor_is_refused_in_words(given, message):
    with pytest.raises(rg.RegardError, match=message):
        FORGETTING(*drawn()[:3], **given)


def test_a_tensor_that_no_piece_needs_is_refused():
    with pytest.raises(rg.RegardError, match="unexpected keyword argument 'log_forget'") as plain:
        rg.Attention()(*drawn()[:3], log_forget=drawn()[3])
    with pytest.raises(rg.RegardError, match=r"The pieces need log_forget\. attend has "):
        FORGETTING(*drawn()[:3], log_forget=drawn()[3], gates=drawn()[3])
    assert "The pieces need" not in str(plain.value)


def test_modules_refuse_pieces_that_need_tensors_and_rings_plan_them():
    with pytest.raises(rg.RegardError, match=r"Forget needs log_forget for each call, and the module passes none"):
        rg.nn.MultiHeadAttention(8, 2, attention=FORGETTING)
    plan = rg.plan(*drawn()[:3], attention=FORGETTING, engine=rg.Ring(ranks=2), log_forget=drawn()[3])
    assert plan.key_bytes == 2 * 8 * (2 * 8 + 2 * 8 + 4)  # keys and values of 2 heads, and a sum for each of 4 heads
    with pytest.raises(rg.RegardError, match="Forget needs a tensor for each call"):
        rg.plan(*drawn()[:3], attention=FORGETTING, engine=rg.Ring(ranks=2))


def test_caches_that_cannot_keep_a_tensor_refuse_it():
    q, k, v, log_forget = drawn()
    with pytest.raises(rg.RegardError, match=r"RingCache does not keep log_forget.*GrowingCache"):
        FORGETTING(q, k, v, cache=rg.caches.RingCache(4), log_forget=log_forget)
    plain = rg.Attention(mask=rg.causal())(q, k, v, cache=rg.GrowingCache()).cache
    with pytest.raises(rg.RegardError, match="tensors none of earlier keys, this call gives log_forget"):
        FORGETTING(q, k, v, cache=plain, log_forget=log_forget)


class Stretched(rg.encodings.Encoding):
    """Each token times a number of the call."""

    needs: ClassVar = {"stretch": "B 1 J"}

    def encode_both(self, query, key, positions, stretch=None):
        factors = 1.0 if stretch is None else stretch[..., None]
        return query * factors, key * factors

    def encode(self, x, positions):
        return x


def test_a_selection_compares_what_an_encoding_makes_of_the_tensors_of_the_call():
    q, k, v, _ = drawn()
    stretch = torch.randn(2, 1, 9, dtype=torch.float64)
    selection = rg.selections.BlockMeans(2, 2)
    seen = rg.Attention(position=Stretched(), selection=selection)(q, k, v, stretch=stretch)
    plain = rg.Attention(selection=selection)(*(x * stretch[..., None] for x in (q, k)), v)
    torch.testing.assert_close(seen.output, plain.output)
