"""
# Self, masked and cross-attention: one function in three roles

A Transformer translator (Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3) attends in three places: source tokens
attend to the source, target tokens attend to earlier target tokens, and target tokens attend to the source. All three
use the same function, with other queries, other keys and another mask. Here a translator of one layer learns to write
words backwards. Its three maps are drawn under their three masks.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

import regard as rg

torch.manual_seed(0)

# %%
# One function. Queries and keys from x are self-attention. With a causal mask it is masked self-attention. With keys
# from another sequence y it is cross-attention. torch's fused kernel gives the same output in each role.
x, y = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
plain, masked = rg.Attention(), rg.Attention(mask=rg.causal())
for queries, keys, attention in ((x, x, plain), (x, x, masked), (x, y, plain)):
    seen = attention(queries, keys, keys)
    theirs = F.scaled_dot_product_attention(queries, keys, keys, is_causal=attention is masked)
    assert torch.allclose(seen.output, theirs, atol=1e-6)
    print(f"{seen.weights!r}: {int((seen.weights.dense()[0, 0] > 0).sum())} weights above 0 a head")

# %%
# In 400 steps, a translator with one layer on each side learns to write words of 3 to 9 letters backwards.
model = rg.lab.build("transformer", source_size=30, target_size=30, width=64, layers=1, num_heads=2)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(400):
    words = torch.randint(4, 30, (64, int(torch.randint(3, 10, ())))).tolist()
    batch = rg.lab.data.Batch.of([(word, word[::-1]) for word in words])
    logits = model.logits(model(batch.source, batch.target_input))
    loss = F.cross_entropy(logits.flatten(0, 1), batch.target_output.flatten(), ignore_index=rg.lab.data.PAD)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
tests = torch.randint(4, 30, (100, 8)).tolist()
outputs = rg.lab.greedy(model.eval(), rg.lab.data.Batch.of([(word, []) for word in tests]).source)
right = sum(list(best[0].tokens) == word[::-1] for best, word in zip(outputs, tests, strict=True))
print(f"{right} of 100 new words of 8 letters are written backwards without a mistake")
assert right >= 60

# %%
# `rg.watch` shows the map of each role. Where the mask forbids a pair, the weight is exactly 0.
letters = list("reading")
batch = rg.lab.data.Batch.of([([ord(c) - 93 for c in letters], [ord(c) - 93 for c in letters[::-1]])])
with torch.no_grad(), rg.watch(model) as seen:
    outputs = model(batch.source, batch.target_input)
target, source = ["<s>", *letters[::-1]], [*letters, "</s>"]
roles = {
    "self (encoder)": ("transformer.encoder.layers.0.self_attention", source, source),
    "masked (decoder)": ("transformer.decoder.layers.0.self_attention", target, target),
    "cross (decoder to encoder)": ("transformer.decoder.layers.0.cross_attention", target, source),
}
figure, axes = plt.subplots(2, 3, figsize=(9, 5.6), layout="constrained")
for (title, (name, rows, cols)), (above, below) in zip(roles.items(), axes.T, strict=True):
    weights = seen[name].dense()[0].mean(0)
    allowed = torch.ones(len(rows), len(cols)).tril() if "masked" in title else torch.ones(len(rows), len(cols))
    assert torch.equal(weights > 0, allowed > 0) and torch.allclose(weights.sum(-1), torch.ones(len(rows)))
    said = f"{title}\n{int(allowed.sum())} pairs may attend"
    rg.heatmap(allowed, (rows, cols), kind="mask", title=said, axes=above, colorbar=False)
    rg.heatmap(weights, (rows, cols), axes=below, colorbar=False)
figure.colorbar(below.images[0], ax=axes[1], label="weight, mean of 2 heads,\nsquare root scale", shrink=0.9)

# %%
# Because of the mask, one pass teaches all target positions: the first 4 outputs are the same without the later
# tokens. And cross-attention found the answer by itself: the step that writes a letter attends most to that letter.
assert torch.allclose(model(batch.source, batch.target_input[:, :4]), outputs[:, :4], atol=1e-5)
attended = seen["transformer.decoder.layers.0.cross_attention"].dense()[0].mean(0)[:-1].argmax(-1).tolist()
print("the steps attend most to:", " ".join(source[j] for j in attended))
assert attended == list(range(len(letters)))[::-1]
rg.drawing.show_or_save("09_three_roles.png")
