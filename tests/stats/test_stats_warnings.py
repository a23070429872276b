"""Warnings, each on a model broken on purpose, and none on one that is whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import regard as rg
from regard.stats import findings, mask_findings, profile

B, H, N = 2, 3, 9
LENGTHS = [9, 5]


def maps(mask=None, scale=2.0, queries=N, **change):
    q, k, v = (scale * torch.randn(B, H, n, 4) for n in (queries, N, N))
    return {"layer": rg.Attention(mask=mask)(change.get("q", q), change.get("k", k), v).weights}


def kinds(found):
    return [finding.kind for finding in found]


def test_a_whole_model_gives_no_warning(small_blocks):
    assert mask_findings(maps(rg.causal() & rg.padding(LENGTHS)), causal=True, real=LENGTHS) == []
    assert mask_findings(maps(rg.padding(LENGTHS)), real=torch.arange(N) < torch.tensor(LENGTHS)[:, None]) == []
    reversed_array = np.array(LENGTHS[::-1])[::-1]  # no tensor has its strides
    assert mask_findings(maps(rg.padding(LENGTHS)), real=reversed_array) == []
    assert findings(profile(maps(), list("abcdefghi"))) == []


def test_broken_on_purpose_scores_without_scale_average_the_whole_layer():
    result = profile(maps(q=torch.zeros(B, H, N, 4)), list("abcdefghi"))
    found = findings(result)[0]
    assert (found.kind, found.heads) == ("uniform", (0, 1, 2)) and "all heads of the layer" in found.sentence


def test_broken_on_purpose_heads_collapse():
    q, k = (2 * torch.randn(B, 1, N, 4).expand(B, H, N, 4) for _ in range(2))
    found = findings(profile(maps(q=q, k=k), list("abcdefghi")))
    assert [(f.kind, f.heads) for f in found] == [("copies", (0, 1, 2))] and found[0].number > 0.99


def test_broken_on_purpose_one_mask_for_the_whole_batch(small_blocks):
    too_long, too_short = maps(rg.padding([9, 9])), maps(rg.padding([5, 5]))
    (padding,) = mask_findings(too_long, real=LENGTHS)
    assert padding.kind == "padding" and padding.heads == (0, 1, 2) and "one mask seems to be used" in padding.sentence
    w = too_long["layer"].dense()[1, :, :5, 5:].sum(-1).max()
    assert padding.number == pytest.approx(float(w), abs=1e-6)
    (unseen,) = mask_findings(too_short, real=LENGTHS)
    assert (unseen.kind, unseen.number) == ("unseen", 4.0) and "one mask seems to be used" in unseen.sentence


def test_broken_on_purpose_padding_of_queries_instead_of_keys():
    real = torch.arange(N) < torch.tensor(LENGTHS)[:, None]
    transposed = rg.mask_tensor(real[:, None, :, None].expand(B, 1, N, N))
    assert "padding" in kinds(mask_findings(maps(transposed), real=real))


def test_broken_on_purpose_a_future_that_leaks(small_blocks):
    late = rg.mask_tensor((torch.arange(N) <= torch.arange(N)[:, None] + 1)[None, None])
    broken = maps(late)
    (leak,) = mask_findings(broken, causal=True)
    future = torch.ones(N, N).triu(1)
    assert leak.kind == "leak" and leak.heads == (0, 1, 2)
    assert leak.number == pytest.approx(float((broken["layer"].dense() * future).sum(-1).max()), abs=1e-6)
    assert "L0.H0, L0.H1 and L0.H2 put up to" in leak.sentence


def test_a_chunk_after_a_cache_is_no_leak():
    assert mask_findings(maps(rg.causal(), queries=4), causal=True, real=[9, 9]) == []


def test_only_the_heads_that_leak_are_named():
    allowed = torch.ones(1, H, N, N, dtype=torch.bool).tril()
    allowed[:, 1] = True
    (leak,) = mask_findings(maps(rg.mask_tensor(allowed)), causal=True)
    assert leak.heads == (1,) and leak.sentence.startswith("L0.H1 puts")


@pytest.mark.parametrize("mask", [None, rg.causal()], ids=["none", "causal"])
def test_heads_that_rest_on_the_first_token_are_named(mask):
    k = torch.zeros(B, H, N, 4)
    k[:, 1, 0] = 20.0
    resting = maps(mask, q=torch.ones(B, H, N, 4), k=k)
    named = [f for f in findings(profile(resting, list("abcdefghi"))) if f.kind == "sink"]
    assert [f.heads for f in named] == [(1,)] and named[0].number == pytest.approx(1.0, abs=1e-5)
    special = findings(profile(resting, ["[CLS]", *"bcdefghi"]))
    assert "special" in kinds(special) and "sink" not in kinds(special)


@pytest.mark.parametrize("real", [torch.arange(N) > 3, torch.arange(N) < 6], ids=["left", "right"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_queries_without_keys_hide_no_sink(real, causal):
    """Padding, on either side, has neither keys nor weight; the first token is the first that is real."""
    pairs = real[:, None] & real & (torch.ones(N, N, dtype=torch.bool).tril() if causal else True)
    k = torch.zeros(B, H, N, 4)
    k[:, 1, int(real.int().argmax())] = 20.0
    resting = maps(rg.mask_tensor(pairs), q=torch.ones(B, H, N, 4), k=k)
    named = [f for f in findings(profile(resting, list("abcdefghi"))) if f.kind == "sink"]
    assert [f.heads for f in named] == [(1,)] and named[0].number == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("real", [[9.0, 5.0], [9, 5, 3], torch.ones(2, 4, dtype=torch.bool)])
def test_claims_that_do_not_fit_are_refused(real):
    with pytest.raises(rg.RegardError, match=r"integer lengths or booleans of shape|a list of integers"):
        mask_findings(maps(), real=real)


@pytest.mark.parametrize(("num_words", "expected"), [(2, []), (3, []), (4, [(0, 1)])])
def test_heads_that_rest_on_special_tokens_need_words_to_count_as_alike(num_words, expected):
    """Two heads that put most of their weight on [SEP]: with n tokens, n (n - 3) weights on words are free."""
    n = num_words + 2
    tokens = ["[CLS]", *"abcd"[:num_words], "[SEP]"]
    weights = torch.rand(2, n, n) / n + 2 * torch.nn.functional.one_hot(torch.tensor(n - 1), n)
    (weights := weights / weights.sum(-1, keepdim=True)).log_()
    q = torch.eye(n).expand(1, 2, n, n)
    scores = (n**0.5 * weights).mT[None]
    result = profile({"layer": rg.Attention()(q, scores, scores).weights}, tokens)
    found = [finding.heads for finding in findings(result) if finding.kind == "copies"]
    assert found == expected
    plain = profile({"layer": rg.Attention()(q, scores, scores).weights}, list("uvwxyz")[:n])
    assert [f.heads for f in findings(plain) if f.kind == "copies"] == [(0, 1)], "without special tokens they are alike"


def shared(own, mask=None, num_heads=4, n=16):
    """Heads whose queries and keys are `own` parts random and 1 - own parts common to all heads."""
    q, k = (2 * own * torch.randn(1, num_heads, n, 8) + 2 * (1 - own) * torch.randn(1, 1, n, 8) for _ in range(2))
    weights = rg.Attention(mask=mask)(q, k, k).weights
    return findings(profile({"layer": weights}, [f"t{i}" for i in range(n)]))


def test_heads_that_treat_every_query_alike_have_collapsed():
    (collapse,) = shared(own=0.3)
    assert (collapse.kind, collapse.heads) == ("collapse", (0, 1, 2, 3)) and 0.45 < collapse.number < 0.95
    assert shared(own=1.0) == [] and "collapse" not in kinds(shared(own=0.3, num_heads=2))


def test_a_causal_mask_makes_the_rows_of_heads_alike_which_is_no_collapse():
    weights = rg.Attention(mask=rg.causal())(*(0.5 * torch.randn(1, 4, 20, 8) for _ in range(3))).weights
    result = profile({"layer": weights}, [f"t{i}" for i in range(20)])
    assert result.layers[0].agreement.min() > 0.45 and "collapse" not in kinds(findings(result))


def test_heads_that_give_the_same_keys_weight_have_not_collapsed():
    """Each key has a common advantage, whatever the query: maps are similar, but not by query."""
    n = 16
    q, k = (torch.randn(1, 4, n, 8) for _ in range(2))
    q[..., -1], k[..., -1] = 3.0, 2 * torch.randn(n)
    weights = rg.Attention()(q, k, k).weights
    result = profile({"layer": weights}, [f"t{i}" for i in range(n)])
    others = ~torch.eye(4, dtype=torch.bool)
    assert result.layers[0].similarity[others].mean() > 0.5 and "collapse" not in kinds(findings(result))


def test_random_heads_rarely_count_as_collapsed():
    rows = torch.distributions.Dirichlet(torch.full((11,), 0.5)).sample((200, 3, 11))
    centered = (rows - rows.mean(-2, keepdim=True)).flatten(2)
    cosines = torch.nn.functional.normalize(centered, dim=-1) @ torch.nn.functional.normalize(centered, dim=-1).mT
    assert ((cosines.sum((1, 2)) - 3) / 6).max() < 0.45


@pytest.mark.parametrize(("scale", "size", "expected"), [(1.0, 1.0, ["scale"]), (None, 1.0, []), (1.0, 0.3, [])])
def test_a_factor_that_is_missing_saturates_the_softmax(scale, size, expected):
    """With weights that are smaller, as in T5, a factor of 1 is right."""
    q, k = (size * torch.randn(B, H, N, 64) for _ in range(2))
    weights = rg.Attention(rg.Dot(scale=scale))(q, k, k).weights
    found = [finding for finding in findings(profile({"layer": weights}, list("abcdefghi"))) if finding.kind == "scale"]
    assert kinds(found) == expected
    assert all("8.0 times as large" in finding.sentence and finding.heads == (0, 1, 2) for finding in found)


@pytest.mark.parametrize("scale", [None, 0.125])
def test_a_sharp_layer_with_the_usual_factor_is_no_finding(scale):
    weights = rg.Attention(rg.Dot(scale))(*(10 * torch.randn(B, H, N, 64) for _ in range(3))).weights
    assert profile({"layer": weights}, list("abcdefghi")).layers[0].values["evenness"].max() < 0.1
    assert "scale" not in kinds(findings(profile({"layer": weights}, list("abcdefghi"))))


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_findings_of_a_tensor_of_weights_are_those_of_its_map(axes):
    weights = torch.full((1, 2, 8, 8), 1 / 8)
    whole = weights if axes == 4 else weights[0] if axes == 3 else weights[0, 0]
    expected = rg.findings(rg.maps.DenseMap(weights if axes > 2 else weights[:, :1]))
    assert rg.findings(whole) == expected and expected[0].kind == "uniform"


def test_findings_refuse_a_tensor_that_is_no_map():
    with pytest.raises(rg.RegardError, match=r"findings: the weights have shape \(8,\). Expected \(I, J\)"):
        rg.findings(torch.ones(8))


@pytest.mark.parametrize("weights", [torch.full((2, 2), torch.nan), torch.zeros(1, 0, 4, 4), torch.zeros(4, 0)])
def test_findings_refuse_a_tensor_without_usable_numbers(weights):
    with pytest.raises(rg.RegardError, match=r"findings: the weights .* hold (no|NaN)"):
        rg.findings(weights)
