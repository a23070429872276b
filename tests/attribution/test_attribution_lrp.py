"""AttnLRP: relevance by modified gradients against relevance that is passed on explicitly, and against `lxt`."""

from __future__ import annotations

import importlib
import sys
import types
from functools import partial

import pytest
import torch
import transformers
from test_attribution import CONFIGS, built, target_of, text

import regard as rg
from extras import needs_transformers
from miniatures import LLAMA, sharpened
from regard.attribution.attn_lrp import _rule

LAYERS = transformers.LlamaConfig(**LLAMA | {"num_hidden_layers": 1, "rms_norm_eps": 0.0})


def linear(x, weight, relevance):
    """R_j = sum_i w_ij x_j / y_i R_i, y = W x."""
    return x * ((relevance / (x @ weight.T)) @ weight)


def rotated_back(x, relevance, turn):
    """The relevance through a rotation y = T x of each position, T (n, D, D)."""
    y = torch.einsum("nde,hne->hnd", turn, x)
    return x * torch.einsum("nde,hnd->hne", turn, relevance / y)


def explicit(model, ids, token):
    """R of each embedding channel (n, C) and of each weight (H, n, n), rule by rule, without a gradient."""
    layer, core = model.model.layers[0], model.model
    attention, mlp = layer.self_attn, layer.mlp
    H, G, D = 4, 2, 8

    def norm(module, x):
        return x * x.square().mean(-1, keepdim=True).rsqrt() * module.weight

    x = core.embed_tokens(ids)[0]
    n = len(x)
    cos, sin = core.rotary_emb(x[None], torch.arange(n)[None])
    half = torch.zeros(D, D, dtype=x.dtype)
    (
        half[torch.arange(D // 2), torch.arange(D // 2) + D // 2],
        half[torch.arange(D // 2) + D // 2, torch.arange(D // 2)],
    ) = -1, 1
    turn = torch.diag_embed(cos[0]) + sin[0][..., None] * half
    a = norm(layer.input_layernorm, x)
    q, k, v = (p(a).view(n, -1, D).transpose(0, 1) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    q_turned, k_turned = (torch.einsum("nde,hne->hnd", turn, t) for t in (q, k))
    k_heads, v_heads = k_turned.repeat_interleave(H // G, 0), v.repeat_interleave(H // G, 0)
    products = q_turned[:, :, None] * k_heads[:, None] * D**-0.5  # (H, i, j, D)
    scores = products.sum(-1)
    allowed = torch.ones(n, n).tril().bool()
    w = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    o = w @ v_heads
    joined = o.transpose(0, 1).flatten(1)
    added = attention.o_proj(joined)
    middle = x + added
    b = norm(layer.post_attention_layernorm, middle)
    gate, up = mlp.gate_proj(b), mlp.up_proj(b)
    product = mlp.act_fn(gate) * up
    fed = mlp.down_proj(product)
    last = norm(core.norm, middle + fed)[-1]

    relevance = torch.zeros_like(x)
    relevance[-1] = last * model.lm_head.weight[token]  # a norm passes relevance on
    of_fed, of_middle = (relevance * part / (middle + fed) for part in (fed, middle))
    of_product = linear(product, mlp.down_proj.weight, of_fed) / 2
    of_b = linear(b, mlp.gate_proj.weight, of_product) + linear(b, mlp.up_proj.weight, of_product)
    of_middle = of_middle + of_b
    of_added, of_x = (of_middle * part / middle for part in (added, x))
    of_o = linear(joined, attention.o_proj.weight, of_added).view(n, H, D).transpose(0, 1)
    shares = w[..., None] * v_heads[:, None] * (of_o / o)[:, :, None] / 2  # (H, i, j, D)
    of_w, of_v = shares.sum(-1), shares.sum(1).view(G, H // G, n, D).sum(1)
    of_scores = scores * (of_w - w * of_w.sum(-1, keepdim=True))
    passed = torch.where(allowed[..., None], products * (of_scores / scores)[..., None] / 2, 0)
    of_q, of_k = passed.sum(2), passed.sum(1).view(G, H // G, n, D).sum(1)
    of_q, of_k = rotated_back(q, of_q, turn), rotated_back(k, of_k, turn)
    projections = (attention.q_proj, of_q), (attention.k_proj, of_k), (attention.v_proj, of_v)
    of_a = sum(linear(a, p.weight, r.transpose(0, 1).flatten(1)) for p, r in projections)
    return of_x + of_a, of_w


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@torch.no_grad()
def test_relevance_is_what_the_rules_pass_on(backend):
    torch.manual_seed(4)
    model = sharpened(transformers.LlamaForCausalLM._from_config(LAYERS, attn_implementation=backend).eval()).double()
    ids = torch.tensor([[5, 9, 14, 30, 7]])
    tokens, weights = explicit(model, ids, 9)
    found = rg.attribute(model, ids, 9, "attn-lrp", test=False)
    torch.testing.assert_close(found.tokens()[0].double(), tokens.sum(-1), atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(found[0].dense()[0], weights, atol=2e-5, rtol=2e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_keeps_its_output_and_its_modules(name):
    model, inputs = built(name), text(name, batch=2)
    before = model(**inputs).logits
    found = rg.attribute(model, inputs, target_of(name), "attn-lrp")
    torch.testing.assert_close(model(**inputs).logits, before, atol=0, rtol=0)
    assert not any(part._forward_hooks for part in model.modules())
    assert found.tokens().shape == (2, 7) and bool(found.tokens().isfinite().all())
    torch.testing.assert_close(found.value, rg.attribute(model, inputs, target_of(name)).value)
    model.requires_grad_(False)
    torch.testing.assert_close(rg.attribute(model, inputs, target_of(name), "attn-lrp").tokens(), found.tokens())


def test_a_model_with_another_operation_is_refused_by_its_name():
    class Cubed(transformers.GPT2LMHeadModel):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            outputs.logits = outputs.logits**3
            return outputs

    torch.manual_seed(0)
    model = Cubed(CONFIGS["GPT2LMHeadModel"]).eval()
    with pytest.raises(rg.RegardError, match=r"Cubed computes Pow .*no rule.*'weight-gradient'"):
        rg.attribute(model, torch.tensor([[3, 4, 5]]), 9, "attn-lrp")
    assert not any(part._forward_hooks for part in model.modules())


@needs_transformers("5.1", "eager attention is seen")
def test_what_has_no_rule_is_refused_inside_attention_too():
    gemma = transformers.Gemma2Config(**LLAMA | {"attn_logit_softcapping": 1.5, "sliding_window": 4})
    model = transformers.Gemma2ForCausalLM._from_config(gemma, attn_implementation="eager").eval()
    with pytest.raises(rg.RegardError, match="caps scores"):
        rg.attribute(model, torch.tensor([[3, 4, 5]]), 9, "attn-lrp")

    class Softened(transformers.GPT2LMHeadModel):
        def __init__(self, config):
            super().__init__(config)
            self.soft = torch.nn.Softmax(-1)  # a module, and no activation

        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            outputs.logits = self.soft(outputs.logits)
            return outputs

    with pytest.raises(rg.RegardError, match="computes Softmax"):
        rg.attribute(Softened(CONFIGS["GPT2LMHeadModel"]).eval(), torch.tensor([[3, 4, 5]]), 9, "attn-lrp")


@pytest.mark.parametrize("kind", ["layer", "rms", "rms + 1", "centered"])
def test_a_norm_keeps_its_numbers_and_divides_by_a_constant(kind):
    class CenteredLayerNorm(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight, self.eps = weight, 1e-5

        def forward(self, x):
            return torch.nn.functional.layer_norm(x, (6,), self.weight, eps=self.eps)

    class ShiftedRMSNorm(torch.nn.RMSNorm):
        def forward(self, x):
            return torch.nn.functional.rms_norm(x, (6,), 1 + self.weight, self.eps)

    torch.manual_seed(0)
    x, seed = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True), torch.randn(2, 5, 6, dtype=torch.float64)
    weight = torch.nn.Parameter(torch.rand(6, dtype=torch.float64))
    make = {"layer": torch.nn.LayerNorm, "rms": torch.nn.RMSNorm, "rms + 1": ShiftedRMSNorm}
    module = CenteredLayerNorm(weight) if kind == "centered" else make[kind](6, eps=1e-5).double()
    module.weight = weight
    plain = module(x)
    output = _rule(module)(module, (x,), plain)
    torch.testing.assert_close(output, plain, atol=0, rtol=0)
    centered = x - x.mean(-1, keepdim=True) if kind in ("layer", "centered") else x
    constant = (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt().detach()
    expected = centered / constant * (1 + weight if kind == "rms + 1" else weight)
    (wanted,), (mine,) = (torch.autograd.grad(y, x, seed, retain_graph=True) for y in (expected, output))
    torch.testing.assert_close(mine, wanted)


def lxt_patches():
    """The functions of `lxt`: in the environment, or installed with --target into a folder on sys.path."""
    pytest.importorskip("lxt", reason="lxt is not installed: pip install --no-deps lxt")
    rules = types.ModuleType("lxt.efficient")
    rules.__path__ = [
        f"{sys.modules['lxt'].__path__[0]}/efficient"
    ]  # its __init__ imports models of older transformers
    sys.modules.setdefault("lxt.efficient", rules)
    return importlib.import_module("lxt.efficient.patches")


def test_relevance_is_that_of_lxt(monkeypatch):
    patches = lxt_patches()
    from transformers.models.llama import modeling_llama

    model, ids = built("LlamaForCausalLM", "eager"), text("LlamaForCausalLM")["input_ids"]
    found = rg.attribute(model, ids, 9, "attn-lrp", test=False)
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.forward = partial(patches.rms_norm_forward, module)
        elif hasattr(module, "gate_proj"):
            module.forward = partial(patches.gated_mlp_forward, module)
    wrapped = patches.wrap_attention_forward(modeling_llama.eager_attention_forward)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", wrapped)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embedded).logits[0, -1, 9].backward()
    expected = (embedded * embedded.grad).sum(-1)
    torch.testing.assert_close(found.tokens().double(), expected, atol=1e-3, rtol=1e-3)
