"""
# Luong's three scores, and when the context is computed

Luong, Pham & Manning 2015 (arXiv:1508.04025) compare a decoder state h with an encoder state by a dot product
("dot"), by a matrix ("general") or by a small network ("concat"). Each formula is written out here. Concat is
Bahdanau's additive score in another notation. The two papers differ in the step at which the decoder attends:
Bahdanau uses the state before the step, Luong the state after it. A changed word shows the difference.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import regard as rg

torch.manual_seed(0)
decoder, encoder = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 6, 8)  # (batch, heads, length, width)

# %%
# The catalogue builds all three. Dot needs states of equal width; general and concat compare states of any widths.
build = {name: rg.mechanism(f"luong_{name}").build for name in ("dot", "general", "concat")}
attentions = {"dot": build["dot"](), "general": build["general"](8, 8), "concat": build["concat"](8, 8, hidden=16)}

# %%
# The same with loops: h · s, h W s and v · tanh(W [h; s]), then a softmax over the source.
general, concat = attentions["general"].score, attentions["concat"].score
formulas = {
    "dot": lambda h, s: h @ s,
    "general": lambda h, s: h @ general.weight[0] @ s,
    "concat": lambda h, s: concat.direction @ torch.tanh(concat.projection.weight @ torch.cat((h, s))),
}
weights = {}
for name, formula in formulas.items():
    by_hand = torch.stack([torch.stack([formula(h, s) for s in encoder[0, 0]]) for h in decoder[0, 0]]).softmax(-1)
    seen = rg.attend(attentions[name], decoder, encoder, encoder)
    weights[name] = seen.weights.dense()[0, 0]
    numbers = sum(parameter.numel() for parameter in attentions[name].parameters())
    off = (weights[name] - by_hand).abs().max()
    print(f"{name:8} {numbers:4} parameters; largest difference to the formula {off:.1e}")
    assert torch.allclose(weights[name], by_hand, atol=1e-5)
    assert torch.allclose(seen.output[0, 0], by_hand @ encoder[0, 0], atol=1e-5)

# %%
# General with the identity matrix W is dot. Concat can be split: W [h; s] = A h + B s with W = [A B]. With A and B as
# Bahdanau's matrices, `Additive` gives the same weights; A h and B s are computed once for each state, not each pair.
additive = rg.Additive(8, 8, hidden=16)
with torch.no_grad():
    general.weight.copy_(torch.eye(8))
    additive.query.weight.copy_(concat.projection.weight[:, :8])
    additive.key.weight.copy_(concat.projection.weight[:, 8:])
    additive.direction.copy_(concat.direction)
for name, attention in (("dot", attentions["general"]), ("concat", rg.Attention(additive))):
    same = rg.attend(attention, decoder, encoder, encoder).weights.dense()[0, 0]
    assert torch.allclose(same, weights[name], atol=1e-6)

# %%
# When does the decoder attend? Row t of a map belongs to the step that reads word t. If word 3 changes, Bahdanau's
# row 3 does not: its query is s_{t-1}, which has not read word 3. Luong's query h_t has. Untrained models show this.
source, target = torch.randint(4, 20, (1, 7)), torch.randint(4, 20, (1, 8))
other = torch.where(torch.arange(8) == 3, 23 - target, target)
moved = {}
for name in ("bahdanau", "luong_general"):
    model = rg.seq2seq.build(name, source_size=20, target_size=20, width=32)
    maps = [rg.seq2seq.attention_of(model, source, words)[model.cross_attention].dense() for words in (target, other)]
    moved[name] = (maps[0] - maps[1])[0, 0].abs().amax(-1)
    print(f"{name}: largest change of each row", *(f"{change:.0e}" for change in moved[name]))
assert not moved["bahdanau"][:4].any() and (moved["bahdanau"][4:] > 0).all()
assert not moved["luong_general"][:3].any() and (moved["luong_general"][3:] > 0).all()

# %%
# Left: the same states under three scores. Right: the first row that changes with word 3.
figure, axes = plt.subplots(1, 4, figsize=(9, 3), layout="constrained", width_ratios=(1, 1, 1, 2))
for ax, (name, matrix) in zip(axes, weights.items(), strict=False):
    image = ax.imshow(matrix, cmap="cividis", vmin=0, vmax=1)
    ax.set(title=name, xlabel="encoder state", ylabel="decoder state" if name == "dot" else "")
figure.colorbar(image, ax=axes[:3].tolist(), label="weight", location="bottom")
for shift, (name, color) in enumerate((("bahdanau", "#0072B2"), ("luong_general", "#E69F00"))):
    axes[3].bar(np.arange(8) + 0.4 * shift - 0.2, moved[name], 0.4, color=color, label=name)
axes[3].set(title="word 3 changed", xlabel="decoder step", ylabel="change of weights", yscale="log", ylim=(1e-5, 1))
axes[3].legend(loc="upper left"), plt.show()
