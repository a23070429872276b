"""Profiles and warnings: against NumPy on dense weights, and in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import regard as rg
from damage import DELETED, changed, parts
from exact_maps import exact
from regard.stats import CAVEAT, STATISTICS, findings, profile
from regard.stats.text_reading import plain
from regard.stats.warnings import COPY, SPECIAL, UNIFORM
from regard.types import HeadTable, LayerTable, TextReading


def weights_of(attention=None, batch=1, heads=3, length=9, scale=1.0):
    q, k, v = (scale * torch.randn(batch, heads, length, 4) for _ in range(3))
    return (attention or rg.Attention())(q, k, v).weights


TOKENS = ["[CLS]", *"abcdefg", "[SEP]"]
MASKS = {"none": None, "causal": rg.causal(), "window": rg.causal() & rg.window(3)}


def dense_statistics(w, allowed, special):
    """The definitions, in NumPy, on (heads, n, n) weights."""
    n = w.shape[-1]
    i, j = np.indices((n, n))
    logs = np.log(w, out=np.zeros_like(w), where=w > 0)
    entropy = -(w * logs).sum(-1)
    counts = allowed.sum(-1)
    choice = counts > 1
    beside = np.delete(w, [0, *special], axis=-1)
    left = beside.sum(-1, keepdims=True)
    shares = np.divide(beside, left, out=np.zeros_like(beside), where=left > 0)
    elsewhere = -(beside * np.log(shares, out=np.zeros_like(shares), where=shares > 0)).sum(-1)
    return {
        "entropy": entropy.mean(-1),
        "evenness": (entropy[:, choice] / np.log(counts[choice])).mean(-1),
        "reach": (w * np.abs(i - j)).sum(-1).mean(-1),
        "special": w[..., special].sum(-1).mean(-1),
        "first": w[..., 0].mean(-1),
        "elsewhere": elsewhere.mean(-1),
        "previous": (w * (j == i - 1)).sum(-1).mean(-1),
        "next": (w * (j == i + 1)).sum(-1).mean(-1),
        "itself": (w * (j == i)).sum(-1).mean(-1),
    }


@pytest.mark.parametrize("mask", MASKS)
def test_statistics_are_their_definitions(mask, small_blocks):
    weights = weights_of(rg.Attention(mask=MASKS[mask]))
    dense = weights.dense()[0].double().numpy()
    i, j = np.indices((9, 9))
    allowed = {"none": i == i, "causal": j <= i, "window": (j <= i) & (j > i - 3)}[mask]
    expected = dense_statistics(dense, allowed, [0, 8])
    values = profile({"layer": weights}, TOKENS).layers[0].values
    assert set(values) == set(expected) == {statistic.name for statistic in STATISTICS}
    for name, value in expected.items():
        assert values[name].dtype == torch.float32
        np.testing.assert_allclose(values[name], value, atol=1e-5, err_msg=name)


def test_links_received_and_similarity_are_their_definitions(small_blocks):
    weights = weights_of()
    dense = weights.dense()[0].double().numpy()
    layer = profile({"layer": weights}, TOKENS, num_links=3).layers[0]
    np.testing.assert_allclose(layer.received, dense.sum(1), atol=1e-5)
    np.testing.assert_allclose(layer.links.weights, -np.sort(-dense, -1)[..., :3], atol=1e-6)
    np.testing.assert_array_equal(layer.links.keys, np.argsort(-dense, -1)[..., :3])
    flat = dense.reshape(3, -1)
    norms = np.linalg.norm(flat, axis=1)
    np.testing.assert_allclose(layer.similarity, flat @ flat.T / np.outer(norms, norms), atol=1e-5)
    query, key = np.unravel_index(dense[1].argmax(), (9, 9))
    strongest = layer.strongest(1)
    assert (strongest.query, strongest.key) == (query, key)
    assert strongest.weight == pytest.approx(dense[1].max(), abs=1e-6)


def test_a_batch_entry_is_the_text_alone():
    weights = weights_of(batch=2)
    second = weights.select(torch.tensor([1]), torch.arange(3))
    of_batch = profile({"layer": weights}, TOKENS, batch=1).layers[0]
    alone = profile({"layer": second}, TOKENS).layers[0]
    for name, values in alone.values.items():
        torch.testing.assert_close(of_batch.values[name], values)


def test_closed_forms_of_uniform_and_identity():
    n = 9
    layer = profile({"layer": exact([np.full((n, n), 1 / n), np.eye(n)])}, TOKENS).layers[0]
    entropy, evenness, itself = (layer.values[name].tolist() for name in ("entropy", "evenness", "itself"))
    assert entropy == pytest.approx([math.log(n), 0], abs=1e-6)
    assert evenness == pytest.approx([1, 0], abs=1e-6)
    assert itself == pytest.approx([1 / n, 1], abs=1e-6)
    assert layer.values["reach"].tolist() == pytest.approx([(n * n - 1) / (3 * n), 0], abs=1e-5)


def test_a_uniform_causal_row_is_even_though_its_first_query_has_one_key():
    x = torch.zeros(1, 1, 9, 4)
    weights = rg.Attention(mask=rg.causal())(x, x, x).weights
    result = profile({"layer": weights}, TOKENS)
    assert result.layers[0].values["evenness"].item() == pytest.approx(1.0, abs=1e-6)
    assert [finding.kind for finding in findings(result)] == ["uniform"]


def test_a_single_token_has_no_evenness_and_no_warning_of_it():
    x = torch.zeros(1, 1, 1, 4)
    result = profile({"layer": rg.Attention()(x, x, x).weights}, ["a"])
    assert result.layers[0].values["evenness"].item() == 0
    assert findings(result) == []


@pytest.mark.parametrize("mask", [None, rg.causal()], ids=["none", "causal"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_text_of_one_to_three_tokens_says_nothing_of_alike_heads(length, mask):
    x = torch.randn(1, 1, length, 4).expand(1, 3, length, 4)
    q, k = 0.5 * x, x + 0.01 * torch.randn(1, 3, length, 4)
    result = profile({"layer": rg.Attention(mask=mask)(q, k, k).weights}, list("abc")[:length])
    assert not any(finding.kind == "copies" for finding in findings(result))


def test_one_query_with_two_keys_is_not_uniform_by_chance():
    x = torch.zeros(1, 1, 2, 4)
    result = profile({"layer": rg.Attention(mask=rg.causal())(x, x, x).weights}, ["a", "b"])
    assert findings(result) == []


def test_heads_alike_because_they_rest_on_the_first_token_say_so():
    resting = np.full((2, 9, 9), 0.02)
    resting[:, :, 0] = 0.84
    (copies,) = findings(profile({"layer": exact(resting)}, list("abcdefghi")))
    assert copies.kind == "copies" and "most of its weight on the first token, which alone" in copies.sentence


def test_the_largest_weights_are_measured_without_the_first_token():
    rows = np.full((2, 9, 9), 0.01)
    rows[0, :, 0], rows[1, :, 2] = 0.92, 0.5
    rows[1, :, 0] = 0.43
    maps = {"layer": exact(rows / rows.sum(-1, keepdims=True))}
    best = TextReading.of("text", maps, list("abcdefghi")).notable(6, 2)
    assert (best[0].head, best[0].link.key) == (1, 2) and all(link.link.key for link in best)
    assert best[0].link.weight == pytest.approx(0.5, abs=1e-6)
    across = TextReading.of("text", maps, list("abcdefghi"), queries=list("ABCDEFGHI")).notable(6, 1)
    assert across[0].link.key == 0, "the first word of a source is no place to rest"


def test_findings_name_the_heads_that_were_made_for_them():
    n, uniform, previous = 9, np.full((9, 9), 1 / 9), np.eye(9, k=-1) + np.diag([1.0] + [0] * 8)
    resting = np.zeros((n, n))
    resting[:, 0] = 1
    found = findings(profile({"layer": exact([uniform, previous, resting, previous])}, TOKENS))
    assert [(f.kind, f.heads) for f in found] == [("uniform", (0,)), ("special", (2,)), ("copies", (1, 3))]
    assert found[0].number > UNIFORM and found[1].number > SPECIAL and found[2].number > COPY
    for finding in found:
        assert finding.sentence.startswith(f"L0.H{finding.heads[0]} ")
    assert "not why" in CAVEAT


def test_copies_are_grouped_through_one_another():
    base = torch.rand(5, 5).softmax(-1)
    weights = exact(torch.stack([base, torch.eye(5).double(), base, base]))
    copies = [f for f in findings(profile({"layer": weights}, list("abcde"))) if f.kind == "copies"]
    assert [f.heads for f in copies] == [(0, 2, 3)]


def test_heads_of_one_layer_share_a_warning():
    x = torch.zeros(1, 3, 9, 4)
    found = findings(profile({"layer": rg.Attention()(x, x, x).weights}, list("abcdefghi")))
    assert [(f.kind, f.heads) for f in found] == [("uniform", (0, 1, 2)), ("copies", (0, 1, 2))]
    assert found[0].sentence.startswith("L0.H0, L0.H1 and L0.H2 give all tokens nearly the same weight")


def test_the_strongest_link_is_one_of_a_query_with_a_choice():
    layer = profile({"layer": weights_of(rg.Attention(mask=rg.causal()))}, TOKENS).layers[0]
    assert all(layer.strongest(head).query > 0 for head in range(3))


def test_ordinary_text_gives_no_warning():
    assert findings(profile({"layer": weights_of(scale=3.0)}, list("abcdefghi"))) == []


def test_the_table_has_a_line_for_every_head():
    result = profile({"one": weights_of(), "two": weights_of()}, TOKENS)
    lines = result.table().splitlines()
    assert len(lines) == 1 + 6 and lines[0].split()[:3] == ["layer", "head", "entropy"]
    assert lines[4].split()[:2] == ["1", "0"]


def test_a_reading_says_what_a_word_looks_at():
    rows = np.full((9, 9), 0.05)
    rows[4] = [0, 0, 0.7, 0.3, 0, 0, 0, 0, 0]
    reading = TextReading.of("text", {"layer": exact([rows / rows.sum(-1, keepdims=True)])}, TOKENS)
    pieces = TextReading.of("text", {"layer": weights_of(length=4)}, ["su", "##it", "it", "##em"])
    assert pieces.find("it") is None and pieces.find("suit") == 0 and pieces.find("item") == 2
    assert reading.find("D") == 4 and reading.find("de") == 4 and reading.find("nothing") is None
    assert [key for key, _ in reading.top(4, 0, 2)] == [2, 3]
    (notable,) = reading.notable(4, 1)
    assert (notable.link.key, round(notable.link.weight, 6)) == (2, 0.7)


def test_a_word_does_not_begin_at_a_token_that_is_only_a_prefix():
    reading = TextReading.of("text", {"layer": weights_of(length=4)}, ["▁", "it", "is", "##it"])
    assert reading.occurrences("it") == [1] and reading.find("it") == 1


def notable_keys(rows, **tokens):
    reading = TextReading.of("text", {"layer": exact([np.asarray(rows) / np.sum(rows, -1, keepdims=True)])}, **tokens)
    return [reading.notable(query)[0].link.key for query in range(len(rows))]


def test_neighbors_are_those_of_the_queries_position():
    rows = np.ones((2, 7))  # the queries are tokens 5 and 6
    rows[0, [5, 1]], rows[1, [5, 2]] = (9, 5), (9, 5)
    assert notable_keys(rows) == [1, 2]


def test_tokens_of_another_text_are_no_neighbors():
    assert notable_keys(np.eye(4) + 0.01, tokens=list("abcd"), queries=list("wxyz")) == [0, 1, 2, 3]


@pytest.mark.parametrize("token", ["##It", "Ġit", "▁it", "it "])
def test_marks_of_tokenizers_are_no_part_of_a_word(token):
    assert plain(token) == "it"


@pytest.mark.parametrize(
    ("maps", "tokens", "options", "said"),
    [
        ({}, [], {}, "there are no maps"),
        ({"layer": 9}, list("abc"), {}, "9 queries and 9 keys, but 3 query tokens"),
        ({"layer": 9}, TOKENS, {"batch": 1}, "batch 1 is out of range"),
    ],
)
def test_bad_input_is_refused(maps, tokens, options, said):
    with pytest.raises(rg.RegardError, match=said):
        profile({name: weights_of(length=n) for name, n in maps.items()}, tokens, **options)


def test_an_unknown_statistic_is_refused():
    with pytest.raises(rg.RegardError, match="no statistic 'entropie'"):
        profile({"layer": weights_of()}, TOKENS).values("entropie")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_statistics_do_not_follow_the_default_dtype(dtype):
    weights = weights_of(rg.Attention(mask=rg.causal()))
    expected = profile({"layer": weights}, TOKENS).layers[0].values
    torch.set_default_dtype(dtype)
    try:
        found = profile({"layer": weights}, TOKENS).layers[0].values
    finally:
        torch.set_default_dtype(torch.float32)
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values)


def test_a_damaged_table_is_refused_when_it_is_read():
    """Every list, number and name of the data, changed by itself: refused, or the table prints and merges."""
    table = HeadTable.of(profile({"layer": weights_of()}, TOKENS))
    refused = 0
    for path in parts(table.to_json()):
        for wrong in (None, -1, [], {}, "x", 0.5, [[1.0]], DELETED):
            try:
                read = HeadTable.from_json(changed(table.to_json(), path, wrong))
            except rg.RegardError as error:
                refused += "are not a table" in str(error)
                continue
            assert read.table() and read._repr_html_()
            try:
                read.merge(table)
            except rg.RegardError as error:
                assert "differ in layers" in str(error)
    assert refused > 500


def test_a_table_of_vectors_alone_and_a_table_of_nothing_are_printed():
    """Statistics with several numbers for each head have no column; the heads have their lines all the same."""
    vectors = {"by offset": torch.rand(2, 3)}
    table = HeadTable([LayerTable("a", vectors, {"by offset": torch.ones(2)}, 4)])
    assert table.table().split("\n") == ["layer head", "    4    0", "    4    1"]
    assert table._repr_html_().count("<tr>") == 3
    nothing = HeadTable([])
    assert nothing.table() == "layer head" and nothing._repr_html_().count("<tr>") == 1
    with pytest.raises(rg.RegardError, match="there is no statistic 'entropy'"):
        nothing.values("entropy")
