"""
# The bottleneck: one vector for a whole sentence

The first neural translators gave the decoder the whole source as one vector of fixed size (Cho et al. 2014,
arXiv:1406.1078; Sutskever et al. 2014, arXiv:1409.3215). Longer sentences need more room, so attention was invented
(Bahdanau et al. 2015, arXiv:1409.0473). Here two translators of equal width learn to copy letters: one with the
vector, one with attention. We count exact copies by length, and measure gradients.
"""

import matplotlib.pyplot as plt
import torch

import regard as rg
from regard.lab.evaluation.dependence import source_gradients

longest, letters, first = 15, 20, 4  # ids 0 to 3 stand for padding, unknown, begin and end


# %%
# A task that needs only memory: copy random letters. By chance 1 letter in 20 is right.
def batch(length, count):
    text, end = torch.randint(first, first + letters, (count, length)), torch.full((count, 1), rg.lab.data.EOS)
    return torch.cat((text, end), 1), torch.cat((torch.full((count, 1), rg.lab.data.BOS), text, end), 1)


def train(name, steps):
    torch.manual_seed(0)
    model = rg.lab.build(name, source_size=first + letters, target_size=first + letters, width=48)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    for _ in range(steps):
        source, target = batch(int(torch.randint(1, longest + 1, ())), 32)
        logits = model.logits(model(source, target[:, :-1]))
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), optimizer.zero_grad(), schedule.step()
    return model.eval()


systems = {"one vector": "none", "attention": "bahdanau"}
models = {steps: {name: train(systems[name], steps) for name in systems} for steps in (0, 600)}

# %%
# Test rows of every length are decoded greedily. We count the copies without a mistake.
exact = {name: [] for name in systems}
for length in range(1, longest + 1):
    source, _ = batch(length, 100)
    for name, model in models[600].items():
        copies = rg.lab.greedy(model, source)
        right = [best.tokens == tuple(row[:-1].tolist()) for (best, *_), row in zip(copies, source, strict=True)]
        exact[name].append(sum(right) / len(right))
for name, shares in exact.items():
    print(f"{name}: exact copies by length 1 to {longest}", *(f"{share:.2f}" for share in shares))
assert min(exact["one vector"][:3]) > 0.9 and exact["one vector"][-1] < 0.1
assert sum(exact["attention"]) > 0.9 * longest and exact["attention"][-1] > 0.5

# %%
# The gradient |d log p / d source letter| of the whole output, as a share of the largest. Before training, the vector
# depends on both ends of the row (its encoder reads both ways) and less on the middle; attention depends on all
# letters alike. After training the vector's gradients are larger: its limit is capacity, not gradient flow.
gradients, smallest = {}, {}
for steps, name in ((steps, name) for steps in models for name in systems):
    for length in (5, 10, 15):
        norms = source_gradients(models[steps][name], *batch(length, 32))[:, :, :length].mean((0, 1))
        gradients[steps, name], smallest[steps, name, length] = norms / norms.max(), norms.min() / norms.max()
    print(f"{name}, {steps} steps: smallest gradient of a letter, rows of 5, 10, 15", end=" ")
    print(*(f"{smallest[steps, name, length]:.2f}" for length in (5, 10, 15)))
assert smallest[0, "one vector", 15] < 0.2 * min(smallest[0, "one vector", 5], smallest[600, "one vector", 15])
assert smallest[0, "attention", 15] > 0.6

# %%
# Left: exact copies. Right: the gradient of each letter in rows of 15.
figure, (left, side) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for name, color in (("one vector", "#E69F00"), ("attention", "#0072B2")):
    left.plot(range(1, longest + 1), exact[name], "o-", ms=4, color=color, label=name)
    for steps, style in ((0, "o-"), (600, "s--")):
        side.semilogy(range(1, 16), gradients[steps, name], style, ms=4, color=color, label=f"{name}, {steps} steps")
left.set(title="exact copies", xlabel="letters", ylabel="share of rows", ylim=(0, 1.05)), left.legend()
side.set(title="gradient of each source letter", xlabel="source letter", ylabel="share of largest", ylim=(3e-3, 1.5))
side.legend(fontsize=8, ncols=2, loc="lower center"), rg.drawing.show_or_save("01_bottleneck.png")
