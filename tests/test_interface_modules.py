"""A module that calls transformers' attention functions is attention; messages list no empty names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regard as rg
from extras import needs_transformers
from regard.errors import nearest
from regard.hf.attention_modules import attention_modules
from regard.hf.capture.reasons import nothing_captured

transformers = pytest.importorskip("transformers")
modeling_utils = pytest.importorskip("transformers.modeling_utils")
ALL_ATTENTION_FUNCTIONS = modeling_utils.ALL_ATTENTION_FUNCTIONS


class Mixer(nn.Module):
    """No name and no projection of it says attention."""

    is_causal, scaling = True, 0.5

    def __init__(self):
        super().__init__()
        self.config = transformers.PretrainedConfig(attn_implementation="sdpa")
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        inputs = [part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in self.parts]
        function = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
        return function(self, *inputs, None, scaling=self.scaling, is_causal=True)[0].flatten(2)


@torch.no_grad()
def test_a_module_that_calls_the_interface_is_watched_and_edited_whatever_its_names():
    model, x = nn.Sequential(Mixer(), Mixer()).eval(), torch.randn(1, 5, 8)
    assert list(attention_modules(model)) == ["0", "1"]
    plain = model(x)
    with rg.watch(model) as seen:
        assert torch.equal(model(x), plain)
    q, k, _ = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in model[0].parts)
    scores = (q @ k.mT * 0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    assert torch.allclose(seen[0].dense(), scores.softmax(-1), atol=1e-6)
    with rg.edit(model, rg.KnockOut(rg.Where(layers=1, keys=0))) as run:
        assert not torch.equal(model(x), plain)
    assert list(run.calls) == ["1"]


def test_classes_of_moshi_and_zaya_are_attention():
    for family, name in (("moshi", "MoshiAttention"), ("zaya", "ZayaAttention")):
        module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
        kind = getattr(module, name)
        assert list(attention_modules(nn.ModuleList([bare(kind)]))) == ["0"]


def bare(kind):
    """A module of a class without its children."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module


def test_no_message_has_an_empty_list():
    with pytest.raises(rg.RegardError, match=r"edit: Linear has no attention modules\. Give the model"):
        rg.edit(nn.Linear(2, 2), rg.KnockOut(rg.Where(keys=0)))
    with pytest.raises(rg.RegardError, match=r"no layer 3\. Its layers have no numbers\."):
        rg.watch(nn.MultiheadAttention(8, 2), layers=3).__enter__()
    assert nearest("a", []) == "There are no names to choose from."


@needs_transformers("5.1", "eager attention is seen")
@pytest.mark.parametrize(("backend", "advised"), [("eager", False), ("sdpa", True)])
def test_advice_that_is_followed_is_left_out(backend, advised):
    model = transformers.BertModel(
        transformers.BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    )
    model.set_attn_implementation(backend)
    text = nothing_captured(model, ["reason"])
    assert ("attn_implementation='eager'" in text) == advised and "output_attentions=True" in text
