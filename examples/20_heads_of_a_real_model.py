"""
# What the heads of a real model attend to

Books sort heads by pattern: local, global, distributed, block. `patterns` scores each head for each, 0 for one that
looks at everything alike (but for being distributed) and at most 1. Here are the 72 heads of MiniLM on four kinds of
text; there is no block head among them. "Heads are specialists" (Clark et al. 2019, arXiv:1906.04341; Voita et al.
2019, arXiv:1905.09418) becomes a question with an answer: does a head do the same on another text?
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
# A text is a list of stretches (sentences, lines), whose lengths in tokens are what the block pattern is measured
# against. The model runs on its own backend; the scores of every head come from its queries and keys, in two passes.
def look(stretches):
    pieces = [tokenizer(text, add_special_tokens=False).input_ids for text in stretches]
    pieces[0], pieces[-1] = [tokenizer.cls_token_id, *pieces[0]], [*pieces[-1], tokenizer.sep_token_id]
    ids = torch.tensor([[token for piece in pieces for token in piece]])
    with torch.no_grad(), rg.watch(model) as seen:
        model(ids)
    layers = [rg.patterns(weights, [len(piece) for piece in pieces]) for weights in seen.maps.values()]
    scores = torch.stack([torch.cat([getattr(layer, name) for layer in layers]) for name in names])
    return seen, tokenizer.convert_ids_to_tokens(ids[0]), scores


verses = [pair.source for pair in rg.data.load_corpus("bible-en-fr").train[:14]]
shuffled = random.sample(words := " ".join(verses).split(), len(words))
texts = {
    "prose": verses,
    "code": [line for line in inspect.getsource(torch.nn.Linear.__init__).splitlines() if line.strip()],
    "numbers": [" ".join(str(random.randrange(1000)) for _ in range(12)) for _ in range(12)],
    "shuffled": [" ".join(shuffled[n::14]) for n in range(14)],
}
read, scores = {kind: look(stretches) for kind, stretches in texts.items()}, {}
for kind, (_, tokens, found) in read.items():
    best = zip(names, found.amax(1), found.argmax(1).tolist(), strict=True)
    told = ", ".join(f"{name} {score:.2f} (layer {n // 12} head {n % 12})" for name, score, n in best)
    print(f"{kind:8} {len(tokens)} tokens: {told}")
    scores[kind] = dict(zip(names, found, strict=True))
    assert scores[kind]["local"].max() > 0.7 and scores[kind]["block"].max() < 0.3

# %%
# What do they attend to in prose? `profile` tells how much of its weight a head puts on special tokens or neighbours.
profile = rg.profile(read["prose"][0].maps, read["prose"][1])
for name, thing in {"special": "[CLS] and [SEP]", "previous": "the token before", "next": "the token after"}.items():
    heads = [divmod(n, 12) for n in (torch.cat(profile.values(name)) > 0.4).nonzero().flatten().tolist()]
    print(f"at least two fifths of the weight on {thing}:", *(f"layer {layer} head {head};" for layer, head in heads))

# %%
# Specialists? How the scores of all heads on prose go with those on the other texts (correlation). Local, global and
# distributed heads stay so, even with words shuffled: order matters little to them. What little block there is goes.
for name in names:
    alike = torch.corrcoef(torch.stack([found[name] for found in scores.values()]))[0]
    print(f"{name:11} on prose goes with", ", ".join(f"{kind} {r:.2f}" for kind, r in zip(texts, alike, strict=True)))
    assert alike.min() > 0.6 if name != "block" else alike.min() < 0.4
strongest = torch.stack([found.argmax(0) for *_, found in read.values()])
print(f"{int((strongest == strongest[0]).all(0).sum())} of 72 heads have the same strongest pattern on all four texts")
figure, axes = plt.subplots(2, 4, figsize=(9, 4.9), layout="constrained")
for (above, below), name in zip(axes.T, names, strict=True):
    layer, head = divmod(int(scores["prose"][name].argmax()), 12)
    above.imshow(read["prose"][0][layer][0, head, :60, :60].sqrt(), cmap="viridis")
    above.set(xlabel="key", ylabel="query")
    above.set_title(f"{name.split('_')[0]}: layer {layer} head {head}", fontsize=9)
    for kind, colour in (("code", "#D55E00"), ("shuffled", "#0072B2")):
        below.plot(scores["prose"][name], scores[kind][name], ".", color=colour, label=kind)
    below.axline((0, 0), slope=1, color="grey", linewidth=0.5)
    below.set(xlabel="score on prose", ylabel="on another text", xlim=(-0.05, 1), ylim=(-0.05, 1))
axes[1, 0].legend(fontsize=8), plt.show()
