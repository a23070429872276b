"""What a text reader says of hybrid models: signed weights as shares of |weight|, and the kinds of layers."""

from __future__ import annotations

import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

import regard as rg
from extras import needs_transformers
from recurrent_models import V, build, tokens
from regard.cli.report import with_importance
from regard.maps.changed_map import HeadMean
from regard.maps.scored_map import Convolution, convolution_map
from regard.stats import layer_kinds as kinds_module
from regard.stats import profile, rollout
from regard.stats.layer_kinds import kind_lines, layer_kinds
from regard.types import HeadTable
from regard.viewer import Sheet
from watching import watched

TEXT = " ".join(f"w{number}" for number in range(3, 40))


def reader(name):
    """A model in miniature with a tokenizer of numbered words."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, V)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return rg.TextReader(build(name), PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>"))


def shares_of(weights):
    return weights.abs() / weights.abs().sum(-1, keepdim=True)


@needs_transformers("5.23", "the recurrent layers are read")
def test_a_hybrid_is_read_with_shares_and_kinds():
    result = reader("Qwen3Next").read(TEXT)
    profiled, (delta, attention) = result.reading.profile, layer_kinds(result.reading.profile)
    assert [(kind.kind, kind.numbers) for kind in (delta, attention)] == [("delta rule", (0,)), ("attention", (1,))]
    _, seen = watched(reader("Qwen3Next").model, {"input_ids": torch.arange(3, 40)[None]})
    assert seen.kinds == {layer.name: layer.kind for layer in profiled.layers}
    for shown in result.reading.maps.values():
        torch.testing.assert_close(shown.dense().sum(-1), torch.ones(shown.shape[:3]), atol=1e-5, rtol=0)
    lines = list(kind_lines(profiled))
    assert lines[0].startswith("Delta rule (layer 0): ") and "of |weight| is negative" in lines[0]
    assert lines[1].startswith("Attention (layer 1): ") and "negative" not in lines[1]
    assert lines[2] == "Weights of layer 0 have signs; the numbers here are shares of |weight|."
    assert result.reading.roles is not None and result.error < 1e-4
    about = Sheet.of(result.reading).about
    notes = [layer["note"] for layer in about["layers"]]
    lead = "".join(part for part, _ in about["lead"]["sentence"])
    assert (" of its |weight| on " in lead) == (about["lead"]["layer"] == 0)
    assert notes[0].startswith("Delta rule. Weights have signs") and notes[1] == ""


@needs_transformers("5.23", "the recurrent layers are read")
def test_the_numbers_of_a_kind_are_those_of_its_dense_shares():
    _, seen = watched(build("Qwen3Next"), {"input_ids": tokens(12, batch=1)})
    measured = profile(seen.maps, [f"t{n}" for n in range(12)], kinds=seen.kinds)
    delta, weights = layer_kinds(measured)[0], seen[0].dense()[0]
    shares, place = shares_of(weights), torch.arange(12.0)
    negative = -weights.clamp_max(0).sum(-1) / weights.abs().sum(-1)
    assert delta.negative == pytest.approx(float(negative.mean()), abs=1e-5)
    assert delta.shares["itself"] == pytest.approx(float(shares.diagonal(dim1=1, dim2=2).mean()), abs=1e-5)
    reach = (shares * (place[:, None] - place).abs()).sum(-1).mean()
    assert delta.reach == pytest.approx(float(reach), rel=1e-4)


def test_rollout_and_roles_take_signed_maps():
    _, seen = watched(build("Mamba2"), {"input_ids": tokens(9, batch=1)})
    flow = rollout(seen.maps, range(9))
    expected = torch.eye(9)
    for weights in seen.maps.values():
        expected = (0.5 * shares_of(weights.dense()[0]).mean(0) + 0.5 * torch.eye(9)) @ expected
    torch.testing.assert_close(flow, expected, atol=1e-5, rtol=1e-4)


def test_very_many_channels_are_shown_as_their_mean(monkeypatch):
    monkeypatch.setattr(sys.modules["regard.stats.profile"], "MOST_HEADS", 8)
    _, seen = watched(build("Mamba"), {"input_ids": tokens(9)})
    reading = rg.types.TextReading.of("", seen.maps, batch=1, kinds=seen.kinds)
    (layer, _), (shown, _) = reading.profile.layers, reading.maps.values()
    assert (layer.num_heads, layer.averaged, shown.shape) == (1, (8, 16), (1, 1, 9, 9))
    some = torch.linspace(0, 15, 8).round().long()
    torch.testing.assert_close(shown.dense()[0, 0], shares_of(seen[0].dense()[1][some]).mean(0), atol=1e-6, rtol=1e-5)
    assert "Each of layers 0, 1 is shown as the mean of 8 of its 16 channels." in list(kind_lines(reading.profile))


def test_the_mean_over_heads_is_a_map():
    weights = rg.Attention(mask=rg.causal())(*torch.randn(3, 2, 3, 7, 4)).weights
    mean, expected = HeadMean(weights), weights.dense().mean(1, keepdim=True)
    torch.testing.assert_close(mean.dense(), expected)
    torch.testing.assert_close(mean[1, 0, [5, 2], 1:4], expected[1, 0, [5, 2], 1:4])
    torch.testing.assert_close(mean.received(), expected.sum(2))
    torch.testing.assert_close(mean.select([1], [0, 0]).dense(), expected[[1]].expand(-1, 2, -1, -1))


def test_a_convolution_is_its_weights():
    out_gate, in_gate, taps, x = torch.randn(2, 5, 11), torch.randn(2, 5, 11), torch.randn(5, 3), torch.randn(2, 5, 11)
    weights = convolution_map(Convolution(out_gate[:, :, 4:], in_gate, taps))
    expected = out_gate * F.conv1d(F.pad(in_gate * x, (2, 0)), taps.flip(-1)[:, None], groups=5)
    torch.testing.assert_close((weights.dense() @ x[..., None])[..., 0], expected[:, :, 4:])
    totals = weights.summarize(rg.maps.KeyTotals())[0]
    torch.testing.assert_close(totals, weights.dense().sum(2))
    torch.testing.assert_close(weights.select([1], [2, 0]).dense(), weights.dense()[[1]][:, [2, 0]])


def test_importance_names_the_layers_that_have_it():
    read = reader("OlmoHybrid")
    with pytest.raises(rg.RegardError, match=r"is a delta rule layer, .* Name the layers of attention: --layers 1"):
        with_importance(read, TEXT, read.read(TEXT))
    assert "importance" in with_importance(read, TEXT, read.read(TEXT, [1])).reading.profile.layers[0].values


@needs_transformers("5.23", "the recurrent layers are read")
def test_documents_of_a_hybrid_are_merged():
    read = reader("Qwen3Next")
    table = HeadTable.over(read.profile(text, length=20)[0] for text in (TEXT, TEXT[::-1].replace("w", " w")))
    assert [len(layer.means["reach"]) for layer in table.layers] == [4, 2] and table.documents == 2
    with pytest.raises(rg.RegardError, match="the layers have 4, 2 heads"):
        table.values("reach")


@needs_transformers("5.23", "the recurrent layers are read")
def test_numbers_of_parallel_layers_are_explained():
    lines = list(kind_lines(reader("FalconH1").read(TEXT).reading.profile))
    assert any(line.endswith("L1 is model.layers.0.self_attn.") for line in lines)
    assert kinds_module._layers([0, 1, 2, 4]) == "layers 0 to 2, 4"
