"""`regard analyze --generate`: what it prints, what it saves, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

import regard as rg
from miniatures import GPT2, T5, sharpened
from regard.cli.app import app
from regard.hf.generation_reader import read_generation
from regard.hf.text_reader import TextReader
from regard.viewer import load_run
from watching import oracle

pytestmark = pytest.mark.filterwarnings("ignore")
TEXT = "w3 w4 w5 w6 w7 w8"


def reader(kind, **changes):
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(50)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")
    torch.manual_seed(1)
    if kind == "decoder":
        config = transformers.GPT2Config(**GPT2 | {"bos_token_id": 1, "eos_token_id": 49} | changes)
        model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa")
    else:
        config = transformers.T5Config(**T5 | {"pad_token_id": 0, "eos_token_id": 49})
        model = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    return TextReader(sharpened(model.eval()), tokenizer)


def run(*arguments, status=0):
    result = CliRunner().invoke(app, ["analyze", *map(str, arguments)], env={"COLUMNS": "160"})
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result.output


@pytest.fixture
def decoder(monkeypatch):
    found = reader("decoder")
    monkeypatch.setattr(TextReader, "load", staticmethod(lambda name: found))
    return found


@pytest.fixture
def translator(monkeypatch):
    found = reader("translator")
    monkeypatch.setattr(TextReader, "load", staticmethod(lambda name: found))
    return found


def test_shares_and_links_are_those_of_the_full_pass(decoder):
    result = read_generation(decoder, TEXT, 8)
    tokens = result.generation.tokens
    assert result.labels[:6] == TEXT.split() and result.num_generated == 8 == len(result.output.split())
    weights = torch.stack(oracle(decoder.model, {"input_ids": tokens[:, :-1]})["all"])[:, 0, :, 5:]
    for layer, share in enumerate(result.shares()):
        rows = weights[layer].mean((0, 1))
        parts = rows[0], rows[1:6].sum(), rows[6:].sum()
        assert (share.first, share.prompt, share.output) == pytest.approx([float(part) for part in parts], abs=1e-5)
    for step, link in enumerate(result.links()):
        far = [key for key in range(1, 13) if abs(key - (5 + step)) > 1]
        assert link.number == 6 + step and link.weight == pytest.approx(float(weights[:, :, step, far].max()), abs=1e-5)


def test_a_generation_is_printed_and_saved(decoder, tmp_path):
    printed = run(TEXT, "--generate", "8", "--save", tmp_path / "kept")
    lines = printed.splitlines()
    output = read_generation(decoder, TEXT, 8).output
    assert lines[0] == f"{TEXT}{output}" and output.startswith(" w")
    assert lines[1].startswith("6 tokens of prompt, 8 generated. The model read 13 tokens, 2 layers x 4 heads; checked")
    assert lines[2].startswith("To predict, the heads put ") and printed.count(" was predicted with L") == 6
    (sheet,) = load_run(tmp_path / "kept")
    assert len(sheet.about["tokens"]) == 13 and sheet.maps[0].shape == (1, 4, 13, 13)
    table = run(TEXT, "--generate", "8", "--table", "--layers", "1")
    assert " L1 " in table and " L0 " not in table and table.count(" was predicted with L1") == 8
    data = json.loads(run(TEXT, "--generate", "8", "--json"))
    assert [layer["layer"] for layer in data["layers"]] == [0, 1] and len(data["links"]) == 8


def test_a_translation_links_to_the_source(translator, tmp_path):
    printed = run(TEXT, "--generate", "5", "--save", tmp_path / "kept")
    assert " → " in printed.splitlines()[0] and "of the source" in printed
    own, cross = load_run(tmp_path / "kept")
    assert own.maps[0].shape[2:] == (5, 5) and cross.maps[0].shape[2:] == (5, 6)
    assert cross.about["tokens"] == TEXT.split() and len(cross.about["queries"]) == 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--probe"], "--probe does not go with --generate"),
        (["--corpus"], "--corpus and --generate are different analyses"),
        (["w9"], "continues one text, got 2"),
        (["--layers", "7"], "there is no layer 7; the model has layers 0 to 1"),
        (["--length", "99"], "length 99 is more than the 40 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(decoder, arguments, said):
    assert said in " ".join(run(TEXT, "--generate", "3", *arguments, status=2).split())


def test_a_model_that_cannot_generate_or_has_no_room_is_refused(decoder):
    assert "6 tokens of prompt and 35 more are above the 40 tokens" in " ".join(
        run(TEXT, "--generate", "35", status=2).split()
    )
    encoder = TextReader(decoder.model.transformer, decoder.tokenizer)
    with pytest.raises(rg.RegardError, match="GPT2Model does not generate text"):
        read_generation(encoder, TEXT, 3)
