"""
# The copy task, and a check of every gradient

The first test of a sequence-to-sequence model is to copy its input. Before training, we check its gradients: against
the backward pass of attention by hand, and by finite differences, through each engine and through the whole model.
Then a Transformer of one layer learns to copy; its attention is a diagonal.
"""

import matplotlib.pyplot as plt
import torch

import regard as rg

torch.manual_seed(0)

# %%
# Backward by hand. With weights W = softmax(S) and S = q k^T / sqrt(D): dV = W^T dO, dW = dO V^T, dS = W * (dW -
# sum_j W dW), dQ = dS k / sqrt(D), dK = dS^T q / sqrt(D). Each engine and finite differences give the same gradients.
q, k, v, grad_out = torch.randn(4, 1, 2, 6, 4, dtype=torch.float64)
attention, inputs = rg.Attention(mask=rg.causal()), [t.clone().requires_grad_() for t in (q, k, v)]
w = attention(q, k, v).weights.dense()
ds = w * (grad_out @ v.mT - (w * (grad_out @ v.mT)).sum(-1, keepdim=True)) / 2
by_hand = ds @ k, ds.mT @ q, w.mT @ grad_out
for engine in ("dense", "fused", "blocked"):
    gradients = torch.autograd.grad(attention(*inputs, engine=engine).output, inputs, grad_out)
    worst = max(float((mine - hand).abs().max()) for mine, hand in zip(gradients, by_hand, strict=True))
    print(f"{engine:7}: gradients differ from those by hand by {worst:.1g}")
    assert worst < 1e-12
    assert torch.autograd.gradcheck(lambda *x, e=engine: attention(*x, engine=e).output, inputs)


# %%
# The whole model in float64: each parameter is changed a little, and the loss must change as backward says. The check
# can fail: one gradient that is wrong by a thousandth makes it fail.
def batch_of(words):
    return rg.lab.data.Batch.of([(word, word) for word in words])


def loss_of(batch):
    logits = model.logits(model(batch.source, batch.target_input)).mT
    return torch.nn.functional.cross_entropy(logits, batch.target_output, ignore_index=rg.lab.data.PAD)


model = rg.lab.build("transformer", source_size=30, target_size=30, width=64, layers=1, num_heads=4).double()
batch, parameters = batch_of(torch.randint(4, 30, (4, 7)).tolist()), tuple(model.parameters())
strict = {"fast_mode": True, "atol": 1e-8, "rtol": 1e-5, "raise_exception": False}
assert torch.autograd.gradcheck(lambda *_: loss_of(batch), parameters, **strict)
wrong_gradient = model.projection.bias.register_hook(lambda gradient: 1.001 * gradient)
assert not torch.autograd.gradcheck(lambda _: loss_of(batch), (model.projection.bias,), **strict)
wrong_gradient.remove()
print(f"{len(parameters)} tensors of parameters: backward agrees with finite differences")

# %%
# Training on words of 3 to 9 letters from an alphabet of 26. The model copies new words of these lengths, but no
# longer words. Its cross-attention is the diagonal: the step that writes a letter attends to that letter.
optimizer, losses = torch.optim.Adam(model.float().parameters(), lr=4e-3), []
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, 300)
for _ in range(300):
    optimizer.zero_grad()
    loss = loss_of(batch_of(torch.randint(4, 30, (64, int(torch.randint(3, 10, ())))).tolist()))
    loss.backward()
    optimizer.step(), schedule.step()
    losses.append(float(loss.detach()))
copied = {}
for length in (4, 8, 14):
    words = torch.randint(4, 30, (100, length)).tolist()
    outputs = rg.lab.greedy(model.eval(), batch_of(words).source)
    copied[length] = sum(list(best[0].tokens) == word for best, word in zip(outputs, words, strict=True))
print(f"loss {losses[0]:.2f}, after 300 steps {losses[-1]:.3f}; copies without a mistake, of 100, by length: {copied}")
assert losses[-1] < 0.3 < 2.5 < losses[0] and min(copied[4], copied[8]) >= 70 and copied[14] <= 20
example = batch_of([[ord(letter) - 93 for letter in "copyist"]])
weights = rg.lab.attention_of(model, example.source, example.target_input)[model.cross_attention].dense()[0].mean(0)
assert weights[:-1].argmax(-1).tolist() == list(range(7))
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
left.semilogy(losses, color="#0072B2")
left.set(xlabel="step", ylabel="loss, nats a letter", title="training")
rg.heatmap(weights, [*"copyist", "</s>"], title="cross-attention, mean of 4 heads", axes=right)
right.set(xlabel="letter read", ylabel="letter written next")
rg.drawing.show_or_save("15_copy_task.png")
