"""
# Query, key, value: a dictionary that answers with a blend

A dictionary returns the value of the one key that equals the query. Attention compares the query with every key by
their dot product, turns the scores into weights that sum to 1, and returns the weighted mean of all values (Graves,
Wayne & Danihelka 2014, arXiv:1410.5401; Miller et al. 2016, arXiv:1606.03126). A temperature T divides the scores
first. If T goes to 0, attention becomes the dictionary; if T grows, the answer becomes the mean of all values.
"""

import matplotlib.pyplot as plt
import torch

import regard as rg

# %%
# Four entries. A key is a direction in the plane, a value a speed in km/h. The catalog's `soft_lookup` scores by
# the plain dot product. Tensors are (batch, heads, length, width).
names, degrees, speeds = ["dog", "wolf", "bus", "car"], [0, 50, 180, 240], [45.0, 60.0, 90.0, 130.0]


def directions(degrees):
    radians = torch.as_tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack((radians.cos(), radians.sin()), -1)[None, None]


def lookup(temperature, queries, keys, values):
    return rg.mechanism("soft_lookup").build(temperature)(queries, keys, values)


keys, values = directions(degrees), torch.tensor(speeds, dtype=torch.float64)[None, None, :, None]
query = directions([35])  # an animal that is closer to a wolf than to a dog
scores = (query @ keys.mT)[0, 0, 0]
for temperature in (100.0, 1.0, 0.1, 0.01, 0.0):
    seen = lookup(temperature, query, keys, values)
    weights = " ".join(f"{name} {w:.3f}" for name, w in zip(names, seen.weights[0, 0, 0], strict=True))
    print(f"T = {temperature:6.2f}: {weights}, answer {seen.output.item():6.2f} km/h")
    assert temperature == 0 or torch.allclose(seen.weights[0, 0, 0], (scores / temperature).softmax(0))

# %%
# At T = 0 attention is the dictionary: for a query that equals a key, it returns the value of that key alone. For a
# small T the difference has a known bound: all other weights together are at most (n - 1) exp(-gap / T), where gap is
# the difference of the two best scores.
assert lookup(0.0, keys, keys, values).output.flatten().tolist() == speeds
assert torch.allclose(lookup(1e9, query, keys, values).output, values.mean())
for temperature in (0.1, 0.03, 0.01):
    others = 1 - lookup(temperature, query, keys, values).weights[0, 0, 0].max()
    bound = 3 * torch.exp(scores.topk(2).values.diff()[0] / temperature)
    print(f"T = {temperature:4.2f}: weight of all others {others:.1e}, at most {bound:.1e}")
    assert others <= bound

# %%
# Why soft? The gradient of a soft lookup says how to change the query for a better answer. A hard lookup has no such
# gradient: a small change of the query does not change the answer, so its derivative is 0 where it exists, and
# PyTorch gets none.
for temperature in (1.0, 0.1, 0.03, 0.01):
    learned = query.clone().requires_grad_()
    gradient = torch.autograd.grad(lookup(temperature, learned, keys, values).output.sum(), learned)[0]
    print(f"T = {temperature:4.2f}: |d answer / d query| = {gradient.norm():.2g} km/h")
assert gradient.norm() < 0.001 and not lookup(0.0, learned, keys, values).output.requires_grad

# %%
# It is often said that attention finds the most similar key. But a dot product also depends on the length of the key.
# For a query at 100 degrees the wolf is nearest, but the bus wins if its key is 8 times as long. `Cosine` compares
# only directions.
longer = keys * torch.tensor([1.0, 1.0, 8.0, 1.0], dtype=torch.float64)[:, None]
for attention, expected in ((rg.mechanism("soft_lookup").build(0.0), "bus"), (rg.mechanism("cosine").build(), "wolf")):
    nearest = [names[attention(directions([100]), k, values).weights.top(1).keys.item()] for k in (keys, longer)]
    print(f"{attention.score!r}: {nearest[0]}, with a longer bus {nearest[1]}")
    assert nearest == ["wolf", expected]

# %%
# The answer for every direction of the query: the temperature turns a smooth curve into the steps of a dictionary.
angles = torch.arange(-60, 300, 1.0)
for T, color in ((1.0, "#E69F00"), (0.3, "#009E73"), (0.1, "#0072B2"), (0.0, "black")):
    plt.plot(angles, lookup(T, directions(angles), keys, values).output.flatten(), color=color, label=f"T = {T}")
plt.scatter(degrees, speeds, color="#D55E00", zorder=3, label="keys and values")
plt.gca().set(title="One lookup, four temperatures", xlabel="direction of the query (degrees)", ylabel="answer (km/h)")
plt.legend(), rg.drawing.show_or_save("02_soft_dictionary.png")
