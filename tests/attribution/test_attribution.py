"""Attribution: maps of weight x gradient and relevance, against dense autograd in float64."""

from __future__ import annotations

import copy
import pickle
import sys

import numpy as np
import pytest
import tokenizers
import torch
import transformers

import regard as rg
from miniatures import BERT, GPT2, LLAMA, T5, V, sharpened
from regard.attribution.attention_flow import flows_to_inputs

transformers.logging.set_verbosity_error()
CONFIGS = {
    "GPT2LMHeadModel": transformers.GPT2Config(**GPT2),
    "LlamaForCausalLM": transformers.LlamaConfig(**LLAMA),
    "BertForMaskedLM": transformers.BertConfig(**BERT),
    "BertForSequenceClassification": transformers.BertConfig(**BERT, num_labels=3),
    "T5ForConditionalGeneration": transformers.T5Config(**T5),
}


def built(name, backend="sdpa", dtype=torch.float64):
    torch.manual_seed(2)
    model = getattr(transformers, name)._from_config(CONFIGS[name], attn_implementation=backend)
    return sharpened(model.eval()).to(dtype)


def text(name, batch=1):
    generator = torch.Generator().manual_seed(5)
    inputs = {"input_ids": torch.randint(3, V, (batch, 7), generator=generator)}
    if name.startswith("T5"):
        inputs["decoder_input_ids"] = torch.randint(3, V, (batch, 4), generator=generator)
    return inputs


def target_of(name):
    if name == "BertForMaskedLM":
        return rg.Target(9, position=3)
    return 1 if "Sequence" in name else 9


def number(outputs, name):
    logits = outputs.logits
    return (logits[:, 1] if "Sequence" in name else logits[:, 3 if "Masked" in name else -1, 9]).sum()


def eager(name, inputs):
    """Weights that eager returns, in the order in which they are computed, and dL/dw by autograd."""
    model = built(name, "eager")
    outputs = (
        model(**inputs, output_attentions=True, use_cache=False)
        if "T5" in name
        else model(**inputs, output_attentions=True)
    )
    if "T5" in name:
        pairs = zip(outputs.decoder_attentions, outputs.cross_attentions, strict=True)
        weights = [*outputs.encoder_attentions, *(w for pair in pairs for w in pair)]
    else:
        weights = list(outputs.attentions)
    slopes = torch.autograd.grad(number(outputs, name), weights, allow_unused=True)
    return [w.detach() for w in weights], [
        torch.zeros_like(w) if g is None else g for w, g in zip(weights, slopes, strict=True)
    ]


def budget(name):
    """Eager Llama computes its softmax in float32, whatever the dtype of the model."""
    return {"atol": 1e-5, "rtol": 1e-4} if "Llama" in name else {"atol": 1e-9, "rtol": 1e-7}


@pytest.mark.parametrize("name", CONFIGS)
def test_weight_gradient_is_that_of_autograd_through_eager(name):
    inputs = text(name, batch=2)
    weights, slopes = eager(name, inputs)
    found = rg.attribute(built(name), inputs, target_of(name))
    assert len(found) == len(weights)
    received = {}
    for links, w, g in zip(found.values(), weights, slopes, strict=True):
        assert links.is_signed
        torch.testing.assert_close(links.dense(), w * g, **budget(name))
        key = "decoder" if "T5" in name and w.shape[2:] == (4, 4) else "input"
        received[key] = received.get(key, 0) + (w * g).sum((1, 2))
    for key, expected in received.items():
        torch.testing.assert_close(found.tokens(key).double(), expected, atol=1e-5, rtol=1e-4)


