"""A watch and an edit of models that run inside of torch.func, or that are copied while they are edited."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch
import transformers
from torch.func import functional_call, grad, jvp, vmap

import regard as rg
from miniatures import BERT, V, tokens

#: What torch says of its own functions under these transforms.
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": V, "n_positions": 40, "bos_token_id": 1}
NEO = {
    "vocab_size": V, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "window_size": 4,
    "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 40,
}  # fmt: skip
#: By the attention interface with each backend, and by a softmax of the module's own.
MODELS = {
    "sdpa": ("Bert", BERT, "sdpa"),
    "eager": ("GPT2", GPT | {"eos_token_id": None}, "eager"),
    "own softmax": ("GPTNeo", NEO, "eager"),
}
IDS = tokens(9)


@pytest.fixture(params=MODELS)
def model(request):
    name, sizes, backend = MODELS[request.param]
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}Model")._from_config(config, attn_implementation=backend).eval()


def loss(model):
    """A function of the parameters of a model, and the parameters."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    read = torch.linspace(-1, 1, 16)  # of each channel: a norm at the end makes sums of squares constant

    def function(given):
        return (functional_call(model, given, (IDS,))[0] * read).sum()

    return function, parameters


def knocked_out():
    return rg.edits.KnockOut(rg.Where(layers=0, keys=[1]))


def test_a_watched_model_has_its_derivatives_and_its_maps(model):
    function, parameters = loss(model)
    expected = grad(function)(parameters)
    with torch.no_grad(), rg.watch(model) as plain:
        model(IDS)
    with rg.watch(model) as seen:
        found = grad(function)(parameters)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)
    for weights, of_plain in zip(seen, plain, strict=True):
        torch.testing.assert_close(weights.dense(), of_plain.dense(), atol=1e-6, rtol=1e-5)


def test_a_watched_model_has_its_derivative_along_a_direction(model):
    if model.config._attn_implementation == "sdpa":
        pytest.skip("torch has no forward derivative of its kernel")
    function, parameters = loss(model)
    expected = jvp(function, (parameters,), (parameters,))
    with rg.watch(model) as seen:
        found = jvp(function, (parameters,), (parameters,))
    torch.testing.assert_close(found, expected)
    assert len(seen) == 2


def test_calls_under_vmap_run_as_without_a_watch_and_are_named(model):
    def states(ids):
        return model(ids[None])[0][0]

    expected, found = vmap(states)(IDS), []
    with (
        pytest.raises(rg.RegardError, match=r"2 attention modules: it ran inside of torch\.func"),
        rg.watch(model),
    ):
        found.append(vmap(states)(IDS))
    torch.testing.assert_close(found[0], expected)


def test_an_edited_model_has_the_derivatives_of_the_edited_model(model):
    function, parameters = loss(model)
    learned = {name: parameter.clone().requires_grad_() for name, parameter in parameters.items()}
    with rg.edit(model, knocked_out()):
        function(learned).backward()  # without torch.func
        found = grad(function)(parameters)
    plain = grad(function)(parameters)
    for name, parameter in learned.items():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], expected, atol=1e-5, rtol=1e-4, msg=name)
    assert not all(torch.allclose(found[name], plain[name], atol=1e-4) for name in found)


@torch.no_grad()
def test_an_edit_under_vmap_is_that_of_each_text(model):
    with rg.edit(model, knocked_out()):
        expected, found = model(IDS)[0], vmap(lambda ids: model(ids[None])[0][0])(IDS)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("copied", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("patched", [False, True])
def test_a_copy_of_an_edited_model_is_not_edited(model, copied, patched):
    expected = model(IDS)[0]
    with rg.watch(model, keep="qkv") as source:
        model(IDS.flip(1))
    patch = rg.edits.ActivationPatch(rg.Where(layers=1, queries=[2]), "output", source) if patched else knocked_out()
    with rg.edit(model, patch):
        edited, copy = model(IDS)[0], copied(model)
        inside = copy(IDS)[0]
    assert torch.equal(inside, expected) and torch.equal(copy(IDS)[0], expected)
    assert torch.equal(model(IDS)[0], expected) and not torch.allclose(edited, expected)
    with rg.edit(copy, knocked_out()), rg.edit(model, knocked_out()):
        torch.testing.assert_close(copy(IDS)[0], model(IDS)[0])
