"""A subclass that overrides a rule is computed as it says, by every engine that accepts it."""

import math

import pytest
import torch

import regard as rg
from regard.engine.plan import ENGINES
from regard.pieces.tensor_bias import TensorBias

N, WIDTH = 6, 8
POSITIONS = rg.types.Positions.aligned_to_end(N, N)


def own_transform(base):
    """A subclass whose scores are divided by 5, and nothing is added."""
    return type("Divided", (base,), {"transform": lambda self, score, grid, rows, cols: score / 5})


def own_term(base):
    """A subclass that adds -0.7 |j - i|."""
    return type("Sloped", (base,), {"term": lambda self, grid, rows, cols: -0.7 * grid.distance.abs().double()})


class Squared(rg.Dot):
    def tile(self, query, key, grid):
        return super().tile(query, key, grid).square()


class Tripled(rg.Dot):
    def prepare(self, query, key):
        return 3 * query, key


def every_second(base):
    """A subclass that allows every second key of those that the base allows, and the query's own."""

    def allowed(self, grid):
        return (base.allowed(self, grid) & (grid.j % 2 == 0)) | (grid.i == grid.j)

    return type("EverySecond", (base,), {"allowed": allowed})


def replaced(piece, name, method):
    """A module with a function in place of a method."""
    setattr(piece, name, method)
    return piece


TABLE = torch.linspace(-1, 1, 2 * 2 * N * N).view(2, 2, N, N)
PIECES = {
    "the transform of a soft cap": lambda: {"bias": own_transform(rg.biases.Softcap)(1.0)},
    "the transform of ShawBias": lambda: {"bias": own_transform(rg.biases.ShawBias)(WIDTH, 2)},
    "the transform of ALiBi": lambda: {"bias": own_transform(rg.ALiBi)(2)},
    "the transform of a tensor": lambda: {"bias": own_transform(TensorBias)(TABLE, 0)},
    "the transform of a cap after ALiBi": lambda: {"bias": [rg.ALiBi(2), own_transform(rg.biases.Softcap)(1.0)]},
    "the term of ShawBias": lambda: {"bias": own_term(rg.biases.ShawBias)(WIDTH, 2)},
    "the term of ALiBi": lambda: {"bias": own_term(rg.ALiBi)(2)},
    "the term of a tensor": lambda: {"bias": own_term(TensorBias)(TABLE, 0)},
    "the term of one ShawBias": lambda: {
        "bias": replaced(rg.biases.ShawBias(WIDTH, 2), "term", lambda grid, rows, cols: -grid.distance.abs().double())
    },
    "nothing of a soft cap before ShawBias": lambda: {
        "bias": [type("Cap", (rg.biases.Softcap,), {})(0.3), rg.biases.ShawBias(WIDTH, 2)]
    },
    "the tile of a dot product": lambda: {"score": Squared()},
    "the vectors of a dot product": lambda: {"score": Tripled()},
    "the rule of causal": lambda: {"mask": every_second(rg.causal)()},
    "the rule of a part of a mask": lambda: {"mask": every_second(rg.causal)() & rg.window(4)},
    "the rule of window": lambda: {"mask": every_second(rg.window)(3)},
    "the rule of padding": lambda: {"mask": every_second(type(rg.padding([4, 6])))(torch.tensor([4, 6]))},
    "the rule of documents": lambda: {"mask": every_second(rg.masks.documents)([2, 4])},
}


def by_definition(attention, query, key, value):
    """The output from the methods of the pieces, on all pairs."""
    grid = rg.types.Grid.whole(POSITIONS, 2, 2, N)
    scores = attention.score.tile(*attention.score.prepare(query, key), grid)
    for bias in attention.bias:
        scores = bias.transform(scores.clone(), grid, *bias.prepare(query, key, POSITIONS))
    if attention.mask is not None:
        scores = scores.masked_fill(~attention.mask.allowed(grid), -math.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("overridden", PIECES)
@torch.no_grad()
def test_a_subclass_is_computed_as_it_says(overridden):
    attention, tensors = rg.Attention(**PIECES[overridden]()), torch.randn(3, 2, 2, N, WIDTH)
    expected, accepting = by_definition(attention, *tensors), set()
    for name in ["auto", *ENGINES]:
        try:
            seen = rg.attend(*tensors, attention=attention, engine=name)
        except rg.RegardError:
            continue
        accepting.add(name)
        torch.testing.assert_close(seen.output, expected, atol=1e-5, rtol=1e-5, msg=name)
        torch.testing.assert_close(seen.weights.dense() @ tensors[2], expected, atol=1e-5, rtol=1e-5, msg=name)
        steps = seen.weights.step_table(4, head=1, batch=1, value=tensors[2])
        torch.testing.assert_close(steps.output, expected[1, 1, 4], atol=1e-5, rtol=1e-5, msg=name)
    assert {"auto", "dense", "blocked"} <= accepting
