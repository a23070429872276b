"""A registered model inside torch.compile: one graph, the kernels in it, and the numbers of the model without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend

import regard as rg
from kernels import needs_kernel
from miniatures import TEXTS, padding, tokens
from regard.engine.kernel.operator import OPERATOR
from regard.hf.masks.graph_masks import GraphMask
from regard.hf.masks.span_masks import spans_mask
from registered import needs_register

needs_register()
pytestmark = [needs_kernel, pytest.mark.filterwarnings("error:regard")]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def named(name):
    """The model; of one layer, where all layers are alike, because compiling takes seconds a layer."""
    model = next(model for model in TEXTS if model.name == f"{name}Model")
    is_alike = name in ("Llama", "Mistral", "Bert")
    return replace(model, config=model.config | {"num_hidden_layers": 1}) if is_alike else model


def compiled(net, backend="aot_eager", **options):
    """The compiled model, and its graphs so far."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(net, backend=counter, **options), counter.graphs


def num_kernels(graphs):
    return [sum(node.target is OPERATOR for node in graph.graph.nodes) for graph in graphs]


def pair(model):
    """The model on the backend that is the oracle, and on ours."""
    plain, ours = model.make(model.backends[0]), model.make("regard")
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def packed_positions():
    return torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2], [0, 0, 1, 2, 0, 1, 2, 3, 4]])


#: Models, and how they are called. Without a cache every decoder may hold packed sequences, for all the graph knows.
CALLS = {
    "Llama padded": lambda: {"attention_mask": padding("left")},
    "Mistral without a cache": lambda: {"use_cache": False},
    "Mistral packed": lambda: {"use_cache": False, "position_ids": packed_positions()},
    "Gemma2": lambda: {"attention_mask": padding("right")},
    "GptOss": lambda: {},
    "Bert padded": lambda: {"attention_mask": padding("right")},
    "ModernBert": lambda: {"attention_mask": padding("right")},
}


@pytest.mark.parametrize("call", CALLS)
def test_one_graph_with_the_outputs_and_gradients_of_the_models_own_backend(call):
    plain, ours = pair(named(call.split()[0]))
    inputs = {"input_ids": tokens(9), **CALLS[call]()}
    whole, graphs = compiled(ours, fullgraph=True)
    output, expected = whole(**inputs)[0], plain(**inputs)[0]
    toward = torch.randn_like(expected) * inputs.get("attention_mask", torch.ones(2, 9))[..., None]
    torch.testing.assert_close(output * toward, expected * toward, **CLOSE)
    assert num_kernels(graphs) == [plain.config.num_hidden_layers]
    for result in (output, expected):
        (result * toward).sum().backward()
    for (where, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            scale = max(float(theirs.grad.abs().max()), 0.1)  # that of a bias of keys is 0
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4 * scale, msg=where)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Mistral", "Bert"])
def test_one_graph_serves_other_lengths(name):
    plain, ours = pair(named(name))
    whole, graphs = compiled(ours, fullgraph=True)
    for length in (9, 14, 30):
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, :2] = 0
        inputs = {"input_ids": tokens(length), "attention_mask": mask}
        output, expected = whole(**inputs)[0], plain(**inputs)[0]
        torch.testing.assert_close(output[mask.bool()], expected[mask.bool()], **CLOSE)
    assert num_kernels(graphs) == [1, 1]  # the second graph is of any length


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_decoding_with_a_cache_is_in_the_graph(cache):
    plain, ours = pair(named("Mistral"))
    whole, graphs = compiled(ours, fullgraph=True)
    ids, caches = tokens(9), []
    for net in (plain, ours):
        make = transformers.StaticCache if cache == "static" else transformers.DynamicCache
        options = {"max_cache_len": 20} if cache == "static" else {}
        caches.append(make(config=net.config, **options))
    for part in (slice(0, 6), slice(6, 7), slice(7, 8), slice(8, 9)):
        expected, output = (
            net(ids[:, part], past_key_values=past)[0] for net, past in zip((plain, whole), caches, strict=True)
        )
        torch.testing.assert_close(output, expected, **CLOSE)
    assert set(num_kernels(graphs)) == {1}


