"""Models of other packages are watched as they come: outputs keep their bits, weights are those of an eager formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regard as rg


@torch.no_grad()
def watched(model, *inputs, num_maps, **options):
    """The maps of a run; its output has the bits of a run without a watch, and every map was checked."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    model.eval()
    plain = model(*inputs, **options)
    with rg.watch(model) as seen:
        output = model(*inputs, **options)
    assert len(seen) == (num_maps or len(seen)) > 0 and not [
        r for r in seen.missing.values() if "was not called" not in r
    ]
    for one, other in zip(tensors(plain), tensors(output), strict=True):
        assert torch.equal(one, other)
    assert all(check.ok is not False for check in seen.verify().values())
    for weights in seen:
        assert not weights.has_shares or torch.allclose(weights.dense().sum(-1), torch.ones(()), atol=1e-5)
    return seen


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    value = list(value.values()) if hasattr(value, "values") else value
    return [x for part in value for x in tensors(part)] if isinstance(value, tuple | list) else []


@pytest.mark.parametrize(
    "options",
    [
        {}, {"attn_flash": True}, {"rotary_pos_emb": True}, {"alibi_pos_bias": True}, {"rel_pos_bias": True},
        {"attn_kv_heads": 1}, {"attn_qk_norm": True}, {"attn_num_mem_kv": 2},
    ],
)  # fmt: skip
def test_x_transformers(options):
    library = pytest.importorskip("x_transformers", reason="x-transformers is not installed")
    layers = library.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    model = library.TransformerWrapper(num_tokens=20, max_seq_len=16, attn_layers=layers)
    kept = {}
    for name, module in model.named_modules():
        if name.endswith(".attend"):
            module.register_forward_hook(lambda *run, name=name: kept.update({name: run[-1][1].post_softmax_attn}))
    seen = watched(model, torch.randint(20, (2, 7)), num_maps=2)
    for name, weights in seen.maps.items():
        assert kept[name] is None or torch.allclose(weights.dense(), kept[name], atol=1e-6)


@pytest.mark.parametrize("changed", [{}, {"n_query_groups": 2}, {"attention_logit_softcapping": 5.0}])
def test_litgpt(changed):
    library = pytest.importorskip("litgpt.model", reason="litgpt is not installed")
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 20, "padded_vocab_size": 20}
    model, kept = library.GPT(library.Config(**sizes | changed)), {}
    for name, module in model.named_modules():
        if isinstance(module, library.CausalSelfAttention):
            module.scaled_dot_product_attention = keeping(module.scaled_dot_product_attention, kept, name)
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    for name, weights in watched(model, torch.randint(20, (2, 7)), num_maps=2).maps.items():
        q, k = (each.double() for each in kept[name][:2])
        scores = q @ k.mT / 8**0.5
        if "attention_logit_softcapping" in changed:
            scores = 5.0 * torch.tanh(scores / 5.0)
        eager = scores.masked_fill(future, -torch.inf).softmax(-1)
        assert torch.allclose(weights.dense().double(), eager, atol=1e-6)


def keeping(function, kept, name):
    """A function that keeps what it is given, by a name."""

    def called(*given):
        kept[name] = given
        return function(*given)

    return called


def test_gpt_2_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 12, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=None)).eval()
    ids = torch.tensor([[3, 1, 4, 1]])
    seen = watched(model, ids, num_maps=2)
    model.set_attn_implementation("eager")
    eager = model(ids, output_attentions=True).attentions
    for weights, returned in zip(seen, eager, strict=True):
        assert torch.allclose(weights.dense(), returned, atol=1e-6)


def library_of(name):
    """A package; skips without it, or where its own imports are broken."""
    return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


def returned_by(model, kind):
    """What the modules of this name return, by the path of their parent."""
    kept = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == kind:
            module.register_forward_hook(lambda *run, name=name: kept.update({name.rpartition(".")[0]: run[-1]}))
    return kept


TIMM = {
    "vit_tiny_patch16_224": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "deit3_small_patch16_224": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "eva02_tiny_patch14_224": {"img_size": 28, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "beit_base_patch16_224": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "vit_small_patch14_dinov2": {"img_size": 28, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "cait_xxs24_224": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "convit_tiny": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4, "local_up_to_layer": 1},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)
    },
    "coatnet_nano_rw_224": {"img_size": 64},
    "maxvit_nano_rw_256": {"img_size": 64},
}  # fmt: skip


@pytest.mark.parametrize("name", TIMM)
def test_timm(name):
    library = library_of("timm")
    torch.manual_seed(0)
    model = library.create_model(name, num_classes=3, **TIMM[name]).eval()
    image = torch.randn(2, 3, *[TIMM[name]["img_size"]] * 2)
    seen = watched(model, image, num_maps=None)
    for module in model.modules():
        module.fused_attn = False
    kept = returned_by(model, "attn_drop")
    with torch.no_grad():
        model(image)
    assert set(kept) == set(seen.names)
    for path, weights in kept.items():
        torch.testing.assert_close(seen[path].dense(), weights.reshape(seen[path].dense().shape), atol=1e-6, rtol=0)


