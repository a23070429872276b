"""When do the heads of a layer stay alike? The task of heads_and_steps.py, 400 steps, 3 seeds."""

import torch
from torch import nn

import regard as rg

torch.set_num_threads(1)
width, length, symbols, offsets, seeds = 32, 32, 16, (1, 2, 4, 8), (1, 2, 3)


def batch_of(count):
    ids = torch.randint(symbols, (count, length))
    return ids, torch.stack([ids.roll(offset, 1) for offset in offsets], -1)


@torch.no_grad()
def look(model):
    """Share of right answers, and the mean cosine of the maps of two heads."""
    ids, answer = batch_of(100)
    with rg.watch(model.eval()) as seen:
        right = (model(ids)[:, 8:].argmax(-1) == answer[:, 8:]).double().mean()
    maps = nn.functional.normalize(seen[0].dense().transpose(0, 1).flatten(1), dim=1)  # one vector a head
    cosines = maps @ maps.T
    model.train()
    return float(right), float(cosines[~torch.eye(len(maps), dtype=torch.bool)].mean())


def train(num_heads, dropout, seed):
    torch.manual_seed(seed)
    encoder = rg.nn.TransformerConfig(width, num_heads, dropout=dropout).encoder(1, vocab_size=symbols)
    model = nn.Sequential(encoder, nn.Linear(width, 4 * symbols), nn.Unflatten(-1, (4, symbols)))
    optimizer, before = torch.optim.Adam(model.parameters(), lr=4e-3), look(model)
    for _ in range(400):
        ids, answer = batch_of(32)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids)[:, 8:].flatten(0, 2), answer[:, 8:].flatten()).backward()
        optimizer.step()
    return before, look(model)


cosines = {}
for num_heads, dropout in ((4, 0.0), (4, 0.3), (16, 0.0)):
    runs = torch.tensor([train(num_heads, dropout, seed) for seed in seeds])  # (seeds, before and after, 2)
    cosines[num_heads, dropout] = runs[:, 1, 1]
    (right, _), (_, before), (_, after) = runs[:, 1].T, runs[:, 0].T, runs[:, 1].T
    print(f"{num_heads:2} heads of width {width // num_heads}, dropout {dropout}: cosine of two heads", end=" ")
    print(f"{before.min():.2f} to {before.max():.2f} before, {after.min():.2f} to {after.max():.2f} after;", end=" ")
    print(f"{100 * right.min():.0f} to {100 * right.max():.0f} % right")
assert cosines[4, 0.0].max() < 0.3 < min(cosines[4, 0.3].min(), cosines[16, 0.0].min())
