"""Modules that compute softmax themselves: run again, one at a time, against their own output_attentions."""

from __future__ import annotations

from inspect import unwrap

import pytest
import torch
import transformers
from torch import nn

import regard as rg
from miniatures import BERT, V, padding, sharpened, tokens
from regard.hf.capture import module_rerun as held
from watching import assert_identical, watched
from zoo import OwnAttention

GPT = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": V, "n_positions": 40, "rotary_dim": 2}
MODELS = {
    "BloomModel": {"vocab_size": V, "hidden_size": 16, "n_layer": 2, "n_head": 4},
    "GPTJModel": GPT,
    "CodeGenModel": GPT,
    "GPTNeoModel": {
        "vocab_size": V, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "window_size": 4,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 40,
    },
    "MPNetModel": BERT | {"pad_token_id": 1},
    "DebertaV2Model": BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "FalconModel": {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4},
}  # fmt: skip


XLNET = {"vocab_size": V, "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 16}
BARK = {"input_vocab_size": V, "output_vocab_size": V, "hidden_size": 16, "num_layers": 2, "num_heads": 4}
ENTITIES = {"entity_vocab_size": 10, "entity_emb_size": 8}
#: Whose inputs have axes of their own: channels before tokens, tokens before texts, words beside entities.
OTHERS = {
    "SqueezeBertModel": BERT | {"embedding_size": 16},
    "XLNetModel": XLNET,
    "BarkSemanticModel": BARK | {"block_size": 40},
    "LukeModel": BERT | ENTITIES,
    "DebertaModel": BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "BigBirdModel": BERT | {"block_size": 4, "num_random_blocks": 1},
}
MODELS |= OTHERS


def make(name):
    config = getattr(transformers, f"{name.removesuffix('Model')}Config")(**MODELS[name])
    torch.manual_seed(1)
    return sharpened(getattr(transformers, name)._from_config(config, attn_implementation="eager").eval())


def calls_interface(model):
    """Whether the attention of this transformers looks for a backend: GPT-J and CodeGen do from 5.24 on."""
    code = [unwrap(module.forward).__code__ for module in model.modules()]
    return any("attention_interface" in each.co_varnames for each in code)


@pytest.fixture(params=[0, held.SMALL], ids=["run again", "small"])
def size(request, monkeypatch):
    monkeypatch.setattr(held, "SMALL", request.param)


def entities():
    places = torch.full((2, 2, 30), -1)
    places[:, 0, :2], places[:, 1, 0] = torch.tensor([1, 2]), 3
    mask = torch.ones(2, 2, dtype=torch.long)
    return {"entity_ids": torch.tensor([[1, 2]] * 2), "entity_position_ids": places, "entity_attention_mask": mask}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts_of_inputs(name, size):
    """BigBird exchanges its attention modules in its first call, when it finds the text too short for blocks."""
    model, inputs = make(name), {"input_ids": tokens(9), "attention_mask": padding("right")}
    inputs |= entities() if name == "LukeModel" else {}
    outputs, seen = watched(model, inputs)
    with torch.no_grad():
        returned = model(**inputs, output_attentions=True)
    assert_identical(returned[0], outputs[0])
    assert not seen.missing and len(seen) == 2
    for weights, weight in zip(seen, returned.attentions, strict=True):
        weight = weight.softmax(-1) if name == "SqueezeBertModel" else weight  # it returns its scores
        torch.testing.assert_close(weights.dense(), weight, atol=1e-6, rtol=0)


def test_texts_before_batches_of_other_sizes(size):
    """A batch, heads, tokens and channels that all differ, so that no axis can stand in for another."""
    model, inputs = make("XLNetModel"), {"input_ids": tokens(7, batch=3)}
    _, seen = watched(model, inputs)
    assert seen[0].shape == (3, 4, 7, 7)


def test_a_head_that_is_mixed_after_the_softmax_is_refused():
    config = transformers.DebertaConfig(**BERT, relative_attention=True, talking_head=True, pos_att_type=["c2p"])
    model = sharpened(transformers.DebertaModel(config).eval())
    with pytest.raises(
        rg.RegardError, match=r"DisentangledSelfAttention changes its weights after the softmax \(linear\)"
    ):
        watched(model, {"input_ids": tokens(9)})


def test_a_gate_of_each_token_is_no_map():
    config = transformers.SwiftFormerConfig(depths=[1] * 4, embed_dims=[8, 8, 16, 16], image_size=64)
    with pytest.raises(rg.RegardError, match="SwiftFormerEfficientAdditiveAttention changes its weights"):
        watched(transformers.SwiftFormerModel(config).eval(), {"pixel_values": torch.randn(1, 3, 64, 64)})


def test_queries_that_a_module_has_of_its_own():
    labels = {"num_character_labels": 5, "num_bpe_labels": 6, "num_wordpiece_labels": 7, "max_token_length": 5}
    sizes = {"image_size": [8, 16], "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2}
    config = transformers.MgpstrConfig(**sizes, **labels, num_attention_heads=4, mlp_ratio=1)
    model, x = transformers.MgpstrForSceneTextRecognition(config).eval(), torch.randn(2, 3, 8, 16)
    _, seen = watched(model, {"pixel_values": x})
    assert not seen.missing and len(seen) == 5
    with torch.no_grad():
        wanted = model(x, output_a3_attentions=True).a3_attentions
    names = ("char_a3_module", "bpe_a3_module", "wp_a3_module")
    for name, weight in zip(names, wanted, strict=True):
        torch.testing.assert_close(seen[name].dense(), weight[:, None], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in OTHERS])
def test_weights_are_those_that_the_model_returns(name, size):
    model, inputs = make(name), {"input_ids": tokens(9), "attention_mask": padding("right")}
    with torch.no_grad():
        plain, wanted = model(**inputs), model(**inputs, output_attentions=True).attentions
    outputs, seen = watched(model, inputs)
    assert_identical(plain[0], outputs[0])
    assert not seen.missing and len(seen) == 2
    for weights, weight in zip(seen, wanted, strict=True):
        torch.testing.assert_close(weights.dense(), weight, atol=1e-6, rtol=0)
        torch.testing.assert_close(weights[1, 2, 3:6, 4], weight[1, 2, 3:6, 4], atol=1e-6, rtol=0)
        entropy, received = weights.summarize(rg.maps.Entropy(), rg.maps.KeyTotals())
        torch.testing.assert_close(entropy, torch.special.entr(weight).sum(-1), atol=1e-5, rtol=0)
        torch.testing.assert_close(received, weight.sum(-2), atol=1e-5, rtol=0)
    if not calls_interface(model):
        assert all("own softmax" in check.note for check in seen.verify().values())


@pytest.mark.parametrize("name", ["BloomModel", "GPTNeoModel", "CodeGenModel"])
def test_a_cache_is_the_one_of_its_step(name, size):
    model, ids = make(name), tokens(6)
    with torch.no_grad():
        wanted = model(ids, output_attentions=True).attentions
    with rg.watch(model) as seen, torch.no_grad():
        cache = model(ids[:, :4], use_cache=True).past_key_values
        model(ids[:, 4:], past_key_values=cache, use_cache=True)
    for layer in (0, 1):
        first, then = seen.calls(layer)
        torch.testing.assert_close(first.dense(), wanted[layer][:, :, :4, :4], atol=1e-5, rtol=0)
        torch.testing.assert_close(then.dense(), wanted[layer][:, :, 4:], atol=1e-5, rtol=0)


def test_one_call_is_held_at_a_time(monkeypatch):
    monkeypatch.setattr(held, "SMALL", 0)
    _, seen = watched(make("BloomModel"), {"input_ids": tokens(9)})
    calls = [part.calls[0] for part in seen._parts.values()]
    assert calls[0].slot is calls[1].slot
    for number in (0, 1, 0):
        seen[number].entropy()
        assert calls[0].slot.owner is calls[number]
    assert seen[0].attention.mask == rg.causal()
    monkeypatch.setattr("regard.maps.attention_map.BUDGET", 100)
    with pytest.raises(rg.RegardError, match="BloomAttention computes all its weights at once"):
        seen[1].entropy()


def test_parameters_that_changed_are_noticed(monkeypatch):
    monkeypatch.setattr(held, "SMALL", 0)
    model = make("BloomModel")
    _, seen = watched(model, {"input_ids": tokens(9)})
    sharpened(model)
    with pytest.raises(rg.RegardError, match="returns other weights than"):
        seen[0].dense()


def test_statistics_of_held_weights(size):
    model, inputs = make("GPTJModel"), {"input_ids": tokens(9)}
    _, kept = watched(model, inputs)
    _, seen = watched(model, inputs, keep="statistics")
    for name, weights in kept.maps.items():
        torch.testing.assert_close(seen.statistics[name].of(rg.maps.Entropy), weights.entropy(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("made", "why"), [({"dim": 2}, "not linear in its values"), ({"times": 2}, "2 softmaxes")])
def test_another_softmax_is_no_map(made, why):
    with pytest.raises(rg.RegardError, match=f"no attention of OwnAttention.*{why}"):
        watched(OwnAttention(**made), {"x": torch.randn(2, 6, 16)})


M = torch.eye(4) + 0.5
KEPT = torch.arange(6) < 3
#: What a module does between its softmax and its values, and the function that changes the weights.
CHANGES = {
    "masks": (lambda w: w * KEPT, "mul"),
    "fills": (lambda w: w.masked_fill(~KEPT, 0), "masked_fill"),
    "fills in place": (lambda w: w.masked_fill_(~KEPT, 0), "masked_fill_"),
    "fills a view in place": (lambda w: w.flatten(0, 1).mul_(KEPT).view_as(w), "mul_"),
    "writes an item": (lambda w: w.__setitem__((..., 0), 0.0) or w, "__setitem__"),
    "writes by out": (lambda w: torch.mul(w.clone() * 2, KEPT, out=w), "mul"),
    "writes by out, from other tensors": (
        lambda w: torch.mul(torch.arange(1.0, 5).view(4, 1, 1), KEPT.float().expand(w.shape), out=w),
        "mul",
    ),
    "scales": (lambda w: w / 2, "div"),
    "mixes heads": (lambda w: torch.einsum("gh,bhij->bgij", M, w), "einsum"),
    "mixes heads by a product": (lambda w: (M @ w.flatten(2)).view_as(w), "flatten"),
    "mixes heads by a projection": (
        lambda w: nn.functional.linear(w.permute(0, 2, 3, 1), M).permute(0, 3, 1, 2),
        "linear",
    ),
    "adds": (lambda w: w + torch.eye(6), "add"),
    "drops the last": (lambda w: nn.functional.pad(w[..., :-1], (1, 0)), "getitem"),
    "once more": (lambda w: (w * 4).softmax(-1) * w, "mul"),
}
#: What leaves them as they are.
KEEPS = {
    "nothing": lambda w: w,
    "types": lambda w: w.double().to(torch.float32),
    "dropout": lambda w: nn.functional.dropout(w, 0.5, training=False),
    "dropout in place": lambda w: nn.functional.dropout(w, 0.5, training=False, inplace=True),
    "axes": lambda w: w.permute(0, 2, 1, 3).contiguous().transpose(1, 2),
    "heads and batch together": lambda w: w.flatten(0, 1).view(2, 4, 6, 6),
    "a mask of ones": lambda w: w * torch.ones(4, 1, 1),
    "no change in place": lambda w: w.clone().contiguous(),
    "statistics": lambda w: (w, w.amax(-1), w.std())[0],
}  # fmt: skip
PRODUCTS = {
    "matmul": lambda w, v: torch.matmul(w, v),
    "bmm": lambda w, v: torch.bmm(w.flatten(0, 1), v.flatten(0, 1)).view(2, 4, 6, 4),
    "baddbmm": lambda w, v: torch.baddbmm(torch.zeros(8, 6, 4), w.flatten(0, 1), v.flatten(0, 1)).view(2, 4, 6, 4),
    "einsum": lambda w, v: torch.einsum("bhij,bhjd->bhid", w, v),
    "einsum, any batch": lambda w, v: torch.einsum("...jd, ...ij -> ...id", v, w),
    "turned": lambda w, v: (v.mT @ w.mT).mT,
    "sum": lambda w, v: (w[..., None] * v[:, :, None]).sum(3),
}


class ChangedAttention(OwnAttention):
    """Does something between its softmax and its product."""

    def __init__(self, change, product=torch.matmul):
        super().__init__()
        self.change, self.product = change, product

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return self.product(self.change((q @ k.mT).softmax(-1)), v).transpose(1, 2).flatten(2)


@torch.no_grad()
def look(model):
    x = torch.randn(2, 6, 16)
    _, seen = watched(model, {"x": x})
    q, k, _ = model.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(seen[0].dense(), (q @ k.mT).softmax(-1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("product", ["matmul", "einsum"])
def test_weights_changed_after_the_softmax_are_refused(change, product):
    model = ChangedAttention(CHANGES[change][0], PRODUCTS[product])
    why = f"ChangedAttention changes its weights after the softmax .*{CHANGES[change][1]}"
    with pytest.raises(rg.RegardError, match=why), torch.no_grad():
        watched(model, {"x": torch.randn(2, 6, 16)})


@pytest.mark.parametrize("keep", KEEPS)
def test_weights_that_stay_the_same_are_shown(keep, size):
    look(ChangedAttention(KEEPS[keep]))


@pytest.mark.parametrize("product", PRODUCTS)
def test_any_product_with_the_values_is_known(product, size):
    look(ChangedAttention(lambda w: w, PRODUCTS[product]))


def test_a_softmax_that_takes_no_values_is_no_weight():
    """A gate of each row, beside the attention: the softmax that the values are multiplied by is shown."""

    class Gated(OwnAttention):
        def forward(self, x):
            return x.softmax(-1).amax(-1, keepdim=True) * super().forward(x)

    look(Gated())


def test_a_softmax_in_a_module_that_is_not_named_after_attention():
    class Mixer(OwnAttention):
        pass

    look(Mixer())


def test_weights_changed_after_their_product_are_refused():
    def spoilt(w, v):
        output = w @ v
        w[:, :, :, 0] = 0
        return output

    with pytest.raises(rg.RegardError, match="changes its weights"), torch.no_grad():
        watched(ChangedAttention(lambda w: w, spoilt), {"x": torch.randn(2, 6, 16)})


@pytest.mark.parametrize("product", [lambda w, v: (w[..., None] * v[:, :, None]).mean(3), lambda w, v: w.mT @ v])
def test_a_softmax_without_a_product_is_refused(product):
    with pytest.raises(rg.RegardError, match="no product with it was found"), torch.no_grad():
        watched(ChangedAttention(lambda w: w, product), {"x": torch.randn(2, 6, 16)})


def test_generation_of_a_model_with_a_softmax_of_its_own(size):
    config = transformers.BloomConfig(**MODELS["BloomModel"])
    model = sharpened(transformers.BloomForCausalLM._from_config(config, attn_implementation="eager").eval())
    told = {
        "num_beams": 2,
        "max_new_tokens": 4,
        "min_new_tokens": 4,
        "return_dict_in_generate": True,
        "do_sample": False,
    }
    ids = tokens(4)
    with rg.watch(model) as seen:
        model.generate(ids, **told)
    wanted = model.generate(ids, **told, output_attentions=True).attentions
    for mine, step in zip(seen.calls(1), wanted, strict=True):
        torch.testing.assert_close(mine.dense(), step[1].expand_as(mine.dense()), atol=1e-5, rtol=0)


class PaddedAttention(OwnAttention):
    """Keys after `lengths` of each text are masked; it keeps its weights."""

    def forward(self, x, lengths):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        late = torch.arange(x.shape[1]) >= lengths[:, None, None, None]
        self.weights = (q @ k.mT + torch.zeros(late.shape).masked_fill(late, -torch.inf)).softmax(-1).detach()
        return (self.weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("batch", "head"),
    [([1, 0], [0, 1, 2, 3]), ([1, 0], [2, 0]), (-1, 3), (slice(1, None), None), (torch.tensor([True, False]), [3])],
)
def test_a_selection_of_held_weights_is_that_of_any_map(batch, head):
    """Indices of every kind select, and the mask fits the selected texts."""
    model = PaddedAttention().eval()
    with rg.watch(model, verify=False) as seen:
        model(torch.randn(2, 5, 16), torch.tensor([5, 2]))
    texts, heads = (torch.arange(size)[index].reshape(-1) for index, size in ((batch, 2), (head or slice(None), 4)))
    expected = model.weights[texts][:, heads]
    selected = seen[0].select(batch, head)
    torch.testing.assert_close(selected.dense(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(selected.entropy(), torch.special.entr(expected).sum(-1), atol=1e-5, rtol=0)
    assert torch.equal(selected.attention.mask.allowed(selected.grid).expand_as(expected), expected > 0)


class Chosen(nn.Module):
    """Each query attends to keys that follow no short rule."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.allowed = 1, torch.tensor([[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 0, 1], [0, 0, 0, 1]]).bool()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        q, k, v = (project(x)[:, None] for project in (self.q_proj, self.k_proj, self.v_proj))
        return ((q @ k.mT).masked_fill(~self.allowed, -torch.inf).softmax(-1) @ v)[:, 0]


@torch.no_grad()
def test_weights_without_a_short_rule_have_no_mask(size):
    model = nn.Sequential(Chosen()).eval()
    with rg.watch(model) as seen:
        model(torch.randn(2, 4, 4))
    assert torch.equal(seen[0].dense()[0, 0] > 0, model[0].allowed) and seen[0].attention.mask is None
