"""The code of docs/guides/from-tutorials.md and -models.md computes what the tutorials and torch compute."""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regard as rg

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
TEXT = "".join((GUIDES / name).read_text() for name in ("from-tutorials.md", "from-tutorials-models.md"))
close = torch.testing.assert_close


CODE = "\n".join(re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The names of both pages after all of their code ran, in order."""
    names = {}
    with contextlib.chdir(tmp_path_factory.mktemp("page")):
        exec(compile(CODE, "from-tutorials", "exec"), names)
    return names


def pooled(scores, values):
    """What every tutorial returns: the output, and the weights."""
    weights = scores.softmax(-1)
    return weights @ values, weights


def split_heads(x, num_heads):
    return x.view(*x.shape[:2], num_heads, -1).transpose(1, 2)


# Scores


def test_scaled_dot_product_attention(page):
    x, memory = page["x"], page["memory"]
    close(page["scaled_dot"], pooled(x @ memory.transpose(-2, -1) / math.sqrt(16), memory)[0])


def test_dot_product_attention(page):
    close(page["dot"], pooled(torch.bmm(page["x"], page["memory"].mT), page["memory"])[0])


def test_multiplicative_attention(page):
    score = page["x"] @ page["multiplicative"].weight[0] @ page["memory"].mT
    close(page["general"], pooled(score, page["memory"])[0])


def test_additive_attention(page):
    additive = page["additive"]
    features = torch.tanh(additive.query(page["x"]).unsqueeze(2) + additive.key(page["memory"]).unsqueeze(1))
    close(page["bahdanau"], pooled(features @ additive.direction, page["memory"])[0])


def test_nadaraya_watson_kernel_regression(page):
    distances = page["x_new"][:, None] - page["x_train"][None, :]
    close(page["y_new"], (-(distances**2) / 2).softmax(1) @ page["y_train"], atol=1e-4, rtol=1e-4)


# Self-attention, heads, masks


def of_torch(module, width, num_heads):
    """torch's module with the weights of ours."""
    theirs = nn.MultiheadAttention(width, num_heads, batch_first=True)
    projections = module.query, module.key, module.value
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        theirs.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
        theirs.out_proj.load_state_dict(module.output.state_dict())
    return theirs


def test_self_attention(page):
    x, module = page["x"], page["self_attention"]
    output, _ = pooled(module.query(x) @ module.key(x).mT / math.sqrt(16), module.value(x))
    close(module(x).output, module.output(output))


def test_causal_attention(page):
    x, module = page["x"], page["causal_attention"]
    scores = module.query(x) @ module.key(x).mT / math.sqrt(16)
    scores = scores.masked_fill(torch.triu(torch.ones(5, 5), diagonal=1).bool(), -torch.inf)
    close(module(x).output, module.output(pooled(scores, module.value(x))[0]))


def test_multi_head_attention_and_its_weights(page):
    x, memory, module = page["x"], page["memory"], page["multi_head"]
    theirs = of_torch(module, 16, 4)
    output, mean = theirs(x, memory, memory)
    close(module(x, memory).output, output)
    close(page["mean_of_heads"], mean)
    close(page["attention_weights"], theirs(x, memory, memory, average_attn_weights=False)[1])


def test_create_padding_mask(page):
    theirs = of_torch(page["self_attention"], 16, 1)
    close(page["output"], theirs(page["x"], page["x"], page["x"], key_padding_mask=page["ids"] == 0)[0])


def test_create_look_ahead_mask_with_padding(page):
    theirs, x = of_torch(page["causal_attention"], 16, 1), page["x"]
    later = nn.Transformer.generate_square_subsequent_mask(5).bool()
    close(page["target_output"], theirs(x, x, x, attn_mask=later, key_padding_mask=page["ids"] == 0)[0])


# Positions


def test_sinusoidal_positional_encoding(page):
    expected = torch.zeros(50, 16)
    for position in range(50):
        for channel in range(0, 16, 2):
            angle = position / 10_000 ** (channel / 16)
            expected[position, channel], expected[position, channel + 1] = math.sin(angle), math.cos(angle)
    close(page["encoding"].float(), expected)
    close(page["encoded"], page["x"] + expected[:5])
    vectors = page["embedding"].table(page["ids"]) * math.sqrt(16)
    close(page["embedding"](page["ids"]), vectors + expected[:5])


# Layers


def test_transformer_encoder_layer(page):
    ours, x = page["layer"], page["x"]
    theirs = nn.TransformerEncoderLayer(16, 4, dim_feedforward=64, dropout=0.0, batch_first=True)  # post-norm
    theirs.self_attn = of_torch(ours.self_attention, 16, 4)
    pairs = {"linear1": ours.feed_forward.inner, "linear2": ours.feed_forward.outer}
    pairs |= {"norm1": ours.around_self.norm, "norm2": ours.around_feed.norm}
    for name, module in pairs.items():
        getattr(theirs, name).load_state_dict(module.state_dict())
    close(ours(x), theirs(x), atol=1e-5, rtol=1e-4)


def test_transformer_encoder_has_the_parameters_of_torch(page):
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048), 6, enable_nested_tensor=False)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (page["encoder"], theirs)]
    assert sizes[0] == sizes[1]


