"""What watching, `regard analyze`, `see --corpus` and the page compute of a long text: compiled passes, and no tile."""

from __future__ import annotations

import pytest
import torch
import transformers

import regard as rg
from kernels import needs_kernel
from miniatures import LLAMA, V, sharpened
from regard.base.versions import shares_key_heads
from regard.engine.kernel.library import load_fast
from regard.hf.capture.transformers_interface import KernelStatistic
from regard.maps import compiled_reductions
from regard.maps.scored_map import ScoredMap
from regard.stats import mask_findings, profile, text_statistics, value_weighted
from regard.stats.text_reading import TextReading
from regard.viewer import page_reductions
from regard.viewer.sheet import Sheet

pytestmark = [needs_kernel, pytest.mark.skipif(load_fast() is None, reason="the kernels are slow here")]
LENGTH = 300
IDS = torch.randint(3, V, (1, LENGTH), generator=torch.Generator().manual_seed(0))
NAMES = [f"t{n % 11}" for n in range(LENGTH)]


@pytest.fixture
def model():
    config = transformers.LlamaConfig(**LLAMA | {"max_position_embeddings": 2 * LENGTH})
    return sharpened(transformers.LlamaModel._from_config(config, attn_implementation="sdpa").eval())


@torch.no_grad()
def watched(model, **options):
    with rg.watch(model, **options) as seen:
        output = model(IDS).last_hidden_state
    return output, seen


@pytest.fixture
def no_tiles(monkeypatch):
    """Computing a tile of weights is an error."""

    def refused(self):
        raise AssertionError("tiles were computed")

    monkeypatch.setattr(ScoredMap, "tiles", refused)


def on_tiles(monkeypatch, compute):
    with monkeypatch.context() as patch:
        patch.setattr(compiled_reductions, "FEWEST_PAIRS", 1 << 60)
        patch.setattr(ScoredMap, "tiles", TILES)
        return compute()


TILES = ScoredMap.tiles
STATISTICS = (
    rg.maps.Entropy(),
    rg.maps.TopLinks(4),
    rg.maps.KeyTotals(),
    rg.maps.Distance(),
    rg.maps.Pool(9, 9),
    rg.maps.Similarity(),
    rg.maps.MassOn([0]),
)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=5e-5)


@pytest.mark.usefixtures("no_tiles")
def test_statistics_of_a_watch(model, monkeypatch):
    _, seen = watched(model, keep="statistics", reductions=STATISTICS)
    _, expected = on_tiles(monkeypatch, lambda: watched(model, keep="statistics", reductions=STATISTICS))
    for name, statistics in seen.statistics.items():
        for reduction in STATISTICS:
            one, other = (s.of(reduction) for s in (statistics, expected.statistics[name]))
            close(
                one.weights if isinstance(one, rg.maps.RowLinks) else one,
                other[0] if isinstance(one, rg.maps.RowLinks) else other,
            )


@pytest.mark.usefixtures("no_tiles")
def test_a_profile_of_a_text_and_of_a_corpus(model, monkeypatch):
    """`regard analyze` and `see --corpus` compute these."""
    _, seen = watched(model)

    def profiled():
        return profile(seen.maps, NAMES, special=[0, 7], statistics=text_statistics(NAMES, [3, 4]))

    mine, theirs = profiled(), on_tiles(monkeypatch, profiled)
    for layer, other in zip(mine.layers, theirs.layers, strict=True):
        for name, values in layer.values.items():
            close(values, other.values[name])
        for part in ("received", "similarity", "agreement", "allowed"):
            close(getattr(layer, part), getattr(other, part))
        close(layer.links.weights, other.links.weights)


@pytest.mark.usefixtures("no_tiles")
def test_warnings_about_masks(model):
    assert mask_findings(watched(model)[1].maps, causal=True) == []


@pytest.mark.usefixtures("no_tiles")
def test_value_weighted_norms(model, monkeypatch):
    weights = watched(model)[1][0]
    H, J = weights.shape[1], weights.shape[3]
    norms = value_weighted(weights, torch.randn(1, H, J, 6), torch.randn(8, 6 * H))
    for compute in (norms.carried, norms.received):
        close(compute(), on_tiles(monkeypatch, compute))


@pytest.mark.parametrize("level", [0, 5])
@pytest.mark.usefixtures("no_tiles")
def test_the_page(model, monkeypatch, level):
    """Its cells and offsets are reductions of the same pass as the profile: thumbnails, and the pyramid of a long
    text.
    """
    monkeypatch.setattr("regard.viewer.sheet.base_level", lambda I, J: level)
    _, seen = watched(model)

    def sheet():
        return TextReading.of("", seen.maps, NAMES, also=page_reductions)

    mine, theirs = sheet(), on_tiles(monkeypatch, sheet)
    Sheet.of(mine)
    for layer, other in zip(mine.profile.layers, theirs.profile.layers, strict=True):
        for one, two in zip(layer.also, other.also, strict=True):
            for part, expected in zip(*((x if isinstance(x, tuple) else (x,)) for x in (one, two)), strict=True):
                close(part, expected)


@pytest.mark.skipif(not shares_key_heads(), reason="the kernel of torch 2.8 does not share key heads")
@torch.no_grad()
def test_the_kernel_of_a_watched_model_gives_its_logsumexp(model):
    plain = model(IDS).last_hidden_state
    output, seen = watched(model)
    assert torch.equal(output, plain)
    for weights in seen.maps.values():
        assert weights._row_statistic is not None
        own = ScoredMap(weights.attention, weights._prepared, weights.positions, weights.grid, None)
        close(weights.row_statistic[0], own.row_statistic[0])


@torch.no_grad()
def test_a_logsumexp_that_is_not_that_of_the_rows_is_left_out(model, monkeypatch):
    original = KernelStatistic.__torch_dispatch__

    def shifted(self, *args):
        output = original(self, *args)
        self.logsumexps = [logsumexp + 0.01 for logsumexp in self.logsumexps]
        return output

    monkeypatch.setattr(KernelStatistic, "__torch_dispatch__", shifted)
    assert all(weights._row_statistic is None for weights in watched(model)[1].maps.values())


@pytest.mark.parametrize("shape", [(1, 2, LENGTH), (0, 2, LENGTH), (1, 2, 0)])
def test_gradients_of_entropies_and_distances(shape, monkeypatch):
    """Of an empty map too, which has none to compute."""
    q, k = (torch.randn(*shape, 8, requires_grad=True) for _ in range(2))
    weights, given, differentiable = rg.attend(q, k, k, is_causal=True).weights, [], compiled_reductions.differentiable
    entropy, distance = weights.summarize(rg.maps.Entropy(), rg.maps.Distance())
    loss = (entropy * torch.arange(shape[2]) + distance).sum() / LENGTH
    with monkeypatch.context() as patch:
        patch.setattr(compiled_reductions, "differentiable", lambda *args: given.append(args) or differentiable(*args))
        found = torch.autograd.grad(loss, (q, k), retain_graph=True)
    assert len(given) == all(shape)
    for one, other in zip(found, on_tiles(monkeypatch, lambda: torch.autograd.grad(loss, (q, k))), strict=True):
        close(one, other)
