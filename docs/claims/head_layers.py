"""In which layers do heads attend to neighbors, and in which to the first token? Four models, up to five texts.

MiniLM comes with `regard[demo]`. packaged_models.py names the packages of the others; those that are missing are
left out. The first token is [CLS] in two of them, <s> in multilingual-e5-small, and the first word in SmolLM2.
"""

import inspect

import torch
from packaged_models import installed

import regard as rg

torch.set_num_threads(1)
pairs = rg.lab.data.load_corpus("bible-en-fr").train
texts = {f"verses from {at:,}": " ".join(pair.source for pair in pairs[at : at + 14]) for at in (0, 5000, 12_000)}
texts["French"] = " ".join(pair.target for pair in pairs[5000:5014])
texts["code"] = inspect.getsource(torch.nn.Linear.__init__)


def by_layer(model, ids):
    """Mean over the heads of each layer: the score for "local", and the weight on the first token, (2, layers)."""
    with torch.no_grad(), rg.watch(model) as seen:
        model(torch.tensor([ids]))
    local = torch.stack([rg.stats.patterns(weights).local.mean() for weights in seen.maps.values()])
    first = torch.stack([weights.dense()[0, :, :, 0].mean() for weights in seen.maps.values()])
    return torch.stack((local, first))


ranges = {}
for name, (model, ids) in installed().items():
    runs = torch.stack([by_layer(model, ids(text)) for text in texts.values()])  # (texts, 2, layers)
    ranges[name] = least, most = runs.amin(0), runs.amax(0)
    print(f"{name}, {len(texts)} texts, {runs.shape[-1]} layers")
    for what, low, high in zip(("local", "on the first token"), least, most, strict=True):
        print(f"  {what}:", ", ".join(f"{a:.2f} to {b:.2f}" for a, b in zip(low, high, strict=True)))
    shares = runs[:, 1, -1] / runs[:, 1].amax(-1)
    layers = runs[:, 1].argmax(-1).tolist()
    print(
        f"  most on the first token: layers {layers}; the last layer has {shares.min():.2f} to {shares.max():.2f} of it"
    )
    if name != "SmolLM2":
        half = runs.shape[-1] // 2
        assert runs[:, 0, : half + 1].amax(-1).min() > 1.5 * runs[:, 0, half + 1 :].amax()  # the early layers are local
        assert shares.max() < 0.6 and runs[:, 1, -1].max() < 0.2

low, high = ranges["MiniLM"]
assert low[0, :3].min() > 0.12 and high[0, 3:].max() < 0.13
if "SmolLM2" in ranges:  # here the middle is more local than the beginning, and late layers attend to the first token
    low, high = ranges["SmolLM2"]
    assert low[0, 11] > high[0, :10].max() and low[1, 20:].min() > 0.3
