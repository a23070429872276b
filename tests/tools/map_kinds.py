"""Maps of every kind: those of every mechanism of the catalog, and those that are made of other maps."""

from __future__ import annotations

import torch

import regard as rg
from regard.catalog import mechanisms
from regard.maps.changed_map import HeadMean, PositiveMap, QuerySample
from regard.maps.joined import joined


def of_mechanism(name):
    attention, *inputs = mechanisms()[name].example()
    tensors = mechanisms()[name].tensors(attention, *inputs)
    return attention(*inputs, **tensors).weights


def plain(I=9, J=11, mask=None, dtype=None, batch=2, heads=3):
    q, k = torch.randn(batch, heads, I, 4, dtype=dtype), torch.randn(batch, heads, J, 4, dtype=dtype)
    return rg.Attention(mask=rg.causal() if mask is None else mask)(q, k, k).weights


def signed():
    weights = plain()
    return rg.maps.GradientMap(weights, torch.randn(2, 3, 9, 4), torch.randn(2, 3, 11, 4))


def negative():
    """No weight is above 0, and keys that the mask hides weigh 0."""
    return rg.maps.SumMap([plain()], [-1.0])


def steps():
    q, k = torch.randn(2, 2, 3, 5, 4)
    attention = rg.Attention(mask=rg.causal(), normalizer=rg.normalizers.Sigmoid())
    return joined([attention(q[:, :, i : i + 1], *[k[:, :, : i + 1]] * 2).weights for i in range(5)])


#: Maps that are made of others, and lengths and masks at the ends of what is possible.
MADE = {
    "no queries": lambda: plain(I=0),
    "no keys": lambda: plain(J=0),
    "no batch": lambda: plain(batch=0),
    "one weight": lambda: plain(1, 1, batch=1, heads=1),
    "empty rows": lambda: plain(mask=rg.padding([0, 6])),
    "a window": lambda: plain(mask=rg.causal() & rg.window(2)),
    "bfloat16": lambda: plain(dtype=torch.bfloat16),
    "float16": lambda: plain(dtype=torch.float16),
    "float64": lambda: plain(dtype=torch.float64),
    "mean of heads": lambda: HeadMean(plain()),
    "shares": lambda: signed().shares(),
    "signed": signed,
    "negative": negative,
    "positive": lambda: PositiveMap(signed()),
    "some queries": lambda: QuerySample(plain(), torch.tensor([1, 4, 5])),
    "steps": steps,
    "table": lambda: rg.maps.DenseMap(torch.randn(2, 3, 4, 5)),
    "matrix": lambda: rg.maps.DenseMap(torch.randn(2, 3, 4, 5, dtype=torch.float64)),
    "value weighted": lambda: rg.maps.ValueWeightedMap(plain(), torch.rand(2, 3, 11)),
    "selected": lambda: plain().select([1], [2, 0]),
}
NAMES = sorted([*mechanisms(), *MADE])


def map_of(name):
    return MADE[name]() if name in MADE else of_mechanism(name)
