"""
# How training goes wrong: five faults and their findings

A small translator learns to reverse lists of 6 to 8 numbers. Then one line of it is wrong: a causal mask is missing,
labels are not shifted, queries and keys of cross-attention are swapped, the padding mask is reversed, or the factor
1/sqrt(D) is missing. Nothing raises an error. Three of the five have a training loss that looks good.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy, pad

import regard as rg

NUMBERS, LENGTH, WIDTH, STEPS = 22, 8, 32, 100  # 0 is padding, 1 the beginning of a text


# %%
# The translator: source embeddings, and one decoder layer with one head.
class Translator(torch.nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault, config = fault, rg.nn.TransformerConfig(WIDTH)
        self.source, self.target = config.encoder(0, NUMBERS), config.encoder(0, NUMBERS)
        own = rg.Attention(mask=None if fault == "leak" else rg.causal())
        cross = rg.Attention(rg.Dot(scale=1.0) if fault == "no scale" else rg.Dot())
        self.own, self.cross = (rg.nn.MultiHeadAttention(WIDTH, 1, attention=each) for each in (own, cross))
        self.feed_forward, self.output = rg.nn.FeedForward(WIDTH), torch.nn.Linear(WIDTH, NUMBERS)

    def forward(self, source, target):
        memory, x = self.source(source), self.target(target)
        mask = rg.padding(source == 0 if self.fault == "mask reversed" else source > 0)
        x = x + self.own(x).output
        seen = self.cross(memory, x) if self.fault == "swapped" else self.cross(x, memory, mask=mask)
        x = x + seen.output
        return self.output(x + self.feed_forward(x))


def texts(count, shortest=6):  # sources have padding on the left; targets start with 1 and have padding on the right
    is_real = torch.arange(LENGTH) < torch.randint(shortest, LENGTH + 1, (count, 1))
    target = torch.randint(2, NUMBERS, (count, LENGTH)) * is_real
    return target.flip(1), pad(target, (1, 0), value=1)


# %%
# Each fault has its own findings, from predictions, masks or heads. The right model has none.
expected = {"right": set(), "leak": {"leak"}, "labels": {"offset"}, "swapped": {"leak"}}
expected |= {"mask reversed": {"padding", "unseen"}, "no scale": {"scale"}}
percent, (figure, axes) = {}, plt.subplots(2, 6, figsize=(11, 4.2), layout="constrained", sharey="row")
for (fault, kinds), (above, below) in zip(expected.items(), axes.T, strict=True):
    torch.manual_seed(0)
    model, losses = Translator(fault), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        source, ids = texts(32)
        labels = ids[:, :-1] if fault == "labels" else ids[:, 1:]
        loss = cross_entropy(model(source, ids[:, :-1]).mT, labels, ignore_index=0)
        optimizer.zero_grad(), loss.backward(), optimizer.step(), losses.append(loss.item())
    source, ids = texts(200, shortest=LENGTH)
    found = rg.stats.prediction_findings(lambda read, model=model, source=source: model(source, read), ids)
    written = pad(ids[:, :1], (0, LENGTH))  # the model writes each target; what is not written yet is padding
    for t in range(LENGTH):
        written[:, t + 1] = model(source, written[:, :-1])[:, t].argmax(-1)
    percent[fault], final = 100 * float((written == ids)[:, 1:].double().mean()), sum(losses[-10:]) / 10
    source, ids = texts(200)  # with padding
    with torch.no_grad(), rg.watch(model) as seen:
        model(source, ids[:, :-1])
    own, cross = ({"layers.0": each} for each in seen.maps.values())
    found += rg.stats.mask_findings(own, causal=True) + rg.stats.mask_findings(cross, real=source > 0)
    found += [f for f in rg.findings(rg.profile(cross, list("01234567"))) if f.kind == "scale"]
    print(f"{fault}: loss {losses[0]:.2f}, after {STEPS} steps {final:.2f}; written right: {percent[fault]:.0f} %")
    print(*(f"  {finding.kind}: {finding.sentence}\n" for finding in found), sep="", end="")
    assert {f.kind for f in found} >= kinds and bool(kinds) == bool(found)
    assert (final < 1) == (fault not in ("mask reversed", "no scale"))
    shown, name = (own, "self-attention") if fault in ("leak", "labels") else (cross, "cross-attention")
    rg.heatmap(shown["layers.0"][int(source.sum(1).argmin()), 0], title=name, axes=below, colorbar=False)
    above.plot(losses), above.set(title=fault, xlabel="step"), below.label_outer()
assert max(percent[fault] for fault in expected if fault != "right") < percent["right"] - 10
axes[0, 0].set(ylabel="loss, nats"), figure.colorbar(below.images[0], ax=axes[1], label="weight, square root scale")
rg.drawing.show_or_save("25_training_goes_wrong.png")
