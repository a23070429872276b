"""What a print shows of values that hold many numbers: names and shapes, in a few lines."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch

import regard as rg
from regard.base.printing import folded

#: The most characters of a line, and of a printed value.
LINE, MOST = 200, 1500


def fits(value, most=MOST):
    shown = repr(value)
    assert len(shown) <= most and max(map(len, shown.splitlines())) <= LINE, shown[: 2 * LINE]
    return shown


def cached(name, cache):
    entry = rg.mechanism(name)
    attention, *tensors = entry.example(dtype=torch.float32)
    return rg.attend(*tensors, attention=attention, cache=cache, **entry.tensors(attention, *tensors)).cache


@pytest.mark.parametrize("name", ["deltanet", "gla", "linear", "performer", "rwkv_7"])
def test_a_recurrent_cache_shows_the_shape_of_its_state(name):
    cache = cached(name, rg.caches.RecurrentCache())
    assert fits(cache, 100) == f"RecurrentCache({cache.length} tokens, state {tuple(cache.state.shape)})"


@pytest.mark.parametrize("name", ["deepseek_sparse", "forgetting"])
def test_a_cache_shows_the_shapes_of_the_tensors_of_a_call(name):
    cache = cached(name, rg.GrowingCache())
    ((tensor, values),) = cache.tensors.items()
    assert fits(cache, 100) == f"GrowingCache({cache.length} tokens, {tensor} {tuple(values.shape)})"


def test_a_new_cache_says_its_sizes():
    assert repr(rg.caches.RingCache(5, sinks=1)) == "RingCache(size=5, sinks=1, 0 tokens)"
    assert [repr(kind()) for kind in (rg.GrowingCache, rg.caches.LatentCache)] == [
        "GrowingCache(0 tokens)",
        "LatentCache(0 tokens)",
    ]


def test_the_keys_of_a_module_and_of_a_decoder_show_shapes():
    decoder = rg.nn.TransformerConfig(8, num_heads=2).decoder(layers=3, vocab_size=9, cross=False)
    past = decoder.advance(torch.tensor([[2, 4]]))[1]
    assert repr(past) == "DecoderCache(3 layers, 2 tokens)"
    assert "key=tensor (1, 2, 2, 4), value=tensor (1, 2, 2, 4)" in fits(past.keys[0], 400)


def test_the_catalog_prints_its_names_and_a_table_in_a_notebook():
    entries = rg.mechanisms()
    shown, table = fits(entries), entries._repr_html_()
    assert shown.startswith(f"{len(entries)} mechanisms; ")
    assert shown.split("\n", 1)[1].replace("\n", " ").split(", ") == list(entries)
    assert table.count("<tr>") == len(entries) + 1 and "Press, Smith &amp; Lewis 2022" in table
    for entry in entries.values():
        assert fits(entry).startswith(f"CatalogEntry({entry.name!r}: ")
        assert entry.formula.split()[0] in entry._repr_html_()


def test_the_catalog_is_not_changed_by_what_is_done_to_its_dict():
    entries = rg.mechanisms()
    assert isinstance(entries, dict) and deepcopy(entries).keys() == entries.keys()
    entries.clear()
    assert rg.mechanism("alibi") is rg.mechanisms()["alibi"]


def test_statistics_of_a_watched_model_are_a_line_for_each_module():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    with rg.watch(model, keep="statistics") as seen, torch.no_grad():
        for _ in range(2):
            model(torch.randn(4, 50, 8))
    lines = fits(seen.statistics).splitlines()
    assert lines[0] == "3 modules with statistics" and len(lines) == 4
    assert all("Entropy(), TopLinks(k=1)" in line and line.endswith("of 2 calls") for line in lines[1:])
    assert seen.statistics._repr_html_().count("<tr>") == 4
    copied = pickle.loads(pickle.dumps(seen.statistics))
    assert repr(copied) == repr(seen.statistics)


def test_tensors_inside_of_values_are_shapes():
    value = {"a": torch.zeros(2, 3), "b": (torch.zeros(1), None), "c": [1]}
    assert folded(value) == "{'a': tensor (2, 3), 'b': (tensor (1,), None), 'c': [1]}"
    assert folded((torch.zeros(()),)) == "(tensor (),)"
