"""`watch` against the weights that transformers itself returns: eager with output_attentions=True."""

from __future__ import annotations

import pytest
import torch

from extras import older_than
from miniatures import OTHERS, TEXTS
from watching import assert_identical, assert_same_weights, assert_verified, oracle, watched


def is_as_eager(model, backend):
    """Whether a model computes with this backend what it computes with eager."""
    differs = model.name in ("StableLmModel", "DogeModel") or "scale_attn_by_inverse_layer_idx" in model.config
    return not (differs and backend == "sdpa" and older_than("5.1"))


CASES = [(model, backend) for model in TEXTS + OTHERS for backend in model.backends if is_as_eager(model, backend)]


@pytest.mark.parametrize(("model", "backend"), CASES, ids=str)
def test_weights_are_those_that_eager_returns(model, backend):
    net, inputs = model.make(backend), model.inputs()
    with torch.no_grad():
        plain = net(**inputs)
    outputs, seen = watched(net, inputs)
    assert_identical(plain[0], outputs[0])
    assert not seen.missing
    assert_same_weights(seen, oracle(net, inputs))
    assert_verified(seen)
    assert not any("mask_tensor" in repr(weights.attention.mask) for weights in seen)


PADDED = (
    "Bert",
    "ModernBert",
    "GPT2",
    "Llama",
    "Mistral",
    "Qwen2",
    "Gemma2",
    "GptOss",
    "Doge",
    "Llama4Text",
    "T5",
    "Bart",
)
PADDED_CASES = [case for case in CASES if case[0].name.removesuffix("Model") in PADDED]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("model", "backend"), PADDED_CASES, ids=str)
def test_padding(model, backend, side):
    net, inputs = model.make(backend), model.inputs(side)
    with torch.no_grad():
        plain = net(**inputs)
    outputs, seen = watched(net, inputs)
    assert_identical(plain[0], outputs[0])
    assert_verified(seen)
    assert_same_weights(seen, oracle(net, inputs), inputs["attention_mask"])
    chunks_start_at_the_text = model.name == "Llama4TextModel" and side == "left"
    assert chunks_start_at_the_text or not any("mask_tensor" in repr(each.attention.mask) for each in seen)
