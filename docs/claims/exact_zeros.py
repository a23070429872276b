"""Softmax is above 0 everywhere, its floating-point numbers are not; and no weight can depend on the bias of keys."""

import torch

import regard as rg
from regard.hf.models import load_model

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    gaps = torch.arange(0, 200, 0.5, dtype=torch.float64)
    weights = torch.stack([torch.tensor([0.0, -gap]).to(dtype).softmax(0)[1] for gap in gaps.tolist()])
    zero = gaps[(weights == 0).nonzero()[0]].item()
    print(f"{dtype}: a weight is exactly 0 from a score {zero:.1f} below the greatest on")

model, tokenizer = load_model("minilm")
given = tokenizer("The animal didn't cross the street because it was too tired.", return_tensors="pt")
with torch.no_grad(), rg.watch(model) as seen:
    before = model(**given).last_hidden_state
weights = torch.stack([one.dense()[0] for one in seen.maps.values()])
print(f"MiniLM, {weights.numel():,} weights: least {weights.min():.1e}, exactly 0: {(weights == 0).sum()}")
cold = torch.stack([(one.dense()[0].double().log() / 0.02).softmax(-1).float() for one in seen.maps.values()])
print(f"the same scores at temperature 0.02: exactly 0: {(cold == 0).float().mean():.0%}")
with torch.no_grad():
    for layer in model.encoder.layer:
        layer.attention.self.key.bias.zero_()
    after = model(**given).last_hidden_state
print(f"outputs of all layers without the biases of keys: {(after - before).abs().max():.1e} apart")
with torch.no_grad():
    for layer in model.encoder.layer:
        layer.attention.self.query.bias.zero_()
    without = model(**given).last_hidden_state
print(f"and without those of queries: {(without - before).abs().max():.2f} apart")
assert (weights > 0).all() and (cold == 0).any() and (after - before).abs().max() < 1e-4
assert (without - before).abs().max() > 0.1