def test_decoder_reads_the_source_without_padding_and_no_later_token(page):
    model, ids = page["transformer"].eval(), page["ids"]
    target = torch.tensor([[1, 5, 9], [1, 8, 4]])
    whole = model(ids, target, rg.padding(ids != 0))
    close(model(ids[1:, :3], target[1:, :2]), whole[1:, :2], atol=1e-5, rtol=1e-4)


# Sequence to sequence


def test_bahdanau_decoder_attends_from_the_state_before(page):
    """d2l.ai and PyTorch: the query of step t is s_(t-1), so the first row is that of the decoder's first state."""
    model, source = page["model"], page["source"]
    memory = model.encode(source)
    bridge = model.bridge.attention.score
    first = model.start(memory).carried[0][-1][0]
    scores = torch.tanh(bridge.query(first)[:, None] + bridge.key(memory.states)) @ bridge.direction
    close(page["alignment"][0], scores.softmax(-1)[0])
    close(page["alignment"].sum(-1), torch.ones(3))


def test_context_of_one_step(page):
    score, memory = page["attend_to_encoder"].attention.score, page["states"]
    scores = torch.tanh(score.query(page["state"]) + score.key(memory)) @ score.direction
    scores[1, 4:] = -1e9
    close(page["context"][:, 0], (scores.softmax(-1)[:, None] @ memory)[:, 0])


def test_beam_search_returns_the_better_first(page):
    assert page["best"].score >= page["others"][0].score


# Variants and looking


def test_grouped_query_attention(page):
    module, x = page["grouped"], torch.randn(2, 5, 64)
    q, k, v = (split_heads(p(x), n) for p, n in ((module.query, 8), (module.key, 2), (module.value, 2)))
    k, v = k.repeat_interleave(4, dim=1), v.repeat_interleave(4, dim=1)  # repeat_kv
    close(module(x).output, module.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


def test_sliding_window(page):
    i, j = torch.arange(4)[:, None], torch.arange(4)
    weights = page["local"](page["q"], page["k"], page["v"]).weights.dense()
    band = (j <= i) & (i - j < 2)
    expected = (page["q"] @ page["k"].mT / math.sqrt(8)).masked_fill(~band, -torch.inf).softmax(-1)
    close(weights, expected)


def test_statistics_of_the_maps(page):
    weights = page["layer_weights"].dense()
    close(page["entropy"], -torch.xlogy(weights, weights).sum(-1), atol=1e-5, rtol=1e-4)
    assert torch.equal(page["strongest"], weights.argmax(-1))
    flat = F.normalize(weights.flatten(2), dim=-1)
    close(page["similarity"], flat @ flat.mT, atol=1e-5, rtol=1e-4)


def test_the_other_names_are_there():
    """Every `rg.` name in the tables of the page exists, and every option of `training`."""
    for name in sorted(set(re.findall(r"\brg\.((?:\w+\.)*\w+)", TEXT))):
        value = rg
        for part in name.split("."):
            value = getattr(value, part)
    template = rg.lab.make_config({}).training
    for option in re.findall(r"`training\.(\w+)=", TEXT):
        assert hasattr(template, option), option
    for mechanism in re.findall(r'rg\.mechanism\("(\w+)"\)', TEXT):
        assert mechanism == "GQA" or rg.mechanism(mechanism)