def test_linear_attention_of_timm_is_refused():
    model = library_of("timm").create_model("mobilevitv2_050", num_classes=3).eval()
    reason = "no attention of ByobNet was captured .* LinearSelfAttention computes a softmax, but no product with it"
    with pytest.raises(rg.RegardError, match=reason), torch.no_grad(), rg.watch(model):
        model(torch.randn(1, 3, 64, 64))


@torch.no_grad()
def test_open_clip():
    library = library_of("open_clip.model")
    vision = library.CLIPVisionCfg(layers=2, width=32, head_dim=8, patch_size=8, image_size=16)
    text = library.CLIPTextCfg(context_length=9, vocab_size=20, width=32, heads=4, layers=2)
    model = library.CLIP(16, vision, text).eval()
    inputs = torch.randn(2, 3, 16, 16), torch.randint(20, (2, 9))
    seen, kept = watched(model, *inputs, num_maps=4), {}

    def weigh(name, module, args, given):
        given = given | {"need_weights": True, "average_attn_weights": False}
        kept[name] = nn.MultiheadAttention.forward(module, *args, **given)[1]

    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            module.register_forward_pre_hook(lambda *run, name=name: weigh(name, *run), with_kwargs=True)
    model(*inputs)
    assert set(kept) == set(seen.names)
    for path, weights in kept.items():
        torch.testing.assert_close(seen[path].dense(), weights, atol=1e-6, rtol=0)


def test_open_clip_resnet():
    library = library_of("open_clip.modified_resnet")
    model = library.ModifiedResNet((1, 1, 1, 1), 8, 4, image_size=64, width=8)
    image = torch.randn(2, 3, 64, 64)
    seen = watched(model, image, num_maps=1)
    pool = model.attnpool
    with torch.no_grad():
        x = model.layer4(model.layer3(model.layer2(model.layer1(model.stem(image))))).flatten(2).mT
        x = torch.cat([x.mean(1, keepdim=True), x], 1) + pool.positional_embedding
        q, k = (f(x).double().unflatten(-1, (4, -1)).transpose(1, 2) for f in (pool.q_proj, pool.k_proj))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    torch.testing.assert_close(seen[0].dense().double(), weights, atol=1e-6, rtol=0)


def test_vit_pytorch():
    library = library_of("vit_pytorch")
    model = library.ViT(image_size=16, patch_size=8, num_classes=3, dim=32, depth=2, heads=4, dim_head=8, mlp_dim=32)
    image = torch.randn(2, 3, 16, 16)
    seen, kept = watched(model, image, num_maps=2), returned_by(model, "attend")
    with torch.no_grad():
        model(image)
    assert set(kept) == set(seen.names)
    for path, weights in kept.items():
        torch.testing.assert_close(seen[path].dense(), weights, atol=1e-6, rtol=0)


def bert(folder):
    """A random BERT and its tokenizer, saved and loaded, as a user gets them."""
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "a", "mat"]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=len(words))).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def assert_eager(model, inputs, seen):
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = model(**inputs, output_attentions=True).attentions
    assert len(seen) == len(eager)
    for weights, returned in zip(seen, eager, strict=True):
        real = inputs["attention_mask"].bool()
        mine, theirs = (w.transpose(1, 2)[real] for w in (weights.dense(), returned))
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)


TEXTS = ["the cat sat on a mat", "a cat sat"]


def test_sentence_transformers(tmp_path):
    library = library_of("sentence_transformers")
    parts = library_of("sentence_transformers.models")
    model, tokenizer = bert(tmp_path)
    words = parts.Transformer(str(tmp_path))
    whole = library.SentenceTransformer(modules=[words, parts.Pooling(16)], device="cpu")
    plain = whole.encode(TEXTS, convert_to_tensor=True)
    with rg.watch(whole) as seen:
        output = whole.encode(TEXTS, convert_to_tensor=True)
    assert torch.equal(plain, output) and not seen.missing
    assert list(rg.stats.layer_numbers(seen)) == [0, 1]
    assert_eager(model, tokenizer(TEXTS, padding=True, return_tensors="pt"), seen)
    with rg.edit(whole, rg.KnockOut(rg.Where(layers=1, keys=0))) as run:
        assert not torch.equal(whole.encode(TEXTS, convert_to_tensor=True), plain)
    assert list(run.calls) == seen.names[1:]


def test_a_pipeline_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    model, tokenizer = bert(tmp_path)
    features = transformers.pipeline("feature-extraction", model=model, tokenizer=tokenizer)
    plain = features(TEXTS[0])
    with rg.watch(features.model) as seen:
        assert features(TEXTS[0]) == plain
    assert not seen.missing
    assert_eager(model, tokenizer(TEXTS[:1], return_tensors="pt"), seen)
