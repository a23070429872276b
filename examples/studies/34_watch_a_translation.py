"""
# A translation as it is written, and as one map

A model that generates reads one token in each forward pass. With `rg.watch(model, on_step=...)` a function sees the new
rows of every layer after each pass: alignments appear word by word, while beam search is still running. Afterwards
`seen.generation` is one map of the returned sentence, although beams were reordered on the way: its rows come from the
cache rows of its ancestors, and they are those of one pass over the sentence.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F
from transformers import BartConfig, BartForConditionalGeneration

import regard as rg

torch.set_num_threads(1)
torch.manual_seed(0)
corpus = rg.lab.data.load_corpus("grammar", size=16_000)
texts = zip(*((pair.source, pair.target) for pair in corpus.train), strict=True)
source_words, target_words = (rg.lab.data.train_tokenizer(text, kind="words") for text in texts)
encoded = rg.lab.data.encode_pairs(corpus.train, source_words, target_words)

# %%
# A BART of transformers with one layer of 4 heads on each side learns a small language, whose alignments are known.
tokens = {"pad_token_id": rg.lab.data.PAD, "bos_token_id": rg.lab.data.BOS, "eos_token_id": rg.lab.data.EOS}
tokens |= {"decoder_start_token_id": rg.lab.data.BOS, "forced_eos_token_id": None, "max_position_embeddings": 64}
side = {"layers": 1, "attention_heads": 4, "ffn_dim": 128}
sizes = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in side.items()}
sizes |= {"vocab_size": max(len(source_words), len(target_words)), "d_model": 64}
model = BartForConditionalGeneration(BartConfig(dropout=0.0, init_std=0.1, **tokens, **sizes))
optimizer = torch.optim.Adam(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.004, total_steps=600, pct_start=0.1)
batches = rg.lab.data.Batches(encoded, sentences=64).start_at()
for _ in range(600):
    batch = next(batches)[1]
    given = {"input_ids": batch.source, "attention_mask": batch.source != rg.lab.data.PAD}
    logits = model(**given, decoder_input_ids=batch.target_input, use_cache=False).logits
    loss = F.cross_entropy(logits.mT, batch.target_output, ignore_index=rg.lab.data.PAD)
    optimizer.zero_grad(), loss.backward(), optimizer.step(), schedule.step()
model.eval()
print(f"loss {loss:.2f}")

# %%
# The beam that leads while it is written. A row is that of the word that the model reads in this pass.
pair = next(pair for pair in corpus.test if len(pair.source.split()) == 9)
source = torch.tensor([[*source_words.encode(pair.source), rg.lab.data.EOS]])
names = [*pair.source.split(), "(end)"]


def look(step):
    word = target_words.decode(step.tokens[0].tolist()) or "(start)"
    row = step.cross[0][0].mean(0)[-1]
    print(f"{step.number:2} reads {word:8} and looks at {names[int(row.argmax())]} ({row.max():.2f})")


with rg.watch(model, on_step=look) as seen:
    written = model.generate(source, num_beams=4, max_new_tokens=24)
generation = seen.generation.sequence(0)
print(pair.source, "->", target_words.decode(written[0].tolist()), "| right:", pair.target)

# %%
# One map of the sentence that won. It is the map of one pass over it, in each layer, to rounding.
with rg.watch(model) as whole, torch.no_grad():
    model(input_ids=source, decoder_input_ids=generation.tokens[:, :-1], use_cache=False)
assert generation.names == whole.names
error = max(float((generation[name].dense() - weights.dense()).abs().max()) for name, weights in whole.maps.items())
print(f"largest difference to one pass: {error:.0e}")
assert error < 1e-5

figure, axes = plt.subplots(1, 2, figsize=(10, 5), layout="constrained")
words = [target_words.decode([n]) or "(start)" for n in generation.tokens[0, :-1].tolist()]
shown = (generation.cross[0], names, "cross-attention"), (generation.decoder[0], words, "self-attention")
for axis, (weights, keys, title) in zip(axes, shown, strict=True):
    rg.heatmap(weights, (words, keys), "mean", title=title, axes=axis, colorbar=False)
    axis.set(xlabel="attends to", ylabel="word that the model reads")
figure.colorbar(axis.images[0], ax=axes, label="weight, mean of 4 heads, square root scale", shrink=0.8)
rg.drawing.show_or_save("34_watch_a_translation.png")
