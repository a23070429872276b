"""`watch` shows recurrent layers: W . values is what the layer computed, for every family of transformers."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from torch.nn import functional as F

import regard as rg
from extras import needs_transformers
from recurrent_models import CONFIGS, KINDS, build, tokens
from regard.hf.recurrent import core_calls
from regard.hf.recurrent.core_functions import core_names
from regard.hf.recurrent.inline_layers import GatedConvolution
from watching import assert_identical, assert_verified, watched

pytestmark = needs_transformers("5.23", "its code is what is read")


@pytest.mark.parametrize("name", CONFIGS)
def test_maps_reproduce_the_layer_in_one_pass_and_in_a_generation(name):
    model = build(name)
    for length in (1, 2, 17):
        inputs = {"input_ids": tokens(length), "use_cache": False}
        outputs, seen = watched(model, inputs, verify="all")
        assert_verified(seen)
    with torch.no_grad():
        assert_identical(model(**inputs).logits, outputs.logits)
    assert set(seen.kinds.values()) <= {KINDS[name], "attention"} and KINDS[name] in seen.kinds.values()
    assert not seen.missing and KINDS[name] in repr(seen)
    first = next(path for path, kind in seen.kinds.items() if kind == KINDS[name])
    weights = seen[first].dense()
    assert torch.equal(weights, weights.tril()) and bool(weights.any())
    with rg.watch(model) as seen, torch.no_grad():
        model.generate(tokens(5), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert_verified(seen)
    shapes = [call.shape[2:] for call in seen.calls(first)]
    assert shapes[0] == (5, 5) and len(shapes) == 3 and all(J > I for I, J in shapes[1:])
    for before, after in zip(seen.calls(first), seen.calls(first)[1:], strict=False):
        assert after.dense().shape[3] == before.shape[3] + after.shape[2]


def core_functions(model):
    """Files of the model, and the functions of one text that they call."""
    places = {}
    for module in model.modules():
        for name in core_names(module):
            if "update" not in name and "torch_recurrent" not in name and not name.startswith("recurrent"):
                places[sys.modules[type(module).__module__], name] = None
    return list(places)


def units(function, given, name, token):
    """What a function returns for values of 1 at one token and 0 elsewhere: a column of its linear map."""
    value = torch.zeros_like(given[name])
    value.select(2 if name == "hidden_states" and value.ndim == 3 else 1, token).fill_(1.0)
    result = function(**{**given, name: value})
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("name", ["Qwen3Next", "KimiLinear", "Mamba2", "Mamba", "Rwkv"])
def test_a_column_is_what_the_function_of_transformers_does_with_one_value(name, monkeypatch):
    model, calls = build(name), []

    def recorded(function):
        names = list(inspect.signature(function).parameters)

        def run(*args, **options):
            calls.append((function, {**dict(zip(names, args, strict=False)), **options}))
            return function(*args, **options)

        run.__signature__ = inspect.signature(function)
        return run

    for file, function in core_functions(model):
        monkeypatch.setattr(file, function, recorded(getattr(file, function)))
    n = 6
    _, seen = watched(model, {"input_ids": tokens(n), "use_cache": False})
    path = next(path for path, kind in seen.kinds.items() if kind == KINDS[name])
    function, given = calls[0]
    given.pop("return_last_state", None)
    value = next(key for key in ("value", "hidden_states") if key in given)
    for token in (0, 3, n - 1):
        with torch.no_grad():
            column = units(function, given, value, token)
        mine = seen[path].dense()[..., token]
        if name == "Mamba":  # values (B, C, n), and a gate
            mine = mine[:, : column.shape[1]] * F.silu(given["z"])
        elif name == "Rwkv":
            mine = mine.transpose(1, 2)
        else:
            mine, column = mine.transpose(1, 2), column[..., 0]
        torch.testing.assert_close(mine, column, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["Qwen3Next", "KimiLinear", "Mamba2", "Bamba", "Mamba", "MiniMax", "Lfm2"])
def test_padding_on_the_left_has_no_weight(name):
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    _, seen = watched(build(name), {"input_ids": tokens(9), "attention_mask": mask, "use_cache": False}, verify="all")
    assert_verified(seen)
    path = next(path for path, kind in seen.kinds.items() if kind == KINDS[name])
    real, padded = seen[path].dense()[1, :, 4:, 4:], seen[path].dense()[1, :, 4:, :4]
    assert bool(real.any()) and not bool(padded.any())


@pytest.mark.parametrize("name", ["Qwen3Next", "Mamba2", "MiniMax", "Lfm2"])
def test_beams_keep_their_own_past(name):
    model = build(name)
    with rg.watch(model) as seen, torch.no_grad():
        model.generate(tokens(4), max_new_tokens=4, min_new_tokens=4, num_beams=3, do_sample=False)
    assert_verified(seen)
    assert not seen.missing


def changed(reader, **factors):
    """A reader with a wrong formula: some tensors of its form are multiplied."""

    def read(given, result):
        call = reader(given, result)

        def form():
            right = call.form()
            return replace(right, **{name: getattr(right, name) * factor for name, factor in factors.items()})

        return replace(call, form=form)

    return read


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("Qwen3Next", {"log_decay": 0.9}),
        ("Qwen3Next", {"address": 1.1}),
        ("Mamba2", {"own": 1.01}),
        ("Mamba", {"key": 0.99}),
        ("Rwkv", {"query": 0.99}),
    ],
)
def test_a_wrong_formula_is_refused(name, factors, monkeypatch):
    model = build(name)
    for function, reader in list(core_calls.READERS.items()):
        monkeypatch.setitem(core_calls.READERS, function, changed(reader, **factors))
    with pytest.raises(rg.RegardError, match="differ from the output"), rg.watch(model), torch.no_grad():
        model(tokens(17))


def test_a_state_from_before_the_watch_is_not_guessed():
    model = build("Qwen3Next")
    with torch.no_grad():
        cache = model(tokens(5), use_cache=True).past_key_values
        with rg.watch(model) as seen:
            model(tokens(1), past_key_values=cache, use_cache=True)
    assert list(seen.kinds.values()) == ["attention"]
    assert "state from before the watch" in seen.missing["model.layers.0.linear_attn"]


def test_a_layer_of_another_version_is_missing_with_the_reason(monkeypatch):
    monkeypatch.setattr(GatedConvolution, "parts", ("in_proj", "renamed"))
    _, seen = watched(build("Lfm2"), {"input_ids": tokens(5)})
    assert list(seen.kinds.values()) == ["attention"]
    assert "not as in transformers 5.23 (KeyError: 'out_proj')" in seen.missing["model.layers.0.conv"]


def test_a_convolution_over_a_picture_is_missing_with_the_reason():
    """Once its tensors were said to be those of another version."""
    if not hasattr(transformers, "Lfm3VlVisionModel"):
        pytest.skip("this version of transformers has no LFM3")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "patch_size": 8}
    model = transformers.Lfm3VlVisionModel(transformers.Lfm3VlVisionConfig(**sizes, **layers)).eval()
    with rg.watch(model) as seen, torch.no_grad():
        model(torch.randn(16, 3 * 8 * 8 * 2), torch.tensor([[1, 4, 4]]))
    (reason,) = seen.missing.values()
    assert len(seen) == 1 and reason.startswith("it convolves patches of pictures in two directions")


def test_functions_are_restored_and_other_options_work():
    model = build("Qwen3Next")
    file = sys.modules[type(model).__module__]
    original = file.torch_chunk_gated_delta_rule
    with (
        rg.watch(model, layers=0) as outer,
        rg.watch(model, keep="statistics", reductions=[rg.maps.TopLinks(1)]) as inner,
    ):
        assert file.torch_chunk_gated_delta_rule is not original
        with torch.no_grad():
            model(tokens(7))
    assert file.torch_chunk_gated_delta_rule is original
    assert outer.names == ["model.layers.0.linear_attn"] and len(inner.statistics) == 2
    assert outer.decoder.names == outer.names
    links = inner.statistics["model.layers.0.linear_attn"].of(rg.maps.TopLinks)
    assert torch.equal(links.weights, outer[0].top().weights)


@pytest.mark.parametrize("name", ["OlmoHybrid", "Mamba2", "xLSTM"])
def test_low_precision_is_verified_with_its_own_tolerance(name):
    _, seen = watched(build(name, torch.bfloat16), {"input_ids": tokens(9)}, verify="all")
    assert_verified(seen)
    assert not seen.missing


def test_training_is_watched_too():
    model = build("Mamba2").train()
    with rg.watch(model, verify="all") as seen:
        model(tokens(6), use_cache=False).logits.sum().backward()
    assert_verified(seen)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_of_many_channels_some_are_verified(monkeypatch):
    monkeypatch.setattr("regard.hf.capture.recurrent_calls.HEADS", 3)
    model = build("Mamba")
    _, seen = watched(model, {"input_ids": tokens(7)})
    assert_verified(seen)
    for function, reader in list(core_calls.READERS.items()):
        monkeypatch.setitem(core_calls.READERS, function, changed(reader, key=0.9))
    with pytest.raises(rg.RegardError, match="differ from the output"):
        watched(model, {"input_ids": tokens(7)})
