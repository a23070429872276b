"""Cases of rings.py: modules of regard.nn and registered models on the default ring."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

import regard as rg
from ring_tools import CLOSE, LAYOUTS, case, raises, some


def summed_gradients(module):
    """The gradients of the parameters, summed over the ranks."""
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad)
    return [parameter.grad for parameter in module.parameters()]


@case
def modules_run_on_the_default_ring():
    n, real = 13, torch.arange(13) < torch.tensor([[13], [9]])
    x, source = some(2, n, 8), some(2, n + 4, 8, seed=1)
    for layout in LAYOUTS:
        ring = rg.Ring(layout=layout)
        torch.manual_seed(4)
        attention = rg.Attention(mask=rg.causal() & rg.window(7), position=rg.RoPE(4))
        layers = rg.nn.MultiHeadAttention(8, 2, 1, attention), rg.nn.MultiHeadAttention(8, 2)
        one, many = (torch.nn.ModuleList(copy.deepcopy(layers)).double() for _ in range(2))
        whole = one[1](one[0](x, mask=rg.padding(real)).output, source).output
        whole.square().sum().backward()
        with ring.as_default():
            hidden = many[0](ring.share(x, axis=1), mask=rg.padding(real)).output
            output = many[1](hidden, ring.share(source, axis=1)).output
        output.square().sum().backward()
        torch.testing.assert_close(output, ring.share(whole, axis=1), **CLOSE)
        for mine, parameter in zip(summed_gradients(many), one.parameters(), strict=True):
            torch.testing.assert_close(mine, parameter.grad, **CLOSE)


@case
def what_a_share_cannot_know_is_refused_in_modules():
    x, ring = some(1, 6, 8), rg.Ring()
    module = rg.nn.MultiHeadAttention(8, 2, is_causal=True).double()
    with ring.as_default():
        assert rg.plan(*[some(1, 2, 6, 4)] * 3, attention=rg.Attention()).ranks == dist.get_world_size()
        raises(["start=3", "Omit start"], lambda: module(x, start=3))
        raises(["ring cannot decode"], lambda: module.advance(x, module.keys(x)))
        raises(["Sinusoidal", "ring.share"], lambda: rg.nn.PositionalEncoding(8)(x))
        with rg.Ring(layout="zigzag").as_default():
            assert rg.Ring.default().layout == "zigzag"
        assert rg.Ring.default() is ring
        assert rg.Attention()(*[some(1, 2, 6, 4)] * 3, engine="dense").output.shape[2] == 6
    assert rg.Ring.default() is None


@case
def registered_models_run_on_the_default_ring():
    if dist.get_world_size() > 2:
        return  # to import transformers takes longer than all cases
    import transformers

    rg.register()
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 20}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids, ring = torch.randint(20, (2, 17), generator=torch.Generator().manual_seed(0)), rg.Ring()
    for kind, others in (("Llama", {}), ("Mistral", {"sliding_window": 5})):
        config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **others)
        torch.manual_seed(4)
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="regard").double()
        whole = model(ids, use_cache=False).logits
        whole.square().sum().backward()
        expected = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        positions = ring.share(torch.arange(17)[None], axis=1)
        with ring.as_default():
            logits = model(ring.share(ids, axis=1), position_ids=positions, use_cache=False).logits
        logits.square().sum().backward()
        torch.testing.assert_close(logits, ring.share(whole, axis=1), **CLOSE)
        for mine, one in zip(summed_gradients(model), expected, strict=True):
            torch.testing.assert_close(mine, one, **CLOSE)
    layer = model.model.layers[0].self_attn
    with ring.as_default():
        wrong = positions - positions[:, :1] + (dist.get_rank() == 0)  # both ranks see that it is not theirs
        turned = torch.ones(2, positions.shape[1], 8), torch.zeros(2, positions.shape[1], 8)
        call = lambda: layer(some(2, positions.shape[1], 32), turned, None, position_ids=wrong)  # noqa: E731
        raises(["position_ids are", "ring.share"], call)
