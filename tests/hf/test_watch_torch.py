"""`watch` on plain torch: F.scaled_dot_product_attention and nn.MultiheadAttention, against torch's own weights."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as every

import regard as rg
from extras import needs_transformers
from miniatures import V, padding, sharpened, tokens
from regard.hf.capture import kept_calls as verifying
from regard.hf.capture.torch_calls import ProjectionInputs
from regard.hf.capture.watcher import UNCALLED
from watching import assert_identical, assert_verified, oracle, watched

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

C, H, T = 16, 4, 7
FALCON = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


# F.scaled_dot_product_attention


class Attention(nn.Module):
    """What users write."""

    def __init__(self, **options):
        super().__init__()
        self.qkv, self.options = nn.Linear(C, 3 * C), options

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        if self.options.get("enable_gqa"):
            k, v = k[:, :2], v[:, :2]
        return attended(q, k, v, **self.options)


def attended(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """No name says that this attends, only what it calls."""

    def __init__(self):
        super().__init__()
        self.mix, self.then = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x):
        q, k, v = self.mix(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        return self.then(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def inner_weights(model, x):
    """The weights, from values that are one-hot: the output is then the weights."""
    q, k, _ = model.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
    if model.options.get("enable_gqa"):
        k = k[:, :2]
    return F.scaled_dot_product_attention(q, k, torch.eye(T).expand(*k.shape[:2], -1, -1), **model.options)


torch.manual_seed(3)
ALLOWED = torch.rand(T, T) < 0.6
ALLOWED.fill_diagonal_(True)
SDPA = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.9},
    "boolean mask": {"attn_mask": ALLOWED},
    "mask of each head": {"attn_mask": torch.rand(H, T, T) < 0.6},
    "float mask": {"attn_mask": torch.randn(2, 1, T, T)},
    "float mask with forbidden pairs": {"attn_mask": torch.randn(T, T).masked_fill(~ALLOWED, -torch.inf)},
    "grouped heads": {"enable_gqa": True, "is_causal": True},
}


@pytest.mark.parametrize("case", SDPA)
def test_the_function_of_torch(case):
    model, x = sharpened(Attention(**SDPA[case])), torch.randn(2, T, C)
    plain = model(x)
    output, seen = watched(model, {"x": x})
    assert_identical(plain, output)
    assert_verified(seen)
    wanted = inner_weights(model, x)
    torch.testing.assert_close(seen[0].dense(), torch.where(wanted.isnan(), 0.0, wanted), atol=1e-5, rtol=0)


@pytest.mark.parametrize("I", [1, 3])
def test_causal_of_torch_starts_at_the_first_key(I):
    class CrossAttention(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    _, seen = watched(CrossAttention(), {"q": torch.randn(1, 2, I, 4), "k": torch.randn(1, 2, 5, 4)})
    assert_verified(seen)
    assert torch.equal(seen[0].dense() > 0, torch.ones(I, 5).tril().bool().expand(1, 2, -1, -1))


def test_a_block_without_the_name_and_one_inside_another():
    model = nn.Sequential(Block(), Block())
    _, seen = watched(model, {"input": torch.randn(2, T, C)})
    assert seen.names == ["0", "1"] and not seen.missing
    assert_verified(seen)


def test_only_chosen_layers_of_plain_torch():
    model = nn.Sequential(Attention(), Attention(), Attention())
    _, seen = watched(model, {"input": torch.randn(2, T, C)}, layers=[1])
    assert seen.names == ["1"] and not seen.missing


def test_dropout_of_the_function_counts_in_eval_too():
    _, seen = watched(Attention(dropout_p=0.5).eval(), {"x": torch.randn(2, T, C)})
    assert "dropout 0.5" in seen.verify()[seen.names[0]].note


def test_arguments_that_are_refused_by_name():
    class FlatAttention(nn.Module):
        def forward(self, q, **options):
            return F.scaled_dot_product_attention(q, q, q, **options)

    _, seen = watched(FlatAttention(), {"q": torch.randn(2, 5, 4)})
    assert seen[0].shape == (1, 2, 5, 5)  # the axis before length and width is that of heads
    both = {"attn_mask": torch.zeros(5, 5), "is_causal": True}
    # From 2.15 on torch refuses both by itself.
    with pytest.raises(
        (rg.RegardError, RuntimeError), match=r"both attn_mask and is_causal|attn_mask should not be set"
    ):
        watched(FlatAttention(), {"q": torch.randn(1, 2, 5, 4), **both})


@pytest.mark.parametrize("more", [{}, {"alibi": True}, {"new_decoder_architecture": True, "num_kv_heads": 2}], ids=str)
@pytest.mark.parametrize("side", ["", "left", "right"])
def test_falcon(more, side):
    config = transformers.FalconConfig(**FALCON | more)
    model = sharpened(transformers.FalconModel._from_config(config, attn_implementation="sdpa").eval())
    inputs = {"input_ids": tokens(9)} | ({"attention_mask": padding(side)} if side else {})
    with torch.no_grad():
        plain = model(**inputs)
    output, seen = watched(model, inputs)
    assert_identical(plain[0], output[0])
    assert_verified(seen)
    assert len(seen) == 2 and not seen.missing
    if "alibi" in more:  # eager adds ALiBi twice, to the mask and to the scores
        return
    real = inputs.get("attention_mask", torch.ones(2, 9)).bool()
    for mine, wanted in zip(seen, oracle_of_falcon(model, inputs), strict=True):
        mine, wanted = (w.transpose(1, 2)[real] for w in (mine.dense(), wanted))
        torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=0)


def oracle_of_falcon(model, inputs):
    """Falcon decides its class when it is built, so eager is another model with the same weights."""
    eager = type(model)._from_config(model.config, attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    return oracle(eager, inputs)["all"]


def test_a_call_through_the_interface_is_taken_once():
    config = transformers.BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, vocab_size=V)
    model = transformers.BertModel._from_config(config, attn_implementation="sdpa").eval()
    _, seen = watched(model, {"input_ids": tokens(5)})
    assert [len(seen.calls(name)) for name in seen.names] == [1, 1]


def test_the_hooks_are_gone_after_an_exception_inside_the_model():
    class BrokenAttention(nn.Module):
        def forward(self, q):
            F.scaled_dot_product_attention(q, q, q)
            raise ZeroDivisionError

    model = BrokenAttention()
    with pytest.raises(ZeroDivisionError), rg.watch(model):
        model(torch.randn(1, 1, 2, 2))
    assert not every._global_forward_hooks and not every._global_forward_pre_hooks
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_model_of_plain_torch_does_not_need_transformers():
    code = (
        "import sys, torch, regard as rg\n"
        "model = torch.nn.MultiheadAttention(8, 2)\n"
        "with rg.watch(model) as seen: model(*[torch.randn(3, 1, 8)] * 3)\n"
        "assert seen[0].shape == (1, 2, 3, 3) and 'transformers' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# nn.MultiheadAttention


def by_need_weights(module, *inputs, **options):
    """The weights that torch itself returns."""
    with torch.no_grad():
        options |= {"need_weights": True, "average_attn_weights": False}
        return module(*inputs, **options)[1]


CAUSAL = torch.ones(T, T).triu(1).bool()
PADDED = torch.tensor([[False] * T, [False] * 4 + [True] * (T - 4)])
MULTIHEAD = {
    "plain": ({}, {}),
    "sequence first": ({"batch_first": False}, {}),
    "no bias": ({"bias": False}, {}),
    "odd heads": ({"num_heads": 1}, {}),
    "own keys": ({"add_bias_kv": True}, {}),
    "zero key": ({"add_zero_attn": True}, {"attn_mask": CAUSAL}),
    "boolean mask": ({}, {"attn_mask": CAUSAL}),
    "float mask": ({}, {"attn_mask": torch.zeros(T, T).masked_fill(CAUSAL, -torch.inf)}),
    "added numbers": ({}, {"attn_mask": torch.randn(T, T)}),
    "mask of each head": ({}, {"attn_mask": (torch.rand(2 * H, T, T) < 0.3) & ~torch.eye(T).bool()}),
    "padding": ({}, {"key_padding_mask": PADDED}),
    "padding as numbers": ({"batch_first": False}, {"key_padding_mask": torch.randn(2, T)}),
    "both": ({}, {"key_padding_mask": PADDED, "attn_mask": CAUSAL}),
    "causal hint": ({}, {"attn_mask": CAUSAL, "is_causal": True}),
}


@pytest.mark.parametrize("mode", ["inference", "gradient", "need weights"])
@pytest.mark.parametrize("case", MULTIHEAD)
def test_multihead_attention(case, mode):
    made, given = MULTIHEAD[case]
    module = sharpened(nn.MultiheadAttention(**{"embed_dim": C, "num_heads": H, "batch_first": True, **made}).eval())
    x = torch.randn(2, T, C) if module.batch_first else torch.randn(T, 2, C)
    given = given | {"need_weights": mode == "need weights"}
    with torch.set_grad_enabled(mode == "gradient"):
        plain = module(x, x, x, **given)[0]
        with rg.watch(module) as seen:
            output = module(x, x, x, **given)[0]
    assert_identical(plain, output)
    assert_verified(seen)
    torch.testing.assert_close(seen[0].dense(), by_need_weights(module, x, x, x, **given), atol=1e-5, rtol=0)


@pytest.mark.parametrize("made", [{"add_zero_attn": True}, {"add_bias_kv": True}], ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_with_a_causal_hint_torch_hides_the_keys_that_it_adds(made, grad):
    module, x = sharpened(nn.MultiheadAttention(C, H, batch_first=True, **made).eval()), torch.randn(2, T, C)
    with torch.set_grad_enabled(grad), rg.watch(module) as seen:
        module(x, x, x, attn_mask=CAUSAL, is_causal=True, need_weights=False)
    assert_verified(seen)
    assert seen[0].shape[3] == T + 1 and not seen[0].dense()[..., T].any()


@pytest.mark.parametrize("batched", [True, False])
def test_cross_attention_with_other_widths(batched):
    module = sharpened(nn.MultiheadAttention(C, H, kdim=6, vdim=10, batch_first=True).eval())
    inputs = [torch.randn(2, I, width) for I, width in ((4, C), (T, 6), (T, 10))]
    inputs = inputs if batched else [x[0] for x in inputs]
    with torch.no_grad(), rg.watch(module) as seen:
        module(*inputs)
    assert_verified(seen)
    wanted = by_need_weights(module, *inputs)
    torch.testing.assert_close(seen[0].dense(), wanted if batched else wanted[None], atol=1e-5, rtol=0)


def test_a_subclass_with_a_forward_of_its_own_is_named():
    class Own(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x)

    with pytest.raises(rg.RegardError, match=r"Own replaces the forward of nn\.MultiheadAttention"):
        watched(Own(C, H), {"x": torch.randn(T, 2, C)})


# nn.TransformerEncoder and nn.TransformerDecoder


def layer_weights(model, x, **masks):
    """Every layer's weights, by running its parts one after the other on torch's slow path."""
    found = []
    for layer in model.layers:
        given = {"attn_mask": masks.get("mask"), "key_padding_mask": masks.get("src_key_padding_mask")}
        seen = layer.norm1(x) if layer.norm_first else x
        found.append(by_need_weights(layer.self_attn, seen, seen, seen, **given))
        x = layer(x, masks.get("mask"), masks.get("src_key_padding_mask"))
    return found


def encoder(norm_first=False, batch_first=True, **options):
    layer = nn.TransformerEncoderLayer(C, H, 16, norm_first=norm_first, batch_first=batch_first, dropout=0.1)
    options = {"enable_nested_tensor": batch_first and not norm_first} | options
    return sharpened(nn.TransformerEncoder(layer, 2, **options).eval())


ENCODER_MASKS = {
    "plain": {},
    "causal": {"mask": CAUSAL, "is_causal": True},
    "padding": {"src_key_padding_mask": PADDED},
    "padding on the left": {"src_key_padding_mask": PADDED.flip(-1)},
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masks", ENCODER_MASKS)
def test_the_encoder_on_its_fused_path_and_off_it(masks, norm_first, grad):
    model, x, given = encoder(norm_first), torch.randn(2, T, C), ENCODER_MASKS[masks]
    with torch.set_grad_enabled(grad):
        plain = model(x, **given)
        with rg.watch(model) as seen:
            output = model(x, **given)
    assert_identical(plain, output)
    assert_verified(seen)
    assert seen.encoder.names == ["layers.0.self_attn", "layers.1.self_attn"] and not seen.missing
    real = ~given.get("src_key_padding_mask", torch.zeros(2, T).bool())
    for mine, wanted in zip(seen, layer_weights(model, x, **given), strict=True):
        mine, wanted = (w.transpose(1, 2)[real] for w in (mine.dense(), wanted))
        torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=0)


def test_the_fused_path_is_taken_while_watched(monkeypatch):
    model, calls, fused = encoder(), [], torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a: calls.append(1) or fused(*a))
    watched(model, {"src": torch.randn(2, T, C)})
    assert len(calls) == 2


def test_nested_tensors_are_padded():
    """All sequences shorter than the longest place: torch cuts the batch, and so does the map."""
    model, x = encoder(), torch.randn(2, T, C)
    padded = torch.arange(T) >= torch.tensor([5, 3])[:, None]
    _, seen = watched(model, {"src": x, "src_key_padding_mask": padded})
    assert seen[0].shape == (2, H, 5, 5) and not seen[0][1, :, :, 3:].any()
    assert_verified(seen)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_encoder_and_decoder(batch_first, grad):
    with warnings.catch_warnings():  # that sequence first is slow
        warnings.simplefilter("ignore")
        model = sharpened(nn.Transformer(C, H, 2, 2, 16, batch_first=batch_first).eval())
    x, y = torch.randn(2, T, C), torch.randn(2, 5, C)
    inputs = (x, y) if batch_first else (x.transpose(0, 1), y.transpose(0, 1))
    given = {"tgt_mask": CAUSAL[:5, :5], "tgt_is_causal": True, "memory_key_padding_mask": PADDED}
    with torch.set_grad_enabled(grad):
        plain = model(*inputs, **given)
        with rg.watch(model) as seen:
            output = model(*inputs, **given)
    assert_identical(plain, output)
    assert_verified(seen)
    assert [len(part) for part in (seen.encoder, seen.decoder, seen.cross)] == [2, 2, 2]
    assert seen.decoder[0].attention.mask == rg.causal()
    assert seen.cross[0].shape == (2, H, 5, T) and not seen.cross[0][1, :, :, 4:].any()


@needs_transformers("5.1", "its vision models have these names")
def test_multihead_attention_inside_a_model_of_transformers():
    config = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**config, intermediate_size=16)).eval()
    _, seen = watched(model, {"pixel_values": torch.randn(1, 3, 8, 8)})
    assert seen.names[-1] == "head.attention" and seen["head.attention"].shape == (1, 4, 1, 4)
    assert_verified(seen)


def test_numbers_on_the_fused_path_of_a_layer_are_noticed():
    """There torch takes every number but 0 for "forbidden" and returns NaN; the map would show something else."""
    model, x, numbers = encoder().layers[0], torch.randn(2, T, C), torch.rand(T, T) + 1
    with torch.no_grad():
        assert model(x, numbers).isnan().all()
    with pytest.raises(rg.RegardError, match="differ from the output of the kernel"):
        watched(model, {"src": x, "src_mask": numbers})


# Queries and keys of torch's own layers are projected when a map is looked at


def test_layers_of_torch_project_at_the_first_look(monkeypatch):
    model, x, projected = encoder(), torch.randn(2, T, C), ProjectionInputs.projected
    rows = []
    monkeypatch.setattr(
        ProjectionInputs, "projected", lambda self, n, x: rows.append(x.shape[1]) or projected(self, n, x)
    )
    with torch.no_grad(), rg.watch(model, verify=False) as seen:
        model(x)
    assert rows == []
    seen[0].dense()
    assert rows == [T, T]
    with torch.no_grad(), rg.watch(model) as seen:
        model(x)
    assert rows[2:] == [4, 4]  # of each layer, the queries that are verified and no key
    assert_verified(seen)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_projections_that_are_not_those_of_the_kernel_are_caught(which, monkeypatch):
    """Verification folds the projections into the queries and the output; each of them still counts."""
    of = ProjectionInputs.of

    def wrong(module, inputs):
        found = of(module, inputs)
        weights = [w.clone() for w in found.weights]
        weights[which][0] += 1
        return replace(found, weights=tuple(weights))

    monkeypatch.setattr(ProjectionInputs, "of", staticmethod(wrong))
    with pytest.raises(rg.RegardError, match="differ from the output of the kernel"):
        watched(encoder(), {"src": torch.randn(2, T, C)})


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("what", ["input", "parameter"])
def test_inputs_changed_in_place_are_refused(what, inference):
    model = encoder()
    with torch.inference_mode(inference):
        x = torch.randn(2, T, C)
        with torch.no_grad(), rg.watch(model) as seen:
            model(x)
        if what == "input":
            x.mul_(2)
        else:
            weight = model.layers[0].self_attn.in_proj_weight
            (weight.data if inference else weight.detach()).mul_(2)
        with pytest.raises(rg.RegardError, match="were changed in place after"):
            seen[0].dense()


def test_statistics_of_torch_layers_are_folded_while_they_run():
    model, x = encoder(), torch.randn(2, T, C)
    with torch.no_grad(), rg.watch(model) as kept:
        model(x)
    with torch.no_grad(), rg.watch(model, keep="statistics") as seen:
        model(x)
    for name, weights in kept.maps.items():
        torch.testing.assert_close(seen.statistics[name].of(rg.maps.Entropy), weights.entropy())


def test_layers_with_a_forward_of_their_own_are_not_trusted_with_their_inputs():
    """A residual that is added in place changes the input; the map is that of the original input."""

    class InPlace(nn.TransformerEncoderLayer):
        def forward(self, x):
            return x.add_(self.self_attn(x, x, x, need_weights=False)[0])

    model, x = sharpened(InPlace(C, H, 16, batch_first=True).eval()), torch.randn(2, T, C)
    wanted = by_need_weights(model.self_attn, x, x, x)
    with torch.no_grad(), rg.watch(model) as seen:
        model(x)
    torch.testing.assert_close(seen[0].dense(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("grad", [False, True])
def test_every_row_of_torch_layers_is_verified_when_asked(grad, monkeypatch):
    """On the fused path, off it, with padding; one weight of one row is wrong by a little and that is told."""
    model, x = encoder(), torch.randn(3, T, C)
    with torch.set_grad_enabled(grad), rg.watch(model, verify="all") as seen:
        model(x, src_key_padding_mask=torch.arange(T) >= torch.tensor([T, 5, 2])[:, None])
    assert_verified(seen)
    scores = verifying.scores

    def off(attention, tile, grid):
        s = scores(attention, tile, grid)
        return s.masked_fill((grid.query == 5)[:, None] & (grid.key == 2), -torch.inf)

    monkeypatch.setattr(verifying, "scores", off)
    with torch.set_grad_enabled(grad):
        watched(model, {"src": x})
        with pytest.raises(rg.RegardError, match="differ from the output of the kernel"):
            watched(model, {"src": x}, verify="all")


# A model without attention


def test_nothing_seen_says_what_to_do():
    with pytest.raises(rg.RegardError, match="Linear has no attention that can be captured"), rg.watch(nn.Linear(2, 2)):
        pass
    with rg.watch(encoder()) as seen:
        pass
    for name in (0, "layers.0.self_attn", "nowhere"):
        with pytest.raises(rg.RegardError, match="with-block"):
            seen[name]


# Modules that call `regard.attend` themselves


class Asking(nn.Module):
    """A module of a user's own; no name says that it attends."""

    def __init__(self, mask=None):
        super().__init__()
        self.mix, self.attention = nn.Linear(C, 3 * C), rg.Attention(mask=mask)

    def split(self, x):
        return self.mix(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        return self.attention(*self.split(x)).output.transpose(1, 2).flatten(2)


class AskingAttention(Asking):
    """Listened to for its name; what `attend` asks of torch meanwhile is no attention of its own."""

    def __init__(self, engine):
        super().__init__(rg.causal() & rg.window(2))
        self.q_proj, self.engine = nn.Linear(C, C), engine

    def forward(self, x):
        return by_helper(self.attention, *self.split(x), engine=self.engine)


def by_helper(*inputs, **options):
    return inputs[0](*inputs[1:], **options).output.transpose(1, 2).flatten(2)


class ByHelper(Block):
    def forward(self, x):
        return self.then(attended(*self.mix(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)))


@pytest.mark.parametrize("keep", ["qk", "statistics"])
def test_modules_that_call_attend_are_seen(keep):
    model, x = nn.Sequential(Asking(rg.causal()), Block(), Asking()).eval(), torch.randn(2, T, C)
    plain = model(x)
    output, seen = watched(model, {"input": x}, keep=keep)
    assert_identical(plain, output)
    assert seen.names == ["0", "1", "2"] and not seen.missing
    q, k, _ = model[0].split(x)
    wanted = (q @ k.mT / 2).masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf).softmax(-1)
    if keep == "qk":
        torch.testing.assert_close(seen["0"].dense(), wanted.detach(), atol=1e-6, rtol=0)
    else:
        entropy = torch.special.entr(wanted).sum(-1).detach()
        torch.testing.assert_close(seen.statistics["0"].of(rg.maps.Entropy), entropy, atol=1e-5, rtol=0)


