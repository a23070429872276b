"""
# Alignments supervised in a translator

A translator learns by itself where to look, and its alignments are as good as its attention happens to be. Garg et al.
2019 (arXiv:1909.02074) train one head of a Transformer on word alignments beside the translation. The language here is
synthetic, so the true alignment of every sentence is known. The loss is the divergence of the head's rows from it.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

import regard as rg
from regard.lab.decoding.alignment import alignment_error_rate

torch.set_num_threads(1)
corpus = rg.lab.data.load_corpus("grammar", size=8_000)
texts = zip(*((pair.source, pair.target) for pair in corpus.train), strict=True)
words = [rg.lab.data.train_tokenizer(text, kind="words") for text in texts]
train, tested = (rg.lab.data.encode_pairs(split, *words) for split in (corpus.train, corpus.test[:100]))
test, gold = rg.lab.data.Batch.of(tested), [pair.gold for pair in corpus.test[:100]]
steps = 200


# %%
# The target rows of a batch: 1 for the source word that a target word translates. The step that predicts a word has
# its row. Rows of zeros, for the end of the sentence and for padding, have divergence 0.
def true_rows(batch):
    rows = torch.zeros(len(batch), 1, batch.target_input.shape[1], batch.source.shape[1])
    for n, index in enumerate(batch.indices):
        for source, target in corpus.train[index].gold:
            rows[n, 0, target, source] = 1.0
    return rows


def trained(strength):
    torch.manual_seed(0)
    model = rg.lab.build("transformer", source_size=len(words[0]), target_size=len(words[1]), width=64)
    optimizer, batches = torch.optim.Adam(model.parameters()), rg.lab.data.Batches(train, sentences=48).start_at()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.004, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        batch = next(batches)[1]
        with rg.watch(model, layers=model.cross_attention, verify=False, grad=True) as seen:
            logits = model.logits(model(batch.source, batch.target_input))
        loss = F.cross_entropy(logits.mT, batch.target_output, ignore_index=rg.lab.data.PAD)
        if strength:
            head = seen[model.cross_attention].select(None, 0)
            loss = loss + strength * head.summarize(rg.maps.Divergence(to=true_rows(batch)))[0].mean()
        optimizer.zero_grad(), loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), optimizer.step(), schedule.step()
    return model.eval()


# %%
# Head 0 of the last cross-attention: every target word is linked to the source word of greatest weight.
results, maps = {}, {}
for strength in (0.0, 0.3):
    model = trained(strength)
    with torch.no_grad(), rg.watch(model, layers=model.cross_attention) as seen:
        predicted = model.logits(model(test.source, test.target_input)).argmax(-1)
    right = (predicted == test.target_output)[test.target_output != rg.lab.data.PAD].float().mean()
    rows = maps[strength] = seen[model.cross_attention].select(None, 0).dense()[:, 0]
    found = [{(int(rows[n, t, : len(x)].argmax()), t) for t in range(len(y))} for n, (x, y) in enumerate(tested)]
    results[strength] = alignment_error_rate(found, gold), 100 * float(right)
    print(f"strength {strength}: alignment error rate {results[strength][0]:.3f}, {results[strength][1]:.1f} % right")

# %%
# With the term the head points at the translated word for most words, and the translator itself learns faster: where to
# look is half of what it must find out. A sentence of the test set, with the true alignment as squares.
assert results[0.3][0] < results[0.0][0] - 0.2 and results[0.3][1] > results[0.0][1]
chosen = next(n for n, pair in enumerate(corpus.test) if len(pair.source.split()) == 10)
source, target = (text.split() for text in (corpus.test[chosen].source, corpus.test[chosen].target))
figure, panels = plt.subplots(1, 2, figsize=(9, 4.8), layout="constrained")
for axes, (strength, rows) in zip(panels, maps.items(), strict=True):
    title = f"strength {strength}: alignment error rate {results[strength][0]:.2f}"
    rg.heatmap(rows[chosen, : len(target), : len(source)], (target, source), title=title, axes=axes, colorbar=False)
    axes.plot(*zip(*gold[chosen], strict=True), "s", color="#D55E00", markersize=14, fillstyle="none", label="true")
panels[0].legend(fontsize=8)
figure.colorbar(axes.images[0], ax=panels, label="weight, square root scale", shrink=0.8)
rg.drawing.show_or_save("29_supervised_alignment.png")
