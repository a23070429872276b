"""
# Encoder and decoder blocks, and where their parameters are

An encoder block is self-attention and a feed-forward network. A decoder block also has attention to the encoder
between them. Each part has a residual connection with a norm (Vaswani et al. 2017, arXiv:1706.03762, section 3.1). We
compute one block by hand, count the parameters of six (a quoted count is wrong), and measure where gradients grow.
"""

import matplotlib.pyplot as plt
import torch

import regard as rg

torch.manual_seed(0)
C, H, inner = 512, 8, 2048
post, pre = (rg.nn.TransformerConfig(C, H, feed_forward=inner, norm=n, positions="none") for n in ("post", "pre"))


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


# %%
# One encoder block by hand, post-norm as in the paper: norm(x + attention(x)), then norm(x + feed_forward(x)).
layer, x = post.encoder(1).layers[0], torch.randn(2, 10, C)
attention, feed = layer.self_attention, layer.feed_forward
q, k, v = ((p(x)).view(2, 10, H, C // H).transpose(1, 2) for p in (attention.query, attention.key, attention.value))
mixed = attention.output(((q @ k.mT / 8).softmax(-1) @ v).transpose(1, 2).flatten(2))
middle = torch.nn.functional.layer_norm(x + mixed, (C,))
by_hand = torch.nn.functional.layer_norm(middle + feed.outer(feed.inner(middle).relu()), (C,))
assert torch.allclose(layer(x), by_hand, atol=1e-5)

# %%
# Parameters, counted from the sizes, from Regard's modules and from torch's: all three counts are equal.
attends, feeds, norm = 4 * C * C + 4 * C, 2 * C * inner + inner + C, 2 * C
theirs = torch.nn.TransformerEncoderLayer(C, H, inner), torch.nn.TransformerDecoderLayer(C, H, inner)
encoder, decoder = post.encoder(6), post.decoder(6)
expected = {"encoder block": attends + feeds + 2 * norm, "decoder block": 2 * attends + feeds + 3 * norm}
for (name, number), stack, torch_layer in zip(expected.items(), (encoder, decoder), theirs, strict=True):
    assert number == count(stack.layers[0]) == count(torch_layer) and count(stack) == 6 * number
    print(f"{name}: {number:,}, six of them {6 * number:,}")
assert count(pre.encoder(6)) == count(encoder) + norm  # pre-norm stacks have one more norm at the end

# %%
# "A six-layer encoder (512, 8 heads, feed-forward 2,048) has 25,690,112 parameters": it does not. This is 98 x 512^2;
# the matrices of six encoder blocks have 72 x 512^2, those of six decoder blocks 96 x 512^2. The paper's 65 million
# for the whole base model include its one table of 37,000 words.
assert [sum(p.numel() for p in stack.parameters() if p.ndim == 2) / C**2 for stack in (encoder, decoder)] == [72, 96]
whole = count(encoder) + count(decoder) + 37_000 * C
print(f"both stacks and a shared table of 37,000 words: {whole:,}")
assert 98 * C**2 == 25_690_112 and abs(whole / 65e6 - 1) < 0.04

# %%
# "Before training, gradients grow from block to block with post-norm": in three of the six matrices of a block. With
# pre-norm none grows (two do, a little, with Xavier's initialization). What holds (Xiong et al. 2020, theorem 1,
# arXiv:2002.04745): the outer feed-forward matrix of the last block has larger gradients with post-norm.
grows, last, (figure, (left, right)) = {}, {}, plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
colors = {"post-norm": "#D55E00", "post-norm, Xavier": "#E69F00", "pre-norm": "#0072B2", "pre-norm, Xavier": "#56B4E9"}
for place, (name, color) in enumerate(colors.items()):
    norms = torch.empty(3, 2, 6)  # 3 seeds, the first and the last block, 6 matrices
    for seed in range(3):
        torch.manual_seed(seed)
        stack = (post if "post" in name else pre).encoder(6)
        for matrix in (p for p in stack.parameters() if "Xavier" in name and p.ndim == 2):
            torch.nn.init.xavier_uniform_(matrix)
        (stack(torch.randn(8, 32, C)) * torch.randn(8, 32, C)).mean().backward()
        norms[seed] = torch.tensor([[p.grad.norm() for p in b.parameters() if p.ndim == 2] for b in stack.layers[::5]])
    ratios, last[name] = norms[:, 1] / norms[:, 0], norms[:, 1, 5]
    grows[name] = (ratios > 1).all(0).tolist()
    print(f"{name}: block 6 / block 1, query to outer", *(f"{min(x):.2f} to {max(x):.2f}" for x in ratios.T.tolist()))
    right.plot(torch.arange(18) % 6 + 0.15 * place - 0.2, ratios.flatten(), "os^D"[place], c=color, label=name)
assert grows["post-norm"] == grows["post-norm, Xavier"] == [False, False, True, True, True, False]
assert not any(grows["pre-norm"]) and last["post-norm"].min() > 1.3 * last["pre-norm"].max()
right.set_xticks(range(6), ["query", "key", "value", "output", "feed-\nforward,\ninner", "feed-\nforward,\nouter"])
right.set(ylabel="gradient, block 6 / block 1", title="6 matrices of a block, 3 seeds", ylim=(0, 3.2))
parts = [attends / 1e6, 2 * attends / 1e6]
left.bar(list(expected), parts, color="#0072B2", label="attention")
left.bar(list(expected), feeds / 1e6, bottom=parts, color="#E69F00", label="feed-forward")
left.set(ylabel="parameters, millions", title="width 512, 8 heads, feed-forward 2,048", ylim=(0, 5.5)), left.legend()
right.legend(ncols=2), right.axhline(1, color="black", ls=":"), rg.drawing.show_or_save("14_blocks_and_parameters.png")
