"""
# Self-attention and coreference: what does "it" attend to?

"The animal didn't cross the street because it was too tired." A well-known picture shows a head in which "it" attends
to "animal". It is often explained as: attention knows what "it" means. Here we find such a head in a real model,
MiniLM, and test it with twin sentences: another last word changes what "it" means (Levesque, Davis & Morgenstern
2012). The picture is right. Its explanation is not.
"""

import matplotlib.pyplot as plt
import torch
import transformers

import regard as rg
from regard.hf.models import load_model

model, tokenizer = load_model("minilm")
twins = {  # in the first sentence of each pair "it" is the first noun, in the second sentence the other noun
    "The animal didn't cross the street because it was too": ("tired", "wide", "animal", "street"),
    "The trophy didn't fit in the suitcase because it was too": ("big", "small", "trophy", "suitcase"),
    "The fish ate the worm because it was": ("hungry", "tasty", "fish", "worm"),
}


# %%
# `rg.watch` keeps the maps while a model reads. The weights of "it" are a row of each map: (layers, heads, tokens).
def rows_of_it(model, sentence):
    inputs = tokenizer(sentence, return_tensors="pt")
    tokens = tokenizer.convert_ids_to_tokens(inputs.input_ids[0])
    with torch.no_grad(), rg.watch(model) as seen:
        model(inputs.input_ids)
    return tokens, torch.stack([weights[0, :, tokens.index("it")] for weights in seen.maps.values()])


seen = {end: rows_of_it(model, f"{start} {end}.") for start, (*ends, _, _) in twins.items() for end in ends}
tokens, rows = seen["tired"]
layer, head = divmod(int(rows[:, :, tokens.index("animal")].argmax()), 12)
most = {tokens[place]: round(float(rows[layer, head, place]), 3) for place in rows[layer, head].topk(3).indices}
print(f'of 72 heads, "it" attends most to "animal" in L{layer}.H{head}: {most}')
assert next(iter(most)) == "animal" and most["animal"] > 0.5

# %%
# A head that resolves "it" attends more to the first noun in the first sentence, and more to the second noun in the
# second. By chance one head in four does, 18 of 72. The preference is the weight of the first noun minus that of the
# second. L3.H1 prefers the same noun in both sentences of every pair, and so do most heads.
preferences = {}
for *ends, first, second in twins.values():
    nouns = [[seen[end][1][:, :, seen[end][0].index(noun)] for noun in (first, second)] for end in ends]
    for end, (a, b) in zip(ends, nouns, strict=True):
        print(f"{end:6} L{layer}.H{head}: {first} {a[layer, head]:.2f}, {second} {b[layer, head]:.2f}", end="; ")
        print(f"mean of all heads {a.mean():.3f} and {b.mean():.3f}")
    preferences[f"{first} or {second}"] = pair = torch.stack([a - b for a, b in nouns])
    resolve = int(((pair[0] > 0) & (pair[1] < 0)).sum())
    print(f"       {resolve} of 72 heads resolve both")
    assert resolve < 12 and pair[:, layer, head].prod() > 0 and (pair.prod(0) > 0).float().mean() > 0.5

# %%
# A causal model cannot resolve "it" at that position at all: "tired" comes later. Also in an untrained GPT-2 the rows
# of "it" are the same for both twins, bit for bit.
config = transformers.GPT2Config(vocab_size=tokenizer.vocab_size, n_layer=2, bos_token_id=0, eos_token_id=0)
causal, sentence = transformers.GPT2Model(config).eval(), next(iter(twins))
assert torch.equal(*(rows_of_it(causal, f"{sentence} {end}.")[1] for end in ("tired", "wide")))

# %%
# The picture and its twin: the same head, the same "it"; lines are as wide as weights are large. Right: dots are heads,
# the large ones L3.H1. Heads in the green corner resolve both sentences.
figure, (*sides, right) = plt.subplots(1, 3, figsize=(11, 4), layout="constrained")
for ax, end in zip(sides, ("tired", "wide"), strict=True):
    for place, (token, weight) in enumerate(zip(seen[end][0], seen[end][1][layer, head].tolist(), strict=True)):
        ax.plot((0, 1), (-tokens.index("it"), -place), color="#D55E00", linewidth=14 * weight)
        ax.text(-0.05, -place, token, ha="right", va="center", weight="bold" if token == "it" else None)
        ax.text(1.05, -place, f"{token}  {weight:.2f}", va="center", weight="bold" if weight > 0.1 else None)
    ax.set(title=f'L{layer}.H{head}: "... it was too {end}"', xlim=(-0.6, 1.9)), ax.set_axis_off()
right.fill_between((0, 0.7), -0.7, 0, color="#009E73", alpha=0.2)
for (names, pair), color in zip(preferences.items(), ("#D55E00", "#0072B2", "#999999"), strict=True):
    right.scatter(*pair.flatten(1), s=9, color=color, label=names)
    right.scatter(*pair[:, layer, head], s=90, color=color, edgecolors="black")
right.set(xlabel="preference for the first noun", ylabel="the same in the twin", title="72 heads, 3 pairs of sentences")
right.legend(), rg.drawing.show_or_save("07_coreference.png")
