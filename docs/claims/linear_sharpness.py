"""Can linear attention attend to one far token? One layer learns to name the token 32 positions away; 3 seeds."""

import torch

import regard as rg

torch.set_num_threads(1)
stops, seeds = (250, 500, 750, 1000, 1250, 1500), (0, 1, 2)


def train(name, seed, steps):
    """Share of right answers after each stop, on new texts."""
    torch.manual_seed(seed)
    plan = rg.nn.TransformerConfig(64, num_heads=2, attention=name)
    model = torch.nn.Sequential(plan.encoder(1, vocab_size=16), torch.nn.Linear(64, 16))
    optimizer, right = torch.optim.Adam(model.parameters(), lr=4e-3), []
    for step in range(1, steps + 1):
        scores = model(ids := torch.randint(16, (16, 64)))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(scores.mT, ids.roll(-32, 1)).backward()
        optimizer.step()
        if step in stops:
            with torch.no_grad():
                ids = torch.randint(16, (200, 64))
                right.append(float((model(ids).argmax(-1) == ids.roll(-32, 1)).float().mean()))
    return right


last = {}
for name, steps in (("full", 250), ("linear", 1500), ("performer", 250)):
    runs = torch.tensor([train(name, seed, steps) for seed in seeds])
    last[name] = runs[:, -1]
    for step, shares in zip(stops, runs.T, strict=False):
        print(f"{name:9} {step:5,} steps: {100 * shares.min():.1f} to {100 * shares.max():.1f} % right (3 seeds)")
assert last["full"].min() > 0.99 and last["linear"].min() > 0.95
assert last["performer"].max() < 0.5
