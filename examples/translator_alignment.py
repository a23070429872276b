"""
# The alignment of a translator (Bahdanau, Luong)

A translator writes a sentence word by word. Before each word it attends to the words of the source (Bahdanau, Cho &
Bengio 2015, arXiv:1409.0473). Nobody tells it which words belong together, and its attention finds out. Replace
"bahdanau" by "luong_general" for the attention of Luong, Pham & Manning (2015, arXiv:1508.04025).
"""

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy

import regard as rg

torch.manual_seed(0)
data = rg.lab.data

# %%
# A small language: adjectives follow nouns and verbs come last. The last 200 pairs are for the test.
pairs = data.synthetic_pairs("grammar", 12_200)
source_words = data.train_tokenizer([pair.source for pair in pairs], kind="words")
target_words = data.train_tokenizer([pair.target for pair in pairs], kind="words")
ids = data.encode_pairs(pairs, source_words, target_words)
train, test = ids[:-200], ids[-200:]
print(pairs[1].source, "->", pairs[1].target)

# %%
# An encoder and a decoder of LSTMs, and a plain training loop.
model = rg.lab.build("bahdanau", source_size=len(source_words), target_size=len(target_words), width=64)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
batches = data.Batches(train, sentences=32).start_at()
for step in range(400):
    _, batch = next(batches)
    logits = model.logits(model(batch.source, batch.target_input))
    loss = cross_entropy(logits.mT, batch.target_output, ignore_index=data.PAD)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 99:
        print(f"step {step + 1}: loss {loss:.2f}")
model.eval()

# %%
# `align` reads the weights of the test pairs. A link joins each target word and the source word with most weight.
sources = [source for source, _ in test]
targets = [target for _, target in test]
alignments = rg.lab.align(model, (source_words, target_words), sources, targets)
right = 0
for alignment, pair in zip(alignments, pairs[-200:], strict=True):
    right += len(alignment.links() & pair.gold)
share = right / sum(len(target) for target in targets)
print(f"largest weight on the word that is translated: {share:.0%}")
assert share > 0.8

# %%
# One sentence of the test as a picture.
longest = max(alignments, key=lambda alignment: len(alignment.source))
figure, ax = plt.subplots(figsize=(8, 7), layout="constrained")
rg.heatmap(longest.weights, (longest.target, longest.source), title="Rows are written, columns are read", axes=ax)
rg.drawing.show_or_save("translator_alignment.png")
