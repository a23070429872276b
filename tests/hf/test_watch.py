"""How `watch` behaves: caches, verification, refusals, and that nothing of the model's is changed."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import contextmanager
from functools import wraps

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_utils import AttentionInterface

import regard as rg
from extras import needs_transformers
from miniatures import BART, BERT, DECODERS, ENCODERS, LLAMA, SEQ2SEQ, padding, sharpened, tokens
from regard.base.versions import backend_lookup
from regard.hf import calls as translating
from regard.hf.capture import kept_calls as verifying
from regard.hf.capture.watcher import UNCALLED
from regard.hf.masks.mask_tensors import Recognized, recognize
from regard.pieces.tensor_bias import DiagonalBias, TensorBias
from watching import assert_identical, assert_verified, oracle, watched

#: The method that finds backends.
LOOKUP = backend_lookup()[1]
BY_NAME = {model.name: model for model in (*ENCODERS, *DECODERS, *SEQ2SEQ)}


def llama(backend="sdpa", **changes):
    config = transformers.LlamaConfig(**LLAMA | changes)
    return sharpened(transformers.LlamaForCausalLM._from_config(config, attn_implementation=backend).eval())


def bert(backend="sdpa", **changes):
    config = transformers.BertConfig(**BERT | changes)
    return sharpened(transformers.BertModel._from_config(config, attn_implementation=backend).eval())


# Generation: one map for each call


GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_generation_grows_the_maps(backend):
    model = llama(backend)
    ids = tokens(4, batch=1)
    with rg.watch(model) as seen:
        out = model.generate(ids, **GREEDY)
    calls = seen.calls(0)
    assert [weights.shape[2:] for weights in calls] == [(4, 4), (1, 5), (1, 6), (1, 7), (1, 8)]
    (whole, _) = oracle(model, {"input_ids": out[:, :-1]})["all"]
    for weights in calls:
        I, J = weights.shape[2:]
        torch.testing.assert_close(weights.dense(), whole[:, :, J - I : J, :J], atol=1e-5, rtol=0)
    assert_verified(seen)


def test_a_growing_cache_is_held_once():
    model = llama()
    with rg.watch(model) as seen:
        model.generate(tokens(4, batch=1), **GREEDY)
    keys = {weights._prepared.key.untyped_storage().data_ptr() for weights in seen.calls(0)}
    assert len(keys) == 1


def test_a_static_cache_is_copied_before_it_is_written_again():
    model, ids, seen = llama(), tokens(4, batch=1), {}
    for kind in ("dynamic", "static"):
        with rg.watch(model) as seen[kind]:
            model.generate(
                ids,
                max_new_tokens=5,
                min_new_tokens=5,
                do_sample=False,
                cache_implementation=kind,
                disable_compile=True,
            )
    for one, other in zip(seen["dynamic"].calls(1), seen["static"].calls(1), strict=True):
        J = one.shape[3]
        torch.testing.assert_close(one.dense(), other.dense()[..., :J], atol=1e-5, rtol=0)
        assert one.positions.start == other.positions.start
    assert_verified(seen["static"])


def test_a_sliding_cache_forgets_and_the_maps_know():
    net = transformers.MistralForCausalLM(transformers.MistralConfig(**LLAMA, sliding_window=3))
    net = sharpened(net.eval())
    ids = tokens(4, batch=1)
    with rg.watch(net) as seen:
        out = net.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    whole = oracle(net, {"input_ids": out[:, :-1]})["all"][1]
    last = seen.calls(1)[-1].dense()
    torch.testing.assert_close(last[..., -3:], whole[:, :, -1:, -3:], atol=1e-5, rtol=0)
    assert_verified(seen)


def test_beams_may_reorder_the_cache():
    model = llama()
    with rg.watch(model) as seen:
        model.generate(tokens(4), num_beams=3, **GREEDY)
    assert len(seen.calls(0)) == 5 and seen[0].shape == (6, 4, 1, 8)
    assert_verified(seen)


def test_a_module_that_serves_all_layers_has_a_map_for_each():
    config = transformers.AlbertConfig(**BERT, embedding_size=16)
    model = sharpened(transformers.AlbertModel._from_config(config, attn_implementation="sdpa").eval())
    inputs = {"input_ids": tokens(9)}
    _, seen = watched(model, inputs)
    for weights, expected in zip(seen.calls(0), oracle(model, inputs)["all"], strict=True):
        torch.testing.assert_close(weights.dense(), expected, atol=1e-5, rtol=0)


def test_packed_sequences_are_documents():
    model = llama()
    inputs = {
        "input_ids": tokens(7, batch=1),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]]),
        "use_cache": False,
    }
    _, seen = watched(model, inputs)
    assert repr(seen[0].attention.mask) == repr(rg.causal() & rg.documents([3, 4]))
    torch.testing.assert_close(seen[0].dense(), oracle(model, inputs)["all"][0], atol=1e-5, rtol=0)


# Verification


def wrong_scale(call):
    return 2 * (call.options["scaling"] or 1.0), call.query


FAULTS = {
    "scale": ("_scale", wrong_scale, "BertModel"),
    "mask": ("_masking", lambda *_: (Recognized(None), None), "LlamaModel"),
    "window": ("_masking", lambda *_: (Recognized(rg.causal()), None), "MistralModel"),
    "softcap": ("_biases", lambda *_: [], "Gemma2Model"),
    "position bias": ("_biases", lambda *_: [], "T5Model"),
    "sink": ("_normalizer", lambda _: rg.normalizers.Softmax(), "GptOssModel"),
}


@needs_transformers("5.1", "eager attention is seen")
@pytest.mark.parametrize("fault", FAULTS)
def test_verification_catches_a_wrong_reading(fault, monkeypatch):
    function, wrong, name = FAULTS[fault]
    net = BY_NAME[name].make("eager")
    monkeypatch.setattr(translating, function, wrong)
    with pytest.raises(rg.RegardError, match=r"differ from the output of the kernel[^$]*WRONG, error"):
        watched(net, BY_NAME[name].inputs())
    _, seen = watched(net, BY_NAME[name].inputs(), verify=False)
    assert len(seen) > 0
    with pytest.raises(rg.RegardError, match="verify=True"):
        seen.verify()


def test_what_is_wrong_stays_named_after_the_block(monkeypatch):
    monkeypatch.setattr(translating, "_scale", wrong_scale)
    model, kept = bert(), []
    with pytest.raises(rg.RegardError), rg.watch(model) as seen:
        kept.append(seen)
        model(tokens(5))
    assert list(kept[0].mismatched) == list(kept[0].names)


def test_dropout_is_not_verified_and_says_so():
    model = bert(attention_probs_dropout_prob=0.5).train()
    _, seen = watched(model, {"input_ids": tokens(5)})
    assert all(check.ok is None and "dropout 0.5" in check.note for check in seen.verify().values())
    assert "not verified" in str(seen.verify()[seen.names[0]])


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype, backend):
    _, seen = watched(llama(backend).to(dtype), {"input_ids": tokens(9), "attention_mask": padding("right")})
    assert_verified(seen)
    assert seen[0].dense().dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_inference_mode_autocast_and_gradients():
    model, ids = llama(), tokens(9)
    with torch.inference_mode(), rg.watch(model) as seen:
        model(ids)
    seen[0].entropy()
    with torch.autocast("cpu", dtype=torch.bfloat16), rg.watch(model) as seen:
        model(ids)
    assert_verified(seen)
    with rg.watch(model) as seen:
        model(ids).logits.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None
    assert not seen[0].dense().requires_grad


# Nothing of the model's is changed


def test_everything_is_restored_after_an_exception():
    model, before = bert(), getattr(AttentionInterface, LOOKUP)
    with pytest.raises(ZeroDivisionError), rg.watch(model):
        model(tokens(5))
        raise ZeroDivisionError
    assert getattr(AttentionInterface, LOOKUP) is before
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_nested_watches_and_two_models():
    one, two, ids = bert(), llama(), tokens(5)
    before = getattr(AttentionInterface, LOOKUP)
    with rg.watch(one) as outer:
        with rg.watch(one, layers=[1]) as inner, rg.watch(two) as other:
            one(ids)
            two(ids)
        one(ids)
    assert getattr(AttentionInterface, LOOKUP) is before
    assert [len(outer.calls(0)), len(inner.calls(1)), len(other.calls(0))] == [2, 1, 1]
    assert inner.names == ["encoder.layer.1.attention.self"]
    assert torch.equal(outer.calls(1)[0].dense(), inner[1].dense())


def test_a_model_that_is_not_watched_is_left_alone():
    model, other = bert(), bert()
    with rg.watch(model) as seen:
        other(tokens(5))
    assert len(seen) == 0
    with pytest.raises(rg.RegardError, match="was not called inside the with-block"):
        seen["encoder.layer.0.attention.self"]


def test_another_wrapper_of_the_same_method_survives(monkeypatch):
    monkeypatch.setattr(AttentionInterface, LOOKUP, getattr(AttentionInterface, LOOKUP))
    model = bert()
    with rg.watch(model):
        inside = getattr(AttentionInterface, LOOKUP)

        def theirs(self, *args):
            return inside(self, *args)

        setattr(AttentionInterface, LOOKUP, theirs)
        model(tokens(5))
    assert getattr(AttentionInterface, LOOKUP) is theirs
    with rg.watch(model) as seen:
        model(tokens(5))
    assert len(seen.calls(0)) == 1


def test_transformers_is_imported_late():
    code = "import sys, regard as rg; rg.watch; assert 'transformers' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# What is looked at, and what cannot be


def test_parts_names_and_numbers():
    net = BY_NAME["BartModel"].make("sdpa")
    _, seen = watched(net, BY_NAME["BartModel"].inputs())
    assert seen.encoder.names == [f"encoder.layers.{n}.self_attn" for n in (0, 1)]
    assert seen.decoder.names == [f"decoder.layers.{n}.self_attn" for n in (0, 1)]
    assert seen.cross.names == [f"decoder.layers.{n}.encoder_attn" for n in (0, 1)]
    assert seen.cross[-1].shape == (2, 4, 6, 9)
    assert seen[0] is seen["encoder.layers.0.self_attn"] is seen.encoder[0]
    assert len(seen) == 6 and list(seen.maps) == seen.names
    assert "encoder.layers.0.self_attn (2 x 4 heads x 9 x 9)" in repr(seen)
    with pytest.raises(KeyError, match=r"Did you mean 'encoder\.layers\.1\.self_attn'"):
        seen["encoder.layer.1.self_attn"]
    with pytest.raises(rg.RegardError, match="6 attention modules"):
        seen[6]


def test_what_was_watched_is_a_sequence_of_maps():
    _, seen = watched(BY_NAME["BartModel"].make("sdpa"), BY_NAME["BartModel"].inputs())
    maps = [seen[n] for n in range(len(seen))]
    assert all(one is other for one, other in zip(seen, maps, strict=True))
    assert all(one is other for one, other in zip(reversed(seen), reversed(maps), strict=True))
    assert list(seen.maps.values()) == maps and list(seen.maps) == seen.names
    for part in (slice(1, 3), slice(None), slice(-2, None), slice(None, None, -1), slice(4, 99)):
        assert seen[part] == maps[part]
    assert maps[2] in seen and maps[2] in seen.decoder and maps[2] not in seen.cross
    own = rg.Attention()(*torch.randn(3, 1, 1, 2, 4)).weights
    assert own not in seen
    for other in ("encoder.layers.0.self_attn", 3, torch.ones(2)):
        with pytest.raises(rg.RegardError, match=r"in seen: seen holds maps.*seen\.names"):
            other in seen  # noqa: B015
    assert seen[np.int64(1)] is maps[1]


@pytest.mark.parametrize(
    "index", [1.5, True, False, None, (0, 1), [0], slice("a", None), slice(1.0, 2), slice(None, None, 0)]
)
def test_an_index_that_is_no_layer_is_refused(index):
    _, seen = watched(bert(num_hidden_layers=1), {"input_ids": tokens(5)})
    with pytest.raises(rg.RegardError, match="seen\\["):
        seen[index]
    with rg.watch() as calls:
        rg.Attention()(*torch.randn(3, 1, 1, 2, 4))
    with pytest.raises(rg.RegardError, match="seen\\["):
        calls[index]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("keys", "seen.names"),
        ("values", "seen.maps.values()"),
        ("items", "seen.maps.items()"),
        ("k", "seen[3].key"),
        ("key", "seen[3].key"),
        ("q", "seen[3].query"),
        ("query", "seen[3].query"),
        ("v", "seen[3].value"),
    ],
)
def test_a_name_of_a_dict_answers_with_the_new_call(name, call):
    _, seen = watched(bert(num_hidden_layers=1), {"input_ids": tokens(5)})
    with pytest.raises(AttributeError, match=rf"Here: {re.escape(call)}$"):
        getattr(seen, name)


def test_functions_of_maps_take_what_was_watched():
    model, ids = bert(num_hidden_layers=2), tokens(5, batch=1)
    _, seen = watched(model, {"input_ids": ids})
    words = list("abcde")
    assert rg.profile(seen, words).table() == rg.profile(seen.maps, words).table()
    assert torch.equal(rg.rollout(seen, rows=[0]), rg.rollout(seen.maps, rows=[0]))
    assert torch.equal(rg.rollout(list(seen), rows=[0]), rg.rollout(seen.maps, rows=[0]))
    assert rg.stats.locality(seen).table() == rg.stats.locality(seen.maps).table()
    whole = rg.edits.ReplaceWeights(rg.Where(), seen)
    with torch.no_grad(), rg.edit(model, whole), rg.watch(model) as edited:
        model(ids)
    torch.testing.assert_close(edited[1].dense(), seen[1].dense())


def test_queries_and_keys_are_what_the_scores_were_made_of():
    model = llama()
    ids = tokens(6)
    with rg.watch(model) as seen, torch.no_grad():
        model(ids)
    for weights in seen:
        B, H, I, J = weights.shape
        assert weights.query.shape[:3] == (B, H, I) and weights.key.shape[2] == J and weights.key.shape[1] < H
        key = weights.key.repeat_interleave(H // weights.key.shape[1], 1)
        scores = weights.query @ key.mT / weights.query.shape[-1] ** 0.5
        mask = torch.ones(I, J).tril() == 0
        torch.testing.assert_close(scores.masked_fill(mask, -torch.inf).softmax(-1), weights.dense())
        assert not weights.query.requires_grad and not weights.key.requires_grad
    assert weights.query.data_ptr() == weights._prepared.query.data_ptr()
    with rg.watch(model, grad=True, keep="qkv") as live:
        model(ids)
    names = [(name, getattr(live[1], name)) for name in ("query", "key", "value")]
    assert all(tensor.requires_grad for _, tensor in names)
    sum(tensor.square().sum() for _, tensor in names).backward()
    assert model.model.layers[1].self_attn.v_proj.weight.grad is not None
    assert not any(getattr(live[1].detach(), name).requires_grad for name, _ in names)


def test_layers_by_number_and_by_path():
    model = bert(num_hidden_layers=4)
    for layers, found in (([0, 2], [0, 2]), (3, [3]), ("encoder.layer.[12].*", [1, 2])):
        _, seen = watched(model, {"input_ids": tokens(5)}, layers=layers)
        assert seen.names == [f"encoder.layer.{n}.attention.self" for n in found]
        assert not seen.missing
    with pytest.raises(rg.RegardError, match=r"no layer 4\. It has layers 0, 1, 2, 3"):
        watched(model, {"input_ids": tokens(5)}, layers=[4])


def test_a_model_that_cannot_be_seen_is_refused(monkeypatch):
    config = transformers.LongformerConfig(**BERT, attention_window=[4, 4], pad_token_id=1)
    model = transformers.LongformerModel(config).eval()
    for layer in model.encoder.layer:  # values of another name cannot be replaced by unit values
        own = layer.attention.self
        own.content = own._modules.pop("value")
        monkeypatch.setattr(type(own), "value", property(lambda self: self.content), raising=False)
    with pytest.raises(rg.RegardError, match=r"no attention of LongformerModel was captured.*LongformerSelfAttention"):
        watched(model, {"input_ids": tokens(8)})


def test_modules_that_did_not_run_are_named():
    model = transformers.BartModel(transformers.BartConfig(**BART)).eval()
    with rg.watch(model) as seen:
        model.encoder(tokens(5))
    assert len(seen) == 2 and set(seen.missing.values()) == {UNCALLED} and len(seen.missing) == 4


@pytest.fixture
def own_backend():
    """A user's own backend, which reads an option of its own."""

    def backend(module, query, key, value, attention_mask, scaling=None, tilt=None, **kwargs):
        assert tilt is None or kwargs is not None
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
        return out.transpose(1, 2), None

    transformers.AttentionInterface.register("own", backend)
    transformers.AttentionMaskInterface.register("own", transformers.masking_utils.sdpa_mask)
    yield "own"
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        interface._global_mapping.pop("own")


