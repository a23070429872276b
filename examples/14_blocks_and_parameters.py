"""
# Encoder and decoder blocks, and where their parameters are

An encoder block is self-attention and a feed-forward network. A decoder block also has attention to the encoder
between them. Each part has a residual connection with a norm (Vaswani et al. 2017, arXiv:1706.03762, section 3.1).
Here we compute one block by hand and count all parameters of six. An often quoted count is wrong.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import regard as rg

torch.manual_seed(0)
C, H, inner = 512, 8, 2048


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


# %%
# One encoder block by hand, post-norm as in the paper: norm(x + attention(x)), then norm(x + feed_forward(x)).
paper = rg.nn.TransformerConfig(C, num_heads=H, feed_forward=inner, norm="post", positions="none")
layer, x = paper.encoder(1).layers[0], torch.randn(2, 10, C)
attention, feed = layer.self_attention, layer.feed_forward
q, k, v = ((p(x)).view(2, 10, H, C // H).transpose(1, 2) for p in (attention.query, attention.key, attention.value))
mixed = attention.output(((q @ k.mT / 8).softmax(-1) @ v).transpose(1, 2).flatten(2))
middle = F.layer_norm(x + mixed, (C,))
by_hand = F.layer_norm(middle + feed.outer(F.relu(feed.inner(middle))), (C,))
print(f"the block by hand and by Regard differ by {(layer(x) - by_hand).abs().max():.1g}")
assert torch.allclose(layer(x), by_hand, atol=1e-5)

# %%
# Parameters, counted from the sizes, from Regard's modules and from torch's: all three counts are equal.
attends, feeds, norm = 4 * C * C + 4 * C, 2 * C * inner + inner + C, 2 * C
theirs = nn.TransformerEncoderLayer(C, H, inner), nn.TransformerDecoderLayer(C, H, inner)
encoder, decoder = paper.encoder(6), paper.decoder(6)
sizes = {"encoder block": attends + feeds + 2 * norm, "decoder block": 2 * attends + feeds + 3 * norm}
for (name, expected), stack, torch_layer in zip(sizes.items(), (encoder, decoder), theirs, strict=True):
    assert expected == count(stack.layers[0]) == count(torch_layer) and count(stack) == 6 * expected
    print(f"{name}: {expected:,}, six of them {6 * expected:,}")
pre = rg.nn.TransformerConfig(C, num_heads=H, feed_forward=inner, positions="none").encoder(6)
assert count(pre) == count(encoder) + norm  # pre-norm stacks have one more norm at the end

# %%
# "A six-layer encoder (512, 8 heads, feed-forward 2,048) has 25,690,112 parameters": it does not. This is 98 x 512^2;
# the matrices of six encoder blocks have 72 x 512^2, those of six decoder blocks 96 x 512^2. The paper's 65 million
# for the whole base model include its one table of 37,000 words.
quoted = 25_690_112
print(f"quoted {quoted:,} = {quoted / C**2:g} x 512^2, {quoted / count(encoder):.2f} times those of an encoder")
matrices = [sum(p.numel() for p in stack.parameters() if p.ndim == 2) / C**2 for stack in (encoder, decoder)]
assert quoted == 98 * C**2 and matrices == [72, 96]
whole = count(encoder) + count(decoder) + 37_000 * C
print(f"both stacks and a shared table of 37,000 words: {whole:,}")
assert abs(whole / 65e6 - 1) < 0.04

# %%
# Before training, the last block has larger gradients with post-norm (Xiong et al. 2020, arXiv:2002.04745, theorem
# 1). Figures often show growth from block to block: true of three other matrices (docs/claims/gradient_by_block.py).
gradients = {}
for name, stack in (("post-norm (2017)", encoder), ("pre-norm", pre)):
    (stack(torch.randn(8, 32, C)) * torch.randn(8, 32, C)).mean().backward()
    gradients[name] = [float(block.feed_forward.outer.weight.grad.norm()) for block in stack.layers]
    print(f"{name}: gradient of block 1 {gradients[name][0]:.3f}, of block 6 {gradients[name][-1]:.3f}")
    assert gradients[name][-1] < 0.8 * gradients[name][0]
assert gradients["post-norm (2017)"][-1] > 1.3 * gradients["pre-norm"][-1]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
names, matrices = ["encoder block", "decoder block"], [attends / 1e6, 2 * attends / 1e6]
left.bar(names, matrices, color="#0072B2", label="attention")
left.bar(names, feeds / 1e6, bottom=matrices, color="#E69F00", label="feed-forward")
left.set(ylabel="parameters, millions", title="width 512, 8 heads, feed-forward 2,048", ylim=(0, 5.5))
left.legend()
for (name, norms), colour, marker in zip(gradients.items(), ("#D55E00", "#0072B2"), "s^", strict=True):
    right.plot(range(1, 7), norms, color=colour, marker=marker, label=name)
right.set(xlabel="block", ylabel="norm of the gradient", title="gradient of the feed-forward", ylim=(0, None))
right.legend()
plt.show()
