"""A softmax is above 0 in exact arithmetic, but not in floats. And of three biases only that of queries is needed."""

import torch

import regard as rg
from regard.hf.models import load_model

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    gaps = torch.arange(0, 200, 0.5, dtype=torch.float64)
    weights = torch.stack([torch.tensor([0.0, -gap]).to(dtype).softmax(0)[1] for gap in gaps.tolist()])
    zero = gaps[(weights == 0).nonzero()[0]].item()
    print(f"{dtype}: a weight is exactly 0 if its score is {zero:.1f} or more below the largest")

model, tokenizer = load_model("minilm")
inputs = tokenizer("The animal didn't cross the street because it was too tired.", return_tensors="pt")
with torch.no_grad(), rg.watch(model) as seen:
    before = model(**inputs).last_hidden_state
weights = torch.stack([map_.dense()[0] for map_ in seen.maps.values()])
print(f"MiniLM, {weights.numel():,} weights: smallest {weights.min():.1e}, exactly 0: {(weights == 0).sum()}")
cold = torch.stack([(map_.dense()[0].double().log() / 0.02).softmax(-1).float() for map_ in seen.maps.values()])
print(f"the same scores at temperature 0.02: exactly 0: {(cold == 0).float().mean():.0%}")
verses = " ".join(pair.source for pair in rg.lab.data.load_corpus("bible-en-fr").train[:16])
with torch.no_grad(), rg.watch(model) as seen_long:
    model(**tokenizer(verses, return_tensors="pt"))
longer = torch.stack([map_.dense()[0] for map_ in seen_long.maps.values()])
print(f"a text of {longer.shape[-1]} tokens, {longer.numel():,} weights: exactly 0: {(longer == 0).sum()}")
with torch.no_grad():
    for layer in model.encoder.layer:
        layer.attention.self.key.bias.zero_()
    after = model(**inputs).last_hidden_state
print(f"without the biases of keys the outputs change by {(after - before).abs().max():.1e}")
with torch.no_grad():
    for layer in model.encoder.layer:  # the weights of a row sum to 1, so the bias of values is added to each output
        output, values = layer.attention.output.dense, layer.attention.self.value
        output.bias += output.weight @ values.bias
        values.bias.zero_()
    moved = model(**inputs).last_hidden_state
print(f"with the biases of values moved into those of the output: {(moved - before).abs().max():.1e}")
with torch.no_grad():
    for layer in model.encoder.layer:
        layer.attention.self.query.bias.zero_()
    without = model(**inputs).last_hidden_state
print(f"without those of queries too: {(without - before).abs().max():.2f}")
assert (weights > 0).all() and (longer == 0).any() and (cold == 0).any() and (after - before).abs().max() < 1e-4
assert (moved - before).abs().max() < 1e-4 and (without - before).abs().max() > 0.1
