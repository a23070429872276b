"""Limits of memory and precision are the numbers that their comments say."""

from __future__ import annotations

import torch

import regard as rg
from regard.pieces.contents import is_small, split_tensors
from regard.pieces.normalizer import any_coarse, is_coarse
from regard.pieces.selection import CandidateKeys

POSITIONS = rg.types.Positions.aligned_to_end


def test_a_log_sum_exp_is_coarse_above_1024():
    above = torch.nextafter(torch.tensor(1024.0), torch.tensor(torch.inf)).item()
    for sign in (1, -1):
        assert not any_coarse(sign * 1024.0) and any_coarse(sign * above)
        assert not any_coarse(torch.full((2,), sign * above, device="meta"))  # its numbers cannot be read
        assert is_coarse(sign * torch.tensor([1024.0, above, torch.inf])).tolist() == [False, True, False]


def test_a_snapshot_copies_up_to_64_kilobytes_and_lists_are_searched_up_to_256_items():
    assert [is_small(torch.empty(64 * 1024 + more, dtype=torch.uint8)) for more in (0, 1)] == [True, False]
    found = [split_tensors([0] * numbers + [torch.ones(1)])[0] for numbers in (255, 256)]
    assert [len(tensors) for tensors in found] == [1, 0]


def test_a_selection_compares_rows_of_24_mebibytes_at_once():
    candidates = CandidateKeys.of(torch.empty(2, 1, 13, 4), POSITIONS(13, 13), None)
    rows = candidates.rows(1 << 19)  # 4 bytes each, for two batch entries: 4 MiB a row
    assert [(part.start, part.stop) for part in rows] == [(0, 6), (6, 12), (12, 13)]


def test_the_network_of_a_bias_holds_4_million_numbers_at_once(monkeypatch):
    bias, sizes = rg.biases.FIREBias(1, hidden=1 << 12), []
    monkeypatch.setattr(
        bias, "_network", lambda behind, length, head: sizes.append(len(behind)) or torch.zeros(1, *behind.shape)
    )
    bias.term(rg.types.Grid.whole(POSITIONS(70, 32), 1, 1, 70), None, None)
    assert sizes == [32, 32, 6]
