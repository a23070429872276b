"""Statistics by the Triton kernel: under Triton's interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard as rg
from exact_reductions import COMPILED
from regard.attention import Prepared
from regard.engine.gpu.statistics import is_installed
from regard.engine.kernel import logsumexp_of
from regard.engine.kernel.engine import KernelProblem
from regard.engine.kernel.library import load_fast
from regard.engine.kernel.statistics import add_statistics
from regard.maps import compiled_reductions, gpu_reductions, passes
from regard.maps.scored_map import ScoredMap

TOOLS = Path(__file__).parents[1] / "tools"
needs_triton = pytest.mark.skipif(not is_installed(), reason="Triton is not installed: pip install triton, on Linux")


def run(*command: object, **settings: str) -> None:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=TOOLS.parents[1],
        capture_output=True,
        text=True,
        env=os.environ | settings,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-5_000:]


@needs_triton
@pytest.mark.example
def test_under_the_interpreter():
    """Triton reads the setting when it is imported, and torch's compiler imports Triton."""
    run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", TOOLS / "triton_laws.py", TRITON_INTERPRET="1"
    )


@needs_triton
@pytest.mark.slow
@pytest.mark.example
def test_it_compiles_for_gpus(tmp_path):
    run(TOOLS / "triton_compile.py", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))


def test_strongest_links_are_right_if_their_weights_and_their_keys_are():
    """A kernel may choose another key of the same weight, and no key of another."""
    grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(2, 4), 1, 1, 2)
    weights = torch.tensor([[[[0.1, 0.4, 0.4, 0.1], [1.0, 0.0, 0.0, 0.0]]]])
    tile = rg.maps.Tile(weights, None, slice(0, 2), slice(0, 4), grid, rg.types.Spans.of((0, 4)))
    reduction = rg.maps.TopLinks(1)
    exact = reduction.init((1, 1, 2, 4), weights.device)
    reduction.add(exact, tile)

    def agrees(numbers, keys):
        links = [torch.tensor(x).view(1, 1, 2, 1) for x in (numbers, keys)]
        return gpu_reductions._agree(reduction, links, exact, tile)

    assert agrees([0.4, 1.0], [1, 0]) and agrees([0.4, 1.0], [2, 0])
    assert not agrees([0.4, 1.0], [0, 0]) and not agrees([0.1, 1.0], [0, 0]) and not agrees([0.1, 1.0], [1, 0])


def test_without_triton_tiles_compute_them(monkeypatch):
    monkeypatch.setenv("REGARD_KERNEL", "off")
    monkeypatch.setattr(gpu_reductions, "DEVICES", {"cpu"})
    monkeypatch.setattr(gpu_reductions, "is_installed", lambda: False)
    weights = rg.Attention()(*torch.randn(3, 1, 2, 130, 8).unbind()).weights
    assert weights._compiled_terms() is None
    dense = weights.dense()
    torch.testing.assert_close(weights.entropy(), -torch.xlogy(dense, dense).sum(-1), atol=1e-5, rtol=1e-5)


def test_the_dense_formula_beside_the_kernel_has_the_weights_of_the_map(monkeypatch):
    """Also in an empty row: the window of the first queries begins before the first key."""
    monkeypatch.setattr(compiled_reductions, "FEWEST_PAIRS", 0)
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 11, 8)
    attention = rg.Attention(mask=rg.causal() & rg.window(3))
    weights = attention(q, k, k, positions=rg.types.Positions(-2, rg.types.Spans.of((0, 11))), engine="dense").weights
    problem = compiled_reductions.map_problem(attention, Prepared(q, k, (), ()), weights.positions, weights.grid)
    tile = gpu_reductions._dense_tile(KernelProblem.of(problem), weights.row_statistic[0], slice(1, 5))
    torch.testing.assert_close(tile.weights, weights.dense()[:, :, 1:5])
    assert not tile.weights[:, :, 0].any() and tile.weights[:, :, 1:].any()


