"""What three widely used calls give back: weights asked for, a causal mask with a cache, and a row of padding alone."""

import torch
import transformers
from torch.nn import functional as F

import regard as rg
from regard.hf.models import load_model

transformers.logging.set_verbosity_error()  # one line warns of what is measured here
torch.manual_seed(0)
model, tokenizer = load_model("minilm")
given = tokenizer("The animal didn't cross the street because it was too tired.", return_tensors="pt")
with torch.no_grad(), rg.watch(model) as seen:
    given_back = model(**given, output_attentions=True).attentions
told = model.config._attn_implementation
print(f"MiniLM on {told}: output_attentions=True gives {len(given_back)} maps of 6, watch {len(seen.maps)}")
assert told == "sdpa" and not any(one is not None for one in given_back) and len(seen.maps) == 6

# One new query, four keys: the query is the last token, so it may see all four.
q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 4, 8)
theirs = F.scaled_dot_product_attention(q, k, torch.eye(4)[None, None], is_causal=True)[0, 0, 0]
ours = rg.attend(rg.Attention(mask=rg.causal()), q, k, k).weights[0, 0, 0]
print(f"weights of one new token: is_causal {theirs.tolist()}, causal() {[round(x, 2) for x in ours.tolist()]}")
assert (theirs > 0).sum() == 1 and (ours > 0).sum() == 4

layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 4, 8)
padded = torch.tensor([[False] * 4, [True] * 4])
without = layer(x, x, x, key_padding_mask=padded)[0][1]
with torch.no_grad():
    zeros = rg.nn.MultiHeadAttention.from_torch(layer)(x, mask=rg.padding(~padded))[1] - layer.out_proj.bias
print(f"a text of padding alone: {int(without.isnan().sum())} of 32 numbers are NaN; here {float(zeros.abs().max()):g}")
assert without.isnan().all() and not zeros.any()
