"""What computes reductions of a map: the columns of the table in test_reductions.py.

A backend gives maps with their exact weights, and what it computes of them. Adding one is an entry of `BACKENDS`.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import distributed

import regard as rg
from exact_reductions import some_reductions, wrong_results
from kernels import DTYPES, LEVELS
from regard.base.shapes import Sizes
from regard.engine.kernel import library
from regard.engine.problem import Problem
from regard.maps import compiled_reductions
from regard.maps.changed_map import HeadMean, PositiveMap, QuerySample
from regard.maps.joined import joined
from regard.maps.scored_map import ScoredMap
from regard.maps.stored import load_map, save_map
from regard.reference import reference
from regard.stats.statistics import Agreement, Allowed, WeightOnKeys

#: A map, and its weights in float64.
Weighed = tuple[rg.AttentionMap, torch.Tensor]


def scored(
    attention,
    *,
    lengths=(23, 29),
    heads=(4, 2),
    width=8,
    dtype=torch.float32,
    engine="blocked",
    learns=False,
    **options,
):
    """A map of drawn tensors, and its weights by the reference."""
    (I, J), (H, G) = lengths, heads
    tensors = [torch.randn(2, n, length, width).to(dtype) for n, length in ((H, I), (G, J), (G, J))]
    with torch.set_grad_enabled(learns):
        weights = attention(*(t.requires_grad_(learns) for t in tensors), engine=engine, **options).weights
    exact = copy.deepcopy(attention).double()
    problem = Problem(exact, *(t.detach().double() for t in tensors), weights.positions, Sizes.of(*tensors))
    return weights, torch.from_numpy(reference(problem)[1])


def plain(mask=None, **options):
    return scored(rg.Attention(mask=rg.causal() if mask is None else mask), **options)


# Maps of scores

ATTENTIONS = {
    "dilated": lambda: rg.Attention(mask=rg.masks.dilated(20, 3)),
    "alibi": lambda: rg.Attention(mask=rg.causal(), bias=rg.ALiBi(4)),
    "t5 and soft cap": lambda: rg.Attention(bias=[rg.biases.T5Bias(4), rg.biases.Softcap(3.0)]),
    "temperature and sink": lambda: rg.Attention(normalizer=rg.normalizers.Softmax(temperature=0.5, sink=1.0)),
    "additive": lambda: rg.Attention(rg.scores.Additive(24, 24, 10), mask=rg.causal()),
}
MASKS = {
    "none": lambda: None,
    "causal": rg.causal,
    "window": lambda: rg.causal() & rg.window(40),
    "documents": lambda: rg.causal() & rg.documents([60, 150, 63]),
    "padding": lambda: rg.padding([130, 0]),
    "predicate": lambda: rg.mask_mod(lambda b, h, i, j: (i + j + h) % 3 > 0),
    "no key": lambda: rg.causal() & ~rg.window(900),
}


def long_maps() -> dict[str, Callable[[], Weighed]]:
    """Of every kind of attention, and of every kind of mask in every dtype."""
    maps = {name: lambda make=make: scored(make(), lengths=(150, 250), width=24) for name, make in ATTENTIONS.items()}
    maps["keys with gaps"] = lambda: scored(
        rg.Attention(mask=rg.causal() & rg.window(190)),
        lengths=(250, 250),
        positions=rg.types.Positions(300, rg.types.Spans.of((0, 100), (150, 300))),
    )
    for dtype in DTYPES:
        size = ((273, 273), (6, 2)) if dtype == torch.float32 else ((140, 273), (4, 2))
        sizes = {"lengths": size[0], "heads": size[1], "width": 16, "dtype": dtype, "engine": "kernel"}
        for name, mask in MASKS.items():
            maps[f"{name}, {dtype}"] = lambda mask=mask, sizes=sizes: scored(rg.Attention(mask=mask()), **sizes)
    return maps


def short_maps(engine="blocked") -> dict[str, Callable[[], Weighed]]:
    """The same kinds of attention over few tokens."""
    masks = (None, rg.causal(), rg.causal() & rg.window(5), rg.padding([29, 0]), rg.documents([9, 20]))
    maps = {repr(mask): lambda mask=mask: scored(rg.Attention(mask=mask), engine=engine) for mask in masks}
    for name in ("alibi", "t5 and soft cap", "temperature and sink"):
        maps[name] = lambda make=ATTENTIONS[name]: scored(make(), engine=engine)
    maps["additive"] = lambda: scored(rg.Attention(rg.scores.Additive(8, 8, 10)), engine=engine)
    return maps


def gaps():
    """Keys of two intervals, before all queries."""
    positions = rg.types.Positions(36, rg.types.Spans.of((0, 12), (19, 36)))
    return scored(rg.Attention(mask=rg.causal() & rg.window(25)), positions=positions)


def without_statistic(make):
    """The map as of a model's own kernel, which returns no row statistic."""

    def made():
        known, w = make()
        return ScoredMap(known.attention, known._prepared, known.positions, known.grid, None), w

    return made


