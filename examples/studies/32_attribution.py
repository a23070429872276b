"""
# Where does a word come from? Attribution beside attention

Weights say where a head looks. An attribution says which links made one prediction: the weight w_ij times the gradient
dL/dw_ij = g_i . v_j. A translator learns a synthetic language whose true alignment is known, so we can count how often
the source word with the largest score is the right one, for weights, for two attributions, and for chance.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

import regard as rg

torch.set_num_threads(1)
torch.manual_seed(0)
corpus = rg.lab.data.load_corpus("grammar", size=12_000)
texts = zip(*((pair.source, pair.target) for pair in corpus.train), strict=True)
words = [rg.lab.data.train_tokenizer(text, kind="words") for text in texts]
train, tested = (rg.lab.data.encode_pairs(split, *words) for split in (corpus.train, corpus.test[:16]))
model = rg.lab.build("transformer", source_size=len(words[0]), target_size=len(words[1]), width=64, num_heads=4)
optimizer, steps = torch.optim.Adam(model.parameters()), 300
batches = rg.lab.data.Batches(train, sentences=64).start_at()
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps, pct_start=0.1)
for _ in range(steps):
    batch = next(batches)[1]
    logits = model.logits(model(batch.source, batch.target_input))
    loss = F.cross_entropy(logits.mT, batch.target_output, ignore_index=rg.lab.data.PAD)
    optimizer.zero_grad(), loss.backward(), optimizer.step(), schedule.step()
model.eval()


# %%
# One row of a batch for each word of a translation: all read the same sentence, and each explains its own word. So one
# call attributes a whole sentence. A row of the result has a number for each source word.
def rows_of(pair, method):
    sentence = rg.lab.data.Batch.of([pair])
    source, target, wanted = sentence.source, sentence.target_input, sentence.target_output[0]
    places = torch.arange(len(wanted) - 1)  # without the end of the sentence
    copies = source.expand(len(places), -1), target.expand(len(places), -1)
    if method == "weights":
        with torch.no_grad(), rg.watch(model, layers=model.cross_attention) as seen:
            model(source, target)
        [weights] = seen
        return weights.dense()[0].mean(0)[places]
    return rg.attribute(model, copies, lambda out: out[places, places, wanted[places]], method).tokens()


correct, total, rows = dict.fromkeys(("weights", "weight-gradient", "chefer"), 0), 0, {}
for pair, example in zip(tested, corpus.test, strict=False):
    for method in correct:
        found = rows_of(pair, method)[:, :-1]  # without the end of the source
        correct[method] += sum((int(row.argmax()), place) in example.gold for place, row in enumerate(found))
        rows.setdefault(method, found)
    total += len(found)
chance = sum(len(pair[1]) / len(pair[0]) for pair in tested) / total
for method, count in correct.items():
    print(f"{method:16}: {count / total:.0%} of {total} words come from the right source word (chance: {chance:.0%})")
assert correct["weight-gradient"] / total > 2 * chance and correct["chefer"] / total > 2 * chance

# %%
# Is the attribution faithful? The source words are removed in its order. If the probability of the target word falls no
# faster than with random orders, the scores explain nothing, however good they look.
sentence = rg.lab.data.Batch.of(tested[:1])
word = int(sentence.target_output[0, 2])
found = rg.attribute(model, (sentence.source, sentence.target_input), rg.Target(word, position=2), "weight-gradient")
print(found.test)
assert found.test.deletion_area > 0
figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
source, target = corpus.test[0].source.split(), corpus.test[0].target.split()
for axis, (method, scores) in zip(axes, rows.items(), strict=True):
    axis.imshow(scores / scores.abs().amax(1, keepdim=True), cmap="RdBu", vmin=-1, vmax=1)
    axis.scatter(*zip(*corpus.test[0].gold, strict=True), s=120, facecolors="none", edgecolors="black")
    axis.set(title=method, xticks=range(len(source)), yticks=range(len(target)))
    axis.set_xticklabels(source, rotation=60), axis.set_yticklabels(target)
rg.drawing.show_or_save("32_attribution.png")
