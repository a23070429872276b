"""Patches of queries, keys, values and outputs from another run: equal to hooks on the projections of the model."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

import regard as rg
from regard import RegardError
from registered import OURS

transformers = pytest.importorskip("transformers")
N, H, G, D = 7, 4, 2, 4
IDS, OTHER = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8, 1]]), torch.randint(0, 20, (2, N))
PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}


@pytest.fixture(scope="module", params=["sdpa", "eager", *OURS])
def model(request):
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, intermediate_size=8, num_attention_heads=H,
        num_key_value_heads=G, head_dim=D, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=request.param)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def projection(model, layer, part):
    return getattr(model.model.layers[layer].self_attn, PROJECTIONS[part])


def of_other_run(model, layer, part):
    """What the projection of a part gave in a run on the other text (for the output: what it read)."""
    kept = []
    with ExitStack() as stack:
        layer = projection(model, layer, part)
        if part == "output":
            stack.enter_context(layer.register_forward_pre_hook(lambda module, args: kept.append(args[0])))
        else:
            stack.enter_context(layer.register_forward_hook(lambda module, args, output: kept.append(output)))
        model(OTHER)
    return kept[0].unflatten(-1, (-1, D))


def with_hook(model, layer, part, heads, tokens):
    """The logits with a part of some heads and tokens replaced at its projection."""
    source = of_other_run(model, layer, part)

    def replaced(x):
        x = x.unflatten(-1, (-1, D)).clone()
        for head in heads:
            x[:, tokens, head] = source[:, tokens, head]
        return x.flatten(-2)

    layer = projection(model, layer, part)
    if part == "output":
        hook = layer.register_forward_pre_hook(lambda module, args: (replaced(args[0]),))
    else:
        hook = layer.register_forward_hook(lambda module, args, output: replaced(output))
    with hook:
        return model(IDS).logits


CASES = [
    ("output", {"heads": [1, 2]}, [1, 2], slice(None)),
    ("output", {"heads": 3, "queries": [4, 2]}, [3], [4, 2]),
    ("query", {"heads": 0, "queries": slice(3, None)}, [0], slice(3, None)),
    ("key", {"heads": [2, 3], "keys": [0, 5]}, [1], [0, 5]),
    ("value", {}, [0, 1], slice(None)),
    ("value", {"heads": [0, 1], "keys": 6}, [0], [6]),
]


@torch.no_grad()
@pytest.mark.parametrize(("part", "where", "heads", "tokens"), CASES)
def test_a_patch_equals_a_hook_on_the_projection(model, part, where, heads, tokens):
    with rg.watch(model, keep="qkv") as other:
        model(OTHER)
    expected, plain = with_hook(model, 1, part, heads, tokens), model(IDS).logits
    patch = rg.edits.ActivationPatch(rg.Where(layers=1, **where), part=part, source=other)
    with rg.edit(model, patch) as run, rg.watch(model):
        patched = model(IDS).logits
    torch.testing.assert_close(patched, expected, rtol=1e-5, atol=1e-5)
    assert run.calls == {"model.layers.1.self_attn": 1} and not torch.allclose(plain, patched, atol=1e-3)
    again = rg.edits.edit_from_json(patch.to_json())
    with rg.edit(model, again):
        assert torch.equal(model(IDS).logits, patched)


@torch.no_grad()
@pytest.mark.parametrize("part", PROJECTIONS)
def test_a_patch_from_the_same_run_changes_nothing(model, part):
    with rg.watch(model, keep="qkv") as seen:
        plain = model(IDS).logits
    with rg.edit(model, rg.edits.ActivationPatch(rg.Where(), part=part, source=seen)):
        torch.testing.assert_close(model(IDS).logits, plain, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("part", PROJECTIONS)
def test_a_patch_in_generation_counts_tokens_in_the_whole_sequence(model, part):
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with rg.watch(model, keep="qkv") as other:
        model.generate(OTHER, **options)
    patch = rg.edits.ActivationPatch(
        rg.Where(layers=1, **{"keys" if part in ("key", "value") else "queries": [2, N + 1]}), part, other
    )
    with rg.edit(model, patch):
        out = model.generate(IDS, output_scores=True, return_dict_in_generate=True, **options)
        whole = model(out.sequences, use_cache=False).logits
    torch.testing.assert_close(torch.stack(out.scores, 1), whole[:, N - 1 : -1], rtol=1e-4, atol=1e-4)


MISTAKES = [
    ({"layers": 1, "heads": 2}, "value", lambda seen: seen, r"heads 2, 3 .* share one key and value head"),
    ({"layers": 1, "heads": 0}, "key", lambda seen: seen, r"Where\(heads=\[0, 1\]\)"),
    ({"layers": 1}, "output", lambda seen: torch.zeros(2, H, N + 1, D), "has 8 tokens, and this one has at least 7"),
    ({"layers": 1}, "output", lambda seen: torch.zeros(2, H, N - 1, D), "has 6 tokens, and this one has at least 7"),
    ({"layers": 1}, "output", lambda seen: torch.zeros(3, H, N, D), "this run has batch 2"),
    ({"layers": 1}, "query", lambda seen: torch.zeros(2, G, N, D), "4 heads"),
    ({"layers": 1}, "query", lambda seen: torch.zeros(N, D), "expected the seen of a watch"),
    ({"layers": 1}, "query", lambda seen: {0: torch.zeros(2, H, N, D)}, "has no layer"),
    ({"layers": 1, "queries": 9}, "query", lambda seen: seen, "selected nothing: the run had tokens 0 to 6"),
]


@torch.no_grad()
@pytest.mark.parametrize(("where", "part", "source", "message"), MISTAKES)
def test_mistakes_of_a_patch_are_named(model, where, part, source, message):
    with rg.watch(model, keep="qkv") as seen:
        model(OTHER)
    with (
        pytest.raises(RegardError, match=message),
        rg.edit(model, rg.edits.ActivationPatch(rg.Where(**where), part, source(seen))),
    ):
        model(IDS)


@torch.no_grad()
def test_a_run_of_which_no_values_were_kept_is_refused(model):
    with rg.watch(model) as seen:
        model(OTHER)
    with (
        pytest.raises(RegardError, match="keep='qkv'"),
        rg.edit(model, rg.edits.ActivationPatch(rg.Where(), source=seen)),
    ):
        model(IDS)


@torch.no_grad()
@pytest.mark.parametrize("part", PROJECTIONS)
def test_a_source_that_read_a_text_several_times_is_refused(model, part):
    with rg.watch(model, keep="qkv") as seen:
        model(OTHER)
        model(IDS)
    where = rg.Where(layers=1, **{"keys" if part in ("key", "value") else "queries": 2})
    with (
        pytest.raises(RegardError, match="read a whole text 2 times"),
        rg.edit(model, rg.edits.ActivationPatch(where, part, seen)),
    ):
        model(IDS)


@torch.no_grad()
def test_layers_that_share_a_module_are_patched_from_tensors_only():
    config = transformers.AlbertConfig(
        vocab_size=20, embedding_size=8, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8
    )
    albert = transformers.AlbertModel(config).eval()
    with rg.watch(albert, keep="qkv") as seen:
        albert(IDS)
    edit = rg.edit(albert, rg.edits.ActivationPatch(rg.Where(queries=2), source=seen))
    with pytest.raises(RegardError, match=r"3 times \(layers that share a module"), edit:
        albert(IDS)
    patch = rg.edits.ActivationPatch(rg.Where(queries=2), source=seen.head_output(0, call=1))
    with rg.edit(albert, patch) as run:
        albert(IDS)
    assert list(run.calls.values()) == [3]