def test_each_device_has_its_own_kernels_for_statistics(monkeypatch):
    weights, asked = rg.Attention()(*torch.randn(3, 1, 2, 130, 8).unbind()).weights, []
    monkeypatch.setattr(gpu_reductions, "gpu_terms", lambda *given: asked.append("gpu"))
    monkeypatch.setattr(passes, "compiled_terms", lambda *given: asked.append("compiled"))
    weights._compiled_terms()
    monkeypatch.setattr(gpu_reductions, "DEVICES", {"cpu"})
    weights._compiled_terms()
    assert asked == ["compiled", "gpu"]


# Verification at the first use of a program, with the kernels in C in place of Triton

LENGTH = 20


def add_of_rows(terms, logsumexp, wanted, queries=None):
    """The statistics of some queries; the others have no weights."""
    rows = range(LENGTH) if queries is None else queries
    is_left_out = torch.tensor([row not in rows for row in range(LENGTH)])
    add_statistics(terms.setting(), terms.inputs(), logsumexp.masked_fill(is_left_out, -torch.inf), wanted)


@pytest.fixture
def in_c(monkeypatch):
    if load_fast() is None:
        pytest.skip("no compiled kernels")
    for name, value in {
        "DEVICES": {"cpu"},
        "FAULTS": {},
        "is_installed": lambda: True,
        "terms_of": KernelProblem.of,
    }.items():
        monkeypatch.setattr(gpu_reductions, name, value)
    monkeypatch.setattr(gpu_reductions, "add_statistics", add_of_rows)
    monkeypatch.setattr(gpu_reductions, "logsumexp_of", logsumexp_of)
    monkeypatch.setattr(compiled_reductions, "FEWEST_PAIRS", 1)


def weights_of(attention=None, factor=1.0):
    query, key, value = torch.randn(3, 2, 2, LENGTH, 8).unbind()
    return (attention or rg.Attention())(query * factor, key, value, engine="dense").weights


@pytest.mark.usefixtures("in_c")
def test_a_right_program_is_verified_once_and_used(monkeypatch):
    """A program for each dtype, each kind of biases and masks, and each set of statistics."""
    masks = rg.causal() & rg.window(3), rg.mask_tensor(torch.rand(LENGTH, LENGTH) < 0.8), rg.masks.dilated(3, 2)
    attentions = rg.Attention(), rg.Attention(bias=rg.ALiBi(2)), *(rg.Attention(mask=mask) for mask in masks)
    for weights in map(weights_of, attentions):
        found, again = (weights.summarize(*COMPILED) for _ in range(2))
        weights.summarize(*COMPILED[1:])
        with monkeypatch.context() as patch:
            patch.setattr(compiled_reductions, "FEWEST_PAIRS", LENGTH**2 + 1)  # tiles
            for ours, second, tiled in zip(found, again, weights.summarize(*COMPILED), strict=True):
                for a, b, c in zip(*map(parts, (ours, second, tiled)), strict=True):
                    assert torch.equal(a, b)
                    torch.testing.assert_close(a, c, atol=1e-5, rtol=1e-5)
    assert set(gpu_reductions.FAULTS.values()) == {None} and len(gpu_reductions.FAULTS) > 2 * 3


@pytest.mark.parametrize("factor", [1e5, torch.nan])
@pytest.mark.usefixtures("in_c")
def test_tiles_compute_what_the_kernels_refuse(factor):
    """Rows whose statistic is coarse or unknown, and gradients."""
    weights = weights_of(factor=torch.where(torch.arange(LENGTH) == 7, factor, 1.0)[:, None])
    states = {reduction: reduction.init(weights.shape, weights.device) for reduction in COMPILED}
    terms = weights._compiled_terms()
    assert gpu_reductions.fill_on_gpu(terms, weights.row_statistic[0], states) == set()
    assert passes.differentiable(terms, torch.zeros(2, 2, LENGTH), {COMPILED[0]: states[COMPILED[0]]}) == {}


