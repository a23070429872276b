"""
# Causal masks and padding masks

A causal mask keeps a word from attending to later words. A padding mask keeps all words from attending to the padding
of a shorter sentence. Regard's masks are rules, not matrices, and `&` combines them.
"""

import matplotlib.pyplot as plt
import torch

import regard as rg

torch.manual_seed(0)
sentences = [["the", "cat", "sat", "on", "the", "mat"], ["birds", "sing", "now"]]
lengths = torch.tensor([len(sentence) for sentence in sentences])
longest = int(lengths.max())
padded = [sentence + ["pad"] * (longest - len(sentence)) for sentence in sentences]
q = torch.randn(len(sentences), 1, longest, 8)
k = torch.randn(len(sentences), 1, longest, 8)
v = torch.randn(len(sentences), 1, longest, 8)

# %%
# `dense` shows a rule as a matrix: True where a query (row) may attend to a key (column).
print(rg.causal().dense(4))

# %%
# Both rules at once.
attention = rg.Attention(mask=rg.causal() & rg.padding(lengths))
seen = attention(q, k, v)
weights = seen.weights.dense()

# %%
# No weight looks ahead, and none is on padding.
later = torch.ones(longest, longest).triu(diagonal=1).bool()
assert (weights[..., later] == 0).all()
assert (weights[1, :, :, lengths[1] :] == 0).all()

# %%
# The same by hand in PyTorch: masked scores are minus infinity, so their weights are exactly 0.
is_word = torch.arange(longest) < lengths[:, None]
allowed = ~later & is_word[:, None, None, :]
scores = (q @ k.mT / 8**0.5).masked_fill(~allowed, float("-inf"))
assert torch.allclose(seen.output, scores.softmax(dim=-1) @ v, atol=1e-6)

# %%
# A change of the last word changes no earlier output: this is what "causal" promises.
changed = k.clone()
changed[:, :, -1] += 1
assert torch.equal(attention(q, changed, v).output[:, :, :-1], seen.output[:, :, :-1])

figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
for number, ax in enumerate(axes):
    rg.heatmap(seen.weights, padded[number], batch=number, head=0, title=f"sentence {number}", axes=ax)
rg.drawing.show_or_save("masks.png")
