"""
# An indexer distilled from full attention

DeepSeek-V3.2 (arXiv:2512.02556, section 2.1) chooses the keys of each query by a small indexer, so that the attention
itself reads few keys. A choice has no gradient. The indexer learns from full attention instead: the divergence of its
own softmax from the mean of all heads. Here the teacher is a layer of MiniLM, and the indexer has 4 heads of width 8
where the layer has 12 of width 32. Both maps stay lazy: the loss compares them tile by tile.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import regard as rg
from regard.hf.models import load_model
from regard.maps.changed_map import HeadMean

torch.manual_seed(0)
torch.set_num_threads(1)
model, tokenizer = load_model("minilm")
layer, length, heads, width, k = 3, 96, 4, 8, 8
verses = [pair.source for pair in rg.lab.data.load_corpus("bible-en-fr").train[:400]]
tokens = [token for ids in tokenizer(verses, add_special_tokens=False).input_ids for token in ids]
ids = torch.tensor(tokens[: 48 * length]).view(48, length)  # 40 texts to learn from, 8 to test


# %%
# The score of the indexer, sum_n a_in relu(x_in . y_j), is a piece. The queries of the call hold a_i and all x_i.
class IndexScore(rg.scores.Score):
    floats_per_score = 2 * heads

    def tile(self, query, key, grid):
        weights, x = query[:, 0].split((heads, heads * width), -1)
        pairs = torch.einsum("binw,bjw->bnij", x.unflatten(-1, (heads, width)), key[:, 0]).relu()
        return torch.einsum("bin,bnij->bij", weights, pairs)[:, None]

    def check(self, sizes, key_dim):
        """Any sizes fit."""


with torch.no_grad(), rg.watch(model) as seen:
    hidden = model(ids, output_hidden_states=True).hidden_states[layer]
teacher = HeadMean(seen[layer])
queries, keys = nn.Linear(384, heads + heads * width), nn.Linear(384, width)


def index_map(texts):
    query, key = queries(hidden[texts])[:, None], keys(hidden[texts])[:, None]
    return rg.Attention(IndexScore())(query, key, key[..., :1]).weights


@torch.no_grad()
def recall():
    """The teacher's weight on the keys that the indexer chooses, and the most that k keys can have."""
    rows, chosen = teacher.select(slice(40, 48), None).dense(), index_map(slice(40, 48)).top(k).keys
    return float(rows.gather(-1, chosen).sum(-1).mean()), float(rows.topk(k).values.sum(-1).mean())


optimizer, curve = torch.optim.Adam([*queries.parameters(), *keys.parameters()], lr=3e-3), []
for step in range(201):
    curve += [(step, recall()[0])] if step % 20 == 0 else []
    texts = torch.randperm(40)[:8]
    (divergence,) = index_map(texts).summarize(rg.maps.Divergence(to=teacher.select(texts, None)))
    optimizer.zero_grad(), divergence.mean().backward(), optimizer.step()
    if step % 100 == 0:
        print(f"step {step:3}: divergence {divergence.detach().mean():.2f} nats")

# %%
# Before training the choice is that of chance. After it the indexer finds almost the best keys. The rest of the weight
# is spread over many keys, and no choice of so few has it.
found, most = recall()
print(f"weight on {k} of {length} keys: {curve[0][1]:.2f} before, {found:.2f} after; the best choice has {most:.2f}")
assert curve[0][1] < 0.5 * most and found > 0.85 * most
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(*zip(*curve, strict=True), color="#0072B2", label="chosen by the indexer")
axes.axhline(most, color="black", linestyle=":", label="best choice")
axes.set(xlabel="step", ylabel=f"weight on {k} of {length} keys", ylim=(0, 1), title=f"layer {layer} of MiniLM")
axes.legend(), rg.drawing.show_or_save("30_distilled_indexer.png")