@pytest.mark.parametrize("engine", ["auto", "dense", "fused", "blocked", "reference"])
def test_what_attend_asks_of_torch_is_not_taken_for_attention_of_the_module(engine):
    model, x = AskingAttention(engine).eval(), torch.randn(1, T, C)
    _, seen = watched(model, {"x": x})
    assert len(seen.calls(0)) == 1 and not seen.missing
    q, k, v = model.split(x)
    torch.testing.assert_close(seen[0].dense(), model.attention(q, k, v).weights.dense())


def test_calls_of_attend_stay_apart():
    """Each may be of other pieces, even where its queries are the next ones."""
    first, then = rg.Attention(mask=rg.causal()), rg.Attention(mask=rg.window(2))

    class Twice(nn.Module):
        def forward(self, q):
            for attention, rows in ((first, slice(0, 2)), (then, slice(2, 4))):
                attention(q[:, :, rows], q[:, :, : rows.stop], q[:, :, : rows.stop])

    q = torch.randn(1, 2, 4, 4)
    _, seen = watched(Twice(), {"q": q})
    assert [weights.shape[2:] for weights in seen.calls(0)] == [(2, 2), (2, 4)]
    torch.testing.assert_close(seen[0].dense(), then(q[:, :, 2:], q, q).weights.dense())


@pytest.mark.parametrize("kind", [Asking, lambda: AskingAttention("auto"), Block, ByHelper])
def test_modules_that_did_not_run_are_missing_by_name(kind):
    model = nn.ModuleDict({"ran": Block(), "idle": kind()})
    with rg.watch(model) as seen:
        model["ran"](torch.randn(1, T, C))
    assert seen.names == ["ran"] and seen.missing == {"idle": UNCALLED}


class Wrapping(Block):
    """A module that computes in the place of the one that it holds, as wrappers of libraries do."""

    def __init__(self):
        super().__init__()
        self.wrapped = Block()


def test_a_module_that_its_wrapper_replaces_is_not_missing():
    model = nn.ModuleDict({"ran": Wrapping(), "idle": Wrapping()})
    with rg.watch(model) as seen:
        model["ran"](torch.randn(1, T, C))
    assert seen.names == ["ran"] and seen.missing == {"idle": UNCALLED, "idle.wrapped": UNCALLED}


def test_attention_in_a_helper_function_is_seen():
    _, seen = watched(nn.Sequential(ByHelper()), {"input": torch.randn(2, T, C)})
    assert seen.names == ["0"]
    assert_verified(seen)
