"""`attn_implementation="regard"`: what models compute on Regard's engines is what they compute on transformers' own."""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils as theirs

import regard as rg
from miniatures import BERT, GPT2, LLAMA, MOE, OTHERS, T5, TEXTS, Model, sharpened, tokens
from regard.hf import backend
from regard.hf.calls import translate
from regard.hf.masks.mask_functions import MaskFunctionReader
from regard.hf.masks.mask_tensors import Recognized
from regard.hf.masks.span_masks import SpanMask, spans_mask
from registered import needs_register
from watching import assert_same_weights, assert_verified, oracle, watched

needs_register()
pytestmark = pytest.mark.filterwarnings("error:regard")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
#: Doge multiplies its own weights into the mask, which is written out for that.
PASSES_ON = [model for model in TEXTS + OTHERS if model.name != "DogeModel"]


def pair(model):
    """The same model on the backend that is the oracle (sdpa where it can), and on ours."""
    plain, ours = model.make(model.backends[0]), model.make("regard")
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def named(name):
    return next(model for model in TEXTS if model.name == f"{name}Model")


@pytest.mark.parametrize("model", PASSES_ON, ids=str)
@torch.no_grad()
def test_outputs_are_those_of_the_models_own_backend(model):
    plain, ours = pair(model)
    inputs = model.inputs()
    torch.testing.assert_close(ours(**inputs)[0], plain(**inputs)[0], **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model", [model for model in PASSES_ON if model in TEXTS], ids=str)
@torch.no_grad()
def test_padded_batches(model, side):
    plain, ours = pair(model)
    inputs = model.inputs(side)
    mine, expected = ours(**inputs)[0], plain(**inputs)[0]
    if model.kind != "seq2seq":  # of padding itself, backends make different things
        mine, expected = (x[inputs["attention_mask"].bool()] for x in (mine, expected))
    torch.testing.assert_close(mine, expected, **CLOSE)


PACKED = ["Llama", "Mistral", "Qwen2", "Gemma2", "GptOss", "Phi3", "Llama4Text"]


@pytest.mark.parametrize("lengths", [[(9,), (4, 5)], [(1, 3, 5), (1, 3, 5)], [(6, 3)]], ids=str)
@pytest.mark.parametrize("name", PACKED)
@torch.no_grad()
def test_packed_sequences_are_what_each_gives_alone(name, lengths):
    plain, ours = pair(named(name))
    ids = tokens(9, len(lengths))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    mine = ours(**inputs)[0]
    torch.testing.assert_close(mine, plain(**inputs)[0], **CLOSE)
    if name == "GptOss":  # its own code does not look for packed sequences
        return
    for row, entry, output in zip(lengths, ids, mine, strict=True):
        for text, part in zip(entry.split(row), output.split(row), strict=True):
            torch.testing.assert_close(part, ours(input_ids=text[None])[0][0], **CLOSE)


GENERATORS = {
    "llama": transformers.LlamaConfig(**LLAMA),
    "mistral": transformers.MistralConfig(**LLAMA, sliding_window=4),
    "gemma2": transformers.Gemma2Config(**LLAMA, sliding_window=4, attn_logit_softcapping=1.5),
    "gpt_oss": transformers.GptOssConfig(**LLAMA, **MOE, sliding_window=4),
    "gpt2": transformers.GPT2Config(**GPT2, bos_token_id=1, eos_token_id=2, pad_token_id=0),
    "t5": transformers.T5Config(**T5, pad_token_id=0, eos_token_id=2),
}
WAYS = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "hybrid": {"cache_implementation": "hybrid"},
    "no cache": {"use_cache": False},
    "chunked prefill": {"prefill_chunk_size": 4},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", GENERATORS)
@torch.no_grad()
def test_the_same_tokens_are_generated(name, way):
    if name == "t5" and way in ("hybrid", "chunked prefill"):
        pytest.skip("encoder-decoders have neither")
    config = GENERATORS[name]
    kind = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    model = sharpened(kind.from_config(config, attn_implementation="eager").eval())
    ids, mask = tokens(7), torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, **WAYS[way]}
    expected = model.generate(ids, **options)
    model.set_attn_implementation("regard")
    assert torch.equal(model.generate(ids, **options), expected)


