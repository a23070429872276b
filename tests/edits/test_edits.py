"""Edits of attention while a model runs: equal to dense attention with the same edit written out, pair by pair."""

from __future__ import annotations

import copy
import random

import pytest
import torch

import regard as rg
from dense_edits import Dense, drawn
from extras import needs_transformers, older_than
from regard import RegardError
from regard.base import versions
from registered import OURS

transformers = pytest.importorskip("transformers")

N = 9
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2]])
SMALL = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 64,
}
GROUPED = SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
QUIET = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
MODELS = {
    "gpt2": lambda: transformers.GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=20, **QUIET),
    "llama": lambda: transformers.LlamaConfig(**GROUPED, **QUIET),
    "window and softcap": lambda: transformers.Gemma2Config(
        **GROUPED, **QUIET, sliding_window=4, attn_logit_softcapping=5.0, query_pre_attn_scalar=4
    ),
    "sinks": lambda: transformers.GptOssConfig(
        **GROUPED, **QUIET, num_local_experts=2, num_experts_per_tok=1, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip
BACKENDS = dict.fromkeys(MODELS, ("sdpa", "eager", *OURS)) | dict.fromkeys(
    ("window and softcap", "sinks"), ("eager", *OURS)
)


def model_of(name, backend):
    torch.manual_seed(0)
    options = {"experts_implementation": "eager"} if name == "sinks" and not older_than("5.1") else {}
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation=backend, **options)
    for parameter in model.double().parameters():  # numbers that float32 does not have
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


@pytest.fixture(scope="module")
def dense():
    backend = Dense()
    transformers.AttentionInterface.register("dense", backend)
    transformers.AttentionMaskInterface.register("dense", transformers.masking_utils.eager_mask)
    return backend


@pytest.mark.parametrize("name", MODELS)
def test_drawn_edits_equal_dense_attention_with_the_edit_written_out(name, dense):
    expected_of, models = model_of(name, "dense"), [model_of(name, backend) for backend in BACKENDS[name]]
    rng = random.Random(name)
    for _ in range(10):
        drawn_edits = [drawn(rng, N) for _ in range(rng.randint(1, 3))]
        edit = rg.edits.EditSequence(tuple(e for e, _ in drawn_edits))
        dense.edits = [e for _, e in drawn_edits]
        with torch.no_grad():
            expected = expected_of(IDS).logits
            for model in models:
                with rg.edit(model, edit), rg.watch(model) as seen:
                    logits = model(IDS).logits
                # Eager rounds its weights to float32.
                error = 1e-4 if model.config._attn_implementation == "eager" else 1e-9
                assert torch.allclose(logits, expected, rtol=error, atol=error), repr(edit)
                assert all(check.ok is not False for check in seen.verify().values())
    dense.edits = []


def logits_of(model, edit=None, **options):
    with torch.no_grad(), rg.edit(model, edit or rg.edits.EditSequence(), **options):
        return model(IDS).logits


