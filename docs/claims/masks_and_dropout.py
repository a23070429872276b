"""A mask of 0 and minus infinity in code that expects booleans, and the weights that a module returns in training."""

import math

import torch
from torch import nn
from torch.nn import functional as F

import regard as rg

torch.manual_seed(0)
n, width = 6, 8
q, k, v = torch.randn(3, 1, 1, n, width)


def attention_by_hand(mask):
    """As tutorials write it: a key with mask == 0 is forbidden."""
    scores = (q @ k.mT / math.sqrt(width)).masked_fill(mask == 0, -torch.inf)
    return scores.softmax(-1)[0, 0]


added = nn.Transformer.generate_square_subsequent_mask(n)  # 0 where allowed, -inf where forbidden
past = torch.ones(n, n, dtype=torch.bool).tril()
right, reversed_ = attention_by_hand(past), attention_by_hand(added)
print(f"weight on the future: booleans {right[~past].sum():.0f} of {n} rows, 0/-inf {reversed_[~past].nansum():.0f}")
print(f"rows of NaN with 0/-inf: {int(reversed_.isnan().any(-1).sum())} (the last one, which may see every key)")
assert right[~past].sum() == 0 and reversed_[:-1][past[:-1]].sum() == 0 and reversed_[-1].isnan().all()
assert torch.allclose(reversed_[:-1].sum(-1), torch.ones(n - 1))  # it looks like attention
ours = rg.Attention(mask=rg.causal())(q, k, v).weights.dense()[0, 0]
assert torch.allclose(ours, right, atol=1e-6)

# torch drops weights, scales the rest, and returns the result. A row sums to 1 only on average.
sums = {}
for dropout in (0.1, 0.5):
    module = nn.MultiheadAttention(64, 4, dropout=dropout, batch_first=True)
    x = torch.randn(8, 20, 64)
    sums[dropout] = module(x, x, x)[1].sum(-1)  # the mean over four heads
    each = F.dropout(torch.randn(32, 4, 20, 20).softmax(-1), dropout).sum(-1)
    least, mean, most = sums[dropout].min(), sums[dropout].mean(), sums[dropout].max()
    print(f"dropout {dropout}: row sums {least:.2f} to {most:.2f}, mean {mean:.2f};", end=" ")
    print(f"of one head {each.min():.2f} to {each.max():.2f}")
    assert sums[dropout].max() > 1.05 and abs(sums[dropout].mean() - 1) < 0.02
    assert torch.allclose(module.eval()(x, x, x)[1].sum(-1), torch.ones(8, 20), atol=1e-5)
