"""Statistics of the map against NumPy on the reference's dense weights, and closed forms."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import regard as rg
from cataloged import SHARES
from exact_reductions import some_reductions, wrong_results
from map_kinds import map_of
from regard.base.shapes import Sizes
from regard.catalog import mechanisms
from regard.engine.problem import Problem
from regard.maps import Tile
from regard.maps.changed_map import HeadMean
from regard.maps.reductions import greatest
from regard.maps.scored_map import ScoredMap
from regard.reference import reference

pytestmark = pytest.mark.usefixtures("small_blocks")
every_mechanism = pytest.mark.parametrize("name", SHARES)


def seen_and_dense(name):
    attention, q, k, v = mechanisms()[name].example()
    sizes = Sizes.of(q, k, v)
    problem = Problem(attention, q, k, v, rg.types.Positions.aligned_to_end(sizes.I, sizes.J), sizes)
    with torch.no_grad():
        return attention(q, k, v), reference(problem)[1]


def close(mine, theirs):
    np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-5, atol=1e-6)


@every_mechanism
def test_streamed_reductions_are_those_of_dense_weights(name):
    seen, w = seen_and_dense(name)
    reductions = (*some_reductions(*w.shape, 13), rg.maps.Pool(5, 4), rg.maps.Pool(1000, 1000), rg.maps.TopLinks(1))
    found = dict(zip(reductions, seen.weights.summarize(*reductions), strict=True))
    assert not wrong_results(found, torch.from_numpy(w), seen.weights.grid.distance, 1e-5)


@pytest.mark.parametrize("name", ["multi_head", "sliding_window"])
def test_methods_are_their_reductions(name):
    weights = seen_and_dense(name)[0].weights
    flags, J = torch.arange(weights.shape[3]) % 3 == 0, weights.shape[3]
    asked = {
        rg.maps.Entropy(): weights.entropy(),
        rg.maps.KeyTotals(): weights.received(),
        rg.maps.Distance(): weights.distance(),
        rg.maps.MassOn([0, J - 1]): weights.mass([0, -1]),
        rg.maps.MassOn(flags): weights.mass(flags),
        rg.maps.TopLinks(3): weights.top(3),
        rg.maps.TopLinks(1): weights.top(),
        rg.maps.Similarity(): weights.similarity(),
        rg.maps.Pool(5, 4): weights.pool(5, 4),
    }
    for mine, theirs in zip(asked.values(), weights.summarize(*asked), strict=True):
        torch.testing.assert_close(tuple(mine), tuple(theirs), rtol=0, atol=0)


def test_one_pass_gives_what_single_passes_give():
    seen, _ = seen_and_dense("multi_head" if "multi_head" in mechanisms() else "sliding_window")
    together = seen.weights.summarize(rg.maps.Entropy(), rg.maps.KeyTotals(), rg.maps.TopLinks(2))
    alone = (seen.weights.entropy(), seen.weights.received(), seen.weights.top(2))
    assert torch.equal(together[0], alone[0]) and torch.equal(together[1], alone[1])
    assert torch.equal(together[2].weights, alone[2].weights) and torch.equal(together[2].keys, alone[2].keys)


@every_mechanism
@pytest.mark.parametrize(
    "width, strip", [(4, 1), (4, 64), (64, 1)], ids=["rows in pieces", "pieces that are kept", "whole rows"]
)
def test_statistics_do_not_depend_on_who_found_the_row_statistic(name, width, strip, monkeypatch):
    monkeypatch.setattr("regard.maps.scored_map.STRIP", strip)
    monkeypatch.setattr("regard.maps.attention_map.TILE", (5, width))
    monkeypatch.setattr("regard.maps.attention_map.WORKSPACE", 1 << 20)
    seen, _ = seen_and_dense(name)
    told = seen.weights
    alone = ScoredMap(told.attention, told._prepared, told.positions, told.grid, None)
    reductions = [rg.maps.Entropy(), rg.maps.KeyTotals(), rg.maps.Distance()]
    for mine, theirs in zip(alone.summarize(*reductions), told.summarize(*reductions), strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(alone.row_statistic, told.row_statistic, strict=True):
        torch.testing.assert_close(mine, theirs, check_dtype=False)


@pytest.mark.parametrize("length", [1, 7, 31, 64, 257, 4096])
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("levels", [2, 1000], ids=["ties", "spread"])
def test_the_greatest_are_those_of_topk(length, k, levels):
    weights = torch.randint(0, levels, (2, 5, length)).float()
    k = min(k, length)
    values, places = greatest(weights, k)
    assert torch.equal(values, weights.topk(k).values)
    assert torch.equal(weights.gather(-1, places), values)
    assert all(len(row.unique()) == k for row in places.flatten(0, 1))


def test_uniform_attention_has_entropy_log_n():
    x = torch.zeros(1, 1, 7, 4)
    weights = rg.Attention()(x, x, x).weights
    torch.testing.assert_close(weights.entropy(), torch.full((1, 1, 7), 7.0).log())
    causal = rg.Attention(mask=rg.causal())(x, x, x).weights
    torch.testing.assert_close(causal.entropy()[0, 0], torch.arange(1.0, 8.0).log())


def test_a_weight_that_was_rounded_above_one_has_no_entropy_below_zero():
    weights = rg.maps.DenseMap(torch.tensor([1 + 2**-22, 1.0]).view(1, 1, 2, 1))
    assert weights.entropy().flatten().tolist() == [0.0, 0.0]


def test_a_hard_lookup_has_entropy_zero_and_reaches_where_it_points():
    q = torch.eye(4)[None, None]
    k = q[:, :, [2, 3, 0, 1]]
    weights = rg.Attention(normalizer=rg.normalizers.Hardmax())(q, k, k).weights
    assert not weights.entropy().any()
    assert weights.top().keys.flatten().tolist() == [2, 3, 0, 1]
    assert weights.distance().flatten().tolist() == [2.0] * 4


def test_only_the_allowed_tiles_are_visited():
    x = torch.randn(1, 1, 64, 4)
    weights = rg.Attention(mask=rg.causal() & rg.window(4))(x, x, x).weights
    visited = sum((t.rows.stop - t.rows.start) * (t.cols.stop - t.cols.start) for t in weights.tiles())
    assert visited <= 64 * 8 < 64 * 64 / 4


def test_the_mask_is_asked_only_of_keys_that_some_query_of_a_tile_may_not_see(small_blocks, monkeypatch):
    """The spans of a mask decide all others."""
    answer, asked = rg.causal.allowed, []

    def allowed(mask, grid):
        asked.append(answer(mask, grid))
        return asked[-1]

    attention = rg.Attention(mask=rg.causal())
    weights = attention(*torch.randn(3, 1, 2, 40, 4)).weights
    monkeypatch.setattr(rg.causal, "allowed", allowed)
    weights.entropy()
    assert asked and all((~part).any(-2).all() for part in asked)


@pytest.mark.parametrize("normalizer", [rg.normalizers.Softmax(), rg.normalizers.Sparsemax()], ids=repr)
def test_a_statistic_that_is_known_is_not_computed_again(normalizer, small_blocks, monkeypatch):
    def computed(*_):
        raise AssertionError("the engine has told it")

    attention, tensors = rg.Attention(mask=rg.causal(), normalizer=normalizer), torch.randn(3, 1, 2, 20, 4)
    weights, other = (attention(*tensors, engine="dense").weights for _ in range(2))
    entropy = other.entropy()
    for name in {"row_statistic", "logsumexp", "normalize_with_logs"} & set(dir(normalizer)):
        monkeypatch.setattr(type(normalizer), name, computed)
    torch.testing.assert_close(weights.entropy(), entropy)


@pytest.mark.parametrize(("length", "passes"), [(8, 1), (40, 2)])
def test_the_scores_of_few_tiles_are_kept_while_their_statistic_is_found(length, passes, small_blocks, monkeypatch):
    """Rows of 2 tiles are scored once; those of 10 twice, so that their scores are never all held."""
    monkeypatch.setattr("regard.maps.scored_map.STRIP", 2)
    weights = rg.Attention()(*torch.randn(3, 1, 2, length, 4), engine="reference").weights
    score, calls = ScoredMap._tile_scores, []
    monkeypatch.setattr(ScoredMap, "_tile_scores", lambda *given: calls.append(given) or score(*given))
    tiles = list(weights.tiles())
    assert len(calls) == passes * len(tiles)


def test_whole_rows_are_scored_as_many_at_a_time_as_the_workspace_allows(monkeypatch):
    q, k, v = torch.randn(2, 3, 20, 4), torch.randn(2, 3, 30, 4), torch.randn(2, 3, 30, 4)
    weights = rg.Attention(normalizer=rg.normalizers.Sparsemax())(q, k, v, engine="reference").weights
    of_a_row, statistic, held = 2 * 3 * 30 * weights._bytes_per_weight, rg.normalizers.Sparsemax.row_statistic, []
    monkeypatch.setattr("regard.maps.attention_map.WORKSPACE", 4 * of_a_row + 1)
    monkeypatch.setattr(
        rg.normalizers.Sparsemax, "row_statistic", lambda self, s, at: held.append(s.shape[2]) or statistic(self, s, at)
    )
    assert len(weights.row_statistic) == 2 and held == [4] * 5


def test_nothing_is_computed_until_asked(monkeypatch):
    calls = []
    monkeypatch.setattr("regard.maps.scored_map.scores", lambda *a, **k: calls.append(a))
    x = torch.randn(1, 2, 9, 4)
    rg.Attention()(x, x, x)
    assert not calls


def test_weights_after_a_kernel_that_tells_no_statistic(monkeypatch):
    """The public fallback: without the private CPU operator the row statistic is streamed."""
    x, y = torch.randn(1, 2, 9, 4, dtype=torch.float64), torch.randn(1, 2, 9, 4, dtype=torch.float64)
    expected = rg.Attention(mask=rg.causal())(x, y, y)
    monkeypatch.setattr("regard.engine.flash.returns_row_statistic", lambda query: False)
    for engine in ("fused", "blocked"):
        seen = rg.Attention(mask=rg.causal())(x, y, y, engine=engine)
        torch.testing.assert_close(seen.output, expected.output)
        torch.testing.assert_close(seen.weights.dense(), expected.weights.dense())


def test_a_dense_map_over_budget_is_refused_with_the_number():
    x = torch.randn(1, 8, 8192, 4)
    weights = rg.Attention(mask=rg.causal() & rg.window(8))(x, x, x).weights
    with pytest.raises(rg.RegardError, match="2,048 MiB"):
        weights.dense()
    with pytest.raises(rg.RegardError, match="budget"):
        weights.tile(rows=slice(0, 4), budget=100)


@pytest.mark.parametrize(
    "index", [5, (0, 7), (0, 0, 99), (0, 0, 0, -100), (0, 0, 0, 0, 0), (0, 0, 0.5), (..., ...)], ids=str
)
def test_an_index_beyond_the_map_is_refused(index):
    x = torch.randn(1, 2, 9, 4)
    with pytest.raises(rg.RegardError):
        rg.Attention()(x, x, x).weights[index]


def test_a_tile_is_public():
    x = torch.randn(1, 2, 9, 4)
    assert all(isinstance(t, Tile) for t in rg.Attention()(x, x, x).weights.tiles())


def test_weight_on_chosen_keys_is_each_entrys_own(small_blocks):
    """Keys that only the last batch entry chooses count too, in every tile."""
    q, k, v = torch.randn(3, 3, 2, 11, 4)
    weights = rg.Attention(mask=rg.causal())(q, k, v).weights
    chosen = torch.zeros(3, 11, dtype=torch.bool)
    chosen[1, 2], chosen[2, 5:9], chosen[2, 0] = True, True, True
    expected = (weights.dense() * chosen[:, None, None]).sum(-1)
    close(weights.mass(chosen), expected)
    assert not expected[0].any() and expected[1].any() and expected[2].any()


def test_a_fold_keeps_the_keys_it_was_given():
    weights, keys = rg.Attention()(*torch.randn(3, 1, 1, 4, 4)).weights, torch.tensor([0, 1])
    reduction = rg.maps.MassOn(keys)
    keys.fill_(3)
    close(weights.summarize(reduction)[0], weights.mass([0, 1]))


# A map where other libraries expect an array


@pytest.mark.parametrize("length", [0, 3])
def test_a_map_becomes_a_tensor_or_an_array_like_any_array_of_four_axes(length):
    weights = rg.Attention(mask=rg.causal())(*torch.randn(3, 2, 3, length, 4)).weights
    dense = weights.dense()
    for made in (torch.as_tensor(weights), torch.asarray(weights), torch.tensor(weights), torch.from_dlpack(weights)):
        assert torch.equal(made, dense) and made.dtype == dense.dtype
    np.testing.assert_array_equal(np.asarray(weights), dense.numpy())
    assert torch.as_tensor(weights, dtype=torch.float64).dtype == torch.float64
    assert len(weights) == 2 == len(list(weights))
    assert weights


@pytest.mark.parametrize("index", ["x", b"x", 1.5, {1}, object()])
@pytest.mark.parametrize("axis", range(4))
def test_an_index_that_is_none_names_the_axis_and_what_indices_are(index, axis):
    weights = rg.Attention()(*torch.randn(3, 2, 3, 4, 4)).weights
    name = ("batch", "head", "query", "key")[axis]
    with pytest.raises(rg.RegardError, match=rf"^weights\[\.\.\.\]: the {name} index must be .* as in weights\[0, 3"):
        weights[(0,) * axis + (index,)]


def test_a_map_has_the_queries_and_keys_of_its_scores():
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    rotated = rg.Attention(position=rg.RoPE(8))(q, k, v).weights
    for weights in (rotated, rotated.select([0], [1, 2]), rotated.shares(), rotated.detach()):
        key = weights.key.repeat_interleave(weights.shape[1] // weights.key.shape[1], 1)
        close((weights.query @ key.mT / 8**0.5).softmax(-1), weights.dense())
    assert rotated.query.shape == (1, 4, 6, 8) and rotated.key.shape == (1, 2, 6, 8)
    assert not torch.equal(rotated.query, q)  # after the rotation
    live = rg.Attention()(q.requires_grad_(), k, v).weights
    assert live.query.requires_grad and not live.detach().query.requires_grad
    links = rg.maps.GradientMap(rotated, torch.randn(1, 4, 6, 8), v)
    assert torch.equal(links.query, rotated.query) and torch.equal(links.value, v)


def test_maps_without_queries_and_keys_say_what_they_are_made_of():
    q, k, v = torch.randn(3, 1, 2, 4, 4)
    plain = rg.Attention(mask=rg.causal())(q, k, v).weights
    delta = rg.Attention(transition=rg.transitions.Delta())(q, k, v, beta=torch.full((1, 2, 4), 0.5)).weights
    grouped = rg.composites.Grouped(rg.Attention(), rg.composites.MeanGroups(2))(q, k, v).weights
    for weights, made_of in (
        (rg.maps.ProductMap([plain, plain]), r"product of maps, weights\.factors"),
        (rg.maps.SumMap([plain, plain], [0.5, 0.5]), r"sum of maps, weights\.parts"),
        (rg.maps.DenseMap(plain.dense()), r"matrix of weights"),
        (delta, r"weights\.steps"),
        (grouped, r"weights\.by_group"),
        (HeadMean(plain), r"mean over the heads of weights\.source"),
    ):
        for name in ("query", "key"):
            with pytest.raises(rg.RegardError, match=rf"weights\.{name}: .*{made_of}"):
                getattr(weights, name)
        with pytest.raises(rg.RegardError, match=r"weights\.value: .*keep='qkv'"):
            _ = weights.value


def test_a_gradient_map_without_value_heads_is_refused():
    weights = rg.Attention()(*torch.randn(3, 1, 2, 4, 8)).weights
    with pytest.raises(rg.RegardError, match=r"GradientMap: weights .* divides H"):
        rg.maps.GradientMap(weights, torch.randn(1, 2, 4, 8), torch.randn(1, 0, 4, 8))


def test_a_mean_has_the_dtype_that_is_wanted():
    x = torch.randn(1, 2, 5, 4)
    for weights in (rg.Attention()(x, x, x).weights, rg.maps.DenseMap(torch.rand(1, 2, 5, 5).bfloat16())):
        for dtype in (torch.float64, torch.float16, None):
            for axis in (1, 2, (0, 3)):
                found, dense = weights.mean(axis, dtype=dtype), weights.dense().mean(axis, dtype=dtype)
                assert found.dtype == dense.dtype
                torch.testing.assert_close(found, dense, rtol=1e-2, atol=1e-2)


def test_links_that_no_weight_makes_have_the_key_minus_one():
    x = torch.randn(1, 2, 4, 4)
    weights, keys = rg.Attention(mask=rg.causal())(x, x, x).weights.summarize(rg.maps.TopLinks(3))[0]
    assert torch.equal(keys == -1, weights == 0) and not (keys < -1).any()
    assert (keys[:, :, 0, 1:] == -1).all() and (keys[:, :, 2:] >= 0).all()


def counted(allowed, asked):
    return lambda self, grid: asked.append(len(grid.key)) or allowed(self, grid)


def test_a_mask_is_asked_only_for_the_keys_that_its_spans_leave_open(small_blocks, monkeypatch):
    x = torch.randn(1, 1, 20, 4)
    for mask in (rg.window(3), rg.causal() & rg.window(8), rg.window(2) | rg.masks.global_tokens([0, 9])):
        weights, asked = rg.Attention(mask=mask)(x, x, x, engine="blocked").weights, []
        monkeypatch.setattr(type(mask), "allowed", counted(type(mask).allowed, asked))
        tiles = list(weights.tiles())
        num_undecided = sum(len(tile.undecided) for tile in tiles)
        assert sum(asked) == num_undecided < sum(tile.weights.shape[3] for tile in tiles)


def heads_of_pieces():
    """Attentions with a number for each of 3 heads, and the tensor that holds it."""
    numbers = torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1)
    for make in (
        lambda t: rg.Attention(rg.Dot(scale=t)),
        lambda t: rg.Attention(rg.scores.Cosine(t)),
    ):
        tensor = numbers.clone().requires_grad_()
        yield make(tensor), tensor
    sinks = rg.normalizers.LearnedSink(3)
    torch.nn.init.normal_(next(sinks.parameters()))
    yield rg.Attention(normalizer=sinks), next(sinks.parameters())


def test_selected_heads_have_the_gradients_of_their_own_numbers():
    q = torch.randn(2, 3, 5, 4)
    for attention, numbers in heads_of_pieces():
        weights, factor = attention(q, q, q).weights, torch.randn(1, 2, 5, 5)
        selected = weights.select([1], [2, 0]).dense()
        torch.testing.assert_close(selected, weights.dense()[[1]][:, [2, 0]])
        found, expected = (
            torch.autograd.grad((each * factor).sum(), numbers, retain_graph=True)[0]
            for each in (selected, weights.dense()[[1]][:, [2, 0]])
        )
        torch.testing.assert_close(found, expected)


def test_the_similarity_of_heads_reads_every_nth_row_of_the_map(small_blocks):
    """Whatever tile the row is in."""
    x = torch.randn(2, 3, 23, 4)
    weights = rg.Attention(mask=rg.causal())(x, x, x, engine="dense").weights
    for every in range(1, 8):
        heads = torch.nn.functional.normalize(weights.dense()[:, :, ::every].flatten(2), dim=-1)
        torch.testing.assert_close(weights.summarize(rg.maps.Similarity(every=every))[0], heads @ heads.mT)


def test_a_tile_has_one_row_if_no_more_fits(monkeypatch):
    monkeypatch.setattr("regard.maps.attention_map.WORKSPACE", 1)
    x = torch.randn(1, 2, 9, 4)
    for mask in (None, rg.causal()):
        tiles = list(rg.Attention(mask=mask)(x, x, x).weights.tiles())
        assert {tile.rows.stop - tile.rows.start for tile in tiles} == {1}


def numbers_of(x):
    """The tensors of what a map returns."""
    return [x] if isinstance(x, torch.Tensor) else [t for part in x for t in numbers_of(part)]


#: Every way to read a map.
READINGS = {
    "all": lambda w: w.dense(),
    "a tile": lambda w: w.tile(rows=[0], cols=[0]),
    "tiles": lambda w: [tile.weights for tile in w.tiles()],
    "some heads": lambda w: w.select([0], [0]).dense(),
    "a statistic": lambda w: w.summarize(rg.maps.KeyTotals()),
    "a statistic of rows": lambda w: w.summarize(rg.maps.Entropy()),
    "a product": lambda w: w @ torch.ones(*w.shape[:2], w.shape[3], 2, dtype=w.dtype),
    "an output": lambda w: w.output(torch.ones(*w.shape[:2], w.shape[3], 2, dtype=w.dtype)),
    "the statistic of rows": lambda w: w.row_statistic,
    "queries": lambda w: w.query,
    "keys": lambda w: w.key,
    "steps": lambda w: list(w.step_table(0).steps.values()),
    "a copy": lambda w: copy.deepcopy(w).dense(),
    "a gradient": lambda w: w.with_gradients().dense(),
}


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("name", ["masked", "alibi", "sinks", "gated_deltanet", "long_convolution", "signed"])
@torch.no_grad()
def test_no_reading_mixes_old_and_new_numbers(name, is_read):
    """After a change in place every reading is refused, or is that of the old numbers, also after an earlier one."""

    def made():
        torch.manual_seed(0)
        weights = map_of(name)
        if is_read:
            weights.dense()
        return weights

    refused = 0
    for read in READINGS.values():
        try:
            before = numbers_of(read(made()))
        except (rg.RegardError, AttributeError):
            continue  # not a reading of this kind of map
        weights = made()
        for tensor in weights._shared_tensors():
            tensor.add_(1.0)
        try:
            after = numbers_of(read(weights))
        except rg.RegardError as error:
            assert "changed in place" in str(error)
            refused += 1
        else:
            for old, new in zip(before, after, strict=True):
                torch.testing.assert_close(new, old)
    assert refused >= 6


TILED = ("masked", "sliding_window", "a window", "empty rows", "gated_deltanet", "pooled_keys", "signed", "steps")


@pytest.mark.parametrize("name", TILED)
@torch.no_grad()
def test_the_mask_has_to_be_asked_for_the_undecided_keys_of_a_tile_alone(name, small_blocks):
    """Each query of a tile may attend to each other key; a map of transitions is causal, and says which it may not."""
    weights = map_of(name)
    first = weights.shape[3] - weights.shape[2]
    for tile in weights.tiles():
        undecided, mask = {*tile.undecided.tensor().tolist()}, weights.attention.mask
        allowed = mask.allowed(tile.grid).expand(*weights.shape[:2], *tile.weights.shape[2:]).all(0).all(0).all(0)
        hidden = {tile.cols.start + n for n, flag in enumerate(allowed.tolist()) if not flag}
        assert hidden <= undecided <= {*range(tile.cols.start, tile.cols.stop)}
        if name == "gated_deltanet":
            assert undecided == {j for j in range(tile.cols.start, tile.cols.stop) if j > tile.rows.start + first}
