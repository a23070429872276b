"""A task that needs four positions at once, learned by one layer of 1, 4, 8 and 16 heads: 800 steps, 6 seeds.

At each position of 32 random symbols the layer must name the symbols 1, 2, 4 and 8 positions before. Its width is 32.
"""

import torch
from torch import nn

import regard as rg

torch.set_num_threads(1)
width, length, symbols, offsets = 32, 32, 16, (1, 2, 4, 8)
heads, seeds, stops = (1, 4, 8, 16), (1, 2, 3, 21, 22, 23), (200, 400, 600, 800)


def batch_of(count):
    ids = torch.randint(symbols, (count, length))
    return ids, torch.stack([ids.roll(offset, 1) for offset in offsets], -1)


def train(num_heads, seed):
    """Shares of right answers by offset, after each stop, (4 stops, 4 offsets)."""
    torch.manual_seed(seed)
    encoder = rg.nn.TransformerConfig(width, num_heads).encoder(1, vocab_size=symbols)
    model = nn.Sequential(encoder, nn.Linear(width, 4 * symbols), nn.Unflatten(-1, (4, symbols)))
    optimizer, right = torch.optim.Adam(model.parameters(), lr=4e-3), []
    for step in range(1, max(stops) + 1):
        ids, answer = batch_of(32)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids)[:, 8:].flatten(0, 2), answer[:, 8:].flatten()).backward()
        optimizer.step()
        if step in stops:
            with torch.no_grad():
                ids, answer = batch_of(200)
                right.append((model(ids)[:, 8:].argmax(-1) == answer[:, 8:]).double().mean((0, 1)))
    return torch.stack(right)


learned = {}
for num_heads in heads:
    runs = torch.stack([train(num_heads, seed) for seed in seeds])  # (seeds, stops, offsets)
    learned[num_heads] = (runs > 0.5).sum(-1)  # how many of the four positions are found
    print(f"{num_heads:2} heads, right:", end="")
    for step, right in zip(stops, 100 * runs.mean(-1).T, strict=True):
        print(f" {step} steps {right.min():.1f} to {right.max():.1f} %;", end="")
    print(f" positions found in the end, one number a seed: {learned[num_heads][:, -1].tolist()}")
assert learned[1][:, -1].min() >= 2  # one head is not limited to one position
assert learned[8][:, -1].double().mean() > learned[1][:, -1].double().mean()
assert learned[8][:, -1].min() >= 3 and learned[16][:, -1].min() < 4  # no number of heads finds all four in each seed