def relevance_by_hand(name, weights, slopes):
    """Chefer et al. 2021 with dense matrices: equations 5 to 10."""
    maps = [(w * g).clamp_min(0).mean(1)[0] for w, g in zip(weights, slopes, strict=True)]
    own = torch.eye(7, dtype=torch.float64)
    if "T5" not in name:
        for a in maps:
            own = own + a @ own
        return own, None

    def normalized(r):
        rest = r - torch.eye(len(r), dtype=r.dtype)
        return torch.nan_to_num(rest / rest.sum(-1, keepdim=True)) + torch.eye(len(r), dtype=r.dtype)

    for a in maps[:2]:
        own = own + a @ own
    target, across = torch.eye(4, dtype=torch.float64), torch.zeros(4, 7, dtype=torch.float64)
    for self_map, cross_map in (maps[2:4], maps[4:6]):
        target, across = target + self_map @ target, across + self_map @ across
        across = across + normalized(target).T @ cross_map @ normalized(own)
    return across, target


@pytest.mark.parametrize("name", CONFIGS)
def test_the_relevance_of_chefer_is_that_of_dense_matrices(name):
    inputs = text(name)
    weights, slopes = eager(name, inputs)
    row = {"BertForMaskedLM": 3, "BertForSequenceClassification": 0}.get(name, -1)
    source, target = relevance_by_hand(name, weights, slopes)
    found = rg.attribute(built(name), inputs, target_of(name), method="chefer", test=False)
    expected = source[row] - (0 if "T5" in name else torch.eye(7)[row])
    torch.testing.assert_close(found.tokens()[0].double(), expected, atol=1e-5, rtol=1e-4)
    if target is not None:
        torch.testing.assert_close(
            found.tokens("decoder")[0].double(), target[row] - torch.eye(4)[row], atol=1e-5, rtol=1e-4
        )
    first = (weights[0] * slopes[0]).clamp_min(0).mean(1, keepdim=True)
    torch.testing.assert_close(found[0].dense(), first, **budget(name))


