"""
# Recurrent layers have attention maps

Linear attention, Mamba and the delta rule keep a matrix instead of all keys. But output_i = sum_j w_ij v_j holds with
w_ij = q_i . A_i ... A_(j+1) k_j: an exact map. Two layers learn a task of recall, and the maps show why one fails.
"""

from itertools import product

import matplotlib.pyplot as plt
import torch
from torch.nn import Embedding, Linear
from torch.nn.functional import cross_entropy, pad

import regard as rg

KEYS, VALUES, WRITES, QUESTIONS, WIDTH = 8, 8, 16, 4, 32
LINEAR, DELTA = rg.mechanism("linear").build(), rg.Attention(rg.Dot(scale=1.0), transition=rg.transitions.Delta())


# %%
# The task: 16 times a key gets a value, so most are written again. Then four questions: the value of a key now?
def drawn(size):
    keys, values = torch.randint(KEYS, (size, WRITES)), torch.randint(VALUES, (size, WRITES))
    asked = keys.gather(1, torch.randint(WRITES, (size, QUESTIONS)))
    last = ((keys[:, None] == asked[:, :, None]) * torch.arange(1, WRITES + 1)).argmax(-1)
    return torch.cat((keys, asked), 1), pad(values, (0, QUESTIONS), value=VALUES), last, values.gather(1, last)


class Layer(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.key, self.value = Embedding(KEYS, WIDTH), Embedding(VALUES + 1, WIDTH)
        self.qkv, self.beta, self.answer = Linear(WIDTH, 3 * WIDTH, bias=False), Linear(WIDTH, 1), Linear(WIDTH, VALUES)

    def forward(self, keys, values):
        self.inputs = self.qkv(x := self.key(keys) + self.value(values))[:, None].chunk(3, -1)
        tensors = {"beta": self.beta(x).sigmoid().mT} if self.attention is DELTA else {}
        self.seen = self.attention(*self.inputs, **tensors)
        return self.answer(self.seen.output[:, 0, WRITES:])


# %%
# Linear attention adds, so a key that was written twice answers with a mixture. The delta rule first erases.
right, layers = {"linear attention": [], "delta rule": []}, {}
for seed, (name, attention) in product(range(3), zip(right, (LINEAR, DELTA), strict=True)):
    torch.manual_seed(seed)
    layers[name] = layer = Layer(attention)
    optimizer = torch.optim.AdamW(layer.parameters(), 5e-3)
    for _ in range(300):
        keys, values, last, wanted = drawn(64)
        cross_entropy(layer(keys, values).mT, wanted).backward()
        optimizer.step(), optimizer.zero_grad()
    keys, values, last, wanted = drawn(1000)
    right[name].append(int((layer(keys, values).argmax(-1) == wanted).sum()) / 40)
print(f"% of right answers with seeds 0, 1 and 2: {right}")
assert max(right["linear attention"]) < 65 and min(right["delta rule"]) > 98

# %%
# The map of the delta rule, of the last seed. W . values is the output of the layer, so it is the map, not a guess.
weights = layer.seen.weights.dense()
off = float((weights @ layer.inputs[2] - layer.seen.output).detach().abs().max())
asked, negative = weights[:, 0, WRITES:, :WRITES], 100 * float((weights < 0).float().mean())
same = (keys[:, None, :WRITES] == keys[:, WRITES:, None]) & (torch.arange(WRITES) != last[..., None])
on_last = float(asked.gather(2, last[..., None])[same.any(-1)].mean())
on_old = float((asked * same).sum(-1)[same.any(-1)].mean())
print(f"W . values differs from the output by {off:.0g}; {negative:.0f} % of weights are negative")
print(f"a key that was written again: weight {on_last:.2f} on its last write, {on_old:.2f} on all earlier ones")
assert off < 1e-5 and abs(on_last) > 5 * abs(on_old) and negative > 5  # values may be stored with the other sign
figure, axes = plt.subplots(2, figsize=(8, 4.2), layout="constrained", sharex=True)
text = (last.sort(1).values.diff(dim=1).ne(0).sum(1) + same.any(-1).sum(1)).argmax()  # different keys, written again
for axis, (name, layer) in zip(axes, layers.items(), strict=True):
    layer(keys[text, None], values[text, None])
    rg.heatmap(layer.seen.weights[0, 0, WRITES:, :WRITES], kind="score", vmax=1.0, axes=axis, colorbar=False)
    axis.scatter(last[text], range(QUESTIONS), marker="s", s=250, facecolors="none", edgecolors="black")
    axis.set(title=name, yticks=range(QUESTIONS), yticklabels=[f"{chr(97 + k)}?" for k in keys[text, WRITES:]])
written = [f"{chr(97 + k)}={v}" for k, v in zip(keys[text, :WRITES], values[text, :WRITES], strict=True)]
axes[1].set(xticks=range(WRITES), xticklabels=written, xlabel="a key gets a value; squares mark the answers")
figure.colorbar(axis.images[0], ax=axes, label="weight"), rg.drawing.show_or_save("27_recurrent_maps.png")