@needs_transformers("5.1", "BERT calls any backend")
def test_a_users_own_backend(own_backend):
    model = bert("own")
    _, seen = watched(model, {"input_ids": tokens(9), "attention_mask": padding("right")})
    assert_verified(seen)
    with pytest.raises(rg.RegardError, match=r"the option 'tilt' may change its weights"):
        watched(model, {"input_ids": tokens(9), "tilt": 1.5})


SDPA = transformers.AttentionInterface()["sdpa"]


def knocking_out(*place):
    """SDPA, but for one pair: batch entry, head, query and key."""

    def backend(module, query, key, value, attention_mask, **options):
        B, H, I, _ = query.shape
        mask = torch.ones(B, H, I, key.shape[2], dtype=torch.bool)
        mask[place] = False
        return SDPA(module, query, key, value, mask, **options | {"is_causal": False})

    return backend


@contextmanager
def registered(backend):
    transformers.AttentionInterface.register("own", backend)
    transformers.AttentionMaskInterface.register("own", transformers.masking_utils.sdpa_mask)
    try:
        yield bert("own")
    finally:
        for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
            interface._global_mapping.pop("own")


@needs_transformers("5.1", "BERT calls any backend")
@pytest.mark.parametrize("disguised", [False, True])
@pytest.mark.parametrize("bytes_at_once", [1, 1 << 23])
@pytest.mark.parametrize("place", [(1, 0, 3, 7), (0, 3, 1, 8), (2, 1, 4, 2)])
def test_a_backend_that_leaves_out_one_pair_is_caught(place, bytes_at_once, disguised, monkeypatch):
    monkeypatch.setattr(verifying, "BYTES", bytes_at_once)
    backend = knocking_out(*place)
    inputs = {"input_ids": tokens(9, batch=4)}
    with registered(wraps(SDPA)(backend) if disguised else backend) as model:
        with pytest.raises(rg.RegardError, match=r"differ from the output of the kernel[^$]*WRONG, error"):
            watched(model, inputs)
        _, seen = watched(model, inputs, verify=False)
        assert len(seen) == 2


