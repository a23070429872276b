"""`AttentionMap.of`: maps of queries, keys and log-sum-exps that another program computed, and keys in pages."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg


def drawn(lengths=(7, 4), queries=2, heads=4, groups=2, page=3, spare=2):
    """Keys of several texts in shuffled pages, and their queries."""
    torch.manual_seed(3)
    needed = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(needed) + spare).tolist()  # so many pages belong to nobody
    table = torch.full((len(lengths), max(needed) + 1), -7, dtype=torch.int32)
    pages = torch.randn(len(order), page, groups, 8)
    keys = []
    for text, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        own = [order.pop() for _ in range(count)]
        table[text, :count] = torch.tensor(own)
        keys.append(pages[own].flatten(0, 1)[:length].transpose(0, 1))
    return torch.randn(len(lengths), heads, queries, 8), rg.maps.PagedKeys(pages, table, torch.tensor(lengths)), keys


@pytest.mark.parametrize(("lengths", "spare"), [((7, 4), 2), ((5,), 2), ((6, 6, 1), 2), ((3, 0), 2), ((3, 0), 0)])
def test_paged_keys_give_the_maps_of_each_text_alone(lengths, spare):
    query, paged, keys = drawn(lengths, queries=1, spare=spare)
    attention = rg.Attention(mask=rg.causal(), bias=rg.ALiBi(4))
    weights = rg.AttentionMap.of(attention, query, paged)
    J = weights.shape[3]
    assert max(lengths) == J
    for text, key in enumerate(keys):
        alone = rg.AttentionMap.of(attention, query[text : text + 1], key[None]).dense()
        torch.testing.assert_close(weights[text, :, :, J - lengths[text] :], alone[0])
        assert not weights[text, :, :, : J - lengths[text]].any()


def test_a_given_statistic_gives_the_same_weights_and_saves_the_pass(monkeypatch):
    query, paged, keys = drawn((7,), queries=3)
    attention = rg.Attention(mask=rg.causal())
    key = keys[0][None].repeat_interleave(2, 1)
    scores = (query.double() @ key.double().mT / 8**0.5).masked_fill(~torch.ones(3, 7).tril(4).bool(), -torch.inf)
    given = scores.logsumexp(-1)
    weights = rg.AttentionMap.of(attention, query, paged, given.float())
    monkeypatch.setattr(type(weights), "_statistic_of_parts", lambda _: pytest.fail("the statistic was computed again"))
    torch.testing.assert_close(weights.dense().double(), scores.softmax(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights.received(), weights.dense().sum(2))


def test_the_statistics_of_kernels_of_torch_fit():
    q, k, v = torch.randn(3, 2, 3, 33, 8)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, logsumexp = flash(q, k, v, 0.0, True)
    weights = rg.AttentionMap.of(rg.Attention(mask=rg.causal()), q, k, logsumexp)
    torch.testing.assert_close(weights.dense() @ v, output, rtol=1e-4, atol=1e-5)


def test_families_and_empty_rows():
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    beta, decay = torch.rand(1, 2, 6), -torch.rand(1, 2, 6)
    delta = rg.Attention(transition=rg.transitions.GatedDelta())
    weights = rg.AttentionMap.of(delta, q, k, beta=beta, log_decay=decay)
    torch.testing.assert_close(weights.dense() @ v, delta(q, k, v, beta=beta, log_decay=decay).output)
    shifted = rg.types.Positions(-2, rg.types.Spans.of((0, 6)))  # the first two queries have no key
    expected = rg.Attention(mask=rg.causal())(q, k, v, positions=shifted).weights
    statistic = expected.row_statistic[0].masked_fill(expected.row_statistic[0].isneginf(), torch.inf)
    weights = rg.AttentionMap.of(rg.Attention(mask=rg.causal()), q, k, statistic, shifted)
    torch.testing.assert_close(weights.dense(), expected.dense())
    assert not weights[0, :, :2].any()


@pytest.mark.parametrize("sink", [None, 0.5])
def test_a_statistic_of_a_text_of_padding_alone(sink):
    """No compared row has a key; its log-sum-exp is that of the sink alone."""
    q, attention = (
        torch.randn(1, 2, 5, 4),
        rg.Attention(mask=rg.padding([0]), normalizer=rg.normalizers.Softmax(sink=sink)),
    )
    statistic = torch.full((1, 2, 5), -torch.inf if sink is None else sink)
    assert not rg.AttentionMap.of(attention, q, q, statistic).dense().any()
    with pytest.raises(rg.RegardError, match="query 0 is 1, but"):
        rg.AttentionMap.of(attention, q, q, torch.ones(1, 2, 5))


def test_a_map_is_a_snapshot_of_pages_that_are_used_again():
    query, paged, _ = drawn()
    weights = rg.AttentionMap.of(rg.Attention(), query, paged)
    before = weights.dense()
    paged.pages.fill_(9.0)
    torch.testing.assert_close(weights.dense(), before)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"statistic": "base 2"}, "logarithms of base 2.*math.log"),
        ({"statistic": "without the factor"}, "log-sum-exp of its scores is"),
        ({"statistic": torch.zeros(1, 4, 3)}, r"shape \(batch, heads, queries\) = \(2, 4, 2\)"),
        (
            {"statistic": torch.zeros(2, 4, 2), "attention": rg.Attention(normalizer=rg.normalizers.Sparsemax())},
            "Sparsemax",
        ),
        ({"positions": rg.types.Positions.aligned_to_end(2, 7)}, "leave positions out"),
        ({"beta": torch.ones(2, 4, 7)}, "AttentionMap.of: got an unexpected keyword argument 'beta'"),
        ({"attention": rg.causal()}, "AttentionMap.of: "),
    ],
)
def test_what_does_not_fit_is_refused(arguments, words):
    query, paged, _ = drawn()
    exact = rg.AttentionMap.of(rg.Attention(), query, paged).row_statistic[0]
    named = {"base 2": exact / math.log(2), "without the factor": exact * 3}
    given = {"attention": rg.Attention(), **arguments}
    if isinstance(given.get("statistic"), str):
        given["statistic"] = named[given["statistic"]]
    with pytest.raises(rg.RegardError, match=words):
        rg.AttentionMap.of(given.pop("attention"), query, paged, **given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"table": torch.tensor([[0, 99], [0, 1]])}, "page 99, and there are pages 0 to"),
        ({"table": torch.tensor([[0, 1], [4, 1]])}, "page 4, and there are pages 0 to 3"),
        ({"table": torch.tensor([[0, 1], [0, -1]])}, "page -1, and there are pages 0 to 3"),
        ({"table": torch.zeros(2, 2)}, "table holds integers"),
        ({"table": torch.zeros(1, 9, dtype=torch.int32)}, "1 rows of the table for 2 lengths"),
        ({"lengths": torch.tensor([100, 1])}, "needs 34 pages of 3 tokens"),
        ({"lengths": torch.tensor([-1, 1])}, "at least 0"),
        ({"pages": torch.zeros(3, 4)}, "pages are"),
    ],
)
def test_pages_that_cannot_be_are_refused(change, words):
    given = {"pages": torch.zeros(4, 3, 2, 8), "table": torch.tensor([[0, 1], [2, 3]]), "lengths": torch.tensor([6, 4])}
    with pytest.raises(rg.RegardError, match=words):
        rg.maps.PagedKeys(**(given | change)).gathered()


@pytest.mark.parametrize(("error", "is_refused"), [(0.3, True), (-0.3, True), (0.01, False)])
def test_a_statistic_that_is_off_by_more_than_rounding_is_refused(error, is_refused):
    """The log-sum-exp is near 0 here, so that no relative tolerance hides the error."""
    query, key = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 1, 8)
    given = torch.full((1, 2, 3), error)
    if is_refused:
        with pytest.raises(rg.RegardError, match="log-sum-exp of its scores is 0"):
            rg.AttentionMap.of(rg.Attention(), query, key, given)
    else:
        assert rg.AttentionMap.of(rg.Attention(), query, key, given).shape == (1, 2, 3, 1)


@pytest.mark.parametrize("place", [(0, 0, 0), (1, 3, 1)])
def test_one_wrong_number_of_a_statistic_is_enough(place):
    query, paged, _ = drawn()
    given = rg.AttentionMap.of(rg.Attention(), query, paged).row_statistic[0].clone()
    rg.AttentionMap.of(rg.Attention(), query, paged, given)
    given[place] += 1.0
    b, h, i = place
    with pytest.raises(rg.RegardError, match=f"batch entry {b}, head {h}, query {i} is"):
        rg.AttentionMap.of(rg.Attention(), query, paged, given)
