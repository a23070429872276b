"""`rg.findings` takes a profile, a map, the maps of a watched model or a dict of maps."""

from __future__ import annotations

import pytest
import torch

import regard as rg

WORDS = ["[CLS]", "the", "cat", "sat", "here", "[SEP]"]


def sharp(key, num_queries=6, num_keys=6):
    """Weights of a head that looks at one key only."""
    k = torch.zeros(1, 1, num_keys, 8)
    k[..., key, :] = 30
    return rg.Attention()(torch.ones(1, 1, num_queries, 8), k, k).weights


def kinds(found):
    return [(finding.kind, finding.layer, finding.heads) for finding in found]


def test_a_map_is_judged_like_its_profile():
    weights = sharp(5)
    expected = rg.findings(rg.profile({"layer": weights}, WORDS))
    assert rg.findings(weights, WORDS) == expected == rg.findings({"layer": weights}, WORDS)
    assert kinds(expected) == [("special", 0, (0,))]


def test_without_tokens_no_token_is_special():
    assert kinds(rg.findings(sharp(5))) == []
    assert kinds(rg.findings(sharp(0))) == [("sink", 0, (0,))]


@pytest.mark.parametrize(("num_queries", "num_keys"), [(6, 6), (3, 6), (6, 3), (1, 1)])
def test_any_number_of_queries_and_keys(num_queries, num_keys):
    x = torch.zeros(2, 2, num_queries, 4), torch.zeros(2, 2, num_keys, 4)
    weights = rg.Attention()(x[0], x[1], x[1]).weights
    free = num_queries * (num_keys - 1) >= 6
    assert [kind for kind, *_ in kinds(rg.findings(weights, batch=1))][:1] == ["uniform"] * free


class Words:
    all_special_ids = (0, 5)

    def convert_ids_to_tokens(self, ids):
        return [WORDS[n] for n in ids]

    def convert_tokens_to_string(self, tokens):
        return " ".join(tokens)


def test_a_watched_model_is_judged_with_the_tokens_that_it_read():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=6
    )
    model = transformers.BertModel(config).eval()
    with torch.no_grad():
        for layer in model.encoder.layer:  # equal scores on all tokens
            layer.attention.self.query.weight.zero_()
            layer.attention.self.query.bias.zero_()
    with torch.no_grad(), rg.watch(model, Words()) as seen:
        model(torch.arange(6)[None])
    found = rg.findings(seen)
    expected = rg.findings(rg.profile(seen, WORDS))
    assert [finding.sentence for finding in found] == [finding.sentence for finding in expected]
    assert kinds(found)[0] == ("uniform", 0, (0, 1)) and {layer for _, layer, _ in kinds(found)} == {0, 1}


def test_layers_have_the_numbers_of_their_model():
    maps = {f"layers.{n}": sharp(0) for n in (3, 7)}
    assert [layer for _, layer, _ in kinds(rg.findings(maps))] == [3, 7]


MISTAKES = {
    "no maps": (lambda: rg.findings({}), "there are no maps"),
    "a list": (lambda: rg.findings([torch.ones(2, 2)]), "the result of regard.watch or a dict or a Tensor, got list"),
    "too few tokens": (lambda: rg.findings(sharp(0), ["a"]), "6 queries and 6 keys"),
    "another text": (lambda: rg.findings(sharp(0), batch=1), "batch 1 is out of range"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_name_the_rule(case):
    call, words = MISTAKES[case]
    with pytest.raises(rg.RegardError, match=words):
        call()