def rows_recomputed(monkeypatch):
    rows, recompute = [], verifying._recompute
    monkeypatch.setattr(
        verifying, "_recompute", lambda h, t, e, r: rows.append(len(e) * len(r)) or recompute(h, t, e, r)
    )
    return rows


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_every_row_is_verified_when_asked(backend, monkeypatch):
    monkeypatch.setattr(verifying, "BYTES", 4 * 3 * 4 * 9 * 2)
    rows, model, inputs = rows_recomputed(monkeypatch), llama(backend), {"input_ids": tokens(9, batch=3)}
    _, seen = watched(model, inputs)
    assert rows == [2 * 4] * 2  # of each layer, 4 rows of the first and the last entry
    assert_verified(seen)
    rows.clear()
    _, seen = watched(model, inputs, verify="all")
    assert rows == [6, 6, 6, 6, 3] * 2
    assert_verified(seen)
    with pytest.raises(rg.RegardError, match=r"verify='some'.*True .*'all'.*False"):
        watched(model, inputs, verify="some")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_refusals():
    model = bert()
    with pytest.raises(rg.RegardError, match="Known names: qk, qkv, statistics"), rg.watch(model, keep="all"):
        pass
    with pytest.raises(rg.RegardError, match=r"model\._orig_mod"), rg.watch(torch.compile(model)):
        pass
    with (
        pytest.raises(
            rg.RegardError, match=r"watch\(model='bert'\): model must be a Module, got str. A model is loaded first"
        ),
        rg.watch("bert"),
    ):
        pass
    model.compile()
    with pytest.raises(rg.RegardError, match=r"after model\.compile\(\)"), rg.watch(model):
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("part", ["", "encoder.layer.1.attention.self"])
def test_a_compiled_forward_is_refused(part):
    model = bert()
    module = model.get_submodule(part)
    module.forward = torch.compiler.disable(module.forward)
    with rg.watch(model):
        pass
    module.forward = torch.compile(bert().get_submodule(part).forward, backend="eager")
    with pytest.raises(rg.RegardError, match=f"{part or 'the model'}.* is compiled.*if its forward was compiled"):
        rg.watch(model)


