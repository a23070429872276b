"""
# Causal and padding masks, a leak, an empty row, and a mask that broadcasts wrongly

A causal mask hides the future. A padding mask hides the tokens that fill up a batch. Both can fail silently: a model
that leaks trains very well, and a mask with wrong axes is still broadcast. Here we make each failure and detect it: a
leak, a row without any allowed key, and a mask that torch accepts and Regard refuses.
"""

import matplotlib.pyplot as plt
import torch

import regard as rg

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 4, 10, 16)

# %%
# Change the last 4 of 10 keys and values. Under a causal mask no earlier output may change, not even in its last bit.
# A mask with an off-by-one error (j <= i + 1) leaks one token: the output just before the change also changes.
off_by_one = rg.mask_mod(lambda b, h, i, j: j <= i + 1)
later_k, later_v = k.clone(), v.clone()
later_k[:, :, 6:], later_v[:, :, 6:] = torch.randn(2, 1, 4, 4, 16)
changed = {}
for name, mask in (("no mask", None), ("causal", rg.causal()), ("off by one", off_by_one)):
    attention = rg.Attention(mask=mask)
    before, after = attention(q, k, v), attention(q, later_k, later_v)
    changed[name] = (after.output - before.output).abs().amax((0, 1, 3))
    leaks = [finding.kind for finding in rg.stats.mask_findings({"layer 0": before.weights}, causal=True)]
    print(f"{name:10}: outputs 0 to 5 change by {changed[name][:6].max():.2g}; rg.stats.mask_findings says {leaks}")
assert changed["causal"][:6].max() == 0 and changed["causal"][6:].min() > 0.01
assert changed["off by one"][:5].max() == 0 and changed["off by one"][5] > 0.01 and changed["no mask"].min() > 0.01

# %%
# With padding on the left and a causal mask, some rows have no allowed key. -1e9 rounds all their scores to the same
# number: such a row averages forbidden keys. Minus infinity gives 0 / 0. Regard gives 0, and a gradient of 0.
real = torch.tensor([[False] * 3 + [True] * 7])
allowed = torch.ones(10, 10, dtype=torch.bool).tril() & real
scores = q @ k.mT / 4
finite = (scores + torch.where(allowed, 0.0, -1e9)).softmax(-1)
infinite = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
q.requires_grad_()
seen = rg.Attention(mask=rg.causal() & rg.padding(real))(q, k, v)
seen.output.sum().backward()
print(f"row 0 is empty. -1e9: {finite[0, 0, 0].unique().tolist()} on all 10 keys; -inf: {infinite[0, 0, 0, 0]}")
nothing = seen.output.detach()[0, 0, 0].abs().max(), q.grad[0, 0, 0].abs().max()
print(f"Regard: output {nothing[0]:g}, gradient {nothing[1]:g}")
print(f"-1e9 in float16 is {float(torch.tensor(-1e9).half())}, so half precision also gives NaN")
assert torch.equal(finite[0, 0, 0], torch.full((10,), 0.1)) and infinite[0, 0, 0].isnan().all()
assert not seen.output[..., :3, :].any() and not q.grad[..., :3, :].any() and q.grad.isfinite().all()
assert torch.equal(finite[:, :, 3:], infinite[:, :, 3:])  # all other rows are equal, bit for bit

# %%
# 4 texts, 4 heads, and one mask for each text: (batch, queries, keys). Scores are (batch, heads, queries, keys), so
# it is read as (heads, queries, keys): head 1 of EVERY text gets the mask of text 1. torch accepts it.
q, k, v = torch.randn(3, 4, 4, 10, 16)
lengths = torch.tensor([10, 7, 4, 2])
wrong = (torch.arange(10) < lengths[:, None])[:, None].expand(4, 10, 10)
sdpa = torch.nn.functional.scaled_dot_product_attention
wrong_output, right_output = sdpa(q, k, v, attn_mask=wrong), sdpa(q, k, v, attn_mask=wrong[:, None])
errors = (wrong_output - right_output).abs().amax((2, 3))  # (texts, heads): right where both have the same number
print(f"torch accepts both masks, and the outputs differ by {errors.max():.2f}")
assert errors.max() > 0.5 and errors.diagonal().max() < 1e-6
assert torch.allclose(rg.Attention(mask=rg.padding(lengths))(q, k, v).output, right_output, atol=1e-6)
try:
    rg.mask_tensor(wrong)
    raise SystemExit("the wrong mask was accepted")
except rg.RegardError as error:
    print(f"Regard: {error}")

# %%
# The change of outputs, a map whose rows 0 to 2 are empty, and the errors of the mask that broadcasts wrongly.
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
for (name, change), color, marker in zip(changed.items(), ("#999999", "#0072B2", "#D55E00"), "s^o", strict=True):
    left.plot(change, marker=marker, color=color, label=name)
left.axvline(5.5, color="black", linestyle=":"), left.legend()
left.set(xlabel="query", ylabel="largest change of its output", title="keys 6 to 9 changed")
rg.heatmap(seen.weights, head=0, axes=middle, title="causal, and 3 tokens of padding first")
image = right.imshow(errors, cmap="Greys", vmin=0)
right.set(xlabel="head", ylabel="text", title="a mask that broadcasts wrongly", xticks=range(4), yticks=range(4))
figure.colorbar(image, ax=right, label="largest error of the output"), rg.drawing.show_or_save("10_masks.png")
