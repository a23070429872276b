"""Layers are called by their numbers in the model, whichever of them are looked at."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.stats import layer_numbers, mask_findings, profile
from regard.types import HeadTable


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        (["encoder.layer.4.attention.self", "encoder.layer.5.attention.self"], [4, 5]),
        (["encoder.block.3.layer.0.SelfAttention", "encoder.block.7.layer.0.SelfAttention"], [3, 7]),
        (["layers.3.self_attn", "layers.7.self_attn"], [3, 7]),  # the layers between hold no attention
        (["stages.0.blocks.0.attn", "stages.0.blocks.1.attn"], [0, 1]),
        (["encoder.layers.2.self_attn", "decoder.layers.2.self_attn"], [0, 1]),
        (["first", "layers.7.attn"], [0, 1]),
        (["decoder.9.attn", "encoder.2.attn"], [0, 1]),
    ],
)
def test_numbers_are_those_of_the_paths_if_they_tell_layers_apart(names, numbers):
    assert layer_numbers(names) == numbers


def test_given_numbers_count():
    assert layer_numbers(["layers.1.blocks.0"], [5]) == [5]
    with pytest.raises(rg.RegardError, match="2 were given for 1 maps"):
        layer_numbers(["a"], [1, 2])


def maps(*names):
    x = torch.zeros(1, 2, 4, 8)
    return {name: rg.Attention()(x, x, x).weights for name in names}


def test_sentences_and_tables_carry_them():
    some = maps("layer.4.attention", "layer.9.attention")
    measured = profile(some, list("abcd"))
    assert [line.split()[:2] for line in measured.table().splitlines()[1:]] == [[n, h] for n in "49" for h in "01"]
    assert {finding.layer for finding in rg.types.TextReading.of("", some, list("abcd")).findings} == {4, 9}
    leaks = mask_findings(some, causal=True)
    assert [leak.sentence.split(" put ")[0] for leak in leaks] == ["L4.H0 and L4.H1", "L9.H0 and L9.H1"]
    table = HeadTable.of(measured).merge(HeadTable.of(measured))
    assert [layer.number for layer in HeadTable.from_json(table.to_json()).layers] == [4, 9]
    assert table.table().splitlines()[3].split()[:2] == ["9", "0"]


def test_what_one_document_adds_to_a_large_corpus_is_not_rounded_away():
    """A million queries of mean 1, then 20 000 documents of one query of mean 0: 1 / 1.02, exactly known."""
    one = HeadTable.of(profile(maps("layer.0"), list("abcd")))
    (layer,) = one.layers
    assert all(mean.dtype == torch.float64 for mean in layer.means.values())
    many = type(layer)("layer.0", {"x": torch.ones(1).double()}, {"x": torch.tensor([1e6]).double()})
    zero = type(layer)("layer.0", {"x": torch.zeros(1).double()}, {"x": torch.ones(1).double()})
    for _ in range(20_000):
        many = many.merge(zero)
    assert float(many.means["x"]) == pytest.approx(1e6 / 1.02e6, rel=1e-10)
