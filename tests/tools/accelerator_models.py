"""Models and translators on a pretend accelerator; run by test_accelerator.py, in a process of its own."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

import regard as rg
from accelerator import device_dtype, moved, no_float64, on_host, waits
from miniatures import BERT, LLAMA, T5, Model
from regard.lab import align, beam_search, build, greedy
from regard.lab.comparison.inspection import gradient_profile
from regard.lab.data import Batches, Pair, WordTokenizer
from regard.lab.evaluation.dependence import attention_shares
from regard.lab.models.loss import translation_loss
from regard.lab.training.averaging import Averaging
from regard.maps.stored import load_map, save_map

V, W = 20, 24
SYSTEMS = [
    ("none", {}),
    ("bahdanau", {}),
    ("luong_general", {"cell": "gru"}),
    ("luong_concat", {"input_feeding": False}),
    ("hybrid", {"num_heads": 2}),
    ("transformer", {"num_heads": 2}),
    *(("transformer", {"num_heads": 2, "positions": name}) for name in ("rope", "alibi", "t5", "learned")),
]
every_system = pytest.mark.parametrize(("name", "options"), SYSTEMS, ids=str)


dtype = device_dtype()


def close(found, expected):
    """Equal but for rounding, of which sums over many parts of either sign leave some of their largest part."""
    share = 1e-9 if expected.dtype == torch.float64 else 1e-4
    atol = share * max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(on_host(found), expected.detach(), rtol=share, atol=atol)


def translators(name, options, dtype):
    """The same translator on the CPU and on the device, with weights large enough to choose between tokens."""
    torch.manual_seed(1)
    here = build(name, source_size=V, target_size=W, width=16, **options).to(dtype)
    with torch.no_grad():
        for p in here.parameters():
            p.mul_(2.0)
    return here, moved(copy.deepcopy(here))


def pairs():
    source = torch.tensor([[5, 6, 7, 8, 3], [9, 3, 0, 0, 0], [3, 0, 0, 0, 0]])
    target = torch.tensor([[2, 5, 9, 6, 3], [2, 7, 3, 0, 0], [2, 8, 8, 3, 0]])
    return source, target


@every_system
def test_a_translator_learns_what_it_learns_on_the_cpu(name, options, dtype):
    here, there = translators(name, options, dtype)
    batch, near = pairs(), moved(pairs())
    expected = translation_loss(here, *batch, smoothing=0.1)
    expected.smoothed.backward()
    with waits() as counted:
        loss = translation_loss(there, *near, smoothing=0.1)
        loss.smoothed.backward()
    close(loss.smoothed, expected.smoothed)
    assert loss.num_tokens == expected.num_tokens
    for mine, theirs in zip(there.parameters(), here.parameters(), strict=True):
        close(mine.grad, theirs.grad)
    # the ids of either side are checked, and the tokens that are no padding are found
    assert len(counted) <= 3, counted


@every_system
def test_a_translator_says_what_it_says_on_the_cpu(name, options, dtype):
    here, there = translators(name, options, dtype)
    source, near = pairs()[0], moved(pairs()[0])
    for search in ({"beam": 3, "n_best": 2, "no_repeat": 2}, {"beam": 1, "min_length": 2}):
        found, expected = (
            beam_search(model, x, max_length=9, **search) for model, x in ((there, near), (here, source))
        )
        for mine, theirs in zip(found, expected, strict=True):
            assert [one.tokens for one in mine] == [one.tokens for one in theirs]
            assert [one.score for one in mine] == pytest.approx([one.score for one in theirs], rel=1e-4)


@every_system
def test_a_search_waits_once_a_step(name, options):
    _, there = translators(name, options, torch.float32)
    near = moved(pairs()[0])
    steps = max(len(one.tokens) for (one,) in greedy(there, near, max_length=9)) + 1
    with waits() as counted:
        greedy(there, near, max_length=9)
    assert len(counted) <= steps + 2, counted
    with waits() as counted:
        beam_search(there, near, beam=3, max_length=9)
    assert len(counted) <= 9 + 2, counted


@pytest.mark.parametrize("name", ["bahdanau", "transformer"])
def test_a_few_steps_of_training_end_where_they_end_on_the_cpu(name, dtype):
    encoded = [([5 + n % 9, 6, 3], [7, 5 + n % 9, 3]) for n in range(12)]
    ends = []
    for model in translators(name, {}, dtype):
        optimizer, averaging = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), Averaging(model, 0.9)
        for batch in Batches(encoded, sentences=4, shuffle=False).epoch():
            batch = batch.to(model.device)
            loss = translation_loss(model, batch.source, batch.target, smoothing=0.1)
            optimizer.zero_grad()
            (loss.smoothed / loss.num_tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            averaging.add()
        ends.append((list(model.parameters()), averaging.weights))
    (expected, average), (found, near) = ends
    for mine, theirs in zip(found, expected, strict=True):
        close(mine, theirs)
    for key, value in near.items():
        close(value, average[key])


MODELS = [Model("BertModel", BERT, "encoder"), Model("LlamaModel", LLAMA), Model("T5Model", T5, "seq2seq")]


@pytest.mark.parametrize("model", MODELS, ids=str)
@torch.no_grad()
def test_a_watched_model_shows_what_it_shows_on_the_cpu(model):
    here = model.make("sdpa")
    there, inputs = moved(copy.deepcopy(here)), model.inputs("left")
    with no_float64():
        seen = []
        for one, given in ((here, inputs), (there, moved(inputs))):
            with rg.watch(one) as watched:
                one(**given)
            seen.append(watched)
        expected, found = seen
        assert found.names == expected.names and not found.missing
        for mine, other in zip(found, expected, strict=True):
            close(mine.dense(), other.dense())
            close(mine.entropy(), other.entropy())
        assert all(check.ok for check in found.verify().values())


@pytest.mark.parametrize("model", MODELS, ids=str)
@torch.no_grad()
def test_a_registered_model_says_what_it_says_on_the_cpu(model):
    rg.register()
    here = model.make("sdpa")
    there = moved(copy.deepcopy(here))
    there.set_attn_implementation("regard")
    inputs = model.inputs()
    with no_float64():
        close(there(**moved(inputs))[0], here(**inputs)[0])


def same(found, expected):
    """Nested dicts, lists and numbers, equal but for rounding."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            same(mine, theirs)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    else:
        assert found == expected


