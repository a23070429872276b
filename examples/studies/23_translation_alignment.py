"""
# Attention as an alignment

A famous picture (Bahdanau et al. 2015, arXiv:1409.0473, figure 3) shows which source word a translator attends to for
each target word. Here two translators learn a synthetic language with known alignments, so we can compute the exact
alignment error rate (AER) of such pictures. It depends on the step at which a row is read. Chen et al. 2020
(arXiv:2004.14837) found that large Transformers align best at the step that reads the target word as input. Our
small ones do not.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

import regard as rg
from regard.lab.decoding.alignment import alignment_error_rate

torch.set_num_threads(1)
corpus = rg.lab.data.load_corpus("grammar", size=16_000)
texts = zip(*((pair.source, pair.target) for pair in corpus.train), strict=True)
words = [rg.lab.data.train_tokenizer(text, kind="words") for text in texts]
train, tested = (rg.lab.data.encode_pairs(split, *words) for split in (corpus.train, corpus.test[:100]))
test, gold = rg.lab.data.Batch.of(tested), [pair.gold for pair in corpus.test[:100]]


# %%
# A short training of each: Luong's attention in a recurrent network, and a Transformer.
def trained(name, steps, rate, **options):
    torch.manual_seed(0)
    model = rg.lab.build(name, source_size=len(words[0]), target_size=len(words[1]), width=64, **options)
    optimizer, batches = torch.optim.Adam(model.parameters()), rg.lab.data.Batches(train, sentences=64).start_at()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        batch = next(batches)[1]
        optimizer.zero_grad()
        logits = model.logits(model(batch.source, batch.target_input))
        F.cross_entropy(logits.mT, batch.target_output, ignore_index=rg.lab.data.PAD).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


models = {
    "Luong": trained("luong_general", 300, 0.01, input_feeding=False),
    "Transformer": trained("transformer", 300, 0.004),
}

# %%
# Both models read the true translation (teacher forcing). Every target word is linked to the source word with the
# largest weight, at the step that predicts the word ("output"), or at the next step, which reads it ("input"). The
# baseline is the diagonal.
diagonal = alignment_error_rate([{(n, n) for n in range(len(target))} for _, target in tested], gold)
print(f"AER of the diagonal: {diagonal:.3f}")
alignments, rates = {}, {}
for name, model in models.items():
    with torch.no_grad():
        right = model.logits(model(test.source, test.target_input)).argmax(-1) == test.target_output
    print(f"{name}: {right[test.target_output != rg.lab.data.PAD].float().mean():.1%} of words right", end="")
    for reading in ("output", "input"):
        aligned = rg.lab.align(model, words, *zip(*tested, strict=True), reading=reading)
        rates[name, reading] = alignment_error_rate([each.links() for each in aligned], gold)
        alignments[name, reading] = aligned
        print(f"; AER {rates[name, reading]:.3f} read at the {reading}", end="")
    print()
    assert rates[name, "output"] < min(diagonal - 0.15, rates[name, "input"])

# %%
# One sentence, with the true alignment as squares. The rest of a row's weight is on the end-of-sentence token.
chosen = next(n for n, pair in enumerate(corpus.test) if len(pair.source.split()) == 10)
figure, axes = plt.subplots(1, 2, figsize=(9, 4.8), layout="constrained")
for axis, name in zip(axes, models, strict=True):
    each = alignments[name, "output"][chosen]
    title = f"{name}, AER {rates[name, 'output']:.2f}"
    rg.heatmap(each.weights, (each.target, each.source), title=title, axes=axis, colorbar=False)
    axis.plot(*zip(*gold[chosen], strict=True), "s", color="#D55E00", markersize=14, fillstyle="none", label="true")
axes[0].legend(fontsize=8), figure.colorbar(axis.images[0], ax=axes, label="weight, square root scale", shrink=0.8)
rg.drawing.show_or_save("23_translation_alignment.png")
