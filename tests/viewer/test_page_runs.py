"""The page of the lab: attention of translators side by side with gold links, and the curves of their training."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("sacrebleu")

from fabricated import fabricate, made_run
from regard.base.errors import RegardError
from regard.lab import SYSTEMS, align, build
from regard.lab.comparison.curves import curves
from regard.lab.data import BOS, EOS, Pair, WordTokenizer
from regard.lab.data.tokenizer import SentencePiece
from regard.lab.decoding.alignment import attention_of
from regard.lab.evaluation.dependence import source_gradients
from regard.lab.evaluation.pair_maps import read_alignments, read_pair
from regard.lab.pages.run_folders import open_folder
from regard.viewer import Sheet
from regard.viewer.page import payload

PAIR = Pair("the dog sees a cat", "la hundo vidas", gold=frozenset({(0, 0), (1, 1), (2, 2), (4, 0)}))
SOURCE, TARGET = WordTokenizer.train([PAIR.source]), WordTokenizer.train([PAIR.target])


def system_of(name, source=SOURCE, target=TARGET):
    torch.manual_seed(3)
    model = build(name, source_size=len(source), target_size=len(target), width=8).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)  # so that it looks at something
    return SimpleNamespace(model=model, source_tokenizer=source, target_tokenizer=target)


# One pair


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name != "none"])
def test_a_row_is_what_was_looked_at_to_say_its_word(name):
    system = system_of(name)
    (looked,) = read_pair({"One": system}, PAIR)
    assert looked.reading.profile.tokens == [*PAIR.source.split(), "</s>"]
    assert looked.reading.profile.query_tokens == [*PAIR.target.split(), "</s>"] and looked.aligned == "output"
    ids = SOURCE.encode(PAIR.source), TARGET.encode(PAIR.target)
    maps = attention_of(system.model, torch.tensor([[*ids[0], EOS]]), torch.tensor([[BOS, *ids[1]]]))
    last = list(looked.reading.maps.values())[-1].dense()
    torch.testing.assert_close(last, maps[system.model.cross_attention].dense())
    (alignment,) = align(system.model, (SOURCE, TARGET), [ids[0]], [ids[1]])
    torch.testing.assert_close(last.mean(1)[0, :-1, :-1], alignment.weights)


def test_gold_links_lie_on_their_words():
    looked = read_pair({"One": system_of("bahdanau")}, PAIR)[0]
    about = Sheet.of(*looked).about
    assert sorted(map(tuple, about["gold"])) == [(0, 0, True), (0, 4, True), (1, 1, True), (2, 2, True)]
    assert (about["aligned"], about["layers"][0]["name"]) == ("output", "One")


def test_a_link_between_words_is_one_between_all_their_pieces():
    text = ["grandmother sees", "grandfather sees", "mother father"] * 9
    pieces = SentencePiece.train(text, 20)
    pair = Pair("grandmother sees", "sees", gold=frozenset({(0, 0)}))
    (looked,) = read_pair({"One": system_of("bahdanau", pieces, pieces)}, pair)
    source, target = pieces.encode(pair.source), pieces.encode(pair.target)
    first = pieces.word_numbers(source).count(0)
    assert 1 < first < len(source)
    assert looked.gold == [(t, s, True) for t in range(len(target)) for s in range(first)]
    labels = looked.reading.profile.tokens
    assert "".join(labels[:first]).replace("##", "").removeprefix("▁") == "grandmother"
    assert not labels[0].startswith("##") and all(label.startswith("##") for label in labels[1:first])


def test_mechanisms_stand_side_by_side_where_the_pieces_are_the_same():
    other = WordTokenizer.train([PAIR.source, "x"])
    systems = {
        "A": system_of("bahdanau"),
        "B": system_of("transformer"),
        "C": system_of("luong_dot", WordTokenizer.train(["the"])),
    }
    together, alone = read_pair(systems, PAIR)
    assert list(together.reading.maps) == ["A", "B, layer 0", "B, layer 1"] and list(alone.reading.maps) == ["C"]
    assert len(read_pair({"A": systems["A"], "D": system_of("bahdanau", other)}, PAIR)) == 1, "ids may differ"


def test_encoder_and_decoder_are_texts_of_their_own():
    cross, encoder, decoder = read_pair({"T": system_of("transformer")}, PAIR, parts=True)
    assert (
        encoder.reading.title.startswith("Encoder") and encoder.reading.profile.tokens == cross.reading.profile.tokens
    )
    assert decoder.reading.profile.tokens == ["<s>", *PAIR.target.split()] and not decoder.aligned
    weights = next(iter(decoder.reading.maps.values())).dense()
    assert not weights.triu(1).any(), "a decoder looks back"


def test_without_attention_a_row_is_what_its_word_depends_on():
    system = system_of("none")
    (looked,) = read_pair({"None": system}, PAIR)
    ((name, weights),) = looked.reading.maps.items()
    ids = torch.tensor([[*SOURCE.encode(PAIR.source), EOS]]), torch.tensor([[BOS, *TARGET.encode(PAIR.target), EOS]])
    norms = source_gradients(system.model, *ids)[0]
    assert name == "None (gradient)"
    torch.testing.assert_close(weights.dense()[0, 0], norms / norms.sum(-1, keepdim=True), check_dtype=False)


def test_an_empty_side_is_refused():
    with pytest.raises(RegardError, match="has no words"):
        read_pair({"One": system_of("bahdanau")}, Pair("", "la"))


# Folders


def test_a_run_shows_its_test_sentences_and_its_curves(tmp_path):
    sheets = open_folder(made_run(tmp_path / "run", "transformer"))
    titles = [sheet.about["title"] for sheet in sheets]
    assert len(sheets) % 3 == 0 and sum(title.startswith("Encoder: ") for title in titles) == len(sheets) // 3
    about = sheets[0].about
    assert about["gold"] and [layer["name"] for layer in about["layers"]] == [
        "Transformer, layer 0",
        "Transformer, layer 1",
    ]
    drawn = {chart["title"]: chart["series"] for chart in about["charts"]}
    assert drawn["Validation BLEU by step"] == [{"name": "Transformer", "points": [[2.0, 2.0], [3.0, 3.0]]}]
    assert drawn["Training loss by step"][0]["points"][0] == [1.0, 1.0]
    json.dumps(payload(sheets), allow_nan=False)


def test_a_comparison_shows_its_mechanisms_side_by_side(tmp_path):
    sheets = open_folder(fabricate(tmp_path / "study"))
    assert len(sheets) == 6
    names = [layer["name"] for layer in sheets[0].about["layers"]]
    assert names == ["Bahdanau", "Luong general", "Transformer"], "no attention has no alignment"
    written = json.loads((tmp_path / "study/trials/bahdanau-1/looking.json").read_text())["alignments"][0]
    torch.testing.assert_close(sheets[0].maps[0].dense()[0, 0], torch.tensor(written["weights"]))
    assert sheets[0].about["gold"] == [[0, 0, True], [2, 1, True]]
    by_length = next(chart for chart in sheets[0].about["charts"] if chart["title"] == "BLEU by length")
    scores = []
    for seed in (1, 2):
        found = json.loads((tmp_path / f"study/trials/bahdanau-{seed}/evaluation.json").read_text())["by_length"]
        scores.append({bucket["label"]: bucket["bleu"] for bucket in found})
    mean = [[label, pytest.approx((scores[0][label] + scores[1][label]) / 2)] for label in scores[0]]
    assert next(one for one in by_length["series"] if one["name"] == "Bahdanau")["points"] == mean


def test_heads_removed_are_a_curve(tmp_path):
    sheets = open_folder(fabricate(tmp_path / "study", systems={"heads-4": 0.3}, seeds=(1,), sweep="prune"))
    chart = next(chart for chart in sheets[0].about["charts"] if chart["title"] == "BLEU without heads")
    assert [one["name"] for one in chart["series"]] == ["least important first", "at random", "most important first"]
    assert [x for x, _ in chart["series"][0]["points"]] == [n / 8 for n in range(9)]


def test_curves_are_means_over_runs_at_the_same_step():
    def run(*rows):
        metrics = [dict(zip(("step", "minutes", "bleu"), row, strict=True)) for row in rows]
        return SimpleNamespace(metrics=metrics, evaluation=None, pruning={})

    found = curves({"A": [run((1, 0.5, 2.0), (2, 1.0, None)), run((1, 1.5, 4.0), (2, 3.0, 6.0))], "B": []})
    assert [chart["title"] for chart in found] == ["Validation BLEU by step", "Validation BLEU by minutes"]
    assert found[0]["series"] == [{"name": "A", "points": [[1, 3.0], [2, 6.0]]}]
    assert found[1]["series"] == [{"name": "A", "points": [[1.0, 3.0], [3.0, 6.0]]}]


def test_alignments_of_a_translation_are_a_text():
    written = {"source": ["a", "b"], "target": ["x"], "weights": [[0.25, 0.5]], "reading": "input", "gold": None}
    about = Sheet.of(*read_alignments({"One": written})).about
    assert (about["tokens"], about["queries"], about["aligned"], about["gold"]) == (["a", "b"], ["x"], "input", [])


@pytest.mark.parametrize("named", ["nothing", "nowhere"])
def test_a_folder_without_any_of_it_is_refused(named, tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(RegardError, match=r"regard analyze TEXT --save DIR`, `regard train` or `regard compare`"):
        open_folder(tmp_path / named)


def test_folders_that_are_not_whole_are_refused(tmp_path):
    folder = fabricate(
        tmp_path / "study",
        unseen=[f"{name}-{seed}" for name in ("bahdanau", "luong_general", "transformer") for seed in (1, 2)],
    )
    with pytest.raises(RegardError, match=r"no trial with attention.*Continue the comparison"):
        open_folder(folder)
    run = made_run(tmp_path / "run", "bahdanau")
    (run / "config.toml").rename(tmp_path / "config.toml")
    with pytest.raises(RegardError, match=r"config\.toml is missing"):
        open_folder(run)
    (run / "model.safetensors").write_bytes(b"x")
    with pytest.raises(RegardError, match="truncated"):
        open_folder(run)


def test_a_run_without_the_lab_names_what_is_missing(tmp_path, monkeypatch):
    run = made_run(tmp_path / "run", "bahdanau")
    monkeypatch.delitem(sys.modules, "regard.lab.comparison.study", raising=False)
    monkeypatch.delitem(sys.modules, "regard.lab.training.preparation", raising=False)
    monkeypatch.delitem(sys.modules, "regard.lab.training.loop", raising=False)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(RegardError, match=r"lightning\S* is not installed.*regard\[lab\]"):
        open_folder(run)
