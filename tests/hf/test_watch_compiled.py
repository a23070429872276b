"""Models that torch compiled are watched: the maps are those of the model without a compiler."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import regard as rg
from kernels import needs_kernel
from miniatures import TEXTS, padding, tokens
from registered import needs_register

needs_register()
pytestmark = needs_kernel


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pair(name):
    """A model on the backend of its library, and the same on ours."""
    model = next(model for model in TEXTS if model.name == f"{name}Model")
    model = replace(model, config=model.config | {"num_hidden_layers": 2})
    plain, ours = model.make(model.backends[0]), model.make("regard")
    ours.load_state_dict(plain.state_dict())
    return plain, ours


@torch.no_grad()
@pytest.mark.parametrize("name", ["Mistral", "Bert", pytest.param("GptOss", marks=pytest.mark.example)])
def test_the_maps_are_those_of_the_model_without_a_compiler(name):
    plain, ours = pair(name)
    inputs = {"input_ids": tokens(9), "attention_mask": padding("right")}
    counter = CompileCounterWithBackend("aot_eager")
    whole = torch.compile(ours, backend=counter, fullgraph=True)
    whole(**inputs)
    compilations = counter.frame_count
    with rg.watch(plain) as expected:
        plain(**inputs)
    with rg.watch(whole, verify="all") as seen:
        output = whole(**inputs)[0]
    torch.testing.assert_close(output, whole(**inputs)[0], rtol=0, atol=0)
    assert counter.frame_count == compilations  # watching compiles nothing again
    assert seen.names == expected.names and not seen.missing
    for layer in expected.names:
        torch.testing.assert_close(seen[layer].dense(), expected[layer].dense(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_layers_that_share_a_graph_keep_their_own_maps_in_a_generation():
    plain, ours = pair("Llama")
    ids = tokens(7)
    for layer in ours.layers:
        layer.compile(backend="aot_eager")
    with rg.watch(plain) as expected:
        past = plain(ids[:, :6], use_cache=True).past_key_values
        plain(ids[:, 6:], past_key_values=past)
    with rg.watch(ours) as seen:
        past = ours(ids[:, :6], use_cache=True).past_key_values
        ours(ids[:, 6:], past_key_values=past)
    assert len(expected) > 1 and seen.names == expected.names
    for layer in expected.names:
        for ours_call, call in zip(seen.calls(layer), expected.calls(layer), strict=True):
            torch.testing.assert_close(ours_call.dense(), call.dense(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_statistics_are_folded_while_a_compiled_model_runs():
    plain, ours = pair("Mistral")
    whole, ids = torch.compile(ours, backend="aot_eager"), tokens(9)
    with rg.watch(whole, keep="statistics") as seen:
        whole(ids)
    with rg.watch(plain) as expected:
        plain(ids)
    for layer in expected.names:
        torch.testing.assert_close(
            seen.statistics[layer].of(rg.maps.Entropy), expected[layer].entropy(), rtol=1e-4, atol=1e-5
        )


@torch.no_grad()
def test_calls_that_break_the_graph_are_seen_and_other_backends_are_refused(monkeypatch):
    plain, ours = pair("Llama")
    whole, ids = torch.compile(ours.double(), backend="eager"), tokens(9)  # the kernels have no float64
    with rg.watch(whole) as seen:
        whole(ids)
    with rg.watch(plain.double()) as expected:
        plain(ids)
    for layer in expected.names:
        torch.testing.assert_close(seen[layer].dense(), expected[layer].dense())
    with pytest.raises(rg.RegardError, match=r"is compiled.*attn_implementation='regard'"):
        rg.watch(torch.compile(plain, backend="eager"))
    with rg.watch(whole, layers=[0]) as seen:
        pass
    assert not len(seen) and "did not run inside the with-block" in next(iter(seen.missing.values()))
    monkeypatch.setenv("REGARD_KERNEL", "off")
    with pytest.raises(rg.RegardError, match=r"is compiled.*attn_implementation='regard'"):
        rg.watch(whole)
