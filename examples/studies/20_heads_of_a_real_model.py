"""
# What the heads of a real model attend to

Textbooks sort heads by pattern: local, global, distributed, block. `patterns` scores each head for each pattern, from
0 to 1; a uniform head has 0, except for "distributed". Here we score the 72 heads of MiniLM on four kinds of text;
none is a block head. "Heads are specialists" (Clark et al. 2019, arXiv:1906.04341; Voita et al. 2019,
arXiv:1905.09418) becomes a question that we can measure: does a head do the same on another text?
"""

import inspect
import random

import matplotlib.pyplot as plt
import torch

import regard as rg
from regard.hf.models import load_model

random.seed(0)
model, tokenizer = load_model("minilm")
names = "local", "global_keys", "distributed", "block"


# %%
# A text is a list of segments (sentences, lines). The block pattern needs the number of tokens of each segment. The
# model runs on its own backend; the scores of every head are computed from its queries and keys, in two passes.
def score_heads(segments):
    pieces = [tokenizer(text, add_special_tokens=False).input_ids for text in segments]
    pieces[0], pieces[-1] = [tokenizer.cls_token_id, *pieces[0]], [*pieces[-1], tokenizer.sep_token_id]
    ids = torch.tensor([[token for piece in pieces for token in piece]])
    with torch.no_grad(), rg.watch(model) as seen:
        model(ids)
    layers = [rg.stats.patterns(weights, [len(piece) for piece in pieces]) for weights in seen.maps.values()]
    scores = torch.stack([torch.cat([getattr(layer, name) for layer in layers]) for name in names])
    return seen, tokenizer.convert_ids_to_tokens(ids[0]), scores


verses = [pair.source for pair in rg.lab.data.load_corpus("bible-en-fr").train[:14]]
shuffled = random.sample(words := " ".join(verses).split(), len(words))
texts = {
    "prose": verses,
    "code": [line for line in inspect.getsource(torch.nn.Linear.__init__).splitlines() if line.strip()],
    "numbers": [" ".join(str(random.randrange(1000)) for _ in range(12)) for _ in range(12)],
    "shuffled": [" ".join(shuffled[n::14]) for n in range(14)],
}
read, scores = {kind: score_heads(segments) for kind, segments in texts.items()}, {}
for kind, (_, tokens, head_scores) in read.items():
    best = zip(names, head_scores.amax(1), head_scores.argmax(1).tolist(), strict=True)
    summary = ", ".join(f"{name} {score:.2f} (L{n // 12}.H{n % 12})" for name, score, n in best)
    print(f"{kind:8} {len(tokens)} tokens: {summary}")
    scores[kind] = dict(zip(names, head_scores, strict=True))
    assert scores[kind]["local"].max() > 0.7 and scores[kind]["block"].max() < 0.3

# %%
# What do they attend to in prose? `profile` measures the share of weight that a head puts on each kind of token.
profile = rg.profile(read["prose"][0].maps, read["prose"][1])
for name, thing in {"special": "[CLS] and [SEP]", "previous": "the token before", "next": "the token after"}.items():
    heads = [divmod(n, 12) for n in (torch.cat(profile.values(name)) > 0.4).nonzero().flatten().tolist()]
    print(f"at least two fifths of the weight on {thing}:", *(f"L{layer}.H{head}" for layer, head in heads))

# %%
# Specialists? The correlation of the scores of all heads on prose with those on other texts. Local, global and
# distributed heads keep their scores even on shuffled words: order matters little to them. Block scores do not.
for name in names:
    correlation = torch.corrcoef(torch.stack([values[name] for values in scores.values()]))[0]
    print(f"{name:11} on prose, correlation with", *(f"{k} {r:.2f}" for k, r in zip(texts, correlation, strict=True)))
    assert correlation.min() > 0.6 if name != "block" else correlation.min() < 0.4
strongest = torch.stack([head_scores.argmax(0) for *_, head_scores in read.values()])
print(f"{int((strongest == strongest[0]).all(0).sum())} of 72 heads have the same strongest pattern on all four texts")
figure, axes = plt.subplots(2, 4, figsize=(9, 4.9), layout="constrained")
for (above, below), name in zip(axes.T, names, strict=True):
    layer, head = divmod(int(scores["prose"][name].argmax()), 12)
    title = f"{name.split('_')[0]}: L{layer}.H{head}"
    rg.heatmap(read["prose"][0][layer][0, head, :60, :60], title=title, axes=above, colorbar=False)
    for kind, color in (("code", "#D55E00"), ("shuffled", "#0072B2")):
        below.plot(scores["prose"][name], scores[kind][name], ".", color=color, label=kind)
    below.axline((0, 0), slope=1, color="gray", linewidth=0.5)
    below.set(xlabel="score on prose", ylabel="on another text", xlim=(-0.05, 1), ylim=(-0.05, 1))
axes[1, 0].legend(fontsize=8), figure.colorbar(above.images[0], ax=axes[0], label="weight, square root scale")
rg.drawing.show_or_save("20_heads_of_a_real_model.png")
