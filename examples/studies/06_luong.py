"""
# Luong's three scores, and when the context is computed

Luong, Pham & Manning 2015 (arXiv:1508.04025) compare a decoder state h with an encoder state by a dot product
("dot"), by a matrix ("general") or by a small network ("concat"). Each formula is written out here. Concat is
Bahdanau's additive score in another notation. Small translators with each score learn to reverse a text. The papers
differ in the step at which the decoder attends: Bahdanau uses the state before the step, Luong the state after it. A
changed letter shows the difference.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

import regard as rg

torch.manual_seed(0)
decoder, encoder = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 6, 8)  # (batch, heads, length, width)

# %%
# The catalog builds all three. By hand: h · s, h W s or v · tanh(W [h; s]), then a softmax over the source.
build = {name: rg.mechanism(f"luong_{name}").build for name in ("dot", "general", "concat")}
attentions = {"dot": build["dot"](), "general": build["general"](8, 8), "concat": build["concat"](8, 8, hidden=16)}
general, concat = attentions["general"].score, attentions["concat"].score
formulas = {
    "dot": lambda h, s: h @ s,
    "general": lambda h, s: h @ general.weight[0] @ s,
    "concat": lambda h, s: concat.direction @ torch.tanh(concat.projection.weight @ torch.cat((h, s))),
}
for name, formula in formulas.items():
    by_hand = torch.stack([torch.stack([formula(h, s) for s in encoder[0, 0]]) for h in decoder[0, 0]]).softmax(-1)
    seen = attentions[name](decoder, encoder, encoder)
    off = (seen.weights.dense()[0, 0] - by_hand).abs().max()
    print(f"luong {name}: largest difference to the formula {off:.1e}")
    assert off < 1e-5 and torch.allclose(seen.output[0, 0], by_hand @ encoder[0, 0], atol=1e-5)

# %%
# Concat can be split: W [h; s] = A h + B s with W = [A B]. With A and B as Bahdanau's matrices, `Additive` gives the
# same weights; A h and B s are computed once for each state, not once for each pair.
additive = rg.scores.Additive(8, 8, hidden=16)
with torch.no_grad():
    additive.query.weight.copy_(concat.projection.weight[:, :8])
    additive.key.weight.copy_(concat.projection.weight[:, 8:])
    additive.direction.copy_(concat.direction)
    same = rg.Attention(additive)(decoder, encoder, encoder).weights.dense()[0, 0]
assert torch.allclose(same, by_hand, atol=1e-6)


# %%
# Four translators learn to reverse 8 letters. Row t of a map belongs to the step that reads letter t (row 0: the begin
# token <s>) and predicts letter t + 1. By chance 1/8 of its weight is on that letter. When is the query computed? If
# letter 3 changes, Bahdanau's row 3 does not: its query s_{t-1} has not read letter 3. Luong's query h_t has.
def batch(count):
    text = torch.randint(4, 20, (count, 8))  # ids 0 to 3 stand for padding, unknown, begin and end
    return text, torch.cat((torch.full((count, 1), rg.lab.data.BOS), text.flip(1)), 1)


source, target = batch(100)
other = torch.where(torch.arange(9) == 3, 23 - target, target)
_, axes = plt.subplot_mosaic("0144;2344", figsize=(11, 5.6), layout="constrained")
colors = {"bahdanau": "#000000", "luong_dot": "#0072B2", "luong_general": "#D55E00", "luong_concat": "#009E73"}
names = [["<s>", *map(chr, target[0, 1:-1] + 93)], [chr(letter) for letter in source[0] + 93]]
for place, (name, color) in enumerate(colors.items()):
    model = rg.lab.build(name, source_size=20, target_size=20, width=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for letters, answer in (batch(32) for _ in range(150)):
        loss = F.cross_entropy(model.logits(model(letters, answer[:, :-1])).mT, answer[:, 1:])
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    seen = [rg.lab.attention_of(model, source, read[:, :-1])[model.cross_attention] for read in (target, other)]
    weights, changed = (each.dense()[:, 0] for each in seen)
    share, moved = weights.flip(2).diagonal(0, 1, 2).mean(), (weights - changed).abs().amax(-1).mean(0)
    print(f"{name}: loss {loss:.2f} nats a letter, weight on the right letter {share:.2f};", end=" ")
    print("largest change of a weight in each row", *(f"{change:.2f}" for change in moved))
    first = 4 if name == "bahdanau" else 3
    assert share > 0.3 and not moved[:first].any() and moved[first] > 0.02 and (moved[first:] > 0).all()
    title = name.replace("_", ", ").capitalize()
    rg.heatmap(weights[0], names, axes=axes[f"{place}"], title=title)
    axes["4"].plot(moved, "o^sD"[place] + "-", color=color, label=title)
axes["4"].set(title="letter 3 changed", xlabel="row of the map", ylabel="largest change of a weight, mean of 100 texts")
axes["4"].legend(), rg.drawing.show_or_save("06_luong.png")
