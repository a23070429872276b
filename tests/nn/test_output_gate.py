"""The output gate of `MultiHeadAttention`: transformers' Qwen3-Next, the weights, gradients, and pruning."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import gradcheck
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

import regard as rg
from regard.nn import MultiHeadAttention

WIDTH, HEADS = 12, 3


def gated(**options):
    torch.manual_seed(0)
    return MultiHeadAttention(WIDTH, HEADS, bias=False, output_gate=True, **options).double()


@torch.no_grad()
def test_the_gate_is_that_of_qwen3_next():
    ours, x = gated(is_causal=True), torch.randn(2, 7, WIDTH).double()
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": 4}
    theirs = Qwen3NextAttention(Qwen3NextConfig(**sizes, attn_implementation="eager"), 0).double()
    both = [p.weight.unflatten(0, (HEADS, 4)) for p in (ours.query, ours.gate)]
    theirs.q_proj.weight.data = torch.cat(both, 1).flatten(0, 1)  # in each head first the query, then the gate
    theirs.k_proj, theirs.v_proj, theirs.o_proj = ours.key, ours.value, ours.output
    theirs.q_norm = theirs.k_norm = nn.Identity()
    future = torch.full((7, 7), -torch.inf).double().triu(1)[None, None]
    no_turn = torch.ones(1, 7, 4).double(), torch.zeros(1, 7, 4).double()
    output, weights = theirs(x, no_turn, future)
    with rg.watch(ours) as seen:
        torch.testing.assert_close(ours(x).output, output)
    torch.testing.assert_close(seen[0].dense(), weights, rtol=1e-6, atol=1e-6)  # its softmax is in float32


def test_gradients_and_decoding():
    ours, x = gated(), torch.randn(1, 4, WIDTH).double().requires_grad_()
    assert gradcheck(lambda x: ours(x, is_causal=True).output, x)
    past, outputs = None, []
    for step in range(4):
        output, past = ours.advance(x[:, step : step + 1], past)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), ours(x, is_causal=True).output)


@torch.no_grad()
def test_a_closed_gate_closes_the_output_and_pruned_heads_lose_their_gate():
    ours, x = gated(), torch.randn(1, 5, WIDTH).double()
    model = nn.ModuleDict({"attention": ours})
    ours.output.weight[:, 4:8] = 0  # head 1 is not read
    before = ours(x).output
    rg.prune(model, {"attention": [1]})
    assert ours.gate.weight.shape == (8, WIDTH)
    torch.testing.assert_close(ours(x).output, before)
    ours.gate = nn.Linear(WIDTH, 8).double()
    nn.init.zeros_(ours.gate.weight)
    nn.init.constant_(ours.gate.bias, -1e9)
    assert not ours(x).output.any()