@pytest.mark.usefixtures("in_c")
def test_many_strongest_links_and_reductions_of_the_user_run_on_tiles(monkeypatch):
    class Greatest(rg.maps.Reduction):
        def init(self, shape, device):
            return [torch.zeros(shape[:2], device=device)]

        def add(self, state, tile):
            state[0].copy_(state[0].maximum(tile.weights.amax((-2, -1))))

    monkeypatch.setattr(gpu_reductions, "LARGEST_TOP", 2)
    weights = weights_of()
    entropy, top, greatest = weights.summarize(rg.maps.Entropy(), rg.maps.TopLinks(3), Greatest())
    dense = weights.dense()
    torch.testing.assert_close(entropy, -torch.xlogy(dense, dense).sum(-1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(top.weights, dense.topk(3).values)
    torch.testing.assert_close(greatest, dense.amax((-2, -1)))


def test_a_pass_has_few_links_and_one_list_of_numbers_for_all_heads():
    one, two = torch.zeros(2, 1, 5), torch.zeros(2, 2, 5)
    small = {}, {"numbers": [(one, None)]}, {"top_weights": torch.zeros(1, 1, 1, gpu_reductions.LARGEST_TOP)}
    large = {"numbers": [(one, None)] * 2}, {"numbers": [(two, None)]}, {"top_weights": torch.zeros(1, 1, 1, 65)}
    assert all(map(gpu_reductions._is_small, small)) and not any(map(gpu_reductions._is_small, large))


def test_numbers_that_differ_by_the_tolerance_agree_and_others_do_not():
    theirs = torch.tensor([1000.0, 0.0])
    for difference, agrees in ((0.0, True), (1.0, True), (1.01, False), (torch.nan, False)):
        for place in range(2):
            ours = theirs.clone()
            ours[place] += difference
            assert gpu_reductions._is_close(ours, theirs) is agrees


@pytest.mark.parametrize(
    "wrong", ["entropy", "distance", "mass", "received", "cells", "top_weights", "top_keys", "error"]
)
@pytest.mark.usefixtures("in_c")
def test_a_wrong_program_is_found_and_not_used(wrong, monkeypatch):
    def broken(terms, logsumexp, wanted, queries=None):
        if wrong == "error":
            raise NotImplementedError("no such instruction\nand more")
        add_of_rows(terms, logsumexp, wanted, queries)
        tensor = wanted["numbers"][0][1] if wrong == "mass" else wanted[wrong]
        tensor.copy_((tensor + 1) % 20 if wrong == "top_keys" else tensor * 1.02)

    weights = weights_of()
    monkeypatch.setattr(gpu_reductions, "add_statistics", broken)
    said = "NotImplementedError: no such instruction" if wrong == "error" else "is not that of the dense formula"
    with pytest.warns(UserWarning, match=f"Triton kernel for statistics is not used: .*{said}.*Tiles compute them"):
        found = weights.summarize(*COMPILED)
    again = weights.summarize(*COMPILED)  # without another warning
    monkeypatch.setattr(compiled_reductions, "FEWEST_PAIRS", LENGTH**2 + 1)
    for ours, second, tiled in zip(found, again, weights.summarize(*COMPILED), strict=True):
        results = zip(*map(parts, (ours, second, tiled)), strict=True)
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in results)


@pytest.mark.parametrize("row", [None, 0, 1, 10, 11, 18, 19])
@pytest.mark.usefixtures("in_c")
def test_the_log_sum_exp_is_verified_at_the_start_in_the_middle_and_at_the_end(row, monkeypatch):
    known = weights_of(rg.Attention(normalizer=rg.normalizers.Softmax(sink=1.0)))
    weights = ScoredMap(known.attention, known._prepared, known.positions, known.grid, None)
    wrong = torch.zeros(LENGTH)
    if row is not None:
        wrong[row] = 0.01
        monkeypatch.setattr(gpu_reductions, "logsumexp_of", lambda terms: logsumexp_of(terms) + wrong)
        first = row // 2 * 2
        with pytest.warns(UserWarning, match=f"of the queries {first} to {first + 1} is not that of the dense formula"):
            found = weights.row_statistic[0]
    else:
        found = weights.row_statistic[0]
    torch.testing.assert_close(found, known.row_statistic[0])
    assert [fault is None for fault in gpu_reductions.FAULTS.values()] == [row is None]


def parts(result):
    return tuple(result) if isinstance(result, rg.maps.RowLinks) else (result,)
