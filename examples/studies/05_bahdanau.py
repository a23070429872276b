"""
# Bahdanau's attention, one step at a time

A decoder writes a translation word by word. Before each word, a small network compares the decoder's last state with
every state of the encoder. The mean of these states, weighted by the result, goes into the next step (Bahdanau, Cho &
Bengio 2015, arXiv:1409.0473). Here a translator is trained on a synthetic language. Then one sentence is translated
by hand, with every formula of the paper, and the weights are compared with the known alignment.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

import regard as rg

torch.manual_seed(0)

# %%
# In this language adjectives follow nouns and verbs come last. Each word translates one word. We hold out 200 pairs.
pairs = rg.lab.data.synthetic_pairs("grammar", 12_200)
texts = zip(*((pair.source, pair.target) for pair in pairs), strict=True)
tokenizers = [rg.lab.data.train_tokenizer(text, kind="words") for text in texts]
ids = rg.lab.data.encode_pairs(pairs, *tokenizers)
print(f"{pairs[1].source}  ->  {pairs[1].target}")

# %%
# A bidirectional encoder, Bahdanau's decoder, and a plain training loop.
model = rg.lab.build("bahdanau", source_size=len(tokenizers[0]), target_size=len(tokenizers[1]), width=64)
optimizer, steps = torch.optim.Adam(model.parameters(), lr=0.01), 400
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
batches = rg.lab.data.Batches(ids[:-200], sentences=32).start_at()
for _ in range(steps):
    _, batch = next(batches)
    logits = model.logits(model(batch.source, batch.target_input))
    loss = F.cross_entropy(logits.mT, batch.target_output, ignore_index=rg.lab.data.PAD)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(), optimizer.zero_grad(), schedule.step()
print(f"{steps} steps; loss of the last batch {loss:.3f} nats a word")

# %%
# The longest of the 200 by hand. s is the decoder's state before the step, h_j are the encoder's. A softmax of v ·
# tanh(W s + U h_j) gives the weights. The weighted mean of the h_j, the context, goes into the cell and the output.
# The cell is PyTorch's own with the model's parameters. Weights and outputs must equal the model's.
example = max(range(len(ids) - 200, len(ids)), key=lambda number: len(ids[number][0]))
sentence, score, layer = rg.lab.data.Batch.of([ids[example]]), model.bridge.attention.score, model.cells.layers[0]
seen = rg.lab.attention_of(model, sentence.source, sentence.target_input)[model.cross_attention]
numbers = torch.cat((layer.input.weight, layer.fed), 1), layer.recurrent, layer.input.bias, torch.zeros(256)
cell = torch.nn.LSTMCell(128, 64)
cell.load_state_dict(dict(zip(cell.state_dict(), numbers, strict=True)))
with torch.no_grad():
    memory = model.eval().encode(sentence.source)
    state, h = model.start(memory), memory.states[0]
    for t, word in enumerate(sentence.target_input[0]):
        before, embedded = state.carried[0][-1], model.target_embedding(word[None, None])[:, 0]
        weights = (torch.tanh(score.query(before[0]) + score.key(h)) @ score.direction).softmax(0)
        s = cell(torch.cat((embedded, context := (weights @ h)[None]), 1), before)[0]
        logits = model.projection(torch.tanh(model.readout(torch.cat((s, context, embedded), 1))))
        step_logits, state = model.step(memory, state, word[None])
        assert torch.allclose(weights, seen[0, 0, t], atol=1e-5) and torch.allclose(logits, step_logits, atol=1e-4)
print(f"{t + 1} steps by hand equal the model's; the last weights:", *(f"{weight:.2f}" for weight in weights))

# %%
# No training data says which words belong together. How often is the largest weight on the translated word?
alignments = rg.lab.align(model, tokenizers, *zip(*ids[-200:], strict=True))
right = sum(len(each.links() & pair.gold) for each, pair in zip(alignments, pairs[-200:], strict=True))
words = sum(len(target) for _, target in ids[-200:])
print(f"largest weight on the translated word: {right} of {words} target words, {100 * right / words:.1f} %")
assert right > 0.9 * words

# %%
# The sentence that was translated by hand. Circles are the true alignment, which the model never saw.
aligned = alignments[example - len(ids)]
figure, axes = plt.subplots(figsize=(7.4, 6.4), layout="constrained")
title = "Bahdanau's weights, and the true alignment as circles"
rg.heatmap(aligned.weights, (aligned.target, aligned.source), title=title, axes=axes)
axes.scatter(*zip(*pairs[example].gold, strict=True), s=400, facecolors="none", edgecolors="#E69F00", linewidths=1.5)
axes.set(ylabel="target word that is predicted (query)")
rg.drawing.show_or_save("05_bahdanau.png")
