"""
# The bottleneck: one vector for a whole sentence

The first neural translators handed the whole source to the decoder as one vector of fixed size (Cho et al. 2014,
arXiv:1406.1078; Sutskever et al. 2014, arXiv:1409.3215). Attention was invented because that vector has to hold more
as sentences grow (Bahdanau et al. 2015, arXiv:1409.0473). Two translators of equal width learn to copy letters here,
one with the vector and one with attention. Exact copies are counted by length; gradients show what arrives.
"""

import matplotlib.pyplot as plt
import torch

import regard as rg
from regard.seq2seq.evaluation.dependence import source_gradients

longest, letters, first = 15, 20, 4  # ids 0 to 3 stand for padding, unknown, begin and end


# %%
# A task with nothing to it but memory: random letters, to be said again. Chance gets 1 in 20 letters right.
def batch(length, count):
    text, end = torch.randint(first, first + letters, (count, length)), torch.full((count, 1), rg.data.EOS)
    return torch.cat((text, end), 1), torch.cat((torch.full((count, 1), rg.data.BOS), text, end), 1)


def train(name, steps):
    torch.manual_seed(0)
    model = rg.seq2seq.build(name, source_size=first + letters, target_size=first + letters, width=48)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    for _ in range(steps):
        source, target = batch(int(torch.randint(1, longest + 1, ())), 64)
        logits = model.logits(model(source, target[:, :-1]))
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), optimizer.zero_grad(), schedule.step()
    return model.eval()


systems = {"one vector": "none", "attention": "bahdanau"}
models = {steps: {name: train(systems[name], steps) for name in systems} for steps in (0, 600)}

# %%
# New rows of every length, said without help: how many come back without a single mistake.
exact = {name: [] for name in systems}
for length in range(1, longest + 1):
    source, _ = batch(length, 100)
    for name, model in models[600].items():
        said = rg.seq2seq.greedy(model, source)
        right = [best.tokens == tuple(row[:-1].tolist()) for (best, *_), row in zip(said, source, strict=True)]
        exact[name].append(sum(right) / len(right))
for name, shares in exact.items():
    print(f"{name}: exact copies by length 1 to {longest}", *(f"{share:.2f}" for share in shares))
assert min(exact["one vector"][:3]) > 0.9 and exact["one vector"][-1] < 0.1
assert sum(exact["attention"]) > 0.9 * longest and exact["attention"][-1] > 0.5

# %%
# What arrives: |d log p / d source letter| of all that is said, as a share of the letter that arrives best. Before any
# training the vector hears both ends of the row, since its encoder reads both ways, and ever less of the middle;
# attention hears all letters alike. Training opens the way for the vector too: in the end it is room that it lacks.
gradients, least = {}, {}
for steps, name in ((steps, name) for steps in models for name in systems):
    for length in (5, 10, 15):
        arrived = source_gradients(models[steps][name], *batch(length, 32))[:, :, :length].mean((0, 1))
        gradients[steps, name], least[steps, name, length] = arrived / arrived.max(), arrived.min() / arrived.max()
    print(f"{name}, {steps} steps: the letter that arrives least, rows of 5, 10, 15", end=" ")
    print(*(f"{least[steps, name, length]:.2f}" for length in (5, 10, 15)))
assert least[0, "one vector", 15] < 0.2 * min(least[0, "one vector", 5], least[600, "one vector", 15])
assert least[0, "attention", 15] > 0.6

# %%
# Left: exact copies. Right: what arrives of each letter in rows of 15.
figure, (left, side) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for name, color in (("one vector", "#E69F00"), ("attention", "#0072B2")):
    left.plot(range(1, longest + 1), exact[name], "o-", ms=4, color=color, label=name)
    for steps, style in ((0, "o-"), (600, "s--")):
        side.semilogy(range(1, 16), gradients[steps, name], style, ms=4, color=color, label=f"{name}, {steps} steps")
left.set(title="exact copies", xlabel="letters", ylabel="share of rows", ylim=(0, 1.05)), left.legend()
side.set(title="gradient of each source letter", xlabel="source letter", ylabel="share of largest", ylim=(3e-3, 1.5))
side.legend(fontsize=8, ncols=2, loc="lower center"), plt.show()
