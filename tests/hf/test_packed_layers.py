"""Linear layers whose weights are packed, adapted or elsewhere: their matrices, and what is computed from them.

The oracle is a twin of the model with plain weights, which each library unpacks or merges by itself.
"""

from __future__ import annotations

import warnings
from copy import deepcopy

import pytest
import torch
from torch import nn

import regard as rg
from regard.hf.output_projections import LinearLayer, UnreadableMatrix

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attention_bias=True)
    model = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.3, mean=float("norm" in name))
    return model


class Packed(nn.Module):
    """A layer with whole numbers and a scale for each output, as quantized models have them."""

    def __init__(self, plain, change=None):
        super().__init__()
        self.in_features, self.change = plain.in_features, change
        scale = plain.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (plain.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = plain.bias

    def dense(self):
        return self.codes.to(self.scale.dtype) * self.scale

    def forward(self, x):
        y = nn.functional.linear(x, self.dense(), self.bias)
        return y if self.change is None else self.change(y)


def replaced(model, make):
    """The model with other layers in the place of the projections of its attention."""
    for layer in model.model.layers:
        for name in PROJECTIONS:
            setattr(layer.self_attn, name, make(getattr(layer.self_attn, name)))
    return model


def with_plain_weights(model, dense):
    """A twin of the model: the same, with the plain weights that `dense` gives."""
    twin = llama()
    for mine, theirs in zip(model.model.layers, twin.model.layers, strict=True):
        for name in PROJECTIONS:
            getattr(theirs.self_attn, name).weight.data = dense(getattr(mine.self_attn, name))
    return twin


def own():
    model = replaced(llama(), Packed)
    return model, with_plain_weights(model, lambda layer: layer.dense())


def torchao_int8():
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = llama()
    attends = lambda module, path: isinstance(module, nn.Linear) and "self_attn" in path  # noqa: E731
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(), filter_fn=attends)
    return model, with_plain_weights(model, lambda layer: layer.weight.dequantize())


def bitsandbytes_4bit():
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

    def make(plain):
        layer = library.nn.Linear4bit(*plain.weight.shape[::-1], compute_dtype=torch.float32, quant_type="nf4")
        layer.weight = library.nn.Params4bit(plain.weight.data, requires_grad=False, quant_type="nf4")
        layer.bias = plain.bias
        return layer.to("cpu")

    model = replaced(llama(), make)
    unpacked = library.functional.dequantize_4bit
    return model, with_plain_weights(model, lambda x: unpacked(x.weight.data, x.weight.quant_state))


def bitsandbytes_8bit():
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

    def make(plain):
        layer = library.nn.Linear8bitLt(*plain.weight.shape[::-1], has_fp16_weights=False)
        layer.load_state_dict(plain.state_dict())
        return layer.to("cpu")

    model = replaced(llama(), make)
    with torch.no_grad():
        model(IDS)  # packs the weights

    return model, with_plain_weights(model, lambda x: x.weight.data.float() * x.state.SCB[:, None] / 127)


def low_rank(merged=False):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj"], r=2, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.get_peft_model(llama(), config).eval()
    twin = deepcopy(model).merge_and_unload()
    if merged:
        model.merge_adapter()
    return model, twin


def on_disk(folder):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    return accelerate.disk_offload(llama(), folder, execution_device=torch.device("cpu")), llama()


#: A model, its twin, and the largest error relative to the largest number: some libraries compute in float16.
FORMS = {
    "packed by hand": (lambda _: own(), 1e-5),
    "torchao int8": (lambda _: torchao_int8(), 1e-4),
    "bitsandbytes 4-bit": (lambda _: bitsandbytes_4bit(), 1e-4),
    "bitsandbytes 8-bit": (lambda _: bitsandbytes_8bit(), 4e-2),
    "LoRA": (lambda _: low_rank(), 1e-5),
    "merged LoRA": (lambda _: low_rank(merged=True), 1e-5),
    "on a disk": (on_disk, 1e-6),
}


def watched(model):
    with torch.no_grad(), rg.watch(model, keep="qkv") as seen:
        model(IDS)
    return seen


def assert_close(mine, theirs, tolerance):
    assert mine.shape == theirs.shape
    difference = (mine - theirs).nan_to_num().abs().max()
    assert float(difference) <= tolerance * float(theirs.nan_to_num().abs().max())


