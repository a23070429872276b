"""Search: against every sequence there is, against beam search in plain Python, and against teacher forcing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import regard as rg
from decoding import Table, Traced, exhaustive, plain_beam
from regard.base.errors import RegardError
from regard.lab import SYSTEMS, build
from regard.lab.data.vocabulary import BOS, EOS, PAD
from regard.lab.decoding.alignment import attention_of
from regard.lab.decoding.search import Hypothesis, Search, beam_search, evaluating, greedy, length_penalty

SOURCES = [[4, 5, 1, 3], [5, 3], [4, 4, 3], [5, 1, 4, 4, 5, 3]]
ALPHAS = [0.0, 0.6, 1.0, 2.0, -0.5]


def batch(sources, padding=0):
    width = max(map(len, sources)) + padding
    return torch.tensor([[*source, *[PAD] * (width - len(source))] for source in sources])


def like(found: Hypothesis, expected: tuple[float, float, tuple[int, ...]]) -> bool:
    score, total, tokens = expected
    close = math.isclose(found.score, score, rel_tol=1e-9) and math.isclose(found.log_prob, total, rel_tol=1e-9)
    return found.tokens == tokens and found.ended and close


def alike(results, others) -> bool:
    """Whether two searches give the same hypotheses; sums over batches of another shape differ in the last digits."""
    return len(results) == len(others) and all(
        len(hypotheses) == len(expected)
        and all(
            one.tokens == other.tokens
            and one.ended == other.ended
            and math.isclose(one.score, other.score, rel_tol=1e-12)
            and math.isclose(one.log_prob, other.log_prob, rel_tol=1e-12)
            for one, other in zip(hypotheses, expected, strict=True)
        )
        for hypotheses, expected in zip(results, others, strict=True)
    )


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("seed", range(3))
def test_a_beam_that_is_wide_enough_finds_what_trying_everything_finds(seed, alpha):
    model = Table(6, seed=seed)
    found = beam_search(model, batch(SOURCES), beam=300, n_best=6, max_length=5, length_penalty=alpha)
    for source, hypotheses in zip(SOURCES, found, strict=True):
        expected = exhaustive(model, source, alpha, 0, 5)[:6]
        assert len(hypotheses) == 6
        assert all(like(*each) for each in zip(hypotheses, expected, strict=True))


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("beam", [1, 2, 3, 5])
def test_search_is_the_plain_beam_search_without_early_stop(beam, alpha):
    for seed in range(8):
        model = Table(7, seed=seed)
        found = beam_search(model, batch(SOURCES), beam=beam, max_length=9, length_penalty=alpha)
        for source, (best,) in zip(SOURCES, found, strict=True):
            ended = plain_beam(model, source, beam, alpha, 9)
            assert like(best, ended[0]) if ended else not best.ended


@pytest.mark.parametrize("options", [{}, {"min_length": 3}, {"no_repeat": 2}, {"max_length": 4}])
def test_beam_of_one_is_greedy_and_greedy_takes_the_best_token(options):
    model = Table(9, seed=3)
    found = greedy(model, batch(SOURCES), **options)
    assert found == beam_search(model, batch(SOURCES), beam=1, **options)
    if not options:
        for source, (hypothesis,) in zip(SOURCES, found, strict=True):
            output = [*hypothesis.tokens, EOS] if hypothesis.ended else [*hypothesis.tokens]
            for t, token in enumerate(output):
                at = {other: model.log_prob(source, [*output[:t], other]) for other in range(9)}
                assert token == max((other for other in at if other not in (PAD, BOS)), key=at.__getitem__)


@pytest.mark.parametrize("beam", [1, 4])
def test_results_do_not_depend_on_batch_order_or_padding(beam):
    model = Table(8, seed=5)
    search = Search(beam=beam, n_best=beam, no_repeat=3)
    together = search(model, batch(SOURCES))
    assert alike(together, [search(model, batch([source]))[0] for source in SOURCES])
    assert alike(together, search(model, batch(SOURCES, padding=3)))
    assert alike(together[::-1], search(model, batch(SOURCES[::-1])))
    assert alike(together, search(model, batch(SOURCES)))


def test_minimum_and_maximum_length():
    model = Table(6, seed=1)
    for source, (best,) in zip(
        SOURCES, beam_search(model, batch(SOURCES), beam=200, min_length=2, max_length=4), strict=True
    ):
        assert like(best, exhaustive(model, source, 1.5, 2, 4)[0])
    for hypotheses in beam_search(model, batch(SOURCES), beam=3, n_best=3, min_length=5, max_length=6):
        assert all(len(each.tokens) in (5, 6) and each.ended == (len(each.tokens) == 5) for each in hypotheses)
        assert sorted(hypotheses, key=lambda h: (not h.ended, -h.score)) == list(hypotheses)
    assert all(
        len(best.tokens) <= 2 * len(source) + 10
        for source, (best,) in zip(SOURCES, greedy(model, batch(SOURCES)), strict=True)
    )


@pytest.mark.parametrize("n", [1, 2])
def test_no_n_gram_comes_twice(n):
    model = Table(6, seed=2)

    def allowed(tokens):
        grams = [tokens[i : i + n] for i in range(len(tokens) - n + 1)]
        return len(grams) == len(set(grams))

    for source, (best,) in zip(
        SOURCES, beam_search(model, batch(SOURCES), beam=300, max_length=5, no_repeat=n), strict=True
    ):
        assert like(best, exhaustive(model, source, 1.5, 0, 5, allowed)[0])


def test_where_every_continuation_is_barred_the_hypothesis_is_cut():
    found = beam_search(Table(6), batch(SOURCES), beam=2, n_best=2, min_length=20, no_repeat=1, max_length=30)
    for hypotheses in found:
        assert hypotheses and all(sorted(each.tokens) == [1, 4, 5] and not each.ended for each in hypotheses)


def test_the_length_penalty_is_that_of_the_paper():
    assert length_penalty(10, 0.6) == pytest.approx((15 / 6) ** 0.6)
    model = Table(7, seed=4)
    for (best,) in beam_search(model, batch(SOURCES), length_penalty=0.6):
        assert best.score == pytest.approx(best.log_prob / ((5 + len(best.tokens) + best.ended) / 6) ** 0.6)


def test_work_shrinks_as_hypotheses_end():
    model, rows = Table(7, seed=0), []
    step = model.step
    model.step = lambda memory, state, tokens: (rows.append(len(tokens)), step(memory, state, tokens))[1]
    beam_search(model, batch(SOURCES), beam=4)
    assert rows[0] == len(SOURCES) and max(rows) <= 4 * len(SOURCES)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rows[1:]))


def test_equal_scores_are_settled_alike_by_greedy_and_by_a_beam_of_one():
    model = Table(9)
    with torch.no_grad():
        model.table.zero_()
        model.shift.zero_()
    assert greedy(model, batch(SOURCES)) == beam_search(model, batch(SOURCES), beam=1)


def test_training_mode_is_put_back():
    model = Table(6).train()
    model.frozen = torch.nn.Dropout().eval()
    with evaluating(model):
        assert not model.training
    assert model.training and not model.frozen.training


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beam": 0}, "beam must be at least 1"),
        ({"beam": 2, "n_best": 3}, "a beam of 3 or more"),
        ({"min_length": 4, "max_length": 4}, "leaves no room"),
        ({"no_repeat": -1}, "no_repeat must be an integer of at least 0"),
    ],
)
def test_settings_that_cannot_be(options, said):
    with pytest.raises(RegardError, match=said):
        beam_search(Table(6), batch(SOURCES), **options)


def test_sources_that_cannot_be():
    model = Table(6)
    with pytest.raises(RegardError, match="ids are 3 to 9"):
        beam_search(model, torch.tensor([[9, 3]]))
    with pytest.raises(RegardError, match=r"got \(2,\) of torch\.int64"):
        greedy(model, torch.tensor([4, 3]))
    with torch.no_grad():
        model.shift.fill_(float("nan"))
    with pytest.raises(RegardError, match="not finite"):
        greedy(model, batch(SOURCES))


# Every real system: maps and scores of the beam equal those of teacher forcing

MODELS = {name: (name, {}) for name in SYSTEMS}
MODELS |= {
    "bahdanau, gru, 2 layers": ("bahdanau", {"cell": "gru", "layers": 2}),
    "bahdanau, 2 heads": ("bahdanau", {"attention": "multi_head", "bridge_heads": 2}),
    "luong without feeding": ("luong_general", {"input_feeding": False}),
    "transformer, post, swiglu": ("transformer", {"norm": "post", "activation": "swiglu"}),
    "transformer, shared keys": ("transformer", {"num_key_value_heads": 1, "positions": "rope"}),
    "transformer, alibi": ("transformer", {"positions": "alibi"}),
    "transformer, t5": ("transformer", {"positions": "t5"}),
    "transformer, learned": ("transformer", {"positions": "learned"}),
    "transformer, window": ("transformer", {"attention": {"decoder": "sliding_window"}}),
}


def real_model(name, options):
    heads = {"num_heads": 2} if SYSTEMS[name].has_heads else {}
    model = build(name, source_size=11, target_size=9, width=8, **heads, **options).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # fresh weights look everywhere and say everything nearly alike
    return model


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def model(request):
    return real_model(*request.param)


@pytest.mark.parametrize("search", [Search(beam=1, max_length=7), Search(beam=4, n_best=4, max_length=7)], ids=str)
def test_what_is_seen_in_the_beam_is_what_teacher_forcing_sees(model, search):
    sources = [[4, 10, 7, 3], [9, 3], [5, 6, 8, 4, 4, 3]]
    traced = Traced(model)
    found = search(traced, batch(sources, padding=2))
    for number, (source, hypotheses) in enumerate(zip(sources, found, strict=True)):
        for hypothesis in hypotheses:
            said = [BOS, *hypothesis.tokens][: len(hypothesis.tokens) + hypothesis.ended]
            maps = attention_of(model, torch.tensor([source]), torch.tensor([said]))
            assert not maps or model.cross_attention in maps
            for name, seen in maps.items():
                weights = seen.dense()[0]
                if (number, name) in traced.rows:
                    close(traced.rows[number, name][:, : len(source), : len(source)], weights)
                    continue
                for t in range(len(said)):
                    row = traced.rows[number, name, tuple(said[: t + 1])]
                    most = min(row.shape[1], weights.shape[2])
                    close(row[:, :most], weights[:, t, :most])
                    assert not row[:, most:].any() and not weights[:, t, most:].any()


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_scores_are_those_of_teacher_forcing_in_any_batch_and_padding(model):
    sources = [[4, 10, 7, 3], [9, 3], [5, 6, 8, 4, 4, 3]]
    search = Search(beam=3, n_best=3, max_length=8)
    found = search(model, batch(sources, padding=3))
    for source, hypotheses in zip(sources, found, strict=True):
        alone = search(model, torch.tensor([source]))[0]
        assert [each.tokens for each in alone] == [each.tokens for each in hypotheses]
        for hypothesis in hypotheses:
            output = [*hypothesis.tokens, EOS] if hypothesis.ended else [*hypothesis.tokens]
            with torch.no_grad():
                hidden = model(torch.tensor([source]), torch.tensor([[BOS, *output[:-1]]]))
                steps = model.logits(hidden)[0].log_softmax(-1)
            expected = float(steps[range(len(output)), output].sum())
            assert hypothesis.log_prob == pytest.approx(expected, abs=1e-9)


def test_beam_of_one_is_greedy_for_real_systems(model):
    source = batch([[4, 10, 7, 3], [9, 3]])
    assert [h.tokens for (h,) in greedy(model, source)] == [h.tokens for (h,) in beam_search(model, source, beam=1)]


@pytest.mark.parametrize("name", ["bahdanau", "transformer"])
def test_watching_a_search_never_joins_steps_whose_rows_were_reordered(name):
    """Greedy steps are one map, equal to teacher forcing; in a beam every call is what the model did in it."""
    model = real_model(name, {})
    source = batch([[4, 10, 7, 3], [9, 3]])
    with rg.watch(model) as seen:
        (first, _) = greedy(model, source, min_length=4, max_length=5)
    maps = attention_of(model, source[:1], torch.tensor([[BOS, *first[0].tokens[:4]]]))
    assert maps
    for path in maps:
        close(seen[path].dense()[0, :, : maps[path].shape[2], : maps[path].shape[3]], maps[path].dense()[0])

    traced, steps = Traced(model), {}
    traced.on_attention = lambda module, weights: steps.setdefault(module, []).append(weights.dense())
    with rg.watch(model) as seen:
        Search(beam=4, max_length=7)(traced, source)
    assert steps
    for module, each in steps.items():
        rows = [row for weights in seen.calls(traced.names[module]) for row in weights.dense().unbind(2)]
        for row, one in zip(rows, (part for weights in each for part in weights.unbind(2)), strict=True):
            close(row[..., : one.shape[-1]], one)
