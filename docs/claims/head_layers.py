"""In which layers of MiniLM do heads attend to neighbours, and in which to [CLS]? Four texts."""

import inspect

import torch

import regard as rg
from regard.hf.models import load_model

model, tokenizer = load_model("minilm")
verses = [pair.source for pair in rg.data.load_corpus("bible-en-fr").train]
texts = {f"verses from {start:,}": " ".join(verses[start : start + 14]) for start in (0, 5000, 12_000)}
texts["code"] = inspect.getsource(torch.nn.Linear.__init__)


def by_layer(text):
    """Mean over the heads of each layer: the score for "local", and the share of weight on [CLS]."""
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=256).input_ids
    with torch.no_grad(), rg.watch(model) as seen:
        model(ids)
    local = torch.stack([rg.patterns(weights).local.mean() for weights in seen.maps.values()])
    first = torch.stack([weights.dense()[0, :, :, 0].mean() for weights in seen.maps.values()])
    return local, first


for name, text in texts.items():
    local, first = by_layer(text)
    print(f"{name}, layers 0 to 5: local", *(f"{x:.2f}," for x in local), "on [CLS]", *(f"{x:.2f}" for x in first))
    assert local[:3].min() > 0.12 and local[3:].max() < 0.12
    assert first.argmax() in (3, 4) and first[3:5].min() > first[0] and first[5] < 0.6 * first[4]
