"""The first view of the page: the link that leads and the finding cards say what the API's weights say, and no more."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch

import regard as rg
from exact_maps import exact
from pages import TEXT, WORDS, maps_of, reading, told, translation
from regard.types import Role, RoleTable, TextReading
from regard.viewer import Sheet, load_run, save_run
from regard.viewer.findings import cards_of, joined, lead_of, pronouns

N = 12
NAMES = [f"word{n}" for n in range(N)]


def of(rows, tokens=None, roles=None, **layers):
    """A reading of exact weights (heads, n, n) in layer 4; further layers by name."""
    maps = {"layers.4": exact(rows)} | {name: exact(more) for name, more in layers.items()}
    made = TextReading.of("A text", maps, tokens or NAMES[: len(rows[0])])
    return made if roles is None else TextReading(made.title, made.maps, made.profile, RoleTable(roles))


def drawn(heads=2, n=N, seed=0, concentration=1.0):
    return np.random.default_rng(seed).dirichlet([concentration] * n, (heads, n))


def on(*keys, weight=1.0, n=N):
    rows = np.full((n, n), (1 - weight) / (n - len(keys)))
    rows[:, list(keys)] = weight / len(keys)
    return rows


def card(text, kind):
    return next((each for each in cards_of(text, lead_of(text)) if each["kind"] == kind), None)


def said(found):
    return joined(found["sentence"])


# The link that leads


def expected_lead(text, queries, tokens):
    """By brute force over dense maps: the greatest weight on a word that is no neighbor, not first and not special, and
    that is more than twice what the head puts on the same offset from other words.
    """
    dense = torch.stack([weights.dense()[0] for weights in text.maps.values()])  # (layers, H, I, J)
    links = [
        (float(dense[layer, head, i, j]), layer, head, i, j)
        for layer in range(dense.shape[0])
        for head in range(dense.shape[1])
        for i in queries
        for j in range(1, len(tokens))
        if abs(i - j) > 1 and j not in text.profile.special and any(letter.isalnum() for letter in tokens[j])
    ]
    return max(link for link in links if not of_offset(dense, *link))


def of_offset(dense, weight, layer, head, i, j):
    """Whether the mean weight at the same offset over at least 4 other queries is half of this weight or more."""
    others = [float(dense[layer, head, n, n + j - i]) for n in range(dense.shape[2]) if 0 <= n + j - i < dense.shape[3]]
    return len(others) > 4 and (sum(others) - weight) / (len(others) - 1) >= weight / 2


@pytest.mark.parametrize("seed", range(4))
def test_the_pronoun_leads_with_its_strongest_link(seed):
    torch.manual_seed(seed)
    maps = {}
    for name in ("layers.0", "layers.1"):
        q, k = 2 * torch.randn(1, 3, len(WORDS), 8), torch.randn(1, 3, len(WORDS), 8)
        maps[name] = rg.Attention()(q, k, k).weights
    text = TextReading.of("A text", maps, WORDS)
    lead = lead_of(text)
    weight, layer, head, query, key = expected_lead(text, [WORDS.index("it")], WORDS)
    assert (lead["layer"], lead["head"], lead["query"], lead["key"]) == (layer, head, query, key)
    assert lead["weight"] == pytest.approx(weight, rel=1e-5)
    row = text.maps[f"layers.{layer}"].dense()[0, head, query]
    assert [key for key, _ in lead["links"]] == row.argsort(descending=True)[:5].tolist()
    np.testing.assert_allclose([value for _, value in lead["links"]], row.sort(descending=True).values[:5], rtol=1e-5)
    place = f"In layer {layer}, head {head}, “it” puts {weight:.3f} of its weight on “{WORDS[key]}”"
    assert joined(lead["sentence"]).startswith(place)
    assert Sheet.of(text).about["start"] == {"layer": layer, "head": head, "query": query}


def test_without_a_pronoun_a_repeated_word_leads_and_else_any_word():
    tokens = ["[CLS]", "river", "meets", "the", "river", "and", "the", "sea", ".", "[SEP]"]
    text = of(drawn(3, 10, 1, 0.2), tokens)
    lead, (weight, _, head, query, key) = lead_of(text), expected_lead(text, [4], tokens)
    assert (lead["head"], lead["query"], lead["key"]) == (head, 4, key) and query == 4
    assert lead["weight"] == pytest.approx(weight, rel=1e-5)
    assert "“river” (token 4) puts" in joined(lead["sentence"]), "the text has it twice"
    tokens[4] = "lake"
    text = of(drawn(3, 10, 1, 0.2), tokens)
    lead, expected = lead_of(text), expected_lead(text, range(1, 8), tokens)
    assert (lead["weight"], lead["head"], lead["query"], lead["key"]) == (pytest.approx(expected[0]), *expected[2:])


def test_a_link_that_the_offset_of_a_head_explains_does_not_lead():
    """Of "the dog and she ran" a head of the token two places before once led with "she" -> "dog", 75 %."""
    tokens = ["[CLS]", "my", "dog", "and", "she", "ran", "to", "old", "men", "near", "town", "[SEP]"]
    two_before = 0.75 * np.eye(N, k=-2) + 0.25 / N
    content = np.full((N, N), 1 / N)
    content[4] = 0.4 / (N - 1)
    content[4, 10] = 0.6
    rows = [each / each.sum(-1, keepdims=True) for each in (two_before, content)]
    lead = lead_of(of(rows, tokens))
    assert (lead["head"], lead["query"], lead["key"]) == (1, 4, 10) and lead["other"] is None
    alone = lead_of(of(rows[:1], tokens))
    assert alone["key"] - alone["query"] != -2, "nothing that the head attends to two places before is a finding"
    once = np.full((N, N), 1 / N)
    once[4] = 0.25 / (N - 1)
    once[4, 2] = 0.75
    assert lead_of(of([once], tokens))["key"] == 2, "the same link of a head that does it once"


def test_a_pronoun_is_a_whole_word():
    tokens = ["x", "un", "##it", "y", "it", "##em", "z", "It"]
    assert pronouns(of(drawn(2, 8), tokens).profile) == [7]


@pytest.mark.parametrize("length", [1, 2])
def test_a_text_without_a_link_has_no_lead(length):
    about = Sheet.of(reading(length=length)).about
    assert about["lead"] is None and about["start"]["layer"] == 0 and json.dumps(about["cards"])


def test_a_translation_leads_with_any_word_of_its_source():
    text = translation()
    lead = lead_of(text)
    dense = text.maps["layer.0"].dense()[0]
    assert lead["weight"] == pytest.approx(float(dense.max())), "neighbors count: they are words of another sentence"


@pytest.mark.parametrize("seed", range(5))
def test_the_same_word_in_another_head(seed):
    text = of(drawn(4, len(WORDS), seed, 0.05), WORDS)
    lead, found = lead_of(text), card(text, "link")
    dense = text.maps["layers.4"].dense()[0, :, lead["query"]].clone()
    left_out = {0, 14, lead["key"], *(lead["query"] + by for by in (-1, 0, 1))} | {WORDS.index(".")}
    dense[:, sorted(left_out)] = 0
    head, key = divmod(int(dense.argmax()), len(WORDS))
    if float(dense.max()) < 0.3:
        assert found is None and lead["other"] is None and lead["heading"] == [[lead["sentence"], -1]]
        return
    share = f"{float(dense.max()):.3f}"
    if head == lead["head"]:
        assert (found["state"]["head"], found["state"]["query"]) == (head, lead["query"])
        assert said(found).startswith(f"In layer 4, head {head}, “it” puts {share}") and lead["other"] is None
        assert f"on “{WORDS[key]}”" in said(found) and WORDS[lead["key"]] in found["note"]
        return
    other = lead["other"]
    assert found is None and (other["head"], other["query"], other["key"]) == (head, lead["query"], key)
    told = [joined(parts) for parts, _ in lead["heading"]]
    assert told[0] == "The strongest links of “it” beyond its neighbors: " and [at for _, at in lead["heading"]] == [
        -1,
        0,
        -1,
        1,
        -1,
    ]
    assert told[1].startswith(f"“{WORDS[lead['key']]}”") and told[3].startswith(f"“{WORDS[key]}”")
    assert told[1].endswith(f", {lead['weight']:.3f} in layer 4, head {lead['head']}")
    assert told[3].endswith(f", {share} in layer 4, head {head}")


def test_a_link_that_leads_is_near():
    n = 90
    tokens = [f"t{i}" for i in range(n)]
    tokens[80] = "it"
    rows = np.full((1, n, n), 0.1 / n)
    rows[0, :, 5] += 0.5
    rows[0, :, 40] += 0.4
    lead = lead_of(of(rows, tokens))
    assert (lead["query"], lead["key"]) == (80, 40), "and not 5, which stands 75 tokens before"


def test_the_first_view_names_what_it_leaves_out():
    """A link of weight 1 to each of these keys does not lead, and the page says so."""
    n, at = 120, 110
    names = {
        at: "word itself",
        at - 1: "neighbors",
        0: "first token",
        3: "special tokens",
        107: "punctuation",
        9: "50",
    }
    tokens = [f"t{i}" for i in range(n)]
    tokens[at], tokens[3], tokens[107] = "it", "[SEP]", ","
    for key, name in names.items():
        rows = np.full((1, n, n), 1e-3)
        rows[0, :, key], rows[0, :, 100] = 0.8, 0.1
        lead = lead_of(of(rows / rows.sum(-1, keepdims=True), tokens))
        assert (lead["query"], lead["key"]) == (at, 100) and name in lead["left_out"], name
    assert lead_of(translation())["left_out"] == "The sentence above leaves out special tokens and punctuation."
    assert "50" not in lead_of(of(drawn()))["left_out"], "a short text has no word that far"


# The cards


def test_the_sink_is_the_key_with_most_weight_of_all():
    text = of([on(0, weight=0.7), drawn(1)[0]])
    found, dense = card(text, "sink"), text.maps["layers.4"].dense()[0].double()
    share = float(dense.mean((0, 1))[0])
    assert said(found) == f"{share:.3f} of all weight goes to “word0”, the first token."
    assert f"it would get {1 / N:.3f}." in found["note"] and found["title"] == "Attention sink"
    np.testing.assert_allclose(found["bars"], dense.mean((0, 1)), rtol=1e-3)
    assert found["at"] == 0 and found["state"]["query"] == 0 and found["state"]["side"] == "in"
    assert card(of([on(5, weight=0.7), drawn(1)[0]]), "sink")["title"] == "Where most weight goes"


def test_what_a_causal_mask_forces_is_no_sink():
    x = torch.zeros(1, 2, N, 4)
    weights = rg.Attention(mask=rg.causal())(x, x, x).weights
    text = TextReading.of("Even weights", {"layers.0": weights}, NAMES)
    assert float(weights.dense()[0, :, :, 0].mean()) > 0.2, "the first token has most, as every query sees it"
    assert card(text, "sink") is None


def test_bars_of_a_long_text_are_sums_over_its_parts():
    n = 150
    text = of([on(75, weight=0.6, n=n)], [f"t{i}" for i in range(n)])
    found, mean = card(text, "sink"), text.maps["layers.4"].dense()[0].double().mean((0, 1))
    assert len(found["bars"]) == 64 and sum(found["bars"]) == pytest.approx(1, abs=1e-3)
    assert found["bars"][found["at"]] == max(found["bars"])
    inside = [j for j in range(n) if j * 64 // n == found["at"]]
    assert found["bars"][found["at"]] == pytest.approx(float(mean[inside].sum()), rel=1e-3)


def test_a_previous_token_head_of_a_short_text():
    rows = 0.8 * np.eye(N, k=-1) + 0.2 / N
    rows /= rows.sum(-1, keepdims=True)
    text = of([drawn(1)[0], rows])
    found = card(text, "previous")
    share = float(np.diag(text.maps["layers.4"].dense()[0, 1].numpy(), -1)[1:].mean())  # without the first as target
    assert said(found) == f"L4.H1 puts {share:.3f} of its weight on the previous token."
    assert found["heads"] == [[0, 1]] and found["state"] == {"view": "head", "layer": 0, "head": 1}
    assert "Not compared with shuffled words: that needs more than 25 tokens." in found["note"]
    shown = Sheet.of(text).about["layers"][0]["heads"][1]["values"]["previous"]
    assert shown == pytest.approx(share, rel=1e-3), "the list of the head shows the number of the card"
    no_role = [Role("previous", 4, 1, 0.9, 0.2, False, 0.1, 30)]
    assert card(of([drawn(1)[0], rows], roles=no_role), "previous") is None, "the null says otherwise"


def test_a_role_is_told_if_it_was_earned():
    earned = [Role("induction", 4, 0, 0.62, 0.08, True, 0.05, 40), Role("induction", 4, 1, 0.5, 0.1, True, 0.05, 40)]
    earned += [
        Role("duplicate", 4, 1, 0.95, 0.9, False, 0.1, 40),
        Role("positional", 4, 1, 0.7, 0.6, True, 0.1, 40, -3),
    ]
    text = of(drawn(2), roles=earned)
    assert said(card(text, "induction")) == (
        "L4.H0 puts 0.620 of its weight on the token after an earlier occurrence of the current one."
    )
    note = card(text, "induction")["note"]
    assert "On shuffled words: 0.080." in note and "1 more head has this role." in note
    assert said(card(text, "positional")) == "L4.H1 puts 0.700 of its weight on the token 3 places before."
    note = card(text, "positional")["note"]
    assert "By position, not by content: 0.600 on shuffled words too; by chance 0.100." in note
    assert "On shuffled words: 0.600" not in note, "for a role of position an equal score is no refutation"
    rare = of(drawn(2), roles=[Role("previous", 4, 1, 0.81, 0.79, True, 0.002, 400)])
    assert "0.790 on shuffled words too; by chance 0.002." in card(rare, "previous")["note"]
    assert card(text, "duplicate") is None
    assert card(told(reading()), "previous")["state"] == {"view": "head", "layer": 1, "head": 1}


@pytest.mark.parametrize("kind", ["subject", "retrieval", "alignment"])
def test_roles_that_are_not_of_a_text_alone_have_no_card_of_their_own(kind):
    """Those of `syntax_roles`, `retrieval_roles` and `alignment_roles`, which a user may give to a reading."""
    earned = [Role("induction", 4, 0, 0.62, 0.08, True, 0.05, 40), Role(kind, 4, 1, 0.9, 0.1, True, 0.05, 40)]
    text = of(drawn(2), roles=earned)
    assert card(text, kind) is None and card(text, "induction") is not None


def test_heads_are_alike_only_query_by_query():
    varied = drawn(1, seed=5, concentration=0.3)[0]
    text = of([drawn(1)[0], varied, 0.98 * varied + 0.02 / N])
    found, dense = card(text, "copies"), text.maps["layers.4"].dense()[0].double().flatten(1)
    cosine = float(torch.nn.functional.cosine_similarity(dense[1], dense[2], 0))
    assert said(found) == "L4.H1 and L4.H2 have nearly the same map."
    assert f"{cosine:.2f}" in found["note"] and found["heads"] == [[0, 1], [0, 2]] and found["state"]["heads"] == "1,2"
    assert card(of([on(0, weight=0.9), on(0, weight=0.95)]), "copies") is None, "both rest on the first token"
    broad = [on(3, 4, weight=0.9), on(3, 4, weight=0.92)]
    assert text.findings and card(of(broad), "copies") is None, "all queries attend alike, so this says little"


def whole(count):
    return f"{count:.0f}" if count >= 10 else f"{count:.1f}"


def test_the_most_focused_head_by_the_entropy_of_its_weight():
    text = of([on(3, weight=0.9), on(2, 5, weight=0.9), np.full((N, N), 1 / N)])
    dense = text.maps["layers.4"].dense()[0].double()[:, :, 1:]
    rest = dense / dense.sum(-1, keepdim=True)
    kept = dense.sum(-1)
    entropy = (-(rest * rest.log()).sum(-1) * kept).mean(-1) / kept.mean(-1)
    low, high = (whole(math.exp(float(value))) for value in (entropy[0], entropy[2]))
    assert said(card(text, "focused")) == f"L4.H0 attends to about {low} tokens; the broadest, L4.H2, to about {high}."
    assert card(text, "focused")["state"]["heads"] == "0.0,0.2", "both heads of the sentence are shown"
    assert card(of([np.full((N, N), 1 / N)] * 2), "focused") is None


def test_even_weights_give_no_card():
    even = of([np.full((N, N), 1 / N)] * 3)
    assert cards_of(even, lead_of(even)) == []


def test_importance_leads_if_it_was_measured():
    text = of(drawn(3))
    text.profile.layers[0].values["importance"] = torch.tensor([0.1, 0.5, 0.2])
    first = cards_of(text, lead_of(text))[0]
    assert said(first) == "Predicting the next token depends most on L4.H1." and "0.5 nats" in first["note"]
    assert first["state"]["color"] == "importance"


@pytest.mark.parametrize("seed", range(6))
def test_every_card_of_drawn_texts_is_a_place_of_the_page(seed):
    text = of(drawn(3, 16, seed, 0.15), [*WORDS, "x"], **{"layers.7": drawn(3, 16, seed + 50, 0.15)})
    for found in Sheet.of(text).about["cards"]:
        state = found["state"]
        assert state["view"] in ("head", "overview", "statistics")
        assert 0 <= state.get("layer", 0) < 2 and 0 <= state.get("head", 0) < 3 and 0 <= state.get("query", 0) < 16
        assert len(found["sentence"]) > 1 and not re.search(r"nan|inf|None", joined(found["sentence"]))
    assert len(cards_of(text, lead_of(text))) <= 5


# The name of the model


def test_the_name_of_the_model_travels(tmp_path):
    named = TextReading.of("A text", maps_of(15), WORDS, model="tiny")
    assert Sheet.of(named).about["model"] == "tiny" and Sheet.of(reading()).about["model"] == ""
    assert load_run(save_run(tmp_path / "kept", [Sheet.of(named)]))[0].about["model"] == "tiny"


def test_a_watched_model_has_a_name():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("anywidget")
    from miniatures import BERT
    from regard.hf.models import model_name
    from watching import watched

    bert = transformers.BertModel(transformers.BertConfig(**BERT)).eval()
    _, seen = watched(bert, {"input_ids": torch.arange(3, 9)[None]})
    assert seen.model == seen.encoder.model == "BertModel"
    copy = transformers.BertModel.from_pretrained(None, config=bert.config, state_dict=bert.state_dict())
    assert model_name(copy) == "BertModel", "transformers writes the name 'None'"
    for folder, name in (
        ("SmolLM2-135M-Instruct.Q4_1-b179c9523d0e6a0f", "SmolLM2-135M-Instruct"),
        ("model-7", "model-7"),
    ):
        copy.config.name_or_path = f"/cache/models/{folder}"
        assert model_name(copy) == name
    bert.config.name_or_path = "org/tiny-bert"
    _, seen = watched(bert, {"input_ids": torch.arange(3, 9)[None]})
    assert seen.model == "org/tiny-bert"
    assert json.loads(seen.show(list("abcdef")).data)["texts"][0]["model"] == "org/tiny-bert"


def test_the_reader_names_the_model_without_its_folder():
    pytest.importorskip("transformers")
    reader = rg.TextReader.load("minilm")
    assert reader.read(TEXT.replace("[CLS] ", "").replace(" [SEP]", ""), layers=[0]).reading.model == "all-MiniLM-L6-v2"
    from regard.hf.models import model_name

    assert model_name(reader.model) == "all-MiniLM-L6-v2", "not the folder inside of its package"


def test_warnings_have_a_line_for_each_kind():
    about = Sheet.of(of([np.full((N, N), 1 / N), on(0, weight=0.95)])).about
    assert set(about["warnings"]) == {finding["kind"] for finding in about["findings"]}
    assert about["warnings"]["uniform"].startswith("1 of 2 heads (L4.H0) gives all tokens nearly the same weight")