@pytest.mark.parametrize("name", FORMS)
def test_what_is_read_from_the_matrices_is_that_of_a_twin_with_plain_weights(name, tmp_path):
    make, tolerance = FORMS[name]
    model, twin = make(tmp_path)
    mine, theirs = watched(model), watched(twin)
    for layer in range(2):
        for ask in (
            lambda seen: seen.head_part(layer),  # noqa: B023
            lambda seen: seen.bias_part(layer),  # noqa: B023
            lambda seen: seen.logit_effect(layer, token=7),  # noqa: B023
            lambda seen: seen.value_weighted(layer, projected=True).dense(),  # noqa: B023
        ):
            assert_close(ask(mine), ask(theirs), tolerance)
    for kind in "QKV":
        scores = (rg.hf.composition(one, kind, rotations=1).scores for one in (model, twin))
        assert_close(*scores, tolerance)
    found = [rg.attribute(one, IDS, rg.Target(7), test=False) for one in (model, twin)]
    assert_close(*(one.tokens() for one in found), max(tolerance, 1e-4))
    assert rg.attribute(model, IDS, rg.Target(7)).test is not None
    assert len(rg.importance(model, lambda model, ids: model(ids, labels=ids).loss, [IDS]).values) == 2


def test_reading_changes_nothing():
    model, _ = own()
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules, state = [*model.modules()], torch.get_rng_state()
    rg.hf.composition(model, rotations=1)
    assert torch.equal(torch.get_rng_state(), state) and [*model.modules()] == modules
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(part.bias is not None for part in model.modules() if isinstance(part, Packed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 1), (5, 3), (16, 16)])
def test_a_large_bias_does_not_round_the_matrix_away(dtype, sizes):
    plain = nn.Linear(*sizes, dtype=dtype)
    nn.init.constant_(plain.bias, 300.0)
    packed = Packed(plain)
    layer = LinearLayer(packed)
    assert torch.equal(layer.matrix, packed.dense().mT) and torch.equal(layer.bias, plain.bias)


class Twice(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_forward_of_its_own_counts():
    layer = Twice(4, 3, bias=False)
    torch.testing.assert_close(LinearLayer(layer).matrix, 2 * layer.weight.mT)
    conv = transformers.pytorch_utils.Conv1D(3, 4)
    assert LinearLayer(conv).matrix.data_ptr() == conv.weight.data_ptr()


@pytest.mark.parametrize(
    ("change", "reason"), [(torch.tanh, "is not linear"), (nn.Dropout(0.5).train(), "dropout in training mode")]
)
def test_what_is_not_linear_has_no_matrix(change, reason):
    with pytest.raises(UnreadableMatrix, match="is not linear: dropout in training mode, an activation"):
        _ = LinearLayer(Packed(nn.Linear(8, 8), change)).matrix
    model = llama()
    model.model.layers[1].self_attn.o_proj = Packed(nn.Linear(32, 32), change)
    seen = watched(model)
    with pytest.raises(rg.RegardError, match=rf"seen.head_part\(1\): Packed without plain weights .*{reason}"):
        seen.head_part(1)
    with pytest.raises(rg.RegardError, match=r"weights of model.layers.1.self_attn: Packed .* is not linear"):
        rg.hf.composition(model)


def test_a_layer_that_cannot_run_says_why():
    class Broken(Packed):
        def forward(self, x):
            raise NotImplementedError("no kernel for this machine")

    with pytest.raises(UnreadableMatrix, match=r"could not be run to read its matrix: no kernel for this machine"):
        _ = LinearLayer(Broken(nn.Linear(4, 4))).matrix


def test_a_layer_that_was_changed_after_the_run_is_refused():
    model, _ = own()
    seen = watched(model)
    for layer in model.model.layers:
        layer.self_attn.o_proj.scale = layer.self_attn.o_proj.scale * 2
    with pytest.raises(rg.RegardError, match="returns other outputs than when it was watched"):
        seen.head_part(0)
    seen = watched(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.bias.add_(1.0)
    with pytest.raises(rg.RegardError, match="was changed in place after it was watched"):
        seen.head_part(0)
