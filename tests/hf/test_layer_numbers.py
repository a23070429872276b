"""One rule for the numbers of layers: `Where(layers=n)` is the n-th layer, in every wrapper."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import regard as rg
from regard.stats import layer_numbers
from regard.stats.numbering import layer_number

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])
NUM_LAYERS = 6


def small_bert(num_layers=NUM_LAYERS):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 12}
    return transformers.BertModel(transformers.BertConfig(num_hidden_layers=num_layers, **sizes)).eval()


class States(nn.Module):
    """The part of a SentenceTransformer that holds the model of transformers."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids).last_hidden_state


class Held(nn.Module):
    """A model in a list of a wrapper, as a DataParallel or a Lightning module around a Sequential holds it."""

    def __init__(self, *parts):
        super().__init__()
        self.module = nn.ModuleList(parts)

    def forward(self, ids):
        for part in self.module:
            ids = part(ids)
        return ids


def lightning(model):
    module = pytest.importorskip("lightning").LightningModule()
    module.model, module.forward = model, model.forward
    return module


def low_rank(model):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of peft, which reads a name that transformers renamed
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"], r=2)).eval()


def sentence_transformer(model):
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    modules = library.models if hasattr(library, "models") else library.sentence_transformer.modules
    pooling = modules.Pooling(8)
    whole = library.SentenceTransformer(modules=[States(model), pooling], device="cpu")
    whole.forward = lambda ids: pooling({"token_embeddings": model(ids).last_hidden_state, "attention_mask": ids > 0})
    return whole


WRAPPERS = {
    "bare": lambda model: model,
    "first of a Sequential": lambda model: nn.Sequential(States(model), nn.Linear(8, 3)),
    "second of a Sequential": lambda model: nn.Sequential(nn.Identity(), States(model), nn.Linear(8, 3)),
    "named Sequential in a Sequential": lambda model: nn.Sequential(Held(nn.Identity(), nn.Sequential(States(model)))),
    "DataParallel": nn.DataParallel,
    "Lightning": lightning,
    "LoRA": low_rank,
    "SentenceTransformer": sentence_transformer,
}


@torch.no_grad()
@pytest.mark.parametrize("num_layers", [NUM_LAYERS, 1])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_number_is_the_same_layer_for_watch_and_edit_in_every_wrapper(wrapper, num_layers):
    model = WRAPPERS[wrapper](small_bert(num_layers))
    with rg.watch(model) as seen:
        model(IDS)
    assert layer_numbers(seen) == layer_numbers(seen.names) == layer_numbers(seen.maps) == list(range(num_layers))
    assert [layer_number(name) for name in seen.names] == layer_numbers(seen.names)
    for number, name in enumerate(seen.names):
        with rg.edit(model, rg.KnockOut(rg.Where(layers=number, keys=0))) as run, rg.watch(model) as edited:
            model(IDS)
        assert list(run.calls) == [name]
        assert edited[number][0, 0, :, 0].eq(0).all()
        with rg.edit(model, rg.KnockOut(rg.Where(heads=f"L{number}.H1", keys=0))) as run:
            model(IDS)
        assert list(run.calls) == [name]
        with rg.watch(model, layers=number) as one:
            model(IDS)
        assert one.names == [name] and layer_numbers(one.names) == [number]
    with pytest.raises(rg.RegardError, match=f"layer {num_layers}"):
        rg.edit(model, rg.KnockOut(rg.Where(layers=num_layers)))
    with (
        pytest.raises(rg.RegardError, match=rf"no layer {num_layers}\. It has layers 0"),
        rg.watch(model, layers=num_layers),
    ):
        pass


