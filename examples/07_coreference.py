"""
# Self-attention on a sentence: what does "it" look at?

"The animal didn't cross the street because it was too tired." A well-known picture shows a head in which "it" looks
at "animal", and is read as: attention knows what "it" means. Such a head is found here in a real model, MiniLM, and
put to the test with twins: another last word turns the meaning of "it" (Levesque, Davis & Morgenstern 2012). The
picture holds. What is read into it does not.
"""

import matplotlib.pyplot as plt
import torch
import transformers

import regard as rg
from regard.hf.models import load_model

model, tokenizer = load_model("minilm")


# %%
# `rg.watch` listens while a model reads. What "it" looks at is a row of each map: (layers, heads, tokens).
def look(model, sentence):
    inputs = tokenizer(sentence, return_tensors="pt")
    tokens = tokenizer.convert_ids_to_tokens(inputs.input_ids[0])
    with torch.no_grad(), rg.watch(model) as seen:
        model(inputs.input_ids)
    return tokens, torch.stack([weights[0, :, tokens.index("it")] for weights in seen.maps.values()])


tokens, rows = look(model, "The animal didn't cross the street because it was too tired.")
layer, head = divmod(int(rows[:, :, tokens.index("animal")].argmax()), 12)
most = {tokens[place]: round(float(rows[layer, head, place]), 3) for place in rows[layer, head].topk(3).indices}
print(f'of 72 heads, "it" looks most at "animal" in head {head} of layer {layer}: {most}')
assert rows.shape == (6, 12, len(tokens)) and torch.allclose(rows.sum(-1), torch.ones(6, 12), atol=1e-4)
assert next(iter(most)) == "animal" and most["animal"] > 0.5

# %%
# Now the twins: in the second of each pair "it" is the other noun. A head that resolves "it" looks more at the first
# noun in the first sentence and more at the second in the second. Of heads that toss coins one in four does, 18 of
# 72.
twins = {
    "The animal didn't cross the street because it was too": ("tired", "wide", "animal", "street"),
    "The trophy didn't fit in the suitcase because it was too": ("big", "small", "trophy", "suitcase"),
    "The fish ate the worm because it was": ("hungry", "tasty", "fish", "worm"),
}
leans = {}  # weight on the first noun less that on the second, (2 sentences, layers, heads)
for beginning, (*endings, first, second) in twins.items():
    for ending in endings:
        tokens, rows = look(model, f"{beginning} {ending}.")
        one, two = rows[:, :, tokens.index(first)], rows[:, :, tokens.index(second)]
        leans.setdefault(first, []).append(one - two)
        told = [f"{noun[layer, head]:.2f} (mean of all heads {noun.mean():.3f})" for noun in (one, two)]
        print(f"{ending:6} head {layer}.{head}: {first} {told[0]}, {second} {told[1]}")
    resolve = (leans[first][0] > 0) & (leans[first][1] < 0)
    print(f"       {int(resolve.sum())} of 72 heads resolve both")
    assert resolve.sum() < 12

# %%
# The head does move as the meaning does for animal and fish, and hardly for the trophy. But in none of the three
# pairs does it change sides. No pair is resolved by as many heads as coins would: most lean to the same noun in both
# twins.
animal, trophy, fish = (torch.stack(pair)[:, layer, head] for pair in leans.values())
assert animal[0] - animal[1] > 0.2 and fish[0] - fish[1] > 0.2 and trophy.diff().abs() < 0.15
assert animal.min() > 0.05 and trophy.min() > 0.2 and fish.max() < -0.03

# %%
# A model that reads from left to right cannot resolve "it" there at all: "tired" comes later. In an untrained GPT-2,
# too, the rows of "it" are the same in both twins, bit for bit.
config = transformers.GPT2Config(vocab_size=tokenizer.vocab_size, n_layer=2, bos_token_id=0, eos_token_id=0)
causal, sentence = transformers.GPT2Model(config).eval(), next(iter(twins))
assert torch.equal(look(causal, f"{sentence} tired.")[1], look(causal, f"{sentence} wide.")[1])

# %%
# Dots are heads, the large one that of the picture. In the green corner both sentences are resolved.
figure, axes = plt.subplots(1, 3, figsize=(9, 3.3), layout="constrained", sharex=True, sharey=True)
for ax, pair, (one, other, first, second) in zip(axes, leans.values(), twins.values(), strict=True):
    ax.fill_between((0, 0.7), -0.7, 0, color="#009E73", alpha=0.2)
    ax.scatter(*pair, s=12, color="#0072B2"), ax.scatter(*(x[layer, head] for x in pair), s=50, color="#D55E00")
    ax.set(title=f"{first} or {second}", xlabel=f'lean to "{first}" if {one}', ylabel=f"the same if {other}")
plt.show()
