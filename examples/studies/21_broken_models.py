"""
# Four broken models, four findings

A broken model can still run. Here we break one layer of MiniLM on purpose: its heads attend to everything equally,
are copies of one head, or put all weight on [CLS] and [SEP]. And we give a language model a window that is not
causal. The output of the model says at most that something is wrong. `findings` and `mask_findings` name the layer,
the heads and the number that shows the fault. We check each finding by other means.
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
# Uniform: without queries, all scores are equal. Collapsed: every head gets the queries and keys of head 0. No-op:
# every query is the direction that separates the key of [SEP] from the others.
_, uniform, collapsed, no_op = (each.encoder.layer[LAYER].attention.self for each in models.values())
with torch.no_grad():
    keys = no_op.key(model(**inputs, output_hidden_states=True).hidden_states[LAYER][0])
    for query, bias in ((uniform.query, 0 * keys[0]), (no_op.query, 10 * (keys[-1] - keys.mean(0)))):
        query.weight.zero_(), query.bias.copy_(bias)
    for numbers in (*collapsed.query.parameters(), *collapsed.key.parameters()):
        numbers.copy_(torch.cat([numbers[:32]] * 12))

# %%
# The findings for all twelve heads of that layer, and the similarity of the text's embedding to the healthy one.
maps, findings, embedding = {}, {}, {}
for name, each in models.items():
    with torch.no_grad(), rg.watch(each) as seen:
        embedding[name] = each(**inputs).last_hidden_state[0].mean(0)
    maps[name] = seen[LAYER]
    findings[name] = [f for f in rg.findings(rg.profile(seen.maps, tokens)) if (f.layer, len(f.heads)) == (LAYER, 12)]
    print(f"{name}: cosine to the healthy {torch.cosine_similarity(embedding['healthy'], embedding[name], 0):.3f}")
    print(*(f"  {finding.kind}: {finding.sentence}\n" for finding in findings[name]), sep="", end="")

# %%
# Two of the three embeddings hardly changed. But each finding names the right fault: the rows have entropy log
# n, the maps are equal, the weight is on [CLS] and [SEP].
assert all(torch.cosine_similarity(embedding["healthy"], embedding[n], 0) > 0.9 for n in ("uniform", "collapsed"))
kinds = {name: [finding.kind for finding in each] for name, each in findings.items()}
assert not kinds["healthy"] and "uniform" in kinds["uniform"]
assert "copies" in kinds["collapsed"] and "special" in kinds["no-op"]
weights = {name: each.dense()[0] for name, each in maps.items()}
assert torch.allclose(maps["uniform"].entropy(), torch.tensor(math.log(len(tokens))), atol=1e-5)
assert torch.allclose(weights["collapsed"], weights["collapsed"][:1], atol=1e-6)
assert weights["no-op"][..., [0, -1]].sum(-1).min() > 0.9 > weights["healthy"][..., [0, -1]].sum(-1).mean()

# %%
# A leak. No layer of this language model attends to a later token, until we replace one mask by a window. The finding
# comes from the weights alone. The proof: earlier outputs change with the last token.
decoder = rg.nn.TransformerConfig(32, num_heads=4).decoder(3, vocab_size=50, cross=False).eval()
ids = torch.randint(50, (2, len(tokens)))
ids[1, :-1] = ids[0, :-1]
for attention, kinds in ((rg.Attention(mask=rg.causal()), []), (rg.Attention(mask=rg.window(4)), ["leak"])):
    decoder.layers[1].self_attention.attention = attention
    with torch.no_grad(), rg.watch(decoder) as seen:
        first, second = decoder(ids)[:, :-1]
    leaks, change = rg.stats.mask_findings(seen.maps, causal=True), (first - second).abs().max()
    print(f"{attention.mask}: earlier outputs change by {change:.2f}.", *(finding.sentence for finding in leaks))
    assert [finding.kind for finding in leaks] == kinds and (change > 0.01 if kinds else change == 0)
assert (leaks[0].layer, leaks[0].heads) == (1, (0, 1, 2, 3))
figure, axes = plt.subplots(1, 5, figsize=(9, 2.4), layout="constrained", sharey=True)
for axis, (name, each) in zip(axes, (maps | {"leak": seen[1]}).items(), strict=True):
    rg.heatmap(each, head=3, title=name, axes=axis, colorbar=False), axis.label_outer()
figure.colorbar(axis.images[0], ax=axes, label="weight,\nsquare root scale", shrink=0.7)
figure.suptitle("Head 3 of the broken layer")
rg.drawing.show_or_save("21_broken_models.png")
