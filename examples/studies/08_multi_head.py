"""
# Multi-head attention: split, attend, join, project

Several heads attend at the same time, each in its own part of the width. One matrix combines their outputs (Vaswani
et al. 2017, arXiv:1706.03762, section 3.2.2). Here the four steps are written by hand and compared with Regard's
module, with PyTorch's, and with the first layer of a real model, MiniLM. Then its twelve heads are shown.
"""

import matplotlib.pyplot as plt
import torch

import regard as rg
from regard.hf.models import load_model

torch.manual_seed(0)


# %%
# Project, split the width into heads (batch, heads, length, width), attend, concatenate the heads, project.
def by_hand(x, query, key, value, output, num_heads):
    def split(y):
        return y.unflatten(-1, (num_heads, -1)).transpose(1, 2)

    seen = rg.Attention()(split(query(x)), split(key(x)), split(value(x)))
    return output(seen.output.transpose(1, 2).flatten(2)), seen


x, theirs = torch.randn(2, 10, 512), torch.nn.MultiheadAttention(512, 8, batch_first=True)
ours = rg.nn.MultiHeadAttention.from_torch(theirs)
hand, seen = by_hand(x, ours.query, ours.key, ours.value, ours.output, 8)
for name, output in (("Regard", ours(x).output), ("PyTorch", theirs(x, x, x)[0])):
    print(f"largest difference to the module of {name}: {(hand - output).abs().max():.1e}")
    assert torch.allclose(hand, output, atol=1e-5)

# %%
# "Concatenate and project" is a sum: each head has its own 64 columns of the last matrix. What it adds to the output
# does not depend on the other heads. So a head can be removed.
parts = [head @ columns.T for head, columns in zip(seen.output.unbind(1), ours.output.weight.split(64, 1), strict=True)]
assert torch.allclose(sum(parts) + ours.output.bias, hand, atol=1e-5)

# %%
# Parameters: four matrices of width x width, for any number of heads. The usual counts leave out the biases, which
# are four more vectors. The number of heads changes the number of weights: one n x n map for each head.
for width, num_heads, expected in ((512, 8, 1_048_576), (512, 1, 1_048_576), (768, 12, 2_359_296)):
    modules = [rg.nn.MultiHeadAttention(width, num_heads, bias=bias) for bias in (False, True)]
    without, with_bias = (sum(p.numel() for p in module.parameters()) for module in modules)
    print(f"width {width}, {num_heads:2} heads: {without:,} parameters, {with_bias:,} with biases")
    assert without == expected == 4 * width**2 and with_bias == expected + 4 * width

# %%
# Eight heads differ from one wide head. With the same projections, one head of width 512 adds the scores of the
# eight heads, divided by sqrt(8), and takes one softmax of the sum. The mean of the eight maps is another map.
single = by_hand(x, ours.query, ours.key, ours.value, ours.output, 1)[1].weights.dense()[:, 0]
query, key = (y.unflatten(-1, (8, -1)).transpose(1, 2) for y in (ours.query(x), ours.key(x)))
added = (query @ key.mT / 64**0.5).sum(1) / 8**0.5
print(f"one head and the mean of eight heads differ by up to {(single - seen.weights.dense().mean(1)).abs().max():.3f}")
assert torch.allclose(single, added.softmax(-1), atol=1e-5)

# %%
# A real model does the same. `rg.watch` keeps the maps while MiniLM reads; its first layer by hand equals them.
model, tokenizer = load_model("minilm")
inputs = tokenizer("The old dog sees a bird near the river, and the bird sees it.", return_tensors="pt")
with torch.no_grad(), rg.watch(model) as watched:
    states = model(**inputs, output_hidden_states=True).hidden_states
    layer = model.encoder.layer[0].attention
    hand, seen = by_hand(states[0], layer.self.query, layer.self.key, layer.self.value, layer.output.dense, 12)
assert torch.allclose(layer.output.LayerNorm(hand + states[0]), layer(states[0])[0], atol=1e-5)
assert torch.allclose(seen.weights.dense(), watched[0].dense(), atol=1e-5)

# %%
# The twelve maps of that layer: twelve different maps of the same words.
tokens = tokenizer.convert_ids_to_tokens(inputs.input_ids[0])
entropies = watched[0].entropy()[0].mean(-1)
figure, axes = plt.subplots(3, 4, figsize=(12, 9), layout="constrained")
titles = [f"head {head}, entropy {entropy:.2f} nats" for head, entropy in enumerate(entropies)]
rg.heatmap(watched[0], tokens, title=titles, axes=axes)
for ax in axes.flat:
    ax.title.set_fontsize(9), ax.label_outer()
rg.drawing.show_or_save("08_multi_head.png")
