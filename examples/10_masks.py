"""
# Causal and padding masks, a leak, an empty row, and a mask that broadcasts wrongly

A causal mask hides the future, a padding mask hides what fills a batch up. Both fail silently: a model that leaks
trains very well, and a mask of the wrong axes still broadcasts. Here each failure is made on purpose and then found:
a leak by changing the future, a row that may see nothing, and a mask that torch takes and Regard refuses.
"""

import matplotlib.pyplot as plt
import torch

import regard as rg

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 4, 10, 16)

# %%
# Change the last 4 of 10 keys and values. Under a causal mask no output before them may move, not even in its last
# bit. An off-by-one mask (j <= i + 1) leaks one token: the output just before the change moves.
off_by_one = rg.mask_mod(lambda b, h, i, j: j <= i + 1)
later_k, later_v = k.clone(), v.clone()
later_k[:, :, 6:], later_v[:, :, 6:] = torch.randn(2, 1, 4, 4, 16)
moved = {}
for name, mask in (("no mask", None), ("causal", rg.causal()), ("off by one", off_by_one)):
    attention = rg.Attention(mask=mask)
    before, after = rg.attend(attention, q, k, v), rg.attend(attention, q, later_k, later_v)
    moved[name] = (after.output - before.output).abs().amax((0, 1, 3))
    leaks = [finding.kind for finding in rg.mask_findings({"layer 0": before.weights}, causal=True)]
    print(f"{name:10}: outputs 0 to 5 move by {moved[name][:6].max():.2g}; rg.mask_findings says {leaks}")
assert moved["causal"][:6].max() == 0 and moved["causal"][6:].min() > 0.01
assert moved["off by one"][:5].max() == 0 and moved["off by one"][5] > 0.01 and moved["no mask"].min() > 0.01

# %%
# Padding on the left and a causal mask leave rows that may see nothing at all. Adding -1e9 rounds every score away:
# such a row averages keys that it must not see. Minus infinity gives 0 / 0. Regard gives 0, and a gradient of 0.
real = torch.tensor([[False] * 3 + [True] * 7])
may = torch.ones(10, 10, dtype=torch.bool).tril() & real
scores = q @ k.mT / 4
finite = (scores + torch.where(may, 0.0, -1e9)).softmax(-1)
infinite = scores.masked_fill(~may, -torch.inf).softmax(-1)
q.requires_grad_()
seen = rg.attend(rg.Attention(mask=rg.causal() & rg.padding(real)), q, k, v)
seen.output.sum().backward()
print(f"row 0 may see nothing. -1e9: {finite[0, 0, 0].unique().tolist()} on all 10 keys; -inf: {infinite[0, 0, 0, 0]}")
nothing = seen.output.detach()[0, 0, 0].abs().max(), q.grad[0, 0, 0].abs().max()
print(f"Regard: output {nothing[0]:g}, gradient {nothing[1]:g}")
print(f"-1e9 in float16 is {float(torch.tensor(-1e9).half())}, so half precision gets the NaN all the same")
assert torch.equal(finite[0, 0, 0], torch.full((10,), 0.1)) and infinite[0, 0, 0].isnan().all()
assert not seen.output[..., :3, :].any() and not q.grad[..., :3, :].any() and q.grad.isfinite().all()
assert torch.equal(finite[:, :, 3:], infinite[:, :, 3:])  # on any other row the two are the same, bit for bit

# %%
# A batch of 4 texts and 4 heads, and one mask a text: (batch, queries, keys). Added to scores (batch, heads, queries,
# keys) it is read as (heads, queries, keys): head 1 of EVERY text gets the mask of text 1. torch runs it.
q, k, v = torch.randn(3, 4, 4, 10, 16)
lengths = torch.tensor([10, 7, 4, 2])
wrong = (torch.arange(10) < lengths[:, None])[:, None].expand(4, 10, 10)
sdpa = torch.nn.functional.scaled_dot_product_attention
silent, meant = sdpa(q, k, v, attn_mask=wrong), sdpa(q, k, v, attn_mask=wrong[:, None])
print(f"torch takes both, and they differ by {(silent - meant).abs().max():.2f}")
assert (silent - meant).abs().max() > 0.5
assert torch.allclose(rg.attend(rg.Attention(mask=rg.padding(lengths)), q, k, v).output, meant, atol=1e-6)
try:
    rg.mask_tensor(wrong)
    raise SystemExit("the wrong mask was taken")
except rg.RegardError as error:
    print(f"Regard: {error}")

# %%
# How far each output moved when keys and values 6 to 9 changed, and the weights of the text with padding.
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for (name, change), colour, marker in zip(moved.items(), ("#999999", "#0072B2", "#D55E00"), "s^o", strict=True):
    left.plot(change, marker=marker, color=colour, label=name)
left.axvline(5.5, color="black", linestyle=":")
left.set(xlabel="query", ylabel="change of its output", title="keys from 6 on were changed")
left.legend()
image = right.imshow(seen.weights[0, 0], cmap="cividis", vmin=0, vmax=1)
right.set(xlabel="key", ylabel="query", title="causal, 3 tokens of padding first")
figure.colorbar(image, ax=right, label="weight")
plt.show()
