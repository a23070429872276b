"""Results of three common calls: `output_attentions`, a causal mask with a cache, and a text that is only padding."""

import torch
import transformers
from torch.nn import functional as F

import regard as rg
from regard.hf.models import load_model

transformers.logging.set_verbosity_error()  # transformers warns about what is measured here
torch.manual_seed(0)
model, tokenizer = load_model("minilm")
inputs = tokenizer("The animal didn't cross the street because it was too tired.", return_tensors="pt")
with torch.no_grad(), rg.watch(model) as seen:
    returned = model(**inputs, output_attentions=True).attentions
backend = model.config._attn_implementation
print(f"MiniLM on {backend}: output_attentions=True gives {len(returned)} maps of 6, watch {len(seen.maps)}")
assert backend == "sdpa" and not any(weights is not None for weights in returned) and len(seen.maps) == 6

model.set_attn_implementation("eager")
with torch.no_grad():
    eager = model(**inputs, output_attentions=True).attentions
pairs = zip(seen.maps.values(), eager, strict=True)
difference = max(float((map_.dense() - weights).abs().max()) for map_, weights in pairs)
print(f"on eager: {len(eager)} maps; those of watch differ by {difference:.0e}")
assert len(eager) == 6 and difference < 1e-5

# One new query and four keys: the query is the last token, so it may attend to all four.
q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 4, 8)
theirs = F.scaled_dot_product_attention(q, k, torch.eye(4)[None, None], is_causal=True)[0, 0, 0]
ours = rg.Attention(mask=rg.causal())(q, k, k).weights[0, 0, 0]
print(f"weights of one new token: is_causal {theirs.tolist()}, causal() {[round(x, 2) for x in ours.tolist()]}")
assert (theirs > 0).sum() == 1 and (ours > 0).sum() == 4

layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 4, 8)
padded = torch.tensor([[False] * 4, [True] * 4])
output = layer(x, x, x, key_padding_mask=padded)[0][1]
with torch.no_grad():
    zeros = rg.nn.MultiHeadAttention.from_torch(layer)(x, mask=rg.padding(~padded)).output[1] - layer.out_proj.bias
print(
    f"a text that is only padding: {int(output.isnan().sum())} of 32 numbers are NaN; here {float(zeros.abs().max()):g}"
)
assert output.isnan().all() and not zeros.any()
counts = {}
for is_training in (True, False):  # without weights torch takes other kernels
    with torch.set_grad_enabled(is_training):
        output = layer.train(is_training)(x, x, x, key_padding_mask=padded, need_weights=False)[0][1]
    counts[is_training] = int(output.isnan().sum())
print(f"with need_weights=False: {counts[True]} NaN in training, {counts[False]} in eval mode without gradients")
assert counts == {True: 0, False: 32}
