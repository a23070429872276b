"""Pruned models against the same models with the weights of those heads zeroed by hand, and against gates."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from test_importance import bert, weighted
from torch import nn

import regard as rg
from extras import older_than
from miniatures import BERT, DECODERS, ENCODERS, GPT2, LLAMA, OTHERS, SEQ2SEQ, V, sharpened, tokens
from regard.hf.heads.model_heads import ModelHeads
from regard.hf.heads.pruning import PRUNABLE
from watching import assert_same_weights, assert_verified, oracle, watched

MODELS = [*ENCODERS, *DECODERS, *SEQ2SEQ, *OTHERS]
REFUSED = {
    *("GptOssModel", "Olmo2Model", "Phi3Model", "GPTNeoXModel", "GPTBigCodeModel", "DogeModel", "DeepseekV3Model"),
    *("Llama4TextModel", "T5Model", "MT5Model", "UMT5Model", "BeitModel"),
}
CROSS = {"add_cross_attention": True, "is_decoder": True}


def chosen(model):
    """A group of heads of every module: the last of the first module, the second of the next, and so on round."""
    found = ModelHeads.of(model, "test").by_name
    return {
        name: [group * heads.group + member for member in range(heads.group)]
        for number, (name, heads) in enumerate(found.items())
        for group in [(-1 - 2 * number) % (heads.num_heads // heads.group)]
    }


def zeroed(model, removed):
    """A copy in which the output projections do not read the removed heads."""
    model = copy.deepcopy(model)
    found = ModelHeads.of(model, "test").by_name
    with torch.no_grad():
        for name, numbers in removed.items():
            output, width = found[name].output, found[name].head_dim
            inputs = output.weight if isinstance(output, nn.Linear) else output.weight.T
            for head in numbers:
                inputs[:, head * width : (head + 1) * width] = 0
    return model


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


def doubles(inputs):
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


def gates_of(model, removed):
    found = ModelHeads.of(model, "test").by_name
    return {name: [float(h not in gone) for h in range(found[name].num_heads)] for name, gone in removed.items()}


@pytest.mark.parametrize(
    ("case", "backend"), [(m, backend) for m in MODELS if m.name not in REFUSED for backend in m.backends], ids=str
)
def test_a_pruned_model_computes_what_zeroed_heads_do(case, backend):
    """In float64, but for the norms that a model computes in float32."""
    model, inputs = case.make(backend).double(), doubles(case.inputs())
    if case.name == "MixtralModel" and not older_than("5.1"):
        model.set_experts_implementation("eager")  # torch's product of groups has no float64
    removed = chosen(model)
    expected, plain = run(zeroed(model, removed), inputs), run(model, inputs)
    with rg.hf.gated(model, gates_of(model, removed)):
        torch.testing.assert_close(run(model, inputs), expected, atol=1e-6, rtol=0)
    report = rg.prune(model, removed)
    torch.testing.assert_close(run(model, inputs), expected, atol=1e-6, rtol=0)
    assert (expected - plain).abs().max() > 1e-2
    assert report.model is model and report.in_place and report.removed == removed
    assert report.parameters_after == sum(p.numel() for p in model.parameters()) < report.parameters_before


@pytest.mark.parametrize("case", [m for m in MODELS if m.name in REFUSED], ids=str)
def test_other_architectures_are_refused_by_name_and_gates_still_work(case):
    model, inputs = case.make(case.backends[0]), case.inputs()
    removed = chosen(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(rg.RegardError, match=r"Attention \(.*these models can: .*regard.hf.gated\(model"):
        rg.prune(model, removed)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with rg.hf.gated(model, gates_of(model, removed)):
        gated = run(model, inputs)
    torch.testing.assert_close(gated, run(zeroed(model, removed), inputs), atol=1e-5, rtol=0)


def test_every_supported_class_is_tested():
    made = [case.make(case.backends[0]) for case in MODELS if case.name not in REFUSED]
    kinds = {type(heads.module).__name__ for model in made for heads in ModelHeads.of(model, "test").by_name.values()}
    assert kinds | {"BertCrossAttention"} == PRUNABLE


@pytest.mark.parametrize(
    "config", [transformers.BertConfig(**BERT, **CROSS), transformers.GPT2Config(**GPT2, add_cross_attention=True)]
)
def test_cross_attention_is_pruned(config):
    kind = transformers.BertModel if config.model_type == "bert" else transformers.GPT2Model
    model = sharpened(kind(config).eval())
    inputs = {"input_ids": tokens(7), "encoder_hidden_states": torch.randn(2, 5, 16)}
    removed = chosen(model)
    assert any("cross" in name for name in removed)
    pruned = rg.prune(model, removed, copy=True).model
    torch.testing.assert_close(run(pruned, inputs), run(zeroed(model, removed), inputs), atol=1e-5, rtol=0)


def llama(**changes):
    return sharpened(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | changes)).eval())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_pruned_model_generates(cache):
    model, ids = llama(), tokens(4)
    removed = {"model.layers.0.self_attn": [0, 1], "model.layers.1.self_attn": [2, 3]}
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    expected = zeroed(model, removed).generate(ids, **options)
    assert torch.equal(rg.prune(model, removed).model.generate(ids, **options), expected)


@pytest.mark.parametrize("name", ["BertModel", "GPT2Model", "LlamaModel"])
def test_a_pruned_model_is_watched(name):
    case = next(case for case in MODELS if case.name == name)
    model, inputs = case.make("sdpa"), case.inputs()
    rg.prune(model, chosen(model))
    _, seen = watched(model, inputs)
    assert_same_weights(seen, oracle(model, inputs))
    assert_verified(seen)
    assert {weights.shape[1] for weights in seen} == {2 if name == "LlamaModel" else 3}


def test_pruning_twice_numbers_heads_anew():
    once, twice = bert().eval(), bert().eval()
    once.load_state_dict(twice.state_dict())
    rg.prune(once, {0: [1, 3]})
    rg.prune(twice, [(0, 1)])
    assert rg.prune(twice, [(0, 2)]).left == {"encoder.layer.0.attention.self": 2, "encoder.layer.1.attention.self": 4}
    inputs = {"input_ids": tokens(9)}
    assert torch.equal(run(once, inputs), run(twice, inputs))


def test_a_copy_leaves_the_model_alone():
    model, inputs = bert().eval(), {"input_ids": tokens(9)}
    before = run(model, inputs)
    report = rg.prune(model, {0: [0]}, copy=True)
    assert report.model is not model and not report.in_place and "in a copy" in repr(report)
    assert torch.equal(run(model, inputs), before) and not torch.equal(run(report.model, inputs), before)


def test_a_checkpoint_loads_into_a_model_pruned_alike():
    report = rg.prune(bert().eval(), {0: [0, 2], 1: [3]})
    fresh = rg.prune(bert().eval(), report.removed).model
    fresh.load_state_dict(report.model.state_dict())
    inputs = {"input_ids": tokens(9)}
    assert torch.equal(run(fresh, inputs), run(report.model, inputs))


def test_a_pruned_model_trains_and_keeps_what_was_frozen():
    model = bert().eval()
    frozen = model.encoder.layer[0].attention.self.query.weight.requires_grad_(False)
    rg.prune(model, {0: [1]})
    own = model.encoder.layer[0].attention.self
    assert own.query.weight.shape == (12, 16) and not own.query.weight.requires_grad and frozen.shape == (16, 16)
    model(input_ids=tokens(9)).last_hidden_state.sum().backward()
    assert own.value.weight.grad.shape == (12, 16) and own.query.weight.grad is None


def test_the_least_important_heads_can_be_pruned_whole_groups_too():
    model, data = bert().eval(), [{"input_ids": tokens(9)}]
    report = rg.prune(model, rg.importance(model, weighted, data).least(8))
    assert report.left == {name: 1 for name in report.left}
    model = transformers.LlamaModel(transformers.LlamaConfig(**LLAMA)).eval()
    report = rg.prune(model, rg.importance(model, weighted, data).least(5, groups=True))
    assert sorted(report.left.values()) == [2, 2]


def test_the_report_is_a_table():
    report = rg.prune(bert(), {1: [3, 0, 3]})
    assert report.removed == {"encoder.layer.1.attention.self": [0, 3]}
    assert report.table().splitlines()[1].split() == ["encoder.layer.1.attention.self", "2", "0,", "3"]
    assert "2 heads in place" in report.table() and rg.prune(bert(), {}).removed == {}


# Bad input


def test_what_is_no_copy_is_refused_and_nothing_is_cut():
    model = bert("eager")
    for wrong in (torch.ones(2), None, 0):
        with pytest.raises(rg.RegardError, match=r"prune\(copy=\w+\): give True"):
            rg.prune(model, {0: [1]}, copy=wrong)
    assert model.encoder.layer[0].attention.self.query.weight.shape == (16, 16)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({0: [0, 1, 2, 3]}, "attention without heads cannot run.*regard.hf.gated"),
        ({0: [4]}, "has heads 0 to 3, got 4"),
        ({0: [-1]}, "has heads 0 to 3, got -1"),
        ({0: [True]}, "got True"),
        ({0: ["1"]}, "got '1'"),
        ({"encoder.layer.0.attention.selv": [1]}, "Did you mean 'encoder.layer.0.attention.self'"),
        ([1, 2], r"a list of \(module, head\)"),
        ({0: 1}, r"a list of \(module, head\)"),
        ({0: [1], 1: [9]}, "got 9"),
    ],
)
def test_bad_heads_are_refused_and_nothing_is_cut(heads, message):
    model = bert("eager")  # before transformers 5, BERT's class for SDPA is another
    with pytest.raises(rg.RegardError, match=message):
        rg.prune(model, heads)
    assert all(layer.attention.self.query.weight.shape == (16, 16) for layer in model.encoder.layer)


def test_torn_groups_are_named():
    with pytest.raises(rg.RegardError, match=r"each 2 query heads share .* incomplete: 0, 1; 2, 3\. .*groups=True"):
        rg.prune(llama(), {0: [1, 2]})


def test_quantized_and_adapted_weights_are_refused():
    class Linear4bit(nn.Linear):
        pass

    model = bert("eager")
    model.encoder.layer[0].attention.self.key = Linear4bit(16, 16)
    with pytest.raises(rg.RegardError, match=r"key is a Linear4bit.*prune before quantizing"):
        rg.prune(model, {0: [1]})
    model = bert("eager")
    model.encoder.layer[0].attention.output.dense.to("meta")
    with pytest.raises(rg.RegardError, match="no weights of a floating type in memory"):
        rg.prune(model, {0: [1]})


def test_parameters_of_single_heads_are_refused():
    model = transformers.CohereModel(transformers.CohereConfig(**LLAMA, use_qk_norm=True))
    with pytest.raises(rg.RegardError, match=r"q_norm.weight \(4, 8\) may belong to single heads"):
        rg.prune(model, {0: [0, 1]})
    model = bert("eager")
    model.encoder.layer[0].attention.self.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(rg.RegardError, match=r"sinks \(4,\) may belong"):
        rg.prune(model, {0: [0]})


def test_classes_from_elsewhere_are_refused_whatever_they_are_called():
    model = bert()
    own = type(model.encoder.layer[0].attention.self)
    stranger = type("BertSelfAttention", (own,), {"__module__": "elsewhere"})
    model.encoder.layer[0].attention.self.__class__ = stranger
    with pytest.raises(rg.RegardError, match="cannot be pruned"):
        rg.prune(model, {0: [0]})


def test_the_vocabulary_stays():
    assert rg.prune(llama(), {0: [0, 1]}).model.lm_head.weight.shape[0] == V


def test_scores_in_the_place_of_heads_are_refused_with_the_call_that_chooses_them():
    scores = rg.hf.ImportanceScores({"": torch.tensor([0.3, 0.1])}, batches=1)
    with pytest.raises(rg.RegardError, match=r"prune: heads are .*scores\.least\(count\)"):
        rg.prune(rg.nn.MultiHeadAttention(8, 2), scores)
    assert rg.prune(rg.nn.MultiHeadAttention(8, 2), scores.least(1))