def alibi_like(length):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(1, -1, 1, 1)
    distance = torch.arange(length) - torch.arange(length)[:, None]
    return (-slopes * distance.abs()).masked_fill(distance > 0, torch.finfo(torch.float32).min)


OWN_MASKS = {
    "a bias by distance": alibi_like(9),
    "any bias": torch.randn(2, 4, 9, 9),
    "any mask": torch.rand(2, 1, 9, 9) < 0.6,
    "an additive mask": torch.where(torch.rand(2, 1, 9, 9) < 0.6, 0.0, torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("what", OWN_MASKS)
@pytest.mark.parametrize("name", ["Llama", "Bert", "Mistral"])
@torch.no_grad()
def test_masks_and_biases_of_four_axes_are_taken_as_they_are(name, what):
    plain, ours = pair(named(name))
    mask = OWN_MASKS[what].clone()
    if mask.shape[1] == 1:
        mask[..., range(9), range(9)] = mask[..., range(9), range(9)] | True if mask.dtype == torch.bool else 0.0
    inputs = {"input_ids": tokens(9), "attention_mask": mask}
    torch.testing.assert_close(ours(**inputs)[0], plain(**inputs)[0], **CLOSE)


class Calling(torch.nn.Module):
    """A module that calls a backend, as one of a decoder or of an encoder."""

    def __init__(self, is_causal):
        super().__init__()
        self.is_causal = is_causal


#: The rule of a mask that several calls share, as layers do; None: the backend masks as the module asks.
RULES = {"none": None, "causal": Recognized(rg.causal(), 0), "near": Recognized(rg.causal() & rg.window(3), 0)}
RULES["late"] = Recognized(rg.causal(), 4)
#: What calls of one model, or of two that run in turns, differ in.
CALLS = list(itertools.product(RULES, (None, 0.5), (None, 1.5), (True, False), (None, True, False), (2, 1)))


@torch.no_grad()
def test_calls_in_any_order_are_those_of_the_formula():
    """Layers whose calls are alike share one attention, and no call gets that of another."""
    order = random.Random(7).sample(CALLS * 2, 2 * len(CALLS))
    for rule, scaling, softcap, is_causal, option, key_heads in order:
        query, key, value = torch.randn(2, 2, 6, 8), *torch.randn(2, 2, key_heads, 6, 8)
        mask = None if RULES[rule] is None else SpanMask(RULES[rule], (1, 1, 6, 6), "cpu")
        options = {"scaling": scaling, "softcap": softcap, "is_causal": option, "dropout": 0.0}
        output, _ = backend.run(Calling(is_causal), query, key, value, mask, **options)
        scores = query @ key.repeat_interleave(2 // key_heads, 1).mT * (8**-0.5 if scaling is None else scaling)
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        i, j = torch.arange(6)[:, None], torch.arange(6)
        causal_alone = (is_causal if option is None else option) | torch.zeros(6, 6, dtype=torch.bool)
        allowed = {
            "none": (j <= i) | ~causal_alone,
            "causal": j <= i,
            "near": (j <= i) & (i - j < 3),
            "late": j <= i + 4,
        }
        weights = scores.masked_fill(~allowed[rule], -torch.inf).softmax(-1)
        expected = weights @ value.repeat_interleave(2 // key_heads, 1)
        torch.testing.assert_close(output, expected.transpose(1, 2), **CLOSE)


@pytest.mark.parametrize("num_queries", [1, 2, 6])
def test_calls_of_the_same_shapes_keep_their_dtype_and_their_gradients(num_queries):
    """A way that was kept for one call is not taken by one that learns, has another dtype, or runs under autocast."""
    module, allowed = Calling(True), torch.ones(6, 6, dtype=torch.bool).tril()[-num_queries:]
    kinds = [("float32", False, False), ("float32", True, False), ("float64", False, False), ("float64", True, False)]
    kinds += [("bfloat16", False, False), ("float32", False, True)]
    rules = [Recognized(rg.causal(), 6 - num_queries) for _ in itertools.permutations(kinds, 2)]
    orders = [
        (rule, *kind) for rule, pair in zip(rules, itertools.permutations(kinds, 2), strict=True) for kind in pair
    ]
    for rule, name, learns, casts in orders:
        mask = SpanMask(rule, (1, 1, num_queries, 6), "cpu")
        dtype = getattr(torch, name)
        query, key, value = (torch.randn(2, 2, n, 8, dtype=dtype, requires_grad=learns) for n in (num_queries, 6, 6))
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            output, _ = backend.run(module, query, key, value, mask, scaling=8**-0.5, dropout=0.0)
        assert output.dtype == (torch.bfloat16 if casts else dtype)
        q, k, v = (t.detach().double().requires_grad_(learns) for t in (query, key, value))
        expected = ((q @ k.mT * 8**-0.5).masked_fill(~allowed, -torch.inf).softmax(-1) @ v).transpose(1, 2)
        close = {"rtol": 3e-2, "atol": 3e-2} if output.dtype == torch.bfloat16 else CLOSE
        torch.testing.assert_close(output.double(), expected, **close)
        if learns:
            toward = torch.randn(expected.shape, dtype=torch.float64)
            mine = torch.autograd.grad(output, (query, key, value), toward.to(dtype))
            right_ones = torch.autograd.grad(expected, (q, k, v), toward)
            for got, wanted in zip(mine, right_ones, strict=True):
                torch.testing.assert_close(got.double(), wanted, **CLOSE)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 5), (1, 0), (2, 0), (0, 0)])
@torch.no_grad()
def test_calls_without_a_query_or_a_key_give_zeros(num_queries, num_keys):
    """torch's kernel divides by the number of keys, and ends the process where there is none."""
    tensors = torch.randn(1, 4, num_queries, 8), *torch.randn(2, 1, 2, num_keys, 8)
    output, _ = backend.run(Calling(False), *tensors, None)
    assert output.shape == (1, num_queries, 4, 8) and not output.any()


@pytest.mark.parametrize("num_queries", [1, 2])
@torch.no_grad()
def test_autocast_of_an_earlier_call_allows_no_later_call(num_queries):
    """Keys of another dtype than queries are refused without autocast, also after a call of the same kind with it."""
    tensors = torch.randn(1, 2, num_queries, 8), *torch.randn(2, 1, 2, 9, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert backend.run(Calling(True), *tensors, None)[0].dtype == torch.bfloat16
    with pytest.raises(rg.RegardError, match="they must"):
        backend.run(Calling(True), *tensors, None)


def test_layers_whose_calls_are_alike_read_their_mask_once(monkeypatch):
    net, translated = named("Mistral").make("regard"), []
    monkeypatch.setattr(backend, "translate", lambda call, masks: translated.append(1) or translate(call, masks))
    net(input_ids=tokens(9), use_cache=False)
    assert len(translated) == 1 < net.config.num_hidden_layers


@torch.no_grad()
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_later_forwards_find_the_ways_of_the_first(name, monkeypatch):
    """Causal masks and windows of the same numbers are one rule, so a second text of this length plans nothing."""
    net, translated = named(name).make("regard"), []
    monkeypatch.setattr(backend, "translate", lambda call, masks: translated.append(1) or translate(call, masks))
    for _ in range(3):
        net(input_ids=tokens(9), use_cache=False)
    assert len(translated) == 1


@torch.no_grad()
def test_listeners_hear_each_call_of_a_kept_way_and_hidden_keys_stay_hidden():
    """Between calls that repeat a kept plan, a listener gets its maps, and a NaN in a hidden key spoils no row."""
    module, heard = Calling(True), []
    keeper = type("Keeper", (), {"on_attention": lambda self, module, weights: heard.append(weights)})()
    mask = SpanMask(Recognized(rg.causal(), 0), (1, 1, 6, 6), "cpu")
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()
    for listens, spoiled in itertools.product((False, True, False, True), (False, True)):
        query, key, value = torch.randn(3, 2, 2, 6, 8)
        if spoiled:
            key[:, :, 5], value[:, :, 5] = torch.nan, torch.nan
        with rg.attention_output.attend_listeners.to(keeper) if listens else contextlib.nullcontext():
            output, _ = backend.run(module, query, key, value, mask, scaling=0.5, dropout=0.0)
        weights = (query @ key.mT * 0.5).masked_fill(~allowed, -torch.inf).softmax(-1)
        expected = weights[..., :5, :5] @ value[:, :, :5]
        torch.testing.assert_close(output[:, :5], expected.transpose(1, 2), **CLOSE)
        assert output[:, 5].isnan().all() == spoiled
        if listens:
            torch.testing.assert_close(heard.pop().dense()[..., :5, :5], weights[..., :5, :5], **CLOSE)
        assert not heard


def test_gradients_reach_a_bias_that_learns():
    plain, ours = pair(named("Llama"))
    ids, toward, grads = tokens(9), torch.randn(2, 9, 16), []
    for net in (plain, ours):
        bias = torch.zeros(1, 4, 9, 9, requires_grad=True)
        (net(input_ids=ids, attention_mask=bias)[0] * toward).sum().backward()
        grads.append(bias.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_training_with_checkpoints_gives_the_same_gradients():
    net, ids, toward = named("Mistral").make("regard").train(), tokens(9), torch.randn(2, 9, 16)
    grads = []
    for checkpoints in (False, True):
        net.zero_grad()
        if checkpoints:
            is_named_so = hasattr(net, "activation_checkpointing_enable")  # from a later transformers than 5.15 on
            (net.activation_checkpointing_enable if is_named_so else net.gradient_checkpointing_enable)()
        (net(input_ids=ids, use_cache=False)[0] * toward).sum().backward()
        grads.append(net.layers[0].self_attn.q_proj.weight.grad.clone())
    torch.testing.assert_close(*grads)


@torch.no_grad()
def test_half_precision_is_that_of_the_model():
    plain, ours = pair(named("Mistral"))
    ids = tokens(9)
    exact = plain(ids)[0]
    mine, theirs = (net.to(torch.bfloat16)(ids)[0] for net in (ours, plain))
    assert mine.dtype == torch.bfloat16
    assert (mine - exact).abs().max() <= 2 * (theirs - exact).abs().max()


LEARNING = ["Bert", "Llama", "Mistral", "Gemma2", "GptOss", "T5", "Bart", "ModernBert"]


@pytest.mark.parametrize("name", LEARNING)
def test_gradients_reach_everything_that_learns(name):
    model = named(name)
    plain, ours = pair(model)
    inputs = model.inputs("right")
    toward = torch.randn(plain(**inputs)[0].shape)
    if model.kind != "seq2seq":
        toward *= inputs["attention_mask"][..., None]
    for net in (plain, ours):
        (net(**inputs)[0] * toward).sum().backward()
    for (where, mine), expected in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (expected.grad is None), where
        if mine.grad is not None:
            torch.testing.assert_close(
                mine.grad, expected.grad, rtol=1e-4, atol=1e-4 * float(expected.grad.abs().max())
            )


def test_dropout_is_that_of_the_configuration():
    """The mean of many runs is the run without, and the same seed drops the same weights."""
    dropping = Model("BertModel", BERT | {"attention_probs_dropout_prob": 0.3, "num_hidden_layers": 1}, "encoder")
    net = dropping.make("regard")
    inputs = {"input_ids": tokens(9).expand(2, -1)}
    layer = net.encoder.layer[0].attention.self
    layer.train()
    outputs = []
    layer.register_forward_hook(lambda module, args, output: outputs.append(output[0].detach()))
    for seed in (1, 1, *range(2, 400)):
        torch.manual_seed(seed)
        net(**inputs)
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])
    layer.eval()
    net(**inputs)
    dropped = torch.stack(outputs[1:-1])
    assert ((dropped.mean(0) - outputs[-1]).abs() < 5 * dropped.std(0) / len(dropped) ** 0.5).all()


class NoPairs(TorchDispatchMode):
    """Refuses any tensor of as many elements as there are pairs."""

    def __init__(self, pairs):
        super().__init__()
        self.pairs, self.largest = pairs, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, SpanMask):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
                assert self.largest < self.pairs, f"{func} makes {tuple(tensor.shape)}"
        return output


