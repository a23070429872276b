"""Batches: every pair once, alike on every machine, shared out exactly, resumed anywhere."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.base.errors import RegardError
from regard.lab.data import BOS, EOS, PAD, Batch, Batches

ids = st.lists(st.integers(4, 50), max_size=12)
pairs_of = st.lists(st.tuples(ids, ids), min_size=1, max_size=60)
sizes = st.one_of(
    st.fixed_dictionaries({"tokens": st.integers(13, 80)}), st.fixed_dictionaries({"sentences": st.integers(1, 9)})
)
seeds = st.integers(0, 5)


def rows(batch: Batch) -> list[tuple[int, list[int], list[int]]]:
    """A batch as plain lists, without what pads it."""
    kept = zip(batch.indices, batch.source.tolist(), batch.target.tolist(), strict=True)
    return [(place, [i for i in x if i != PAD], [i for i in y if i != PAD]) for place, x, y in kept]


@given(pairs_of)
def test_a_batch_holds_its_pairs_and_nothing_else(pairs):
    batch = Batch.of(pairs, range(len(pairs)))
    assert rows(batch) == [(n, [*x, EOS], [BOS, *y, EOS]) for n, (x, y) in enumerate(pairs)]
    assert batch.source.shape == (len(pairs), 1 + max(len(x) for x, _ in pairs))
    assert batch.target_lengths.tolist() == [len(y) + 1 for _, y in pairs]
    assert batch.num_tokens == sum(len(y) + 1 for _, y in pairs)
    assert batch.source.dtype == batch.target.dtype == torch.int64
    for read, said, (_, y) in zip(batch.target_input, batch.target_output, pairs, strict=True):
        assert read[: len(y) + 1].tolist() == [BOS, *y] and said[: len(y) + 1].tolist() == [*y, EOS]


@given(pairs_of, sizes, seeds, st.integers(0, 3))
def test_every_pair_exactly_once_an_epoch(pairs, size, seed, epoch):
    batches = list(Batches(pairs, **size, seed=seed).epoch(epoch))
    found = [row for batch in batches for row in rows(batch)]
    assert sorted(place for place, _, _ in found) == list(range(len(pairs)))
    assert all(x[:-1] == pairs[place][0] and y[1:-1] == pairs[place][1] for place, x, y in found)
    assert all(len(batch) for batch in batches)


@given(pairs_of, sizes, seeds)
def test_the_size_is_never_exceeded(pairs, size, seed):
    for batch in Batches(pairs, **size, seed=seed).epoch():
        assert len(batch) <= size.get("sentences", len(batch))
        widest = max(batch.source.shape[1], batch.target_output.shape[1])
        assert len(batch) * widest <= size.get("tokens", len(batch) * widest)


@given(pairs_of, sizes, seeds, st.integers(2, 4))
def test_shards_together_are_the_batches_of_one_process_of_many_times_the_size(pairs, size, seed, world):
    whole = Batches(pairs, **{name: number * world for name, number in size.items()}, seed=seed).epoch(1)
    shards = [Batches(pairs, **size, seed=seed, shard=(rank, world)).epoch(1) for rank in range(world)]
    assert {len(shard) for shard in shards} == {len(whole)}
    for batch, *parts in zip(whole, *shards, strict=True):
        assert sorted(rows(batch)) == sorted(row for part in parts for row in rows(part))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert batch.num_tokens == sum(part.num_tokens for part in parts)


@given(pairs_of, sizes, seeds)
def test_the_same_seed_gives_the_same_batches(pairs, size, seed):
    first, again = (Batches(pairs, **size, seed=seed).epoch(2) for _ in range(2))
    assert [rows(batch) for batch in first] == [rows(batch) for batch in again]


def test_other_seeds_and_epochs_give_other_batches():
    pairs = [([5] * (n % 9), [6] * (n % 7)) for n in range(200)]
    orders = {
        tuple(batch.indices for batch in Batches(pairs, sentences=8, seed=seed).epoch(epoch))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9
    still = [Batches(pairs, sentences=8, seed=seed, shuffle=False).epoch(seed) for seed in range(2)]
    assert [batch.indices for batch in still[0]] == [batch.indices for batch in still[1]]


@given(pairs_of, sizes, seeds, st.integers(0, 40))
def test_going_on_anywhere_equals_going_straight_through(pairs, size, seed, stop):
    batches = Batches(pairs, **size, seed=seed)
    straight = list(islice(batches.start_at(), stop + 20))
    place = straight[stop - 1][0] if stop else (0, 0)
    again = list(islice(Batches(pairs, **size, seed=seed).start_at(*place), 20))
    assert [(at, rows(batch)) for at, batch in straight[stop:]] == [(at, rows(batch)) for at, batch in again]


def test_an_epoch_can_be_cut_without_making_its_batches():
    epoch = Batches([([5], [6])] * 10, sentences=2).epoch()
    assert [b.indices for b in epoch[3:]] == [epoch[3].indices, epoch[4].indices]
    assert len(epoch[1:3]) == 2 and epoch[-1].indices == epoch[4].indices


def test_lengths_in_a_batch_are_alike():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (2000,), generator=generator).tolist()
    pairs = [([5] * n, [6] * (n + 1)) for n in lengths]
    batches = list(Batches(pairs, tokens=600).epoch())
    shares = [batch.num_tokens / batch.target_output.numel() for batch in batches]
    assert sum(shares) / len(shares) > 0.95


def test_with_few_rows_left_every_process_still_gets_some():
    pairs = [([5] * 4, [6] * 4)] * 33
    shards = [Batches(pairs, sentences=8, shard=(rank, 4)).epoch() for rank in range(4)]
    assert min(len(batch) for shard in shards for batch in shard) >= 4


def test_a_batch_moves_with_its_indices():
    batch = Batch.of([([5], [6])], [7]).to("cpu")
    assert batch.indices == (7,) and len(batch) == 1


def test_mistakes_are_named():
    pairs = [([5] * 3, [6] * 9), ([5], [6])]
    with pytest.raises(RegardError, match="pair 0 has 10 tokens, more than the 8"):
        Batches(pairs, tokens=8)
    for wrong in ({}, {"tokens": 9, "sentences": 9}):
        with pytest.raises(RegardError, match="either as tokens= or as sentences="):
            Batches(pairs, **wrong)
    with pytest.raises(RegardError, match="the batch size is 0"):
        Batches(pairs, sentences=0)
    with pytest.raises(RegardError, match="rank < world"):
        Batches(pairs, sentences=1, shard=(2, 2))
    with pytest.raises(RegardError, match="no pairs"):
        Batches([], sentences=1)
    with pytest.raises(RegardError, match="epoch 0 has 2 batches, so it cannot resume at step 3"):
        next(Batches(pairs, sentences=1).start_at(0, 3))
