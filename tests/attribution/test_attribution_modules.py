"""Attribution of modules of `regard.nn`: translators, and encoders of one's own."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard import lab


def translator(system="transformer", **options):
    torch.manual_seed(3)
    return lab.build(system, source_size=30, target_size=30, width=16, **options).eval().double()


SOURCE, TARGET = torch.tensor([[7, 12, 9, 21, 3]]), torch.tensor([[2, 11, 8]])


def dense_weights(model, seen):
    """dL/dw of each layer, by a model whose weights are leaves: w @ v through the output projection, by autograd."""
    slopes = {}
    for name in seen.names:
        module, value = model.get_submodule(name), seen[name].value.double()
        weights = seen[name].dense().double().requires_grad_()
        joined = (weights @ value).transpose(1, 2).flatten(2)
        hook = module.output.register_forward_pre_hook(lambda _, args, joined=joined: (joined,))
        number = model.logits(model(SOURCE, TARGET))[:, -1, 9].sum()
        hook.remove()
        slopes[name] = (weights.detach(), torch.autograd.grad(number, weights)[0])
    return slopes


def test_links_of_a_translator_are_weights_times_their_gradients():
    model = translator(num_heads=4)
    with rg.watch(model, keep="qkv") as seen, torch.no_grad():
        model(SOURCE, TARGET)
    slopes = dense_weights(model, seen)
    for inputs in ({"source": SOURCE, "target": TARGET}, (SOURCE, TARGET)):
        found = rg.attribute(model, inputs, 9)
        assert list(found) == seen.names
        for name, (weights, slope) in slopes.items():
            torch.testing.assert_close(found[name].dense(), weights * slope, atol=1e-9, rtol=1e-7)
    assert found.tokens().shape == (1, 5) and found.tokens("decoder").shape == (1, 3)
    assert found.test.counts.tolist() == [0, 1, 2, 3, 4]  # the end of the sentence stays
    relevance = rg.attribute(model, (SOURCE, TARGET), 9, "chefer", test=False)
    assert relevance.tokens().shape == (1, 5) and bool((relevance.tokens() >= 0).all())


@pytest.mark.parametrize("inputs", [5, [SOURCE], [SOURCE, TARGET, TARGET], SOURCE, "ab", {"source": SOURCE}])
def test_a_translator_reads_a_source_and_a_target(inputs):
    with pytest.raises(rg.RegardError, match=r"attribute: a translator reads two tensors of ids"):
        rg.attribute(translator(num_heads=4), inputs, 9)


def test_a_translator_without_a_source_token_is_one_that_pads_it():
    model = translator(num_heads=4)
    test = rg.faithfulness(model, (SOURCE, TARGET), torch.tensor([0.0, 3, 1, 2, 0]), 9, points=4)
    padded = SOURCE.index_fill(1, torch.tensor([1, 3]), rg.lab.data.PAD)
    expected = model.logits(model(padded, TARGET))[0, -1].softmax(-1)[9].detach()
    assert float(test.deletion[2]) == pytest.approx(float(expected), abs=1e-6)


def test_modules_whose_heads_pass_a_gate_say_so():
    class Gated(torch.nn.Module):
        def __init__(self, gate):
            super().__init__()
            self.attention = rg.nn.MultiHeadAttention(8, 2, output_gate=gate)

        def forward(self, x):
            return self.attention(x).output

    torch.manual_seed(0)
    x = torch.randn(1, 5, 8)

    def total(output):
        return output.sum((1, 2))

    found = rg.attribute(Gated(False).eval(), {"x": x}, total)
    links = found[0]
    torch.testing.assert_close(links.dense().sum(-1), (links.gradient * (links.source.dense() @ links.value)).sum(-1))
    with pytest.raises(rg.RegardError, match="a gate or a norm"):
        rg.attribute(Gated(True).eval(), {"x": x}, total)


def test_methods_that_do_not_take_a_module_name_those_that_do():
    model = translator(num_heads=4)
    for method in ("integrated-gradients", "value-zeroing"):
        with pytest.raises(rg.RegardError, match="'weight-gradient' and 'chefer' change nothing"):
            rg.attribute(model, (SOURCE, TARGET), 9, method)
    with pytest.raises(rg.RegardError, match="no get_input_embeddings"):
        rg.attribute(model, (SOURCE, TARGET), 9, "attn-lrp")
    found = rg.attribute(model, (SOURCE, TARGET), 9, "edge-patching", corrupted=(SOURCE.flip(1), TARGET), test=False)
    assert found.edges is None and found[0].dense().any()
    with pytest.raises(rg.RegardError, match="two tensors of ids"):
        rg.attribute(model, {"source": SOURCE}, 9)


@pytest.mark.parametrize("system", ["bahdanau", "luong_general"])
def test_a_decoder_that_attends_once_a_step_has_slopes_of_its_weights(system):
    """dL/dw_ij is the slope of L when v_j is added to the context of step i, and the steps after it follow."""
    torch.manual_seed(4)
    model, step = translator(system), 1e-6
    source, target = torch.tensor([[5, 9, 3, 7]]), torch.tensor([[2, 8, 6, 4, 11]])
    goal = rg.Target(12, position=3)
    found = rg.attribute(model, (source, target), goal, test=False)
    with torch.no_grad(), rg.watch(model, keep="qkv") as seen:
        model(source, target)
    links, weights, values = found[0].dense(), seen[0].dense(), seen[0].value

    def moved(i, j, size):
        rows = iter(range(10))

        def add(module, args, seen):
            output = seen.output
            first = next(rows) if output.shape[1] == 1 else 0
            place = i - first
            if 0 <= place < output.shape[1]:
                output = output.clone()
                output[:, place] += size * values[:, 0, j]
            return seen.with_output(output)

        with model.bridge.register_forward_hook(add), torch.no_grad():
            return model.logits(model(source, target))[:, 3, 12]

    for i, j in [(0, 0), (1, 3), (2, 1), (3, 2), (4, 0)]:
        slope = (moved(i, j, step) - moved(i, j, -step)) / (2 * step)
        torch.testing.assert_close(links[0, 0, i, j], weights[0, 0, i, j] * slope[0], rtol=1e-5, atol=1e-8)
    assert float(links[0, 0, :3].abs().max()) > 0 and not links[0, 0, 4].any()
