"""
# Four broken models, four findings

A model can be broken and still run. MiniLM is broken here in one layer, on purpose: its heads look at everything
alike, are copies of one, or all rest on [CLS] and [SEP]; and a language model is given a window that forgets to be
causal. What comes out at the end tells at most that something is wrong. `findings` and `mask_findings` name the layer,
the heads and the number that gave them away, and what they say is checked by other means.
"""

import copy
import math

import matplotlib.pyplot as plt
import torch

import regard as rg
from regard.hf.models import load_model

torch.manual_seed(0)
model, tokenizer = load_model("minilm")
inputs = tokenizer("The committee met on Monday to discuss the new bridge, and sent for plans.", return_tensors="pt")
tokens, LAYER = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0]), 2
models = {"healthy": model} | {name: copy.deepcopy(model) for name in ("uniform", "collapsed", "no-op")}

# %%
# Uniform: without queries, all scores are alike. Collapsed: every head gets the queries and keys of head 0. No-op:
# whatever the token, its query asks for what sets the key of [SEP] apart.
_, uniform, collapsed, no_op = (each.encoder.layer[LAYER].attention.self for each in models.values())
with torch.no_grad():
    keys = no_op.key(model(**inputs, output_hidden_states=True).hidden_states[LAYER][0])
    for query, bias in ((uniform.query, 0 * keys[0]), (no_op.query, 10 * (keys[-1] - keys.mean(0)))):
        query.weight.zero_(), query.bias.copy_(bias)
    for numbers in (*collapsed.query.parameters(), *collapsed.key.parameters()):
        numbers.copy_(torch.cat([numbers[:32]] * 12))

# %%
# What is found of all twelve heads of that layer, and how near the embedding of the text still is to the healthy one.
maps, found, embedding = {}, {}, {}
for name, each in models.items():
    with torch.no_grad(), rg.watch(each) as seen:
        embedding[name] = each(**inputs).last_hidden_state[0].mean(0)
    maps[name] = seen[LAYER]
    found[name] = [f for f in rg.findings(rg.profile(seen.maps, tokens)) if (f.layer, len(f.heads)) == (LAYER, 12)]
    print(f"{name}: cosine to the healthy {torch.cosine_similarity(embedding['healthy'], embedding[name], 0):.3f}")
    print(*(f"  {finding.kind}: {finding.sentence}\n" for finding in found[name]), sep="", end="")

# %%
# Two of the three embeddings hardly moved. But each finding is the right one, and true: the rows have the entropy
# log n, the maps are equal, the weight is on [CLS] and [SEP].
assert all(torch.cosine_similarity(embedding["healthy"], embedding[n], 0) > 0.9 for n in ("uniform", "collapsed"))
kinds = {name: [finding.kind for finding in each] for name, each in found.items()}
assert not kinds["healthy"] and "uniform" in kinds["uniform"]
assert "copies" in kinds["collapsed"] and "special" in kinds["no-op"]
weights = {name: each.dense()[0] for name, each in maps.items()}
assert torch.allclose(maps["uniform"].entropy(), torch.tensor(math.log(len(tokens))), atol=1e-5)
assert torch.allclose(weights["collapsed"], weights["collapsed"][:1], atol=1e-6)
assert weights["no-op"][..., [0, -1]].sum(-1).min() > 0.9 > weights["healthy"][..., [0, -1]].sum(-1).mean()

# %%
# A leak. No layer of this language model sees a later token, until someone puts a window in the place of one mask. The
# finding comes from the weights alone; the proof is that earlier outputs move when the last token is changed.
decoder = rg.nn.TransformerConfig(32, num_heads=4).decoder(3, vocabulary=50, cross=False).eval()
ids = torch.randint(50, (2, len(tokens)))
ids[1, :-1] = ids[0, :-1]
for attention, kinds in ((rg.Attention(mask=rg.causal()), []), (rg.Attention(mask=rg.window(4)), ["leak"])):
    decoder.layers[1].self_attention.attention = attention
    with torch.no_grad(), rg.watch(decoder) as seen:
        one, other = decoder(ids)[:, :-1]
    found, moved = rg.mask_findings(seen.maps, causal=True), (one - other).abs().max()
    print(f"{attention.mask}: earlier outputs move by {moved:.2f}.", *(finding.sentence for finding in found))
    assert [finding.kind for finding in found] == kinds and (moved > 0.01 if kinds else moved == 0)
assert (found[0].layer, found[0].heads) == (1, (0, 1, 2, 3))
figure, axes = plt.subplots(1, 5, figsize=(9, 2.4), layout="constrained", sharey=True)
for axis, (name, each) in zip(axes, (maps | {"leak": seen[1]}).items(), strict=True):
    image = axis.imshow(each[0, 3], cmap="viridis", vmin=0, vmax=0.5)
    axis.set(title=name, xlabel="key", ylabel="query" if name == "healthy" else "")
figure.colorbar(image, ax=axes, label="weight", shrink=0.7), figure.suptitle("Head 3 of the broken layer")
plt.show()