def test_a_watch_outside_a_with_block_says_how_to_use_it():
    with pytest.raises(rg.RegardError, match="Run the model inside `with"):
        rg.watch(bert())[0]


def test_a_watch_may_be_used_again():
    model = bert()
    watch = rg.watch(model, layers=[0])
    for length in (5, 7):
        with watch as seen:
            model(tokens(length))
        assert [weights.shape[3] for weights in seen.calls(0)] == [length]
    with watch as outer, watch as inner:
        model(tokens(4))
    assert outer[0].shape == inner[0].shape and not any(module._forward_pre_hooks for module in model.modules())


@needs_transformers("5.1", "masks are made without numbers")
@pytest.mark.parametrize("kind", ["Bert", "Bloom", "Falcon"])
def test_a_model_without_numbers_is_refused(kind):
    few = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1, "n_layer": 1}
    config = getattr(transformers, f"{kind}Config")(**few)
    model = getattr(transformers, f"{kind}Model")(config).eval().to("meta")
    with pytest.raises(rg.RegardError, match="on the meta device and hold no numbers"):
        watched(model, {"input_ids": torch.zeros(1, 4, dtype=torch.long, device="meta")})


# Masks and biases


def mask_of(rule, B, I, J, start=None):
    return rule.allowed(rg.types.Grid.whole(rg.types.Positions.of(start, I, J), B, 1, I)).expand(B, 1, I, J).clone()


