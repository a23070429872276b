"""Names of projections: one vocabulary, and what was missing where there were four."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import transformers
from torch import nn

import regard as rg
from recurrent_models import build
from regard.hf.attention_modules import attention_modules
from regard.hf.capture.model_inputs import ReadTexts
from regard.hf.heads.model_heads import ModelHeads
from regard.hf.names import BY_HAND, IN_ORDER, OUTPUTS, cache_in, is_of_attention, is_of_values, output_names, sides_of
from regard.hf.recurrent.inline_layers import inline_reader
from watching import watched

C, H, T = 12, 3, 5
WORDS = {"query": ("q", "query", "queries"), "key": ("k", "key", "keys"), "value": ("v", "value", "values")}
FORMS = ("{}", "{}_proj", "{}_lin", "W_{}", "w{}", "W{}", "to_{}", "{}.linear", "linear_{}", "attn.{}_proj")
NONE = ("linears.1", "layers.0", "value_out", "q_norm", "fc1", "gate_proj", "vision_proj", "equal", "memory")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", WORDS)
def test_a_name_says_what_a_projection_computes(form, side):
    for word in WORDS[side]:
        name = form.format(word)
        assert sides_of(name) == {side} and is_of_attention(name)
        assert is_of_values(name) == (side == "value")


@pytest.mark.parametrize("name", [*IN_ORDER, "query_key_value", "QKV_proj", "in_proj_qkv"])
def test_a_packed_projection_has_all_three(name):
    assert sides_of(name) == {"query", "key", "value"}
    assert not is_of_values(name)


@pytest.mark.parametrize("name", [*NONE, *OUTPUTS, *BY_HAND])
def test_other_names_say_nothing(name):
    assert not sides_of(name) and not is_of_values(name)


@pytest.mark.parametrize("name", ["value_global", "values_text_proj", "values_vision_proj", "value_msa"])
def test_values_of_some_tokens_are_values(name):
    assert is_of_values(name)


class Blocks(nn.Module):
    """Attention whose weights change after the softmax, so that they are measured."""

    def __init__(self, names, output, count):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(C, 3 * C if len(names) == 1 else C))
        setattr(self, output, nn.Linear(C, C))
        setattr(self, count, H)
        self.names, self.output = names, output

    def forward(self, x):
        parts = [getattr(self, name)(x) for name in self.names]
        parts = parts[0].chunk(3, -1) if len(parts) == 1 else parts
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in parts)
        self.weights = (q @ k.mT).softmax(-1) * torch.arange(1, T + 1)
        return getattr(self, self.output)((self.weights @ v).transpose(1, 2).flatten(2))


SEPARATE = [("q_lin", "k_lin", "v_lin"), ("W_q", "W_k", "W_v"), ("to_q", "to_k", "to_v"), ("queries", "keys", "values")]


@pytest.mark.parametrize("output", ["c_proj", "W_o", "to_out", "output_proj", "output_linear"])
@pytest.mark.parametrize("names", [*SEPARATE, ("to_qkv",), ("c_attn",), ("Wqkv",), ("in_proj",)], ids="-".join)
def test_a_map_is_measured_by_any_of_the_names(names, output):
    model = nn.Sequential(Blocks(names, output, "nhead")).eval()
    _, seen = watched(model, {"input": torch.randn(2, T, C)})
    assert "measured" in seen.verify()["0"].note
    torch.testing.assert_close(seen[0].dense(), model[0].weights, atol=1e-5, rtol=1e-4)


def test_the_number_h_may_be_a_height_so_it_is_no_number_of_heads_that_are_measured():
    class OneHead(Blocks):
        def forward(self, x):
            q, k, v = (getattr(self, name)(x)[:, None] for name in self.names)
            self.weights = (q @ k.mT).softmax(-1) * torch.arange(1, T + 1)
            return getattr(self, self.output)((self.weights @ v)[:, 0])

    model = nn.Sequential(OneHead(SEPARATE[0], "out", "h")).eval()
    _, seen = watched(model, {"input": torch.randn(2, T, C)})
    torch.testing.assert_close(seen[0].dense(), model[0].weights, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("second", ["w_v", "value_more"])
def test_the_sum_of_two_values_has_no_measured_map(second):
    class TwoValues(Blocks):
        def forward(self, x):
            q, k, *values = (getattr(self, name)(x).unflatten(-1, (H, -1)).transpose(1, 2) for name in self.names)
            weights = (q @ k.mT).softmax(-1) * torch.arange(1, T + 1)
            return getattr(self, self.output)((weights @ sum(values)).transpose(1, 2).flatten(2))

    model = nn.Sequential(TwoValues(("q_lin", "k_lin", "v", second), "out", "num_heads")).eval()
    with pytest.raises(rg.RegardError, match="adds several projections of values"):
        watched(model, {"input": torch.randn(2, T, C)})


@pytest.mark.parametrize("names", [("0", "1", "2"), ("linear1", "act", "linear2")])
def test_the_first_layer_of_several_is_no_projection(names):
    model = nn.ModuleList([Blocks(("q", "k", "v"), "out", "heads")])
    layers = (nn.Linear(C, C), nn.GELU(), nn.Linear(C, C))
    model[0].q = nn.Sequential(OrderedDict(zip(names, layers, strict=True)))
    with pytest.raises(rg.RegardError, match="have no known names"):
        rg.hf.head_weights(model)


@pytest.mark.parametrize("output", ["to_out", "output_proj", "output_projection", "output_linear"])
def test_heads_are_found_by_names_that_only_measuring_knew(output):
    heads = ModelHeads.of(nn.Sequential(Blocks(("W_q", "W_k", "W_v"), output, "num_attn_heads")), "gated")["0"]
    assert (heads.output_path, heads.num_heads) == (output, H)
    assert output_names(dict(heads.module.named_children())) == [output]


@pytest.mark.parametrize("names", [*SEPARATE, ("to_qkv",), ("qkv",)], ids="-".join)
def test_matrices_of_heads_are_found_by_any_of_the_names(names):
    torch.manual_seed(0)
    model = nn.ModuleList([Blocks(names, "out", "heads")])
    layer = rg.hf.head_weights(model)[0]
    weights = [getattr(model[0], name).weight for name in names]
    for side, weight in zip((layer.query, layer.key, layer.value), torch.cat(weights).chunk(3), strict=True):
        torch.testing.assert_close(side, weight.unflatten(0, (H, -1)).mT)


def test_the_heads_of_a_query_key_value_are_not_read_one_after_the_other():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    model = transformers.GPTNeoXModel(transformers.GPTNeoXConfig(**sizes, vocab_size=20))
    with pytest.raises(rg.RegardError, match="have no known names"):
        rg.hf.head_weights(model)


class TableAttention(nn.Module):
    """No softmax of its own: the class and the names of two tables say what it is."""

    def __init__(self):
        super().__init__()
        self.queries, self.keys = nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x):
        return self.queries(x) * self.keys(x)


def test_words_in_the_plural_are_names_of_projections():
    assert list(attention_modules(nn.Sequential(TableAttention()))) == ["0"]


class Answer:
    """What a model of transformers 5.24 returns: the cache has a new name, and warns under its old ones."""

    def __init__(self, logits, cache):
        self.logits, self.cache = logits, cache

    @property
    def past_key_values(self):
        raise AssertionError("the old name was read")

    cache_params = past_key_values


class CachedLayer(nn.Module):
    """One attention that takes and returns its cache under a name."""

    def __init__(self, name):
        super().__init__()
        self.name, self.embed = name, nn.Embedding(9, 8)

    def forward(self, input_ids, **given):
        x = self.embed(input_ids)[:, None]
        keys = given[self.name].update(x, x, 0)[0]
        mask = torch.ones(x.shape[2], keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - x.shape[2])
        out = nn.functional.scaled_dot_product_attention(x, keys, keys, attn_mask=mask)
        return Answer(out, given[self.name])


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params"])
def test_a_cache_is_found_under_each_name_of_transformers(name):
    model, cache, ids, steps = CachedLayer(name), transformers.DynamicCache(), torch.arange(5)[None], []
    read = ReadTexts()
    with rg.watch(model, on_step=lambda step: steps.append(step.positions)), torch.no_grad():
        for part in ids.split((3, 2), 1):
            model(part, **{name: cache})
            read = read.after(model, (), {"input_ids": part, name: cache})
    assert steps == [range(3), range(3, 5)]
    assert torch.equal(read.ids, ids)


@pytest.mark.parametrize("name", ["MiniMax", "Lfm2"])
def test_the_state_of_a_layer_is_found_under_each_name_of_transformers(name):
    model = build(name)
    with torch.no_grad():
        cache = cache_in(vars(model(torch.arange(5)[None], use_cache=True)))
    layers = [module for module in model.modules() if inline_reader(module) is not None]
    for module in layers:
        states = [inline_reader(module).state_before(module, {old: cache}) for old in ("cache", "past_key_values")]
        assert states[0] and all(torch.equal(*pair) for pair in zip(*states, strict=True))
    assert layers