def live_maps():
    """Maps of tensors that require gradients."""
    return {repr(mask): lambda mask=mask: plain(mask, learns=True) for mask in (rg.causal(), rg.padding([29, 0]))}


# Maps that are made of others


def sums(*factors):
    (one, w), (two, x) = plain(), plain(rg.window(6))
    return rg.maps.SumMap([one, two], [*factors]), factors[0] * w + factors[1] * x


def product():
    (write, w), (read, x) = plain(rg.window(9), lengths=(23, 17)), plain(lengths=(17, 29))
    return rg.maps.ProductMap([write, read]), w @ x


def gradients():
    weights, w = plain()
    gradient, value = torch.randn(2, 4, 23, 5), torch.randn(2, 2, 29, 5)
    slopes = gradient.double() @ value.double().repeat_interleave(2, 1).mT
    return rg.maps.GradientMap(weights, gradient, value), w * slopes


def shares_of_gradients():
    weights, w = gradients()
    return weights.shares(), w.abs() / w.abs().sum(-1, keepdim=True)


def positive_gradients():
    weights, w = gradients()
    return PositiveMap(weights), w.clamp_min(0)


def value_weighted():
    weights, w = plain()
    norms = torch.rand(2, 4, 29)
    return rg.maps.ValueWeightedMap(weights, norms), w * norms[:, :, None]


def groups_of_keys():
    q, k = torch.randn(2, 4, 23, 8), torch.randn(2, 4, 28, 8)
    weights = rg.composites.Grouped(rg.Attention(), rg.composites.MeanGroups(2))(q, k, k).weights
    w = (q.double() @ k.double().unflatten(2, (14, 2)).mean(3).mT / 8**0.5).softmax(-1)
    return weights, w.repeat_interleave(2, -1) / 2


def decayed():
    q, k = torch.randn(2, 2, 4, 21, 8)
    attention = rg.Attention(transition=rg.transitions.Decay(-0.1))
    distance = torch.arange(21.0).double()[:, None] - torch.arange(21)
    w = q.double() @ k.double().mT / 8**0.5 * torch.exp(-0.1 * distance)
    return attention(q, k, k).weights, w.tril()


def joined_rows(change=lambda weights: weights):
    """The maps of three calls, as of a decoder with a cache."""
    q, k = torch.randn(2, 4, 23, 8), torch.randn(2, 2, 29, 8)
    attention, parts = rg.Attention(mask=rg.causal()), []
    for start, stop in ((0, 9), (9, 10), (10, 23)):
        keys = k[:, :, : stop + 6]
        parts.append(change(attention(q[:, :, start:stop], keys, keys).weights))
    problem = Problem(
        attention, q.double(), k.double(), k.double(), rg.types.Positions.aligned_to_end(23, 29), Sizes.of(q, k, k)
    )
    return joined(parts), torch.from_numpy(reference(problem)[1])


def selected_heads():
    weights, w = scored(rg.Attention(mask=rg.causal(), bias=rg.ALiBi(4)))
    return weights.select([1], [3, 1]), w[[1]][:, [3, 1]]


def some_queries():
    weights, w = plain()
    queries = torch.tensor([1, 4, 5, 19])
    return QuerySample(weights, queries), w[:, :, queries]


def mean_of_heads():
    weights, w = plain()
    return HeadMean(weights), w.mean(1, keepdim=True)


def matrix():
    w = torch.randn(2, 3, 11, 13, dtype=torch.float64)
    return rg.maps.DenseMap(w), w


def loaded():
    weights, w = plain(rg.causal() & rg.window(5))
    with tempfile.TemporaryDirectory() as folder:
        save_map(Path(folder) / "map.safetensors", weights)
        return load_map(Path(folder) / "map.safetensors"), w


# The columns


def kind_of(reduction):
    return type(reduction).__name__


def reductions_of(weights):
    """Those that the map allows: some need shares, and some need weights that are not negative."""
    of_all_queries = rg.maps.Similarity(), Agreement((0,))
    for reduction in (*some_reductions(*weights.shape, 13), *of_all_queries, rg.maps.SignedMass(), Allowed(weights)):
        needs_sign = reduction.needs_nonnegative or isinstance(reduction, rg.maps.TopLinks | WeightOnKeys)
        if (weights.has_shares or not reduction.needs_shares) and not (weights.is_signed and needs_sign):
            yield reduction