REAL = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0]]).bool()
RULES = {
    "padding": rg.padding(REAL),
    "causal": rg.causal(),
    "causal, padding": rg.causal() & rg.padding(REAL),
    "window": rg.window(3),
    "window, padding": rg.window(3) & rg.padding(REAL),
    "causal window": rg.causal() & rg.window(3) & rg.padding(REAL),
    "chunks": rg.causal() & rg.masks.block_local(3),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("I", "start"), [(8, 0), (5, 3), (5, 1), (1, 7)])
def test_rules_are_recognized(rule, I, start):
    tensor = mask_of(RULES[rule], 3, I, 8, start)
    found = recognize(tensor, 3, I, 8)
    if start == 8 - I:  # elsewhere a two-sided window may read as a one-sided one, or as no rule
        assert "mask_tensor" not in repr(found.mask)
    if found.mask is not None:
        assert torch.equal(mask_of(found.mask, 3, I, 8, found.start), tensor)


def test_a_two_sided_window_is_not_taken_for_a_causal_one_further_on():
    found = recognize(mask_of(rg.window(3), 1, 8, 8), 1, 8, 8)
    assert found.mask == rg.window(3) and found.start is None


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_recognized_is_the_tensor(seed):
    torch.manual_seed(seed)
    tensor = torch.rand(2, 1, 6, 6) < (0.5 + seed / 40)
    if seed % 2:
        tensor = tensor | mask_of(rg.causal(), 2, 6, 6)
    found = recognize(tensor, 2, 6, 6)
    assert torch.equal(mask_of(rg.masks.prefix(6) if found.mask is None else found.mask, 2, 6, 6, found.start), tensor)


