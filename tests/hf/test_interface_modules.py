"""A module that calls transformers' attention functions is attention; messages list no empty names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regard as rg
from extras import needs_transformers
from regard.base.errors import nearest
from regard.hf.attention_modules import attention_modules
from regard.hf.capture.watcher import nothing_captured

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


class PlainAttention(nn.Module):
    def forward(self, x, mask):
        return nn.functional.scaled_dot_product_attention(x, x, x, mask)


class SelfConditioned(nn.Module):
    """Hands a mask on to its attention, and adds the expected embedding of the words that it predicts so far."""

    def __init__(self, num_layers):
        super().__init__()
        self.layers = nn.ModuleList(PlainAttention() for _ in range(num_layers))
        self.head, self.embedding = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x, attention_mask=None):
        for layer in self.layers:
            x = layer(x, attention_mask)
            x = x + self.embedding(self.head(x).softmax(-1))
        return x


class Pooled(nn.Module):
    """Attends over what its layers return, with `weights_of` (B, 1, J)."""

    def __init__(self):
        super().__init__()
        self.layer, self.attention = PlainAttention(), nn.Linear(8, 1)

    def forward(self, x, attention_mask=None):
        x = self.layer(x, attention_mask)
        return self.weights_of(x) @ x

    def weights_of(self, x):
        return self.attention(x).mT.softmax(-1)


class PooledByVariable(Pooled):
    def __init__(self):
        super().__init__()
        self.score, self.attention = self.attention, None

    def weights_of(self, x):
        attn = self.score(x).mT
        return attn.softmax(-1)


class PooledByParameter(PooledByVariable):
    def __init__(self):
        super().__init__()
        self.attention_query = nn.Parameter(torch.randn(8, 1))

    def weights_of(self, x):
        return (x @ self.attention_query).mT.softmax(-1)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_container_that_hands_a_mask_to_its_attention_is_none_itself(num_layers):
    model, x = SelfConditioned(num_layers).eval(), torch.randn(2, 5, 8)
    names = [f"layers.{n}" for n in range(num_layers)]
    with rg.watch(model) as seen, torch.no_grad():
        model(x, attention_mask=torch.ones(5, 5).tril().bool())
    assert seen.names == names and not seen.missing
    assert list(attention_modules(model)) == names


@pytest.mark.parametrize("kind", [Pooled, PooledByVariable, PooledByParameter])
def test_a_container_that_attends_itself_is_attention(kind):
    model, x = kind().eval(), torch.randn(2, 5, 8)
    assert list(attention_modules(model)) == ["", "layer"]
    with rg.watch(model) as seen, torch.no_grad():
        model(x)
    inner = model.layer(x, None)
    assert seen.names == ["", "layer"] and not seen.missing
    torch.testing.assert_close(seen[""].dense()[:, 0], model.weights_of(inner), atol=1e-6, rtol=0)


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
