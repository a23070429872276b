"""Statistics by the Triton kernel: under Triton's interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard as rg
from regard.attention import Prepared
from regard.engine.gpu.statistics import is_installed
from regard.engine.kernel.engine import KernelProblem
from regard.maps import compiled_reductions, gpu_reductions, passes

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
