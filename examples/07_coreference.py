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


# %%
# `rg.watch` keeps the maps while a model reads. The weights of "it" are a row of each map: (layers, heads, tokens).
def rows_of_it(model, sentence):
    inputs = tokenizer(sentence, return_tensors="pt")
    tokens = tokenizer.convert_ids_to_tokens(inputs.input_ids[0])
    with torch.no_grad(), rg.watch(model) as seen:
        model(inputs.input_ids)
    return tokens, torch.stack([weights[0, :, tokens.index("it")] for weights in seen.maps.values()])


tokens, rows = rows_of_it(model, "The animal didn't cross the street because it was too tired.")
layer, head = divmod(int(rows[:, :, tokens.index("animal")].argmax()), 12)
most = {tokens[place]: round(float(rows[layer, head, place]), 3) for place in rows[layer, head].topk(3).indices}
print(f'of 72 heads, "it" attends most to "animal" in L{layer}.H{head}: {most}')
assert rows.shape == (6, 12, len(tokens)) and torch.allclose(rows.sum(-1), torch.ones(6, 12), atol=1e-4)
assert next(iter(most)) == "animal" and most["animal"] > 0.5

# %%
# Now the twins: in the second sentence of each pair, "it" is the other noun. A head that resolves "it" attends more
# to the first noun in the first sentence, and more to the second noun in the second. By chance one head in four does,
# 18 of 72.
twins = {
    "The animal didn't cross the street because it was too": ("tired", "wide", "animal", "street"),
    "The trophy didn't fit in the suitcase because it was too": ("big", "small", "trophy", "suitcase"),
    "The fish ate the worm because it was": ("hungry", "tasty", "fish", "worm"),
}
preferences = {}  # weight on the first noun minus that on the second, (2 sentences, layers, heads)
for beginning, (*endings, first, second) in twins.items():
    for ending in endings:
        tokens, rows = rows_of_it(model, f"{beginning} {ending}.")
        weights = rows[:, :, tokens.index(first)], rows[:, :, tokens.index(second)]
        preferences.setdefault(first, []).append(weights[0] - weights[1])
        texts = [f"{noun[layer, head]:.2f} (mean of all heads {noun.mean():.3f})" for noun in weights]
        print(f"{ending:6} L{layer}.H{head}: {first} {texts[0]}, {second} {texts[1]}")
    resolve = (preferences[first][0] > 0) & (preferences[first][1] < 0)
    print(f"       {int(resolve.sum())} of 72 heads resolve both")
    assert resolve.sum() < 12

# %%
# The weights of the head change with the meaning for animal and fish, and hardly for the trophy. But the head prefers
# the same noun in both sentences of every pair. In each pair fewer heads resolve both sentences than by chance: most
# prefer the same noun in both.
animal, trophy, fish = (torch.stack(pair)[:, layer, head] for pair in preferences.values())
assert animal[0] - animal[1] > 0.2 and fish[0] - fish[1] > 0.2 and trophy.diff().abs() < 0.15
assert animal.min() > 0.05 and trophy.min() > 0.2 and fish.max() < -0.03

# %%
# A causal model cannot resolve "it" at that position at all: "tired" comes later. Also in an untrained GPT-2 the rows
# of "it" are the same for both twins, bit for bit.
config = transformers.GPT2Config(vocab_size=tokenizer.vocab_size, n_layer=2, bos_token_id=0, eos_token_id=0)
causal, sentence = transformers.GPT2Model(config).eval(), next(iter(twins))
assert torch.equal(rows_of_it(causal, f"{sentence} tired.")[1], rows_of_it(causal, f"{sentence} wide.")[1])

# %%
# Dots are heads; the large dot is the head of the picture. A head in the green corner resolves both sentences.
figure, axes = plt.subplots(1, 3, figsize=(9, 3.3), layout="constrained", sharex=True, sharey=True)
for ax, pair, (ending, other, first, second) in zip(axes, preferences.values(), twins.values(), strict=True):
    ax.fill_between((0, 0.7), -0.7, 0, color="#009E73", alpha=0.2)
    ax.scatter(*pair, s=12, color="#0072B2"), ax.scatter(*(x[layer, head] for x in pair), s=50, color="#D55E00")
    ax.set(title=f"{first} or {second}", xlabel=f'preference for "{first}" if {ending}', ylabel=f"the same if {other}")
plt.show()