def state_of(model):
    """All that an edit could leave behind: parameters, hooks, forwards and the attention interface."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.__dict__.get("forward")) for m in model.modules()]
    interface = getattr(*versions.backend_lookup())
    return hooks, model.config._attn_implementation, interface, copy.deepcopy(model.state_dict())


def assert_same(before, after):
    assert before[:3] == after[:3]
    assert all(torch.equal(before[3][name], after[3][name]) for name in before[3])


@pytest.fixture(scope="module")
def llama():
    return model_of("llama", "sdpa")


EDIT = rg.KnockOut(rg.Where(layers=1, heads=2, queries=6, keys=3))


def test_an_edit_that_changes_nothing_leaves_every_bit(llama):
    expected = llama(IDS).logits
    assert torch.equal(logits_of(llama), expected)
    halved = rg.edits.ScaleWeights(EDIT.where, 0.5) & rg.edits.ScaleWeights(EDIT.where, 2.0)
    for edit in (halved, rg.edits.AddToScores(rg.Where(), 1.7) & rg.edits.AddToScores(rg.Where(), -1.7)):
        torch.testing.assert_close(logits_of(llama, edit), expected, rtol=1e-12, atol=1e-12)


def test_other_heads_and_rows_of_an_edited_layer_keep_their_bits(llama):
    outputs = []
    layer = llama.model.layers[1].self_attn
    with layer.o_proj.register_forward_pre_hook(lambda module, args: outputs.append(args[0].detach().view(2, N, 4, 4))):
        logits_of(llama)
        logits_of(llama, EDIT)
        logits_of(llama, rg.KnockOut(rg.Where(layers=1, heads=2, keys=0)))
    plain, of_pair, of_key = outputs
    changed = (plain != of_pair).any(-1)
    assert changed.any(0).nonzero().tolist() == [[6, 2]]
    assert not (plain != of_key)[:, :, [0, 1, 3]].any() and (plain != of_key)[:, :, 2].any()
    assert not of_key[:, 0, 2].any()  # it had one key, and lost it


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_model_is_the_same_before_and_after(llama, error):
    before = state_of(llama)
    logits_of(llama, EDIT)
    assert_same(before, state_of(llama))

    def fail(*_):
        raise error("stop")

    with llama.lm_head.register_forward_hook(fail), pytest.raises(error, match="stop"):
        logits_of(llama, EDIT)
    assert_same(before, state_of(llama))
    with pytest.raises(RegardError, match="head 7"):
        logits_of(llama, rg.KnockOut(rg.Where(heads=7)))
    assert_same(before, state_of(llama))


def test_nested_edits_compose_and_a_watch_sees_the_weights_as_they_are(llama):
    first, second = (
        rg.edits.AddToScores(rg.Where(layers=0, keys=1), 2.0),
        rg.KnockOut(rg.Where(layers=[0, 1], keys=0), renormalize=False),
    )
    expected = logits_of(llama, first & second)
    with torch.no_grad(), rg.watch(llama) as outside, rg.edit(llama, first), rg.edit(llama, second):  # noqa: SIM117
        with rg.watch(llama) as inside:
            assert torch.equal(llama(IDS).logits, expected)
    with torch.no_grad(), rg.watch(llama) as plain:
        llama(IDS)
    for n in range(2):
        torch.testing.assert_close(inside[n].dense(), outside[n].dense())
        assert not inside[n][:, :, :, 0].any() and plain[n][:, :, :, 0].all()
    weights = plain[0].dense()
    steered = weights * torch.where(torch.arange(N) == 1, torch.tensor(2.0).exp().double(), 1.0)
    steered = (steered / steered.sum(-1, keepdim=True)).masked_fill(torch.arange(N) == 0, 0)
    torch.testing.assert_close(inside[0].dense(), steered)
    statistics = inside[0].summarize(rg.maps.KeyTotals())[0]
    torch.testing.assert_close(statistics, steered.sum(2), rtol=1e-5, atol=1e-5, check_dtype=False)


def test_another_thread_runs_without_the_edit(llama):
    from threading import Thread

    expected, results = llama(IDS).logits, []
    with rg.edit(llama, EDIT):
        thread = Thread(target=lambda: results.append(llama(IDS).logits))
        thread.start()
        thread.join()
        llama(IDS)
    assert torch.equal(results[0], expected)


def test_eager_returns_the_edited_weights():
    model = model_of("llama", "eager")
    edit = rg.KnockOut(rg.Where(layers=1, heads=2, queries=6, keys=3), renormalize=False)
    plain = model(IDS, output_attentions=True).attentions[1]
    with torch.no_grad(), rg.edit(model, edit):
        edited = model(IDS, output_attentions=True).attentions[1]
    expected = plain.clone()
    expected[:, 2, 6, 3] = 0
    torch.testing.assert_close(edited, expected, rtol=1e-6, atol=1e-6)  # eager rounds its weights to float32
    assert not edited[:, 2, 6, 3].any() and plain[:, 2, 6, 3].all()


def test_gradients_pass_through_an_edit(llama, dense):
    edits = EDIT & rg.edits.ScaleWeights(rg.Where(layers=0, heads=[0, 1]), 0.3)
    with rg.edit(llama, edits):
        llama(IDS).logits.square().sum().backward()
    gradients = {name: p.grad for name, p in llama.named_parameters()}
    llama.zero_grad()
    dense.edits = [
        {"kind": "knock", "layers": [1], "heads": [2], "queries": [6], "keys": [3]},
        {"kind": "scale", "layers": [0], "heads": [0, 1], "queries": range(99), "keys": range(99), "number": 0.3},
    ]
    oracle = model_of("llama", "dense")
    oracle(IDS).logits.square().sum().backward()
    dense.edits = []
    for name, parameter in oracle.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-8)


STEPS = 5
GENERATED = (
    rg.KnockOut(rg.Where(layers=0, queries=slice(4, 11), keys=[1, 5, 9]))
    & rg.edits.ScaleWeights(rg.Where(layers=1, heads=1, queries=slice(3, None), keys=2), 0.1)
    & rg.edits.ReplaceWeights(rg.Where(heads=2, queries=slice(2, None), keys=[0, 2]), "uniform")  # a window leaves them
)


@pytest.mark.parametrize("cache", [None, "static", "beams"])
@pytest.mark.parametrize("name", ["llama", "window and softcap", "sinks"])
def test_generation_with_a_cache_counts_queries_in_the_whole_sequence(name, cache):
    for backend in BACKENDS[name]:
        model = model_of(name, backend)
        options = {"num_beams": 2} if cache == "beams" else {"cache_implementation": cache} if cache else {}
        options |= {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
        with torch.no_grad(), rg.edit(model, GENERATED) as run, rg.watch(model) as seen:
            out = model.generate(IDS, output_scores=True, return_dict_in_generate=True, **options)
        with torch.no_grad(), rg.edit(model, GENERATED):
            whole = model(out.sequences, use_cache=False).logits
        assert len(run.calls) == 2 and all(check.ok for check in seen.verify().values())
        if cache == "beams":  # the score of a hypothesis is the mean of its log-probabilities
            logs = whole[:, N - 1 : -1].log_softmax(-1).gather(-1, out.sequences[:, N:, None])[..., 0]
            torch.testing.assert_close(
                out.sequences_scores, logs.sum(-1) / STEPS, rtol=1e-5, atol=1e-5, check_dtype=False
            )
        else:
            scores = torch.stack(out.scores, 1)
            torch.testing.assert_close(scores, whole[:, N - 1 : -1], rtol=1e-5, atol=1e-5, check_dtype=False)


def test_one_edit_serves_several_blocks(llama):
    block, expected = rg.edit(llama, EDIT), logits_of(llama, EDIT)
    for _ in range(2):
        with torch.no_grad(), block as run:
            assert torch.equal(llama(IDS).logits, expected)
        assert run.calls == {"model.layers.1.self_attn": 1}


def test_autocast_keeps_the_dtype_of_the_backend(llama):
    model = copy.deepcopy(llama).float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model(IDS).logits
        with rg.edit(model, EDIT & rg.edits.ScaleWeights(rg.Where(layers=0, heads=1), 0.5)), rg.watch(model):
            edited = model(IDS).logits
    assert plain.dtype == edited.dtype == torch.bfloat16 and not torch.equal(plain, edited)


@needs_transformers("5.1", "eager attention is seen")
def test_an_edited_map_has_gradients(llama, dense):
    """A loss of edited weights has the gradients of dense autograd."""
    edit = EDIT & rg.edits.ScaleWeights(rg.Where(layers=1, heads=[0, 1], keys=slice(0, 3)), 0.3)
    with rg.edit(llama, edit), rg.watch(llama, grad=True) as seen:
        llama(IDS)
    parameters = [p for name, p in llama.named_parameters() if "layers.0" in name or "layers.1.self_attn.q" in name]
    loss = seen[1].shares().entropy().sum() + seen[1][:, 1, 4].square().sum()
    gradients = torch.autograd.grad(loss, parameters)
    dense.edits = [
        {"kind": "knock", "layers": [1], "heads": [2], "queries": [6], "keys": [3]},
        {"kind": "scale", "layers": [1], "heads": [0, 1], "queries": range(99), "keys": range(3), "number": 0.3},
    ]
    oracle = model_of("llama", "dense")
    weights = oracle(IDS, output_attentions=True).attentions[1]
    dense.edits = []
    shares = weights / weights.sum(-1, keepdim=True)
    loss = -torch.special.xlogy(shares, shares.clamp_min(1e-300)).sum() + weights[:, 1, 4].square().sum()
    named = dict(oracle.named_parameters())
    own = [named[name] for name, p in llama.named_parameters() if any(p is q for q in parameters)]
    for one, other in zip(gradients, torch.autograd.grad(loss, own), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_words_need_all_tokens_of_the_text():
    """With the tokens of another text a word would name another place."""
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, bos_token_id=0, eos_token_id=0)
    model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.tensor([[3, 1, 4, 1, 5]])
    edit = rg.KnockOut(rg.Where(queries="d", keys="b"))
    with pytest.raises(rg.RegardError, match=r"4 tokens were given, and the model reads 5.*convert_ids_to_tokens"):  # noqa: SIM117
        with rg.edit(model, edit, tokens=list("abcd")):
            model(ids)
    with rg.edit(model, edit, tokens=list("abcde")) as run:
        model(ids)
    assert sum(run.calls.values()) == 1
