"""
# Pruning heads: how many can be removed

Michel et al. 2019 (arXiv:1905.10650) removed many heads of large trained Transformers with little loss: about 20 % of
a translator's, 40 % of BERT's. "20 to 30 % of heads can go" is no law. We train a small translator and rank its heads
by |d loss / d gate|. Then we remove more and more: the least important first, at random, and the most important first.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

import regard as rg

# Lowest and highest % of words right for 0, 10, ..., 100 % of heads, rounded outward: six seeds, `seeds.py 22 6`.
bands = {
    "importance": ((81, 79, 75, 68, 66, 60, 48, 33, 22, 14, 13), (87, 86, 83, 79, 74, 67, 62, 55, 49, 33, 15)),
    "random": ((81, 76, 68, 63, 57, 50, 50, 42, 37, 21, 13), (87, 83, 76, 68, 65, 57, 55, 54, 46, 26, 15)),
    "reversed": ((81, 71, 63, 40, 18, 14, 13, 13, 13, 13, 13), (87, 81, 71, 66, 56, 39, 28, 26, 24, 24, 15)),
}
torch.manual_seed(0)
pairs = [pair for pair in rg.lab.data.synthetic_pairs("grammar", 18_000) if len(pair.target.split()) <= 10]
texts = zip(*((pair.source, pair.target) for pair in pairs), strict=True)
words = [rg.lab.data.train_tokenizer(text, kind="words") for text in texts]
ids = rg.lab.data.encode_pairs(pairs, *words)
train, valid, test = ids[:-500], ids[-500:-150], rg.lab.data.Batch.of(ids[-150:])
model = rg.lab.build("transformer", source_size=len(words[0]), target_size=len(words[1]), width=64, num_heads=4)


# %%
# A short training. The quality of a model is the percentage of words in the test set that it predicts right.
def loss_of(model, batch):
    logits = model.logits(model(batch.source, batch.target_input))
    return F.cross_entropy(logits.mT, batch.target_output, ignore_index=rg.lab.data.PAD)


@torch.no_grad()
def quality(model):
    right = model.logits(model(test.source, test.target_input)).argmax(-1) == test.target_output
    return 100 * float(right[test.target_output != rg.lab.data.PAD].float().mean())


steps, batches = 220, rg.lab.data.Batches(train, sentences=64).start_at()
optimizer = torch.optim.Adam(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps, pct_start=0.1)
for _ in range(steps):
    optimizer.zero_grad(), loss_of(model, next(batches)[1]).backward(), optimizer.step(), schedule.step()
whole = quality(model.eval())
# Importance on validation pairs, then the three orders. Heads are gated to zero, so the model keeps its shape.
importance = rg.importance(model, loss_of, rg.lab.data.Batches(valid, sentences=32, shuffle=False).epoch())
curve = rg.hf.pruning_curve(model, quality, importance)
points = {order: curve.qualities(order) for order in bands}
for order, left in points.items():
    print(f"{order:10}: 20 % of heads cost {whole - left[0.2]:.1f} points, 30 % {whole - left[0.3]:.1f}")
    assert all(a - 3 < y < b + 3 for y, a, b in zip(left.values(), *bands[order], strict=True))

# %%
# `prune` removes the rows and columns of heads from the weights. The pruned model is as good as the gated model.
pruned = rg.prune(model, importance.least(5), copy=True)
print(f"{pruned}: {whole:.1f} % of words right before, {quality(pruned.model):.1f} % after")
assert abs(quality(pruned.model) - points["importance"][0.2]) < 0.1  # a fifth of 24 heads is 5

# %%
# Each head is removed alone: those of the encoder matter least. Which head matters most depends on the seed.
single = {"encoder": [], "decoder": [], "cross": []}
for name in importance.values:
    for gate in 1 - torch.eye(4):
        with rg.hf.gated(model, {name: gate}):
            single["cross" if "cross" in name else name.split(".")[1]].append(quality(model) - whole)
for part, changes in single.items():
    print(f"without one head of {part}: {min(changes):.1f} to {max(changes):.1f} points, mean {sum(changes) / 8:.1f}")
assert sum(single["encoder"]) > max(sum(single["decoder"]), sum(single["cross"]))
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
labels = {"least important first": "#0072B2", "at random": "#999999", "most important first": "#D55E00"}
for order, (label, color) in zip(bands, labels.items(), strict=True):
    left.fill_between(range(0, 101, 10), *bands[order], color=color, alpha=0.25, linewidth=0)
    left.plot(range(0, 101, 10), list(points[order].values()), "o-", color=color, label=label)
right.plot(list(single), list(single.values()), "o", color="#0072B2", alpha=0.5), left.legend()
left.set(title="Together. Lines: this run; bands: six seeds", xlabel="% of 24 heads", ylabel="% of words right")
right.set(title="Alone", ylabel="change in % of words right"), rg.drawing.show_or_save("22_pruning_heads.png")
