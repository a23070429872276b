"""
# Attention is blind to order

Self-attention treats its input as a set: if the tokens are permuted, the outputs are permuted in the same way (Lee et
al. 2019, arXiv:1810.00825, property 1). Word order can enter by positions. Less known: a causal mask is enough (Haviv
et al. 2022, arXiv:2203.16634). We test this on attention alone, on a real model, and on a task.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import regard as rg
from regard.hf.models import load_model

torch.manual_seed(0)

# %%
# For a permutation P, f(P x) = P f(x) up to rounding without positions. With positions or a causal mask this fails.
x, order = torch.randn(1, 2, 12, 16, dtype=torch.float64), torch.randperm(12)
kinds = {"no positions": {}, "sinusoidal": {"position": rg.encodings.Sinusoidal()}, "RoPE": {"position": rg.RoPE(16)}}
kinds |= {"ALiBi": {"bias": rg.ALiBi(2)}, "causal mask": {"mask": rg.causal()}}
broken = {}
for name, pieces in kinds.items():
    of_permuted, plain = (rg.Attention(**pieces)(y, y, y).output for y in (x[:, :, order], x))
    broken[name] = float((of_permuted - plain[:, :, order]).abs().max())
    print(f"{name:12}: f(P x) and P f(x) differ by {broken[name]:.2g}")
    assert broken[name] < 1e-12 if name == "no positions" else broken[name] > 0.05

# %%
# We set the table of positions of MiniLM, a 6-layer BERT, to 0. Then "the dog bit the man" and "the man bit the dog"
# have the same outputs, up to their order. With positions their mean vectors differ, though not by much.
model, tokenizer = load_model("minilm")
ids = tokenizer(["the dog bit the man", "the man bit the dog"], return_tensors="pt")
cosines = []
for _ in range(2):
    with torch.no_grad():
        cosines.append(float(nn.functional.cosine_similarity(*model(**ids).last_hidden_state.mean(1), dim=0)))
    model.embeddings.position_embeddings.weight.data.zero_()
print(f"MiniLM: cosine of the two sentences {cosines[0]:.4f}, without positions {cosines[1]:.7f}")
assert cosines[1] > 1 - 1e-5 and cosines[0] < 0.995


# %%
# Which came first, a or b? Swapping them is a permutation, which the mean over tokens ignores. So an encoder without
# positions gives the same answer to a text and its twin: half of its answers are right, after any training. With
# positions it learns the task. So does a decoder without positions: its mask separates earlier from later tokens.
def texts(count):
    ids, rows = torch.randint(6, 26, (count, 10)), torch.arange(count)
    first, second = torch.rand(count, 10).topk(2).indices.sort(-1).values.unbind(-1)
    ids[rows, first], ids[rows, second] = 4, 5
    twins = ids.clone()
    twins[rows, first], twins[rows, second] = 5, 4
    return torch.cat((ids, twins)), torch.arange(2).repeat_interleave(count)


right = {}
for name in ("encoder", "encoder +\nsinusoidal", "decoder"):
    torch.manual_seed(1)
    plan = rg.nn.TransformerConfig(32, num_heads=2, positions="sinusoidal" if "sinusoidal" in name else "none")
    stack = plan.decoder(2, vocab_size=26, cross=False) if name == "decoder" else plan.encoder(2, vocab_size=26)
    head = nn.Linear(32, 2)
    optimizer = torch.optim.Adam([*stack.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(200):
        ids, answer = texts(32)
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(stack(ids).mean(1)), answer).backward()
        optimizer.step()
    ids, answer = texts(500)
    with torch.no_grad():
        right[name] = float((head(stack(ids).mean(1)).argmax(-1) == answer).double().mean())
    print(f"which came first, {name.split()}: {right[name]:.1%} of 1,000 answers are right")
assert abs(right["encoder"] - 0.5) < 0.02 and min(right["encoder +\nsinusoidal"], right["decoder"]) > 0.85
figure, (left, side) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
left.barh(list(broken), [max(value, 1e-17) for value in broken.values()], color="#0072B2")
left.set(xscale="log", xlabel="largest |f(P x) - P f(x)|", title="permute 12 tokens")
side.bar(list(right), list(right.values()), color=["#999999", "#0072B2", "#D55E00"])
side.axhline(0.5, color="black", linestyle=":")
side.set(ylabel="share of right answers", ylim=(0, 1.02), title="which came first? (dotted: chance)")
rg.drawing.show_or_save("11_blind_to_order.png")
