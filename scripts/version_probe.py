"""Small results of each feature with the versions that are installed, compared with formulas; prints JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def attend() -> bool:
    """Causal attention with shared key heads, and its gradients, on two engines."""
    import torch

    import regard as rg

    inputs = [torch.randn(2, heads, 7, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    query, key, value = inputs[0], *(x.repeat_interleave(2, 1) for x in inputs[1:])
    scores = (query @ key.mT / 2).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    expected, grad = scores.softmax(-1) @ value, torch.randn(2, 4, 7, 4, dtype=torch.float64)
    theirs = torch.autograd.grad(expected, inputs, grad)
    for engine in ("fused", "blocked"):
        output = rg.Attention(mask=rg.causal())(*inputs, engine=engine).output
        ours = torch.autograd.grad(output, inputs, grad)
        if not all(torch.allclose(a, b) for a, b in zip((output, *ours), (expected, *theirs), strict=True)):
            return False
    return True


def flex() -> bool:
    """The flex engine beside the dense one."""
    import torch

    import regard as rg

    inputs = [torch.randn(1, 2, 9, 16) for _ in range(3)]
    outputs = [rg.Attention(mask=rg.causal())(*inputs, engine=name).output for name in ("flex", "dense")]
    return torch.allclose(*outputs, atol=1e-5)


def llama(backend: str = "sdpa") -> tuple[Any, Any]:
    """A small model, and a text."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 30}
    config = LlamaConfig(hidden_size=32, intermediate_size=32, eos_token_id=None, **sizes)
    model = LlamaForCausalLM._from_config(config, attn_implementation=backend).eval()
    return model, torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def watch() -> bool:
    """Weights on sdpa are those that eager returns, the output is bit-identical, and generation is watched."""
    import torch

    import regard as rg

    (model, ids), (eager, _) = llama(), llama("eager")
    plain = model(ids).logits
    with rg.watch(model) as seen:
        logits = model(ids).logits
    weights = eager(ids, output_attentions=True).attentions
    with rg.watch(model) as generated:
        model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    is_right = all(torch.allclose(seen[n].dense(), w, atol=1e-6) for n, w in enumerate(weights))
    return is_right and torch.equal(plain, logits) and len(generated) == 2


def edit() -> bool:
    """A key that is knocked out in all heads of all layers is a key that the mask hides."""
    import torch

    import regard as rg

    model, ids = llama()
    with rg.edit(model, rg.KnockOut(rg.Where(keys=2))):
        edited = model(ids).logits
    hidden = model(ids, attention_mask=torch.arange(8)[None].ne(2).long(), position_ids=torch.arange(8)[None]).logits
    shown = torch.arange(8).ne(2)  # the row of the hidden token itself is masked otherwise
    return torch.allclose(edited[:, shown], hidden[:, shown], atol=1e-5)


def t5() -> bool:
    """The weights of T5 are those that it returns."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    import regard as rg

    config = T5Config(d_model=16, d_kv=8, num_heads=2, num_layers=2, d_ff=16, vocab_size=20, decoder_start_token_id=0)
    model = T5ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    with rg.watch(model) as seen:
        model(input_ids=ids, decoder_input_ids=ids)
    returned = model(input_ids=ids, decoder_input_ids=ids, output_attentions=True).cross_attentions
    names = [f"decoder.block.{layer}.layer.1.EncDecAttention" for layer in range(2)]
    return all(torch.allclose(seen[name].dense(), w, atol=1e-6) for name, w in zip(names, returned, strict=True))


def register() -> bool:
    """A registered model equals sdpa, with padding and without."""
    import torch

    import regard as rg

    rg.register()
    (ours, ids), (sdpa, _) = llama("regard"), llama()
    padding = torch.arange(8)[None].ge(2).long()
    same = torch.allclose(ours(ids).logits, sdpa(ids).logits, atol=1e-5)
    padded = [model(ids, attention_mask=padding).logits[:, 2:] for model in (ours, sdpa)]
    return same and torch.allclose(*padded, atol=1e-5)


def fullgraph() -> bool:
    """A registered model in one graph of torch.compile."""
    import torch

    import regard as rg

    rg.register()
    (ours, ids), (sdpa, _) = llama("regard"), llama()
    with torch.no_grad():
        compiled = torch.compile(ours, fullgraph=True, backend="eager")
        return torch.allclose(compiled(ids).logits, sdpa(ids).logits, atol=1e-5)


FEATURES: dict[str, Callable[[], bool]] = {
    "`attend`, shared key heads": attend,
    '`engine="flex"`': flex,
    "`watch`": watch,
    "`edit`": edit,
    "`watch` of T5": t5,
    "`register`": register,
    "compiled, `fullgraph`": fullgraph,
}


def result(feature: Callable[[], bool]) -> str:
    """Whether a feature is right, or its error."""
    try:
        return "yes" if feature() else "WRONG"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"


if __name__ == "__main__":
    print(json.dumps({name: result(feature) for name, feature in FEATURES.items()}))
