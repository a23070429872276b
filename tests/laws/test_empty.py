"""Empty in, empty out: no batch, no queries, no keys; for every engine, map, statistic, cache and module."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from cataloged import COMPOSITES, SINGLE
from regard.catalog import mechanisms
from regard.catalog.entry import call_tensors
from regard.engine.plan import ENGINES
from regard.nn import (
    Cell,
    Cells,
    CrossAttention,
    MultiHeadAttention,
    RecurrentEncoder,
    Rows,
    Transformer,
    TransformerConfig,
)

EMPTY = [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0), (0, 0, 0), (0, 1, 1), (2, 1, 0)]
every_emptiness = pytest.mark.parametrize("sizes", EMPTY, ids=str)
#: Mechanisms that know a first position, before which queries without a key would stand.
BOUND = {"axial_rope", "bigbird", "learned_positions", "multimodal_rope", "neighborhood", "shared_prefix"}
BOUND |= {"sliding_tiles", "tree"}


@every_emptiness
@pytest.mark.parametrize("name", SINGLE)
def test_a_mechanism_of_nothing_gives_zeros_and_gradients_of_zero(name, sizes):
    B, I, J = sizes
    attention, *inputs = mechanisms()[name].example(batch=B, queries=I, keys=J)
    positions = rg.types.Positions.of(0, I, J) if name in BOUND else None
    q, k, v = (x.requires_grad_() for x in inputs)
    for engine in ("auto", *(ENGINES if name == "multi_head" else ())):
        seen = attention(q, k, v, engine=engine, positions=positions)
        assert seen.output.shape == (*q.shape[:3], v.shape[3]) and not seen.output.any()
        assert seen.weights.shape == seen.weights.dense().shape == (B, q.shape[1], I, J)
        gradients = torch.autograd.grad(seen.output.sum(), (q, k, v))
        assert all(g.shape == x.shape and not g.any() for g, x in zip(gradients, (q, k, v), strict=True))
        plan = rg.plan(q, k, v, attention=attention, engine=engine, positions=positions)
        assert "No pair is scored" in str(plan) and plan.cost.pairs == 0 and not plan.refused and not plan.quadratic
        assert plan.seconds == 0 and plan.engine == ("dense" if engine == "auto" else engine)
        assert plan.requested == (engine != "auto")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not attention(q, k, v, positions=positions).output.any()


@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 40), (2, 40, 0), (2, 0, 0)], ids=str)
@pytest.mark.parametrize("name", COMPOSITES)
def test_a_composite_of_nothing_gives_zeros(name, sizes):
    B, I, J = sizes
    example = mechanisms()[name].example(batch=B, queries=I, keys=J)
    seen = example[0](*example[1:], **call_tensors(*example))
    assert seen.output.shape == (*example[1].shape[:3], example[3].shape[3]) and not seen.output.any()
    assert seen.weights.dense().shape == (B, example[1].shape[1], I, J)


@every_emptiness
@pytest.mark.parametrize(
    "normalizer",
    [
        rg.normalizers.Softmax(),
        rg.normalizers.Softmax(sink=1.0),
        rg.normalizers.Sparsemax(),
        rg.normalizers.TopK(2),
        rg.normalizers.LearnedSink(2),
    ],
)
def test_statistics_of_nothing(normalizer, sizes):
    B, I, J = sizes
    q, k, v = torch.randn(B, 2, I, 4), torch.randn(B, 2, J, 4), torch.randn(B, 2, J, 4)
    weights = rg.Attention(mask=rg.causal(), normalizer=normalizer)(q, k, v).weights
    reductions = (
        rg.maps.Entropy(),
        rg.maps.Distance(),
        rg.maps.MassOn([]),
        rg.maps.KeyTotals(),
        rg.maps.Similarity(),
        rg.maps.Pool(3, 3),
        rg.maps.TopLinks(2),
    )
    entropy, distance, mass, received, similarity, pool, top = weights.summarize(*reductions)
    assert entropy.shape == distance.shape == mass.shape == (B, 2, I) and received.shape == (B, 2, J)
    assert similarity.shape == (B, 2, 2) and pool.shape == (B, 2, min(3, I), min(3, J))
    assert top.keys.shape == (B, 2, I, min(2, J))
    assert not any(x.any() for x in (entropy, distance, mass, received, pool, top.weights))
    assert all(part.shape[:3] == (B, 2, I) for part in weights.row_statistic)
    assert weights.select(torch.arange(B), torch.tensor([1])).shape == (B, 1, I, J)


@pytest.mark.parametrize("engine", ["dense", "fused", "blocked"])
def test_an_empty_row_has_a_log_sum_exp_of_minus_infinity_and_no_remainder(engine):
    x = torch.randn(1, 2, 3, 4)
    logsumexp, remainder = rg.Attention(mask=rg.padding([0]))(x, x, x, engine=engine).weights.row_statistic
    assert logsumexp.isneginf().all() and not remainder.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalizer", [rg.normalizers.Softmax(), rg.normalizers.Sparsemax(), rg.normalizers.TopK(2)])
def test_a_statistic_of_nothing_has_the_dtype_of_any_other(normalizer, dtype):
    attention, q, k = rg.Attention(normalizer=normalizer), *torch.randn(2, 1, 2, 3, 4).to(dtype)
    for some_q, some_k in ((q[:, :, :0], k), (q, k[:, :, :0]), (q[:0], k[:0])):
        of_nothing, of_all = (attention(*x, x[1]).weights.row_statistic for x in ((some_q, some_k), (q, k)))
        assert [x.dtype for x in of_nothing] == [x.dtype for x in of_all]


@pytest.mark.parametrize(
    "bias", [(), rg.ALiBi(2), rg.biases.T5Bias(2), rg.biases.ShawBias(4, 2), rg.biases.TransformerXLBias(2, 4)]
)
@pytest.mark.parametrize(
    ("index", "shape"),
    [
        ((0, 0, slice(2, 2)), (0, 6)),
        ((0, 0, slice(None), slice(4, 4)), (5, 0)),
        (([],), (0, 2, 5, 6)),
        ((slice(0, 0),), (0, 2, 5, 6)),
        ((slice(None), []), (2, 0, 5, 6)),
        ((1, 1, []), (0, 6)),
        ((1, 1, [], []), (0,)),
        ((..., torch.zeros(6, dtype=torch.bool)), (2, 2, 5, 0)),
        ((1, 1, torch.tensor([], dtype=torch.long), 3), (0,)),
    ],
    ids=str,
)
def test_an_empty_choice_of_weights_is_empty(bias, index, shape):
    q, k, v = torch.randn(2, 2, 5, 4), *torch.randn(2, 2, 2, 6, 4)
    weights = rg.Attention(mask=rg.causal(), bias=bias)(q, k, v).weights
    assert weights[index].shape == shape


@every_emptiness
def test_masks_of_nothing(sizes):
    B, I, J = sizes
    q, k, v = torch.randn(B, 2, I, 4), torch.randn(B, 2, J, 4), torch.randn(B, 2, J, 4)
    for mask in (
        rg.padding([J] * B),
        rg.padding(torch.ones(B, J).bool()),
        rg.mask_tensor(torch.ones(B, 1, I, J).bool()),
        rg.mask_tensor(torch.ones(I, J).bool()) & ~rg.window(2),
        rg.documents([]) if I == J == 0 else rg.masks.prefix(3),
        rg.mask_mod(lambda b, h, i, j: i == j) | rg.masks.global_tokens([]),
    ):
        assert not rg.Attention(mask=mask)(q, k, v).weights.dense().any()
        assert "Attention" in repr(rg.Attention(mask=mask))


@pytest.mark.parametrize("mask", [None, rg.causal()], ids=["all", "causal"])
@pytest.mark.parametrize("make", [rg.GrowingCache, lambda: rg.caches.RingCache(9, sinks=1), rg.caches.RecurrentCache])
def test_a_cache_takes_no_tokens_as_none(make, mask):
    """Calls without new keys, or without queries, between others change nothing."""
    pieces = (
        {"score": rg.scores.FeatureScore(), "normalizer": rg.normalizers.SumNormalizer()}
        if make is rg.caches.RecurrentCache
        else {}
    )
    attention, cache = rg.Attention(mask=mask, **pieces), make()
    q, k, v = torch.randn(3, 2, 2, 6, 4, dtype=torch.float64)

    def call(queries, keys, cache):
        return attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], cache=cache)

    nothing = slice(0, 0)
    for queries, keys in ((nothing, nothing), (slice(0, 3), slice(0, 3)), (nothing, slice(3, 5)), (nothing, nothing)):
        seen = call(queries, keys, cache)
        assert (
            seen.output.shape == (*q[:, :, queries].shape[:3], 4)
            and seen.weights.dense().shape[2] == q[:, :, queries].shape[2]
        )
        cache = seen.cache
    whole = attention(q, k, v).output[:, :, 5:]
    torch.testing.assert_close(call(slice(5, 6), slice(5, 6), cache).output, whole)
    if make is not rg.caches.RecurrentCache:  # a query without a new key stands where the last one does
        torch.testing.assert_close(
            call(slice(5, 6), nothing, cache).output, attention(q[:, :, 5:], k[:, :, :5], v[:, :, :5]).output
        )


@every_emptiness
@pytest.mark.parametrize(
    "attention",
    [
        rg.Attention(),
        rg.Attention(mask=rg.causal(), position=rg.RoPE(4)),
        rg.Attention(bias=rg.ALiBi(2), normalizer=rg.normalizers.Sparsemax()),
    ],
    ids=["plain", "causal", "ALiBi"],
)
def test_modules_of_nothing(attention, sizes):
    B, I, J = sizes
    module, x, y = MultiHeadAttention(8, 2, attention=attention), torch.randn(B, I, 8), torch.randn(B, J, 8)
    for mask in (None, rg.padding([J] * B), rg.padding(torch.ones(B, J).bool())):
        output = module(x.requires_grad_(), y, mask=mask).output
        assert output.shape == (B, I, 8) and torch.autograd.grad(output.sum(), x)[0].shape == x.shape
        with rg.watch(module) as seen:
            assert torch.equal(module(x, y, mask=mask).output, output)
        assert seen[0].dense().shape == (B, 2, I, J)
    bridge = CrossAttention(rg.mechanism("bahdanau").build(8, 6, 4), 8, 6)
    assert bridge(x, bridge.keys(torch.randn(B, J, 6))).output.shape == (B, I, 6)
    output, past = module.advance(x)
    assert output.shape == (B, I, 8) and module.advance(torch.randn(B, 1, 8), past)[0].shape == (B, 1, 8)


def test_no_rows_of_a_beam():
    module, none = MultiHeadAttention(8, 2), torch.zeros(0, dtype=torch.long)
    keys = module.keys(torch.randn(3, 4, 8), mask=rg.padding([4, 2, 1]))
    for selected in (keys.select(none), keys.shared(Rows.of(none))):
        assert module(torch.randn(0, 1, 8), selected).output.shape == (0, 1, 8)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rope", "alibi", "t5", "none"])
@every_emptiness
def test_transformers_of_nothing(sizes, positions):
    B, T, S = sizes
    plan = TransformerConfig(8, num_heads=2, positions=positions)
    model = Transformer(plan.encoder(1, vocab_size=9), plan.decoder(1, vocab_size=9))
    source, target = torch.zeros(B, S, dtype=torch.long), torch.zeros(B, T, dtype=torch.long)
    assert model(source, target, rg.padding(torch.ones(B, S).bool())).shape == (B, T, 8)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize(("B", "T"), [(0, 3), (2, 0), (0, 0)])
def test_recurrent_layers_of_nothing(kind, B, T):
    states, final = RecurrentEncoder(6, 8, 2, kind)(torch.randn(B, T, 6), torch.full((B,), T))
    assert states.shape == (B, T, 8) and final.shape == (B, 8) and not final.any()
    cell, cells = Cell(5, 8, kind=kind), Cells(6, 8, layers=2, kind=kind)
    assert cell.whole(torch.randn(B, T, 5), cell.zeros(B)).shape == (B, T, 8)
    assert cells.whole(torch.randn(B, T, 6), cells.first(torch.randn(B, 8))).shape == (B, T, 8)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_row_without_tokens_has_no_last_state(kind):
    """It must not be the last state of the row before."""
    encoder, x = RecurrentEncoder(6, 8, 1, kind).double(), torch.randn(3, 4, 6).double()
    states, final = encoder(x, torch.tensor([4, 0, 2]))
    assert not states[1].any() and not final[1].any()
    for row, length in ((0, 4), (2, 2)):
        alone = encoder(x[row : row + 1, :length], torch.tensor([length]))
        torch.testing.assert_close(final[row : row + 1], alone[1])
        torch.testing.assert_close(states[row : row + 1, :length], alone[0])


def test_top_k_names_the_keys_that_a_row_may_attend_to_and_no_other():
    places = torch.arange(9)
    step = places[:, None] - places
    scores = torch.randn(1, 2, 9, 9).masked_fill((step < 0) | (step >= 3), -torch.inf)
    kept = rg.normalizers.TopK(4).row_statistic(scores, places)[-1].sort(-1).values
    expected = [([-1] * 4 + list(range(max(0, i - 2), i + 1)))[-4:] for i in range(9)]
    assert kept.tolist() == [[expected, expected]]
