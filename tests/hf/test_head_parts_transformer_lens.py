"""Values, outputs of heads, their parts and direct effects on logits are those of TransformerLens 4."""

from __future__ import annotations

import torch

import regard as rg
from transformer_lens_models import bridge_of, small_gpt2


@torch.no_grad()
def test_a_small_gpt2(tmp_path):
    model, tokenizer = small_gpt2(tmp_path)
    model.transformer.ln_f.weight.fill_(1.0)  # logit_attrs leaves out a gain that is not folded into the head
    bridge, ids = bridge_of(model, tokenizer), torch.randint(0, 20, (1, 8))
    bridge.set_use_attn_result(True)
    _, cache = bridge.run_with_cache(ids)
    with rg.watch(model, keep="qkv") as seen:
        model(ids)
    for number in range(2):
        values, outputs = (cache[f"blocks.{number}.attn.hook_{name}"].transpose(1, 2) for name in "vz")
        torch.testing.assert_close(seen[number].value, values, atol=1e-5, rtol=0)
        torch.testing.assert_close(seen.head_output(number), outputs, atol=1e-5, rtol=0)
    results = cache.stack_head_results(layer=-1)  # layers times heads
    parts = torch.cat([seen.head_part(number)[0] for number in range(2)])
    torch.testing.assert_close(parts, results[:, 0], atol=1e-5, rtol=0)
    effects = torch.cat([(seen.logit_effect(n, 5) - seen.logit_effect(n, 7))[0] for n in range(2)])
    expected = cache.logit_attrs(results, tokens=5, incorrect_tokens=7)[:, 0]
    torch.testing.assert_close(effects, expected, atol=1e-5, rtol=0)
    assert expected.abs().max() > 0.1