def test_one_sequence_packed_or_with_an_open_prefix():
    for rule in (rg.documents([3, 1, 4]), rg.causal() & rg.documents([2, 6]), rg.causal() | rg.masks.prefix(3)):
        assert repr(recognize(mask_of(rule, 1, 8, 8), 1, 8, 8).mask) == repr(rule)


@needs_transformers("5.1", "BERT takes a mask of four axes")
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_float_mask_of_the_users_own_is_a_bias(backend):
    model, ids = bert(backend), tokens(6)
    bias = torch.randn(2, 1, 6, 6)
    bias[:, :, :, -1] = torch.finfo(torch.float32).min
    outputs, seen = watched(model, {"input_ids": ids, "attention_mask": bias})
    assert isinstance(seen[0].attention.bias[0], TensorBias)
    assert_verified(seen)
    with torch.no_grad():
        assert_identical(model(ids, attention_mask=bias)[0], outputs[0])


def test_the_bias_of_t5_is_held_by_distance():
    net = BY_NAME["T5Model"].make("sdpa")
    _, seen = watched(net, BY_NAME["T5Model"].inputs())
    biases = [weights.attention.bias[0] for weights in (*seen.encoder, *seen.decoder)]
    assert all(isinstance(bias, DiagonalBias) for bias in biases)
    assert biases[0].table.shape == (4, 17)
    assert torch.equal(biases[0].table, biases[1].table)