N = 4096
LONG = {"max_position_embeddings": N, "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
LONG |= {"head_dim": 8, "num_key_value_heads": 1}
LONG_MODELS = {
    "llama": Model("LlamaModel", LLAMA | LONG),
    "mistral": Model("MistralModel", LLAMA | LONG | {"sliding_window": 256}),
    "gemma2": Model(
        "Gemma2Model",
        LLAMA | LONG | {"sliding_window": 64, "attn_logit_softcapping": 9.0, "num_hidden_layers": 2},
    ),
    "gpt_oss": Model("GptOssModel", LLAMA | LONG | MOE | {"sliding_window": 64, "num_hidden_layers": 2}),
    "modernbert": Model(
        "ModernBertModel", BERT | LONG | {"local_attention": 64, "pad_token_id": 0, "global_attn_every_n_layers": 2}
    ),
    "bert": Model("BertModel", BERT | LONG),
}
FORMS = {
    "whole": lambda: {},
    "padded": lambda: {"attention_mask": torch.arange(N)[None].ge(torch.tensor([[0], [700]])).long()},
    "packed": lambda: {"position_ids": torch.cat([torch.arange(N // 4)] * 4)[None].expand(2, -1), "use_cache": False},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LONG_MODELS)
def test_nothing_as_large_as_all_pairs_is_made(name, form):
    if form == "packed" and "bert" in name:
        pytest.skip("encoders do not read packing off positions")
    net = LONG_MODELS[name].make("regard")
    inputs = {"input_ids": tokens(N), **FORMS[form]()}
    with torch.no_grad(), NoPairs(N * N):
        net(**inputs)


def test_nothing_as_large_as_all_pairs_is_made_in_training():
    net = LONG_MODELS["mistral"].make("regard")
    with NoPairs(N * N):
        net(input_ids=tokens(N, 1))[0].square().mean().backward()


def test_the_law_of_pairs_sees_those_of_sdpa():
    net = LONG_MODELS["mistral"].make("sdpa")
    with torch.no_grad(), pytest.raises(AssertionError, match="makes"), NoPairs(N * N):
        net(input_ids=tokens(N))


@pytest.mark.parametrize("side", ["", "left"])
@pytest.mark.parametrize("name", ["Bert", "Mistral", "Gemma2", "GptOss", "T5", "Bart", "Llama4Text"])
def test_a_model_that_runs_on_regard_can_be_watched(name, side):
    model = named(name)
    net, inputs = model.make("regard"), model.inputs(side)
    outputs, seen = watched(net, inputs)
    with torch.no_grad():
        assert torch.equal(outputs[0], net(**inputs)[0])
    assert not seen.missing
    assert_verified(seen)
    assert_same_weights(seen, oracle(net, inputs), inputs.get("attention_mask"))


def test_generation_with_a_sliding_cache_can_be_watched():
    model = sharpened(transformers.MistralForCausalLM(GENERATORS["mistral"]).eval())
    model.set_attn_implementation("regard")
    with rg.watch(model) as seen, torch.no_grad():
        model.generate(tokens(9, 1), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert_verified(seen)


# Masks


MASK_FUNCTIONS = {
    "causal": theirs.causal_mask_function,
    "bidirectional": theirs.bidirectional_mask_function,
    "window": theirs.sliding_window_causal_mask_function(3),
    "open window": theirs.sliding_window_overlay(3),
    "window both ways": theirs.sliding_window_bidirectional_mask_function(2),
    "chunks": theirs.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)),
    "chunks of padded text": theirs.chunked_causal_mask_function(4, torch.tensor([0, 3])),
    "images": theirs.or_masks(
        theirs.causal_mask_function,
        theirs.blockwise_overlay(torch.tensor([[0, 0, 0, -1, 1, 1, 1, -1, -1], [-1, 2, 2, 2, -1, -1, 0, 0, 2]])),
    ),
    "both": theirs.and_masks(
        theirs.and_masks(theirs.sliding_window_overlay(5), theirs.causal_mask_function),
        theirs.bidirectional_mask_function,
    ),
}
PACKINGS = {
    "alike": [[0, 1, 2, 3, 0, 1, 0, 1, 2]] * 2,
    "different": [[0, 1, 2, 3, 4, 5, 6, 7, 0], [0, 0, 1, 2, 0, 1, 2, 3, 4]],
}
PLACES = {
    "whole": (9, 9, 0, 0),
    "chunk": (4, 9, 5, 0),
    "one": (1, 9, 8, 0),
    "ring": (2, 4, 7, 5),
    "static": (3, 9, 2, 0),
}
REAL = {"all": None, "some": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 1]]).bool()}


def packed(function, packing):
    positions = torch.tensor(PACKINGS[packing])
    groups = theirs.find_packed_sequence_indices(positions)
    assert groups is not None
    # as `create_causal_mask` makes it in all versions of transformers from 5.23 on
    inside = theirs.remap_positions_for_packed_sequence(function, positions)
    return theirs.and_masks(theirs.packed_sequence_mask_function(groups), inside)


def masks_of(function, place, real, **options):
    """Ours and that of sdpa, by the same question."""
    I, J, q_offset, kv_offset = place
    asked = {"batch_size": 2, "q_length": I, "kv_length": J, "q_offset": q_offset, "kv_offset": kv_offset}
    asked |= {"mask_function": function, "attention_mask": real, **options}
    expected = theirs.sdpa_mask(**asked, allow_is_causal_skip=False)
    return spans_mask(**asked), expected


def assert_spans_hold(mask, expected):
    """`any_allowed` misses no pair and `all` promises none too many, for any interval of rows."""
    if mask.rule.mask is None:
        return
    I, J = expected.shape[2:]
    positions = mask.rule.positions(I, J)
    for start in range(I):
        for stop in range(start + 1, I + 1):
            rows = expected[:, 0, start:stop]
            at = start + positions.start, stop + positions.start
            may = positions.columns(mask.rule.mask.any_allowed(*at)).tensor().tolist()
            every = positions.columns(mask.rule.mask.all_allowed(*at)).tensor().tolist()
            assert set(rows.any(0).any(0).nonzero().flatten().tolist()) <= set(may)
            assert set(every) <= set(rows.all(0).all(0).nonzero().flatten().tolist())


@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", MASK_FUNCTIONS)
def test_mask_functions_are_read_as_they_are_written_out(name, place, real):
    mine, expected = masks_of(MASK_FUNCTIONS[name], PLACES[place], REAL[real])
    assert torch.equal(mine.dense(), expected)
    assert_spans_hold(mine, expected)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", [name for name in MASK_FUNCTIONS if name != "images"])
def test_packed_mask_functions_too(name, packing):
    mine, expected = masks_of(packed(MASK_FUNCTIONS[name], packing), PLACES["whole"], None)
    assert torch.equal(mine.dense(), expected)
    assert_spans_hold(mine, expected)


def unknown(b, h, i, j):
    return torch.tensor([[0, 1, 1, 0, 1, 0, 1, 1, 1]] * 2, dtype=torch.bool)[b, j]


@pytest.mark.parametrize("use_vmap", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_an_unknown_mask_function_is_exact_and_warned_of_by_name(inside, use_vmap):
    function = theirs.and_masks(theirs.causal_mask_function, unknown)
    if inside:
        function = packed(function, "different")
    with pytest.warns(UserWarning, match="unknown|remap.*quadratic time"):
        mine, expected = masks_of(function, PLACES["whole"], None, use_vmap=use_vmap)
    assert torch.equal(mine.dense(), expected)
    assert_spans_hold(mine, expected)


def test_known_rules_read_well():
    read = MaskFunctionReader(9).read
    assert repr(read(MASK_FUNCTIONS["window"])) == "(causal() & window(size=3))"
    assert repr(read(MASK_FUNCTIONS["chunks"])) == "(causal() & block_local(size=4, before=0, after=0))"
    assert "documents([4, 2, 3])" in repr(read(packed(MASK_FUNCTIONS["window"], "alike")))


def test_a_mask_stays_a_rule_where_it_is_cut_and_is_written_out_with_a_warning_elsewhere():
    mask, expected = masks_of(MASK_FUNCTIONS["window"], PLACES["chunk"], REAL["some"])
    for cut in (lambda m: m[:, :, :, :7], lambda m: m[..., 2:, :], lambda m: m.to("cpu").bool(), lambda m: m.detach()):
        assert isinstance(cut(mask), SpanMask)
        assert torch.equal(cut(mask).dense(), cut(expected))
    for use in (
        lambda m: ~m,
        lambda m: m[1:],
        lambda m: m[..., ::2],
        lambda m: torch.cat([m, m], -1),
        lambda m: m.float(),
    ):
        with pytest.warns(UserWarning, match=r"computes aten\.\w+"):
            assert torch.equal(use(mask), use(expected))


# Refusals and registration


def call(**options):
    module = torch.nn.Linear(1, 1)
    x = torch.randn(1, 2, 3, 4)
    given = {"query": x, "key": x, "value": x, "attention_mask": None, "scaling": 1.0, **options}
    return transformers.AttentionInterface()["regard"](module, **given)


@pytest.mark.parametrize("learned", [False, True])
def test_a_scale_of_each_head_in_float32_scales_half_precision(learned):
    """Such a scale may be kept in float32 when a model runs in half precision; eager attention takes it."""
    x, scale = torch.randn(1, 2, 3, 4).bfloat16(), torch.tensor([0.5, 2.0], requires_grad=learned)
    output, _ = call(query=x, key=x, value=x, scaling=scale.view(1, 2, 1, 1), is_causal=False)
    exact = x.float()
    expected = (exact @ exact.mT * scale.detach().view(1, 2, 1, 1)).softmax(-1) @ exact
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.detach().float(), expected.transpose(1, 2), atol=0.02, rtol=0.02)
    if learned:
        output.float().sum().backward()
        assert scale.grad is not None and scale.grad.abs().min() > 0


REFUSED = {
    "an option nobody knows": (
        {"indices": torch.zeros(1)},
        "Linear cannot be run.*'indices'.*attn_implementation='sdpa'",
    ),
    "a paged cache": ({"cache": object()}, "'cache'"),
    "all weights": ({"output_attentions": True}, r"rg\.watch"),
    "a mask of another kind": ({"attention_mask": object()}, "object"),
    "a mask of other sizes": (
        {"attention_mask": spans_mask(1, 3, 5, mask_function=theirs.causal_mask_function)},
        "5 keys.*3 keys",
    ),
    "heads that do not divide": ({"key": torch.randn(1, 3, 3, 4)}, "shapes"),
    "sinks that are computed": ({"s_aux": torch.randn(2, requires_grad=True) * 2}, "not a parameter"),
}


@pytest.mark.filterwarnings("ignore:regard")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(what):
    options, message = REFUSED[what]
    with pytest.raises(rg.RegardError, match=f"(?s){message}"):
        call(**options)


def test_models_that_ask_no_backend_are_refused_when_made():
    bloom, gpt = {"hidden_size": 8, "n_head": 2, "n_layer": 1}, {"n_layer": 1, "n_embd": 12}
    for kind, sizes in ((transformers.BloomModel, bloom), (transformers.OpenAIGPTModel, gpt)):
        with pytest.raises(rg.RegardError, match=r"without a backend.*would change nothing"):
            kind._from_config(kind.config_class(**sizes), attn_implementation="regard")
        kind(kind.config_class(**sizes))


def test_registering_twice_changes_nothing():
    before = transformers.AttentionInterface()["regard"], transformers.PreTrainedModel.get_correct_attn_implementation
    rg.register()
    after = transformers.AttentionInterface()["regard"], transformers.PreTrainedModel.get_correct_attn_implementation
    assert before == after


def test_regard_imports_transformers_only_when_registering():
    code = "import sys, regard as rg; rg.attend; assert 'transformers' not in sys.modules; rg.register(); "
    code += "from transformers import AttentionInterface; assert 'regard' in AttentionInterface()"
    subprocess.run([sys.executable, "-c", code], check=True)
