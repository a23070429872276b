"""Head importance, gates and pruning curves, against finite differences and a head mask written by hand."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from transformers.models.bert import modeling_bert
from transformers.models.llama import modeling_llama

import regard as rg
from miniatures import BERT, DECODERS, ENCODERS, GPT2, LLAMA, OTHERS, SEQ2SEQ, padding, sharpened, tokens

MODELS = {str(model): model for model in (*ENCODERS, *DECODERS, *SEQ2SEQ, *OTHERS)}
LAYER = "encoder.layer.{}.attention.self"


def bert(backend="sdpa"):
    return sharpened(transformers.BertModel._from_config(transformers.BertConfig(**BERT), attn_implementation=backend))


def llama(backend="sdpa"):
    config = transformers.LlamaConfig(**LLAMA)
    return sharpened(transformers.LlamaModel._from_config(config, attn_implementation=backend))


def weighted(model, batch):
    """A loss that no symmetry flattens: a fixed random projection of the last hidden state."""
    hidden = model(**batch).last_hidden_state
    generator = torch.Generator().manual_seed(3)
    return (hidden * torch.randn(hidden.shape, generator=generator).to(hidden)).mean().tanh()


def batches(count=2):
    return [{"input_ids": tokens(9), "attention_mask": padding("right")} for _ in range(count)]


def state(model):
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    return hooks, [p.grad for p in model.parameters()], [p.requires_grad for p in model.parameters()], model.training


# What importance is


# The others compute norms, softmax or rotations in single precision, whatever the model's own.
ROUGH = ("LlamaModel", "GPTNeoXModel", "DeepseekV3Model")


@pytest.mark.parametrize("name", ["BertModel", "GPT2Model", "BartModel", *ROUGH])
def test_importance_is_the_finite_difference_of_the_loss_in_each_gate(name):
    model, inputs = MODELS[name].make("eager").double(), [MODELS[name].inputs() for _ in range(2)]
    found = rg.importance(model, weighted, inputs)
    for module, values in found.values.items():
        for head in range(len(values)):
            step, tolerance = (1e-2, 1e-5) if name in ROUGH else (1e-3, 1e-8)
            slopes = [difference(model, batch, module, head, len(values), step) for batch in inputs]
            assert abs(values[head] - sum(map(abs, slopes)) / 2) < tolerance
    assert found.batches == 2 and max(v.max() for v in found.values.values()) > 1e-3


def difference(model, batch, module, head, num_heads, step):
    """The slope at 1 from four points: (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12 h, wrong by O(h^4)."""
    losses = []
    for change in (step, -step, 2 * step, -2 * step):
        gate = torch.ones(num_heads, dtype=torch.float64)
        gate[head] += change
        with torch.no_grad(), rg.hf.gated(model, {module: gate}):
            losses.append(float(weighted(model, batch)))
    return (8 * (losses[0] - losses[1]) - (losses[2] - losses[3])) / (12 * step)


@pytest.mark.parametrize(("make", "module"), [(bert, modeling_bert), (llama, modeling_llama)])
def test_importance_is_the_derivative_of_a_head_mask_on_the_weights(make, module, monkeypatch):
    model, data = make("eager").eval(), batches(3)
    found = rg.importance(model, weighted, data)
    mask = torch.ones(2, 4, requires_grad=True)

    def attention(layer, query, key, value, attention_mask, scaling, **_):
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
        scores = query @ key.transpose(-1, -2) * scaling + (0 if attention_mask is None else attention_mask)
        weights = scores.softmax(-1) * mask[layer.layer_idx][None, :, None, None]
        return (weights @ value).transpose(1, 2), weights

    monkeypatch.setattr(module, "eager_attention_forward", attention)
    expected = sum(torch.autograd.grad(weighted(model, batch), mask)[0].abs() for batch in data) / 3
    torch.testing.assert_close(torch.stack(list(found.values.values())), expected, atol=1e-6, rtol=1e-4)


def test_importance_leaves_nothing_behind():
    model, data = bert().eval(), batches(1)
    with torch.no_grad():
        plain = model(**data[0]).last_hidden_state
    parameters = list(model.parameters())
    parameters[0].grad = grad = torch.ones_like(parameters[0])
    parameters[1].requires_grad_(False)
    before = state(model)
    with torch.inference_mode():
        found = rg.importance(model, weighted, data)
    assert state(model)[0] == before[0] and state(model)[2:] == before[2:]
    assert parameters[0].grad is grad and grad.eq(1).all() and all(p.grad is None for p in parameters[1:])
    assert not any(value.requires_grad for value in found.values.values())
    with torch.no_grad():
        assert torch.equal(model(**data[0]).last_hidden_state, plain)


def test_a_failing_loss_leaves_nothing_behind():
    model = bert().eval()

    def fails(model, batch):
        model(**batch)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rg.importance(model, fails, batches())
    assert not any(state(model)[0])


def test_half_precision_adds_up_in_single():
    found = rg.importance(bert().eval().bfloat16(), weighted, batches())
    exact = rg.importance(bert().eval(), weighted, batches())
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in found.values.values())
    assert found.values.keys() == exact.values.keys()


def test_modules_that_the_loss_does_not_reach_are_missing_with_the_reason():
    model = bert().eval()
    first = rg.importance(
        model, lambda m, batch: m(**batch, output_hidden_states=True).hidden_states[1].sum(), batches()
    )
    assert list(first.values) == [LAYER.format(0)]
    assert first.missing == {LAYER.format(1): "the loss does not depend on it"}
    assert "unknown: the loss does not depend on it" in first.table()


# The result


def result():
    values = {"a": torch.tensor([3.0, 0.0, 4.0, 0.5]), "b": torch.tensor([0.1, 0.2])}
    return rg.hf.ImportanceScores(values, 1, groups={"a": 2, "b": 1})


def test_layers_are_normalized_by_their_l2_norm():
    normal = result().normalized()
    expected = torch.tensor([3.0, 0.0, 4.0, 0.5]) / (9 + 16 + 0.25) ** 0.5
    torch.testing.assert_close(normal.values["a"], expected)
    torch.testing.assert_close(normal.values["b"].norm(), torch.tensor(1.0))
    assert rg.hf.ImportanceScores({"a": torch.zeros(2)}, 1).normalized().values["a"].tolist() == [0, 0]


def test_the_ranking_is_ascending():
    assert result().ranking() == [("a", 1), ("b", 0), ("b", 1), ("a", 3), ("a", 0), ("a", 2)]
    assert result().ranking(groups=True) == [("b", 0), ("b", 1), ("a", 0), ("a", 1), ("a", 2), ("a", 3)]


def test_the_least_leave_every_layer_its_best():
    assert result().least(2) == [("a", 1), ("b", 0)]
    assert result().least(6) == [("a", 1), ("b", 0), ("a", 3), ("a", 0)]
    assert result().least(2, groups=True) == [("b", 0)] and len(result().least(4, groups=True)) == 3
    with pytest.raises(rg.RegardError, match="has 6 heads, got 7"):
        result().least(7)


def test_the_table_has_a_line_for_each_module():
    lines = result().table().splitlines()
    assert len(lines) == 3 and lines[1].split() == ["a", "3", "0", "4", "0.5"]
    assert repr(result()) == "ImportanceScores(6 heads of 2 modules, 1 batches)"


# Gates


def zeroed(model, heads):
    """The model without these heads, by hand: zeros in the weights of the output projections."""
    with torch.no_grad():
        for module, head, width in heads:
            model.get_submodule(module).weight[:, head * width : (head + 1) * width] = 0
    return model


def test_gates_of_zero_remove_heads_and_gates_of_one_change_no_bit():
    model, batch = bert().eval(), batches(1)[0]
    with torch.no_grad():
        plain = model(**batch).last_hidden_state
        with rg.hf.gated(model, {0: [1, 0, 1, 0], LAYER.format(1): torch.ones(4)}):
            without = model(**batch).last_hidden_state
        with rg.hf.gated(model, {layer: torch.ones(4, dtype=torch.float64) for layer in (0, 1)}):
            assert torch.equal(model(**batch).last_hidden_state, plain)
        assert torch.equal(model(**batch).last_hidden_state, plain)
        output = "encoder.layer.0.attention.output.dense"
        expected = zeroed(model, [(output, 1, 4), (output, 3, 4)])(**batch).last_hidden_state
    torch.testing.assert_close(without, expected, atol=1e-5, rtol=0)
    assert (without - plain).abs().max() > 0.1


def test_gates_multiply_when_nested_and_are_trained_when_asked():
    model, batch = bert().eval(), batches(1)[0]
    gate = torch.tensor([1.0, 2.0, 3.0, 0.5], requires_grad=True)
    with rg.hf.gated(model, {0: gate}), rg.hf.gated(model, {0: 1 / gate.detach()}):
        loss = weighted(model, batch)
    torch.testing.assert_close(loss, weighted(model, batch))
    loss.backward()
    assert gate.grad.abs().min() > 0


def test_watching_under_gates_shows_the_same_weights_of_the_first_layer():
    model, batch = bert().eval(), batches(1)[0]
    with torch.no_grad(), rg.watch(model) as plain:
        model(**batch)
    with torch.no_grad(), rg.hf.gated(model, {0: [0.0] * 4}), rg.watch(model) as seen:
        model(**batch)
    assert torch.equal(seen[0].dense(), plain[0].dense())
    assert not torch.allclose(seen[1].dense(), plain[1].dense())


# The curve


def test_the_curve_is_the_quality_under_gates_in_each_order():
    model, data = bert().eval(), batches(1)
    found, shown = rg.importance(model, weighted, data), []
    curve = rg.hf.pruning_curve(
        model, lambda m: weighted(m, data[0]), found, shares=(0, 0.25, 1), progress=shown.append
    )
    assert curve.complete and curve.points == shown and len(shown) == 9 and curve.num_heads == 8
    for order, heads in (("importance", found.ranking()[:2]), ("reversed", found.ranking()[-2:])):
        gates = {name: [float((name, head) not in heads) for head in range(4)] for name in found.values}
        with torch.no_grad(), rg.hf.gated(model, gates):
            assert curve.qualities(order)[0.25] == float(weighted(model, data[0]))
    assert len({curve.qualities(order)[0] for order in ("importance", "random", "reversed")}) == 1
    assert curve.table().splitlines()[2].split()[:2] == ["0.25", "2"] and not any(state(model)[0])


def test_the_random_order_is_nested_and_belongs_to_its_seed():
    model, data = bert().eval(), batches(1)
    found = rg.importance(model, weighted, data)

    def points(seed, found=found):
        return rg.hf.pruning_curve(model, lambda m: weighted(m, data[0]), found, order="random", seed=seed).points

    other = rg.hf.ImportanceScores({name: torch.rand(4) for name in found.values}, 1)
    assert points(1) == points(1, other)
    assert points(1) == points(1) != points(2)
    assert [point.removed for point in points(1)] == [0, 1, 2, 2, 3, 4, 5, 6, 6, 7, 8]


def test_an_interrupted_curve_keeps_what_was_measured():
    model, calls = bert().eval(), []

    def quality(model):
        model(**batches(1)[0])
        calls.append(model)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return len(calls)

    curve = rg.hf.pruning_curve(model, quality, rg.importance(model, weighted, batches(1)), shares=(0, 0.5))
    assert not curve.complete and [p.quality for p in curve.points] == [1, 1, 1, 2]
    assert curve.table().endswith("interrupted") and not any(state(model)[0])


# Bad input


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, batch: model(**batch).last_hidden_state, "must return a scalar tensor, got a tensor"),
        (lambda model, batch: 1.0, "must return a scalar tensor, got float"),
        (lambda model, batch: weighted(model, batch).detach(), "without torch.no_grad"),
        (lambda model, batch: weighted(model, batch) / 0, "the loss of a batch is"),
        (None, "loss must be a function, got NoneType"),
        (torch.zeros(()), "loss must be a function, got Tensor"),
    ],
)
def test_bad_losses_are_refused(loss, message):
    with pytest.raises(rg.RegardError, match=message):
        rg.importance(bert(), loss, batches())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no batches"),
        ({"input_ids": 1}, "batches is a dict"),
        (torch.ones(1, 2), "batches is a Tensor"),
        (7, "batches must be a list"),
    ],
)
def test_bad_batches_are_refused(given, message):
    with pytest.raises(rg.RegardError, match=message):
        rg.importance(bert(), weighted, given)


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        ({"encoder.layer.0.attention.slef": torch.ones(4)}, "Did you mean 'encoder.layer.0.attention.self'"),
        ({7: torch.ones(4)}, "layer 7 is in none of"),
        ({0: torch.ones(3)}, r"needs 4 finite gates, one for each head, got shape \(3,\)"),
        ({0: [1.0, 1.0, 1.0, float("nan")]}, "finite gates"),
        ({0: "ones"}, r"gates\[0\] must be a Tensor or a list of numbers"),
    ],
)
def test_bad_gates_are_refused(gates, message):
    model = bert()
    with pytest.raises(rg.RegardError, match=message), rg.hf.gated(model, gates):
        raise AssertionError("the block must not run")
    assert not any(state(model)[0])


def test_layer_numbers_must_be_unambiguous():
    with (
        pytest.raises(rg.RegardError, match="layer 0 is in encoder"),
        rg.hf.gated(MODELS["BartModel"].make("sdpa"), {0: []}),
    ):
        pass


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "it has no attention modules"),
        (nn.TransformerEncoderLayer(8, 2), "without calling it"),
        ("bert", "model must be a Module, got str"),
    ],
)
def test_models_without_heads_are_refused(model, message):
    with pytest.raises(rg.RegardError, match=message), rg.hf.gated(model, {}):
        pass


def test_compiled_models_are_refused():
    with pytest.raises(rg.RegardError, match=r"before torch\.compile"):
        rg.importance(torch.compile(bert(), backend="eager"), weighted, batches())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shares": [0, 30]}, "from 0 to 1, of all heads; got 30"),
        ({"order": ["importence"]}, "Did you mean 'importance'"),
        ({"quality": lambda model: None}, "must return a number, got None"),
        ({"importance": {"a": 1}}, "expected the result of importance"),
    ],
)
def test_bad_curves_are_refused(options, message):
    model = transformers.GPT2Model(transformers.GPT2Config(**GPT2)).eval()
    fine = {"quality": lambda model: 1, "importance": rg.hf.ImportanceScores({"h.0.attn": torch.ones(4)}, 1)}
    with pytest.raises(rg.RegardError, match=message):
        rg.hf.pruning_curve(model, **fine | options)


def test_the_number_of_heads_of_a_module_of_regard_may_be_said():
    """3 heads of width 4: the number divides the 12 inputs of the output projection, not the width of a head."""
    model, batches = rg.nn.MultiHeadAttention(12, 3), [torch.randn(1, 5, 12)]

    def loss(model, batch):
        return model(batch).output.square().sum()

    said, found = (rg.importance(model, loss, batches, num_heads=number) for number in (3, None))
    assert str(said) == str(found)
    with pytest.raises(rg.RegardError, match=r"num_heads=2\): .* has 3 heads"):
        rg.importance(model, loss, batches, num_heads=2)