def test_dropout_is_that_of_the_model_without_a_compiler():
    model = named("Bert")
    model = replace(model, config=model.config | {"attention_probs_dropout_prob": 0.3})
    net = model.make("regard").train()
    whole, graphs = compiled(net, "eager", fullgraph=True)
    outputs, ids = [], tokens(9)
    for run in (net, whole, whole):
        torch.manual_seed(len(outputs) // 2)
        outputs.append(run(input_ids=ids)[0])
    torch.testing.assert_close(outputs[0], outputs[1], **CLOSE)
    assert num_kernels(graphs) == [1] and not torch.allclose(outputs[1], outputs[2])


@torch.no_grad()
def test_autocast_rounds_the_inputs_of_the_kernels():
    plain, ours = pair(named("Mistral"))
    ids = tokens(9)
    exact = plain(ids)[0]
    whole, graphs = compiled(ours, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = whole(ids)[0], plain(ids)[0]
    assert num_kernels(graphs) == [1]
    assert (mine - exact).abs().max() <= 2 * (theirs - exact).abs().max()


@torch.no_grad()
def test_what_the_kernels_cannot_compute_breaks_the_graph():
    net, ids = named("Llama").make("regard").double(), tokens(9)
    whole, graphs = compiled(net, "eager")
    torch.testing.assert_close(whole(ids)[0], net(ids)[0])
    assert len(graphs) > 1 and not any(num_kernels(graphs))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(net, fullgraph=True)[0](ids)


@torch.no_grad()
def test_without_the_library_a_model_runs_on_the_other_engines(monkeypatch):
    monkeypatch.setenv("REGARD_KERNEL", "off")
    net, ids = named("Mistral").make("regard"), tokens(9)
    whole, graphs = compiled(net, "eager")
    torch.testing.assert_close(whole(ids)[0], net(ids)[0])
    assert not any(num_kernels(graphs))


GRAPH_MASKS = {
    "causal": GraphMask(0, 0, True, 0, None, None),
    "window in a cache": GraphMask(torch.tensor(5), 2, True, 4, None, None),
    "both ways, padded": GraphMask(0, 0, False, 3, torch.arange(9).ge(torch.tensor([[0], [4]])), None),
    "groups": GraphMask(0, 0, True, 0, None, torch.tensor([[0] * 4 + [1] * 5, [0] * 9])),
}


@pytest.mark.parametrize("name", GRAPH_MASKS)
def test_a_mask_of_a_graph_means_the_same_outside(name):
    mask, I = GRAPH_MASKS[name], 3 if name == "window in a cache" else 9
    rule = mask.recognized()
    allowed = rule.mask.allowed(rg.types.Grid.whole(rule.positions(I, 9 - mask.first), 2, 1, I)).expand(2, -1, -1, -1)
    i = torch.arange(I)[:, None] + mask.start
    j = torch.arange(mask.first, 9)
    expected = (j <= i) if mask.is_causal else torch.ones(I, len(j), dtype=torch.bool)
    if mask.window:
        expected = expected & ((i - j).abs() < mask.window)
    expected = expected.expand(2, 1, I, len(j))
    if mask.real is not None:
        expected = expected & mask.real[:, None, None]
    if mask.groups is not None:
        expected = expected & (mask.groups[:, None, :, None] == mask.groups[:, None, None])
    assert torch.equal(allowed, expected)


def test_slices_of_a_mask_are_slices_of_its_pairs():
    mask = GRAPH_MASKS["causal"][:, :, 2:5, 1:]
    assert (mask.start, mask.first) == (2, 1)
    eager = spans_mask(1, 9, 9, mask_function=transformers.masking_utils.causal_mask_function)[:, :, 2:5, 1:]
    assert (eager.rule.start, eager.rule.first) == (2, 1)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch loads rules of forward mode
def test_a_slope_taken_inside_a_graph_is_that_outside():
    """The operator has no derivative in forward mode: with it, the slope through the attention would be 0."""
    plain, ours = named("Llama").make("eager"), named("Llama").make("regard")
    ours.load_state_dict(plain.state_dict())
    embedded, direction = torch.randn(2, 1, 9, plain.config.hidden_size)

    def slope(net):
        return torch.func.jvp(lambda x: net(inputs_embeds=x)[0], (embedded,), (direction,))[1]

    for net in (plain, ours):
        net.eval().requires_grad_(False)
    found = torch.compile(lambda: slope(ours), backend="aot_eager")()
    torch.testing.assert_close(found, slope(plain), **CLOSE)