@torch.no_grad()
def test_gates_profiles_and_sources_of_patches_use_the_number_of_the_edit():
    model = nn.Sequential(States(small_bert()), nn.Linear(8, 3))
    with rg.watch(model, keep="qkv") as seen:
        plain = model(IDS)
    with rg.watch(model, layers=[2, 4]) as two:
        model(IDS)
    profile = rg.profile(two.maps, list("abcdef"))
    assert [line.split()[0] for line in profile.table().splitlines()[1:]] == ["2", "2", "4", "4"]
    with rg.edit(model, rg.edits.ActivationPatch(rg.Where(layers=3), "value", {3: seen[3].value})) as run:
        assert torch.equal(model(IDS), plain)
    assert list(run.calls) == [seen.names[3]]
    with rg.edit(model, rg.edits.ReplaceWeights(rg.Where(layers=2), {2: torch.eye(6).expand(1, 2, 6, 6)})):
        assert not torch.equal(model(IDS), plain)
    with rg.hf.gated(model, {3: [0.0, 0.0]}), rg.watch(model, keep="qkv") as gated:
        model(IDS)
    assert torch.equal(gated[3].value, seen[3].value) and not torch.equal(gated[4].value, seen[4].value)


@torch.no_grad()
def test_stages_are_counted_through():
    sizes = {"embed_dim": 8, "depths": [2, 3], "num_heads": [2, 2], "window_size": 2, "image_size": 16, "patch_size": 2}
    model = transformers.SwinModel(transformers.SwinConfig(num_channels=3, **sizes)).eval()
    image = torch.randn(1, 3, 16, 16)
    with rg.watch(model) as seen:
        model(image)
    assert layer_numbers(seen.names) == [0, 1, 2, 3, 4]
    for number, name in enumerate(seen.names):
        with rg.edit(model, rg.edits.ScaleWeights(rg.Where(layers=number), 0.5)) as run:
            model(image)
        assert list(run.calls) == [name]
    with rg.watch(model, layers=3) as one:
        model(image)
    assert one.names == [seen.names[3]] and layer_numbers(one.names) == [3]


@torch.no_grad()
def test_with_chosen_layers_a_number_is_that_of_the_layer_in_the_model():
    model = small_bert()
    with rg.watch(model, keep="qkv") as whole:
        model(IDS)
    for layers in ([1, 3], [3, 1], ["encoder.layer.[13].*"]):
        with rg.watch(model, layers=layers, keep="qkv") as seen:
            model(IDS)
        assert seen[3] is seen[whole.names[3]] is seen[-1] is list(seen)[-1] is seen.encoder[3]
        assert seen[1] is seen[-2] is next(iter(seen)) is seen.calls(1)[0]
        assert torch.equal(seen[3].dense(), whole[3].dense())
        assert torch.equal(seen.head_part(3), whole.head_part(3))
        for number in (0, 2, 4):
            with pytest.raises(rg.RegardError, match=rf"seen\[{number}\]: layer {number} was not watched.*layers 1, 3"):
                seen[number]
        with pytest.raises(rg.RegardError, match=r"seen\[-3\]"):
            seen[-3]
        for part, numbers in (
            (slice(1, 3), [1]),
            (slice(3, 5), [3]),
            (slice(None), [1, 3]),
            (slice(-1, None), [3]),
            (slice(None, -1), [1]),
            (slice(None, None, -1), [3, 1]),
        ):
            assert seen[part] == [seen[n] for n in numbers], part
        assert "\n  1: encoder.layer.1." in repr(seen) and "\n  3: encoder.layer.3." in repr(seen)
        pytest.importorskip("matplotlib")
        seen.figure(tokens=list("abcdef"))
        seen.figure(layer=3, tokens=list("abcdef"))
        with rg.edit(model, rg.edits.ActivationPatch(rg.Where(layers=3), "output", seen)):
            model(IDS)