@contextmanager
def small_tiles():
    """Tiles compute, and tiny maps have many of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_reductions, "FEWEST_PAIRS", 1 << 60)
        patch.setattr("regard.maps.attention_map.TILE", (5, 4))
        patch.setattr("regard.maps.transported_map.TILE", (5, 4))
        patch.setattr("regard.maps.attention_map.GAP", 1)
        patch.setattr("regard.maps.attention_map.WORKSPACE", 4096)
        yield


@contextmanager
def kernels(level):
    """Kernels compute, of few pairs and at the lowest level too. To compute a tile is an error.

    Only what depends on distances is left to tiles if keys have gaps.
    """
    weights_of_strip = ScoredMap._weights_of_strip

    def refused(self, *strip, **more):
        computed = "tiles were computed: a kind of reduction that no kernel knows belongs in ON_TILES of this file"
        assert len(self.positions.keys.intervals) > 1, computed
        return weights_of_strip(self, *strip, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_reductions, "FEWEST_PAIRS", 0)
        patch.setattr(library, "LOWEST_LEVEL", 0)
        patch.setenv(library.SETTING, level)
        patch.setattr(ScoredMap, "_weights_of_strip", refused)
        yield


@contextmanager
def ring_of_one():
    """A process group of this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with small_tiles():
            yield
    finally:
        distributed.destroy_process_group()


def detached(result):
    if isinstance(result, torch.Tensor):
        return result.detach()
    parts = [part.detach() for part in result]
    return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)


@dataclass(frozen=True)
class Backend:
    """`maps` by name; what stands `around` the calls; the relative error; reductions that it leaves to another.

    `lacks` names the kinds of reductions that none of its maps has. They have no cell in the table.
    """

    maps: Callable[[], dict[str, Callable[[], Weighed]]]
    around: Callable[[], AbstractContextManager] = small_tiles
    tolerance: float = 1e-5
    leaves: Callable[[str], tuple[str, ...]] = lambda name: ()
    lacks: tuple[str, ...] = ()

    def faults(self) -> dict[str, list[str]]:
        """For each kind of reduction that it computes: what is wrong, and of which map."""
        found = defaultdict(list)
        for name, make in self.maps().items():
            torch.manual_seed(0)
            with self.around():
                weights, w = make()
                reductions = [each for each in reductions_of(weights) if kind_of(each) not in self.leaves(name)]
                results = [detached(result) for result in weights.summarize(*reductions)]
                distance = weights.grid.distance
            wrong = wrong_results(dict(zip(reductions, results, strict=True)), w, distance, self.tolerance)
            for reduction in reductions:
                found[kind_of(reduction)] += [f"{name}: {wrong[reduction]}"] if reduction in wrong else []
        return dict(found)


#: No kernel knows it.
ON_TILES = ("SignedMass",)
#: A map without shares lacks these, and a map with signs also lacks the others.
OF_SHARES = tuple(sorted({kind_of(each) for each in some_reductions(1, 1, 9, 9) if each.needs_shares}))
OF_POSITIVE = (*OF_SHARES, "Pyramid", "TopLinks", "WeightOnKeys")


#: What a kernel knows, but not of every map.
OF_PRODUCTS = ("Similarity", "Agreement")
OF_DISTANCES = ("Distance", "MassWhere", "Offset", "Offsets", "SameToken")


def left_to_tiles(name):
    return (*ON_TILES, *{"additive": OF_PRODUCTS, "keys with gaps": OF_DISTANCES}.get(name, ()))


def wrapped(wrap, maps):
    return {name: wrap(make) for name, make in maps.items()}


def one(make, *given, lacks=()):
    """A column of one map."""
    return Backend(lambda: {make.__name__: functools.partial(make, *given)}, lacks=lacks)


BACKENDS = {
    "tiles": Backend(lambda: short_maps() | {"keys with gaps": gaps}),
    "tiles, without a row statistic": Backend(lambda: wrapped(without_statistic, short_maps())),
    "in the graph": Backend(live_maps),
    "ring": Backend(lambda: short_maps("ring"), ring_of_one),
    "joined maps of scores": one(joined_rows),
    "joined maps of any family": one(joined_rows, PositiveMap, lacks=OF_SHARES),
    "sum of maps": one(sums, 0.25, 0.75),
    "sum of maps with signs": one(sums, 1.0, -0.75, lacks=OF_POSITIVE),
    "product of maps": one(product),
    "gradients": one(gradients, lacks=OF_POSITIVE),
    "shares of gradients": one(shares_of_gradients),
    "positive gradients": one(positive_gradients, lacks=OF_SHARES),
    "value weighted": one(value_weighted, lacks=OF_POSITIVE),
    "groups of keys": one(groups_of_keys),
    "transition": one(decayed, lacks=OF_POSITIVE),
    "selected heads": one(selected_heads),
    "some queries": one(some_queries),
    "mean of heads": one(mean_of_heads),
    "matrix": one(matrix, lacks=OF_POSITIVE),
    "loaded": one(loaded),
} | {
    f"kernels at {level}": Backend(long_maps, functools.partial(kernels, level), 1e-4, left_to_tiles, ON_TILES)
    for level in LEVELS
}