def test_a_decoder_that_reads_given_states_is_explained_or_refused():
    """GPT-2 with cross-attention to `encoder_hidden_states`: no encoder runs whose tokens relevance could reach."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 20, "bos_token_id": None, "eos_token_id": None}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(add_cross_attention=True, **sizes)).eval()
    inputs = {"input_ids": torch.tensor([[3, 1, 4]]), "encoder_hidden_states": torch.randn(1, 6, 8)}
    found = rg.attribute(model, inputs, 9, "weight-gradient")  # with the test, which runs the states in a batch
    assert [found[n].shape[3] for n in range(4)] == [3, 6, 3, 6]
    with pytest.raises(rg.RegardError, match=r"no attention of an encoder ran.*'weight-gradient'"):
        rg.attribute(model, inputs, 9, "chefer")


def gradient_map(groups=2, masked=True):
    torch.manual_seed(3)
    q, g = torch.randn(2, 4, 6, 5, dtype=torch.float64), torch.randn(2, 4, 6, 3, dtype=torch.float64)
    k, v = torch.randn(2, groups, 9, 5, dtype=torch.float64), torch.randn(2, groups, 9, 3, dtype=torch.float64)
    seen = rg.Attention(mask=rg.causal() & rg.window(5) if masked else None)(q, k, v)
    dense = seen.weights.dense() * (g @ v.repeat_interleave(4 // groups, 1).mT)
    return rg.maps.GradientMap(seen.weights, g, v), dense, g, seen.output


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("masked", [True, False])
def test_every_question_to_a_gradient_map_has_the_answer_of_dense_weights(groups, masked):
    links, dense, g, output = gradient_map(groups, masked)
    torch.testing.assert_close(links.dense(), dense)
    torch.testing.assert_close(links[1, [3, 0], 2:4, [8, 1]], dense[1, [3, 0], 2:4, [8, 1]])
    torch.testing.assert_close(links.select([1], [2, 1]).dense(), dense[1:, [2, 1]])
    torch.testing.assert_close(
        links.select([1], [2, 1]).received().double(), dense[1:, [2, 1]].sum(2), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(links.received().double(), dense.sum(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(links.shares().dense(), dense.abs() / dense.abs().sum(-1, keepdim=True))
    # the law of a row: its links sum to g . output
    torch.testing.assert_close(links.dense().sum(-1), (g * output).sum(-1))
    again = pickle.loads(pickle.dumps(links))
    torch.testing.assert_close(again.dense(), dense)


def test_a_gradient_of_zero_gives_a_map_of_zeros():
    links, _, g, _ = gradient_map()
    zero = rg.maps.GradientMap(links.source, torch.zeros_like(g), links.value)
    assert not zero.dense().any() and not zero.received().any() and not zero.shares().dense().any()


def test_a_gradient_map_refuses_what_does_not_fit_and_what_changed():
    links, _, g, _ = gradient_map()
    with pytest.raises(rg.RegardError, match=r"gradient \(2, 4, 6, 2\).*\(B, H, I, E\)"):
        rg.maps.GradientMap(links.source, g[..., :2], links.value)
    with pytest.raises(rg.RegardError, match="divides H"):
        rg.maps.GradientMap(links.source, g, links.value.repeat(1, 3, 1, 1)[:, :3])
    with pytest.raises(rg.RegardError, match="needs shares"):
        links.entropy()
    links.gradient.mul_(2)
    with pytest.raises(rg.RegardError, match="changed in place"):
        links.dense()


# Targets


def test_targets_name_the_same_number_in_every_way():
    model, inputs = built("GPT2LMHeadModel"), text("GPT2LMHeadModel", batch=2)
    by_id = rg.attribute(model, inputs, 9)
    for target in (
        rg.Target(9),
        rg.Target(9, position=-1),
        [9, 9],
        torch.tensor([9, 9]),
        lambda out: out.logits[:, -1, 9],
    ):
        torch.testing.assert_close(rg.attribute(model, inputs, target).tokens(), by_id.tokens())
    torch.testing.assert_close(rg.attribute(model, inputs["input_ids"], 9).tokens(), by_id.tokens())
    predicted = model(**inputs).logits[:, -1].argmax(-1)
    torch.testing.assert_close(rg.attribute(model, inputs).tokens(), rg.attribute(model, inputs, predicted).tokens())
    pair = rg.attribute(model, inputs, rg.Target(9, against=4)).tokens()
    torch.testing.assert_close(pair, by_id.tokens() - rg.attribute(model, inputs, 4).tokens(), atol=1e-5, rtol=1e-4)


def test_padding_on_either_side_changes_nothing():
    model, ids = built("LlamaForCausalLM"), torch.tensor([[3, 14, 15, 9, 26]])
    alone = rg.attribute(model, ids, 9, test=False).tokens()[0]
    real = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    right = rg.attribute(model, {"input_ids": torch.cat([ids, ids[:, :2]], 1), "attention_mask": real}, 9, test=False)
    torch.testing.assert_close(right.tokens()[0, :5], alone, atol=1e-6, rtol=1e-5)
    assert not right.tokens()[0, 5:].any()


def test_frozen_parameters_and_no_grad_are_no_obstacle_and_nothing_is_changed():
    model, inputs = built("LlamaForCausalLM"), text("LlamaForCausalLM")
    expected = rg.attribute(model, inputs, 9, test=False)
    assert all(p.grad is None for p in model.parameters())
    model.requires_grad_(False)
    path = rg.attribute(model, inputs, 9, "integrated-gradients", steps=2, test=False)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            found = rg.attribute(model, inputs, 9, test=False)
            moved = rg.attribute(model, inputs, 9, "integrated-gradients", steps=2, test=False)
        torch.testing.assert_close(found[0].dense(), expected[0].dense())
        torch.testing.assert_close(moved[0].dense(), path[0].dense())


#: Method -> its options; one for each way in which gradients, weights or runs become numbers.
IN_HALF = ("weight-gradient", "attn-lrp", "chefer", "edge-patching", "integrated-gradients", "value-zeroing")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_half_precision_agrees_with_float32_within_its_rounding(name, dtype):
    """The sum of some 20 independent roundings a layer and pass has the size u sqrt(20 layers); here 4 times that."""
    half, inputs = built(name, dtype=dtype), text(name)
    whole, corrupted = copy.deepcopy(half).float(), inputs | {"input_ids": inputs["input_ids"].flip(1)}
    for method in IN_HALF:
        options = {"corrupted": corrupted} if method == "edge-patching" else {}
        mine, exact = (rg.attribute(model, inputs, 9, method, test=False, **options) for model in (half, whole))
        bound = 4 * torch.finfo(dtype).eps / 2 * (20 * len(exact.maps)) ** 0.5
        pairs = [(mine.tokens(), exact.tokens())] + [
            (mine[n].dense(), exact[n].dense()) for n in range(len(exact.maps))
        ]
        for ours, theirs in pairs:
            assert ours.dtype == torch.float32 and bool(theirs.any())
            assert float((ours - theirs).abs().max() / theirs.abs().max()) < bound, method
        assert str(dtype).removeprefix("torch.") in " ".join(mine.notes) and "float" not in " ".join(exact.notes)


def test_autocast_and_dropout_of_functions_are_refused():
    model, inputs = built("LlamaForCausalLM"), text("LlamaForCausalLM")
    for ask in (lambda: rg.attribute(model, inputs, 9), lambda: rg.faithfulness(model, inputs, torch.ones(1, 7), 9)):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(rg.RegardError, match="Leave the autocast block"):
            ask()
    attention = next(part for part in model.modules() if hasattr(part, "attention_dropout"))
    model.train()
    rg.attribute(model, inputs, 9, test=False)  # nothing is dropped
    attention.attention_dropout = 0.5
    with pytest.raises(rg.RegardError, match=r"training mode.*Call model.eval\(\) first"):
        rg.attribute(model, inputs, 9)
    model.eval()
    rg.attribute(model, inputs, 9, test=False)


def test_layers_are_chosen_as_in_watch():
    model, inputs = built("GPT2LMHeadModel"), text("GPT2LMHeadModel")
    whole = rg.attribute(model, inputs, 9, test=False)
    last = rg.attribute(model, inputs, 9, layers=[1], test=False)
    assert list(last) == [whole.names[1]]
    torch.testing.assert_close(last[0].dense(), whole[1].dense())
    relevance = rg.attribute(model, inputs, 9, "chefer", layers=[1], test=False)
    assert list(relevance) == [whole.names[1]]


def test_an_attribution_is_a_mapping_and_names_a_layer_that_it_has_not():
    found = rg.attribute(built("GPT2LMHeadModel"), text("GPT2LMHeadModel"), 9, test=False)
    first, last = found.names[0], found.names[-1]
    assert found[0] is found[first] is found.get(first) and found[-1] is found[last]
    assert found.get("nothing") is None and found.get(len(found), 3) == 3
    for layer in (len(found), "nothing", True, slice(0, 1), [0], None):
        with pytest.raises(rg.RegardError, match=r"^attribution\["):
            found[layer]


def test_a_class_is_found_by_its_name_with_and_without_a_tokenizer():
    """A tokenizer splits names of classes, and knows some as tokens whose ids are no classes."""
    vocabulary = {"<unk>": 0, "good": 1, "LABEL_1": 2, **{f"w{n}": n for n in range(3, V)}}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    model, inputs = built("BertForSequenceClassification"), text("BertForSequenceClassification")
    expected = rg.attribute(model, inputs, 1, test=False)
    for given in (None, tokenizer):
        named = rg.attribute(model, inputs, "LABEL_1", test=False, tokenizer=given)
        torch.testing.assert_close(named[0].dense(), expected[0].dense())
        with pytest.raises(rg.RegardError, match=r"no such class\. Did you mean 'LABEL_1'"):
            rg.attribute(model, inputs, "LABEL1", test=False, tokenizer=given)
    model.config.label2id = {}  # the classes have no names
    with pytest.raises(rg.RegardError, match="none of the 3 tokens or classes"):
        rg.attribute(model, inputs, "w9", test=False, tokenizer=tokenizer)


def test_relevance_may_be_a_reversed_array():
    """No tensor has its strides."""
    model, ids = built("GPT2LMHeadModel"), text("GPT2LMHeadModel")["input_ids"]
    found, same = (rg.faithfulness(model, ids, x, 9) for x in (np.arange(7.0)[::-1], torch.arange(7.0).flip(0)))
    assert torch.equal(found.deletion, same.deletion)


def test_a_figure_without_matplotlib_names_the_class_of_the_curves(monkeypatch):
    model, ids = built("GPT2LMHeadModel"), text("GPT2LMHeadModel")["input_ids"]
    curves = rg.faithfulness(model, ids, torch.arange(7.0), 9)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(rg.RegardError, match=rf"^{type(curves).__name__}\.figure"):
        curves.figure()


def test_mistakes_are_explained():
    model, ids = built("GPT2LMHeadModel", dtype=torch.float32), text("GPT2LMHeadModel")["input_ids"]
    classes = built("BertForSequenceClassification")
    for call, message in (
        (lambda: rg.attribute(model, "a text"), "inputs is a str.*tokenizer"),
        (lambda: rg.attribute(model, ids[0]), r"\(batch, length\).*ids\[None\]"),
        (lambda: rg.attribute(model, ids, 50), "target 50 is none of the 50"),
        (lambda: rg.attribute(model, ids, "cat"), "needs tokenizer="),
        (lambda: rg.attribute(model, ids, rg.Target(9, position=7)), "position 7 is out of range.*0 to 6"),
        (lambda: rg.attribute(model, ids, [9, 9]), "one token for each of the 1 sequences"),
        (lambda: rg.attribute(model, ids, lambda out: out.logits), "must return one number"),
        (lambda: rg.attribute(model, ids, lambda out: out.logits[:, -1, 9].detach()), "without .detach"),
        (lambda: rg.attribute(model, ids, method="weight_gradient"), "Did you mean 'weight-gradient'"),
        (lambda: rg.attribute(model, ids, steps=3), "no option steps"),
        (lambda: rg.attribute(model.transformer, ids), "returns no logits.*last_hidden_state"),
        (lambda: rg.attribute(built("BertForMaskedLM"), ids, 9), "Say which.*position="),
        (lambda: rg.attribute(classes, ids, rg.Target(1, position=2)), "a target has no position"),
        (lambda: rg.attribute(built("GPT2LMHeadModel").train(), ids, 9), "model.eval"),
        (lambda: rg.attribute(None, ids), "NoneType"),
        (lambda: rg.attribute(torch.nn.Embedding(50, 4).eval(), ids, lambda out: out.sum()), "no attention"),
        (lambda: rg.faithfulness(model, ids.repeat(2, 1), torch.ones(7), 9), "one sequence, got 2"),
        (lambda: rg.faithfulness(model, ids, torch.ones(6), 9), "one number for each of the 7"),
        (lambda: rg.faithfulness(model, ids, torch.ones(7) / 0, 9), "NaN or infinite"),
        (lambda: rg.faithfulness(model, ids, torch.ones(7), 9, keep=range(7)), "none of the 7 tokens"),
    ):
        with pytest.raises(rg.RegardError, match=message):
            call()
    found = rg.attribute(model, ids, 9, test=False)
    with pytest.raises(rg.RegardError, match="2 maps"):
        found[2]
    with pytest.raises(rg.RegardError, match="Did you mean"):
        found["transformer.h.0.atn"]
    with pytest.raises(rg.RegardError, match="Known names: input"):
        found.tokens("decoder")


# Faithfulness


def counted(weights):
    """A model whose probability of token 0 is exactly known from the tokens that are left."""

    class Counted(torch.nn.Module):
        def forward(self, input_ids, attention_mask=None):
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            p = 0.1 + (weights * mask).sum(-1)
            return torch.stack([p.log(), (1 - p).log()], -1)

    return Counted().eval()


def test_curves_are_those_of_a_model_whose_probabilities_are_known():
    weights = torch.tensor([0.4, 0.0, 0.2, 0.1, 0.0])
    ids = torch.arange(5)[None]
    test = rg.faithfulness(counted(weights), ids, weights, 0, points=5, seeds=20)
    assert test.counts.tolist() == [0, 1, 2, 3, 4, 5]
    falls = torch.tensor([0.8, 0.4, 0.2, 0.1, 0.1, 0.1])
    torch.testing.assert_close(test.deletion, falls)
    torch.testing.assert_close(test.insertion, torch.tensor([0.1, 0.5, 0.7, 0.8, 0.8, 0.8]))
    # the mean of a random order falls by a fifth of what can be lost at each step
    line = 0.8 - 0.7 * test.counts / 5
    torch.testing.assert_close(test.random_deletion.mean(0), line, atol=0.12, rtol=0)
    torch.testing.assert_close(test.random_deletion[:, [0, -1]], torch.tensor([[0.8, 0.1]]).expand(20, 2))
    by_hand = torch.trapezoid(test.random_deletion.mean(0) - falls, test.counts.float()) / 5
    assert abs(test.deletion_area - by_hand) < 1e-6 and test.is_faithful
    worst = rg.faithfulness(counted(weights), ids, -weights, 0, points=5, seeds=20)
    assert worst.deletion_area < 0 and worst.insertion_area < 0 and not worst.is_faithful
    assert "Removing the 2 tokens" in test.sentences[0] and "from 0.8 to 0.2" in test.sentences[0]
    assert "better than 0 and 0 of 20 random orders: do not rely on it" in worst.sentences[1]


def test_tokens_that_must_stay_stay():
    model, ids = built("GPT2LMHeadModel"), text("GPT2LMHeadModel")["input_ids"]
    test = rg.faithfulness(model, ids, torch.arange(7.0), 9, keep=[0], points=20)
    assert test.counts.tolist() == [0, 1, 2, 3, 4, 5]  # the last position predicts, the first is the sink
    whole = model(ids).logits[0, -1].softmax(-1)[9]
    hidden = torch.tensor([[1, 0, 0, 0, 0, 0, 1]])
    least = model(ids, attention_mask=hidden).logits[0, -1].softmax(-1)[9]
    torch.testing.assert_close(test.deletion[[0, -1]].double(), torch.stack([whole, least]).detach(), atol=1e-6, rtol=0)
    replaced = rg.faithfulness(model, ids, torch.arange(7.0), 9, replacement=3, points=1)
    other = torch.cat([ids[:, :1], torch.full((1, 5), 3), ids[:, 6:]], 1)
    torch.testing.assert_close(
        replaced.deletion[-1].double(), model(other).logits[0, -1].softmax(-1)[9].detach(), atol=1e-6, rtol=0
    )


def test_a_printed_attribution_has_its_test_of_faithfulness():
    model, ids = built("GPT2LMHeadModel"), text("GPT2LMHeadModel")["input_ids"]
    found = rg.attribute(model, ids, 9)
    assert "Removing the 2 tokens with the largest relevance" in repr(found) and "random order" in repr(found)
    same = rg.faithfulness(model, ids, found, 9)
    torch.testing.assert_close(found.test.deletion, same.deletion)
    assert rg.attribute(model, ids, 9, test=False).test is None
    assert rg.attribute(model, ids.repeat(2, 1), 9).test is None


# Attention flow


def by_networkx(capacities, start, sink):
    networkx = pytest.importorskip("networkx")
    graph = networkx.DiGraph()
    for i, capacity in enumerate(start.tolist()):
        graph.add_edge("source", (len(capacities), i), capacity=capacity)
    for layer, matrix in enumerate(capacities):
        for i, row in enumerate(matrix.tolist()):
            for j, capacity in enumerate(row):
                graph.add_edge((layer + 1, i), (layer, j), capacity=capacity)
    return networkx.maximum_flow_value(graph, "source", (0, sink))


@pytest.mark.parametrize("seed", range(4))
def test_flows_are_those_of_networkx(seed):
    generator = torch.Generator().manual_seed(seed)
    n = 4 + seed
    weights = [torch.rand(n, n, generator=generator, dtype=torch.float64) ** 6 for _ in range(4)]
    weights = [w.tril() if seed % 2 else w for w in weights]
    capacities = [(0.5 * w / w.sum(-1, keepdim=True) + 0.5 * torch.eye(n)).numpy() for w in weights]
    start = torch.rand(n, generator=generator).numpy() if seed == 2 else torch.eye(n)[-1].numpy()
    expected = [by_networkx(capacities, start, sink) for sink in range(n)]
    torch.testing.assert_close(torch.tensor(flows_to_inputs(capacities, start.astype(float))).tolist(), expected)


def test_attention_flow_of_a_model_is_that_of_the_weights_of_eager():
    name = "GPT2LMHeadModel"
    weights, _ = eager(name, text(name))
    capacities = [(0.5 * w[0].mean(0) + 0.5 * torch.eye(7)).numpy() for w in weights]
    found = rg.attribute(built(name), text(name), 9, "attention-flow", layers=[1])
    expected = [by_networkx(capacities, torch.eye(7)[-1], sink) for sink in range(7)]
    torch.testing.assert_close(found.tokens()[0].tolist(), expected, atol=1e-6, rtol=1e-5)
    assert len(found) == 1 and "same flow" in repr(found)
    with pytest.raises(rg.RegardError, match="one sequence, got 2"):
        rg.attribute(built(name), text(name, batch=2), 9, "attention-flow")
    with pytest.raises(rg.RegardError, match=r"\(4, 7\).*'chefer' an encoder-decoder"):
        rg.attribute(built("T5ForConditionalGeneration"), text("T5ForConditionalGeneration"), 9, "attention-flow")


# Pages and files


def test_an_attribution_is_shown_and_its_maps_are_saved(tmp_path):
    pytest.importorskip("anywidget", reason="the view extra is not installed")
    from regard.maps.stored import load_map, save_map

    for name, titles in (("GPT2LMHeadModel", 1), ("T5ForConditionalGeneration", 3)):
        for method in ("weight-gradient", "chefer", "value-zeroing"):
            found = rg.attribute(built(name, dtype=torch.float32), text(name), 9, method, test=False)
            widget = found.show(list("abcdefg"), list("vwxy") if titles == 3 else None)
            assert len(widget.answers.sheets) == titles
    save_map(tmp_path / "links.safetensors", found[0])
    torch.testing.assert_close(load_map(tmp_path / "links.safetensors").dense(), found[0].dense())
    links = rg.attribute(built("GPT2LMHeadModel", dtype=torch.float32), text("GPT2"), 9, test=False)[1]
    save_map(tmp_path / "signed.safetensors", links)
    again = load_map(tmp_path / "signed.safetensors")
    torch.testing.assert_close(again.dense(), links.dense())
    assert again.is_signed


def test_a_target_that_no_attention_reaches_is_refused():
    """Layers of torch.ao.quantization.quantize_dynamic pass no gradient: every number of the result was 0."""
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20, bos_token_id=0, eos_token_id=0)
    ).eval()
    for block in model.transformer.h:
        block.attn.c_proj.register_forward_hook(lambda module, args, output: output.detach())
    with pytest.raises(rg.RegardError, match=r"does not depend on any attention .*quantize_dynamic"):
        rg.attribute(model, torch.tensor([[3, 1, 4]]), target=9, test=False)