@torch.no_grad()
def test_numbers_of_layers_that_were_not_captured_and_of_two_parts():
    model = small_bert()
    with rg.watch(model, layers=[1, 3]) as seen:
        model.encoder.layer[3](model.embeddings(IDS))
    assert seen[3] is seen[-1] and len(seen) == 1
    with pytest.raises(rg.RegardError, match="not captured"):
        seen[1]
    with rg.watch(model) as seen:  # without layers= a number is the place among the maps
        model.encoder.layer[3](model.embeddings(IDS))
    assert seen[0] is seen["encoder.layer.3.attention.self"]
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 8, "vocab_size": 12, "max_position_embeddings": 16}
    heads = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("attention_heads", "ffn_dim")}
    bart = transformers.BartModel(transformers.BartConfig(**sizes, **heads, pad_token_id=1)).eval()
    with rg.watch(bart, layers=[1]) as seen:
        bart(IDS)
    assert len(seen) == 3 and seen.cross[1] is seen["decoder.layers.1.encoder_attn"]
    with pytest.raises(rg.RegardError, match=r"layer 1 has several maps.*seen\.encoder\[1\]"):
        seen[1]
    with rg.watch(bart, layers=["encoder.layers.1.*"]) as seen:
        bart(IDS)
    assert seen[1] is seen[-1]


@torch.no_grad()
def test_a_generation_with_chosen_layers_has_their_numbers():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=4, n_head=2, n_embd=8, vocab_size=20, bos_token_id=0, eos_token_id=None)
    model, steps = transformers.GPT2LMHeadModel(config).eval(), []
    with rg.watch(model, layers=[1, 3], on_step=lambda step: steps.append(step[3].shape)) as seen:
        model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=3, do_sample=False)
    assert seen.generation[3] is seen.generation["transformer.h.3.attn"] and len(steps) == 3
    with pytest.raises(rg.RegardError, match="layer 0 was not watched"):
        seen.generation[0]


class Tower(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        self.blocks = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(num_layers))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, x, x)[0]
        return x


@torch.no_grad()
def test_two_towers_share_numbers_if_both_run():
    model = nn.ModuleDict({"vision": Tower(2), "text": Tower(4)}).eval()
    x = torch.randn(1, 5, 8)
    edit = rg.KnockOut(rg.Where(layers=1, keys=0))
    with rg.edit(model, edit) as run:
        model["text"](x)
    assert list(run.calls) == ["text.blocks.1"]
    message = r"layer 1, which is vision\.blocks\.1 and text\.blocks\.1"
    with pytest.raises(rg.RegardError, match=message), rg.edit(model, edit):
        model["vision"](x), model["text"](x)
    with rg.edit(model, rg.KnockOut(rg.Where(layers="text.blocks.1", keys=0))) as run:
        model["vision"](x), model["text"](x)
    assert list(run.calls) == ["text.blocks.1"]


@pytest.mark.parametrize(
    "template",
    [
        "0.model.encoder.layer.{}.attention.self",
        "base_model.model.model.layers.{}.self_attn",
        "_orig_mod.transformer.h.{}.attn",
        "module.1.blocks.{}.attn",
        "net.1.{}",
        "encoder.block.{}.layer.0.SelfAttention",
        "transformer.layers.{}.0",
        "layers.{}.experts.2.attention",
    ],
)
def test_the_number_that_differs_between_siblings_counts_layers(template):
    assert layer_numbers([template.format(n) for n in (3, 7)]) == [3, 7]
    assert layer_numbers([template.format(n) for n in range(12)]) == list(range(12))


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("0.model.encoder.layer.4.attention.self", 4),
        ("module.0.encoder.block.4.layer.0.SelfAttention", 4),
        ("1.transformer.h.4.attn", 4),
        ("visual.resblocks.4.attn", 4),
        ("decoder.4.attn", 4),
        ("4", 4),
        ("attention", None),
        ("layer4.attention", None),
    ],
)
def test_one_path_alone_gives_the_number_behind_the_name_of_a_list_of_layers(name, number):
    assert layer_number(name) == number


def test_copies_of_names_keep_their_numbers():
    names = list(rg.hf.attention_modules.attention_modules(nn.ModuleList([nn.Sequential(Tower(3)), Tower(2)])))
    numbers = [0, 1, 2, 0, 1]
    assert [layer_number(name) for name in names] == numbers
    for again in (copy.deepcopy(names), pickle.loads(pickle.dumps(names))):
        assert again == names and [layer_number(name) for name in again] == numbers