@pytest.mark.parametrize("name", ["bahdanau", "transformer"])
def test_a_report_says_of_a_translator_what_it_says_on_the_cpu(name):
    words = WordTokenizer([f"w{n}" for n in range(12)])
    sentences = [Pair("w1 w2 w3", "w4 w5"), Pair("w6 w7", "w8 w9 w10"), Pair("w2", "w11")]
    encoded = [(words.encode(pair.source), words.encode(pair.target)) for pair in sentences]
    torch.manual_seed(1)
    here = build(name, source_size=len(words), target_size=len(words), width=16)
    with no_float64():
        reports = []
        for model in (here, moved(copy.deepcopy(here))):
            run = SimpleNamespace(model=model, source_tokenizer=words, target_tokenizer=words)
            aligned = align(model, (words, words), *zip(*encoded, strict=True))
            weights = [one.weights.tolist() for one in aligned]
            reports.append([attention_shares(run, sentences).__dict__, gradient_profile(run, sentences), weights])
        same(*reversed(reports))


def test_statistics_of_a_watched_model_are_those_of_the_cpu(tmp_path):
    here = Model("LlamaModel", LLAMA).make("sdpa")
    there, ids = moved(copy.deepcopy(here)), torch.randint(3, 50, (1, 30))
    tokens = [f"t{n % 23}" for n in range(30)]
    with no_float64(), torch.no_grad():
        profiles, kept = [], []
        for model, given in ((here, ids), (there, moved(ids))):
            with rg.watch(model) as seen:
                model(input_ids=given)
            layers = rg.profile(seen, tokens=tokens).layers
            profiles.append([{name: x.tolist() for name, x in layer.values.items()} for layer in layers])
            save_map(tmp_path / "map.safetensors", seen[0])
            kept.append(load_map(tmp_path / "map.safetensors").dense())
        same(*reversed(profiles))
        torch.testing.assert_close(kept[1], kept[0], rtol=1e-4, atol=1e-5)


def test_the_importance_of_heads_is_that_of_the_cpu():
    here = Model("LlamaForCausalLM", LLAMA, config_class="LlamaConfig").make("sdpa")
    there, ids = moved(copy.deepcopy(here)), torch.randint(3, 50, (2, 9))
    with no_float64():
        expected, found = (
            rg.importance(model, lambda model, x: model(input_ids=x, labels=x).loss, [given])
            for model, given in ((here, ids), (there, moved(ids)))
        )
    same([x.tolist() for x in found.values.values()], [x.tolist() for x in expected.values.values()])
