"""
# How heads go wrong: uniform and collapsed

For each token, an encoder layer predicts the tokens 1, 2, 4 and 7 positions before it. Four heads learn this well if
each attends to another position. With normalized queries and keys and no temperature, every head stays an average.
With much dropout, the heads stay alike. Findings read the maps alone; they need no correct model to compare with.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import regard as rg

torch.set_num_threads(1)
SYMBOLS, LENGTH, WIDTH, PLACES, STEPS = 12, 24, 32, (1, 2, 4, 7), 300
names = [str(position) for position in range(LENGTH)]


def texts(count):
    ids = torch.randint(SYMBOLS, (count, LENGTH))
    return ids, torch.stack([ids.roll(place, 1) for place in PLACES], -1)


# %%
# Agreement is the cosine of the maps of two heads after the mean row of each map is subtracted. Before training the
# plain cosine is already high, because all rows are broad; agreement is 0.
def look(model):
    ids, answers = texts(100)
    with torch.no_grad(), rg.watch(model.eval()) as seen:
        percent = 100 * float((model(ids).argmax(-1) == answers)[:, 7:].double().mean())
    model.train()
    return percent, seen[0], rg.profile(seen.maps, names)


def mean_of_pairs(cosines):
    return float(cosines[~torch.eye(len(cosines), dtype=torch.bool)].mean())


# %%
# Three models. After training, the right heads differ, and findings name the two others.
kinds = {"right": [], "uniform": ["uniform"], "dropout": ["collapse"]}
figure, axes = plt.subplots(2, 3, figsize=(8, 4.6), layout="constrained", sharey="row")
results = {}
for fault, (above, below) in zip(kinds, axes.T, strict=True):
    torch.manual_seed(0)
    encoder = rg.nn.TransformerConfig(WIDTH, dropout=0.3 * (fault == "dropout")).encoder(1, vocab_size=SYMBOLS)
    if fault == "uniform":  # the cosine of a query and a key, still divided by sqrt(8): scores from -0.35 to 0.35
        encoder.layers[0].self_attention.attention = rg.Attention(rg.scores.Cosine(8**-0.5))
    model = nn.Sequential(encoder, nn.Linear(WIDTH, 4 * SYMBOLS), nn.Unflatten(-1, (4, SYMBOLS)))
    optimizer, losses, (_, _, before) = torch.optim.Adam(model.parameters(), lr=5e-3), [], look(model)
    for _ in range(STEPS):
        ids, answers = texts(32)
        loss = cross_entropy(model(ids)[:, 7:].flatten(0, 2), answers[:, 7:].flatten())
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        losses.append(loss.item())
    percent, weights, after = look(model)
    cosines = [mean_of_pairs(p.layers[0].similarity) for p in (before, after)]
    agreement = [mean_of_pairs(p.layers[0].agreement) for p in (before, after)]
    found = [f for f in rg.findings(after) if f.kind in ("uniform", "collapse")]
    results[fault] = percent
    print(f"{fault}: {percent:.0f} % right; cosine {cosines[0]:.2f} -> {cosines[1]:.2f}", end=", ")
    print(f"agreement {agreement[0]:.2f} -> {agreement[1]:.2f}")
    print(*(f"  {finding.kind}: {finding.sentence}\n" for finding in found), sep="", end="")
    assert set(kinds[fault]) <= {f.kind for f in found} and (kinds[fault] or not found)
    assert abs(agreement[0]) < 0.1 and (fault == "right" or percent < results["right"] - 15)
    above.plot(losses, color="#D55E00"), above.set(title=fault, xlabel="step")
    rg.heatmap(weights, head="mean", title="mean of 4 heads", axes=below, colorbar=False), below.label_outer()
axes[0, 0].set(ylabel="training loss, nats")
figure.colorbar(below.images[0], ax=axes[1], label="weight, square root scale")
rg.drawing.show_or_save("26_heads_go_wrong.png")
