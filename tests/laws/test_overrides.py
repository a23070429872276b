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


def by_place(base):
    """A subclass of a bias of distances that adds a number for each key, whatever its distance."""
    return type("ByPlace", (base,), {"term": lambda self, grid, rows, cols: -0.3 * grid.j.double()})


def own_weights(base):
    """A subclass whose weights are 3 times those of the base."""
    weights = base.weights
    return type("Tripled", (base,), {"weights": lambda self, *of: 3 * weights(self, *of)})


def own_statistic(base):
    """A subclass whose scores are halved for the statistic, but not for the weights."""
    statistic = base.row_statistic
    return type("Loose", (base,), {"row_statistic": lambda self, s, columns: statistic(self, s / 2, columns)})


class Warmer(rg.normalizers.Softmax):
    def tempered(self, scores):
        return scores / 3


def halved(base):
    """A subclass with half of the weights: log 2 more in the statistic of each row."""

    def finish(self, statistic):
        logsumexp, *remainder = base.finish(self, statistic)
        return logsumexp + math.log(2), *remainder

    return type("Halved", (base,), {"finish": finish})


class Later(rg.RoPE):
    def encode_query(self, x, positions):
        return self.encode(x, positions + 2)


class Doubled(rg.encodings.QKNorm):
    def encode_key(self, x, positions):
        return 2 * super().encode_key(x, positions)


class Slow(rg.RoPE):
    def frequencies(self):
        return super().frequencies() / 7


class Halves(rg.encodings.LinearScaling):
    def __call__(self, frequencies):
        return frequencies / 2


class Loud(rg.encodings.LinearScaling):
    magnitude = 3.0


class Filter(rg.transitions.Taps):
    def transform(self, score, grid, rows, cols):
        return score + grid.distance


class Relu(rg.scores.EluPlusOne):
    def __call__(self, query, key):
        return query.relu() + 0.5, key.relu() + 0.5


def sink(base):
    """A normalizer with a sink that differs between the heads."""
    normalizer = base(2)
    normalizer.sink.data = torch.tensor([-1.0, 2.0])
    return {"normalizer": normalizer}


def taps():
    return {"bias": Filter(torch.ones(2, 3)), "normalizer": rg.normalizers.Unnormalized(), "mask": rg.causal()}


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
    "the term of T5Bias": lambda: {"bias": by_place(rg.biases.T5Bias)(2)},
    "the place in ALiBi": lambda: {"bias": by_place(rg.ALiBi)(2)},
    "the term of a table": lambda: {"bias": by_place(rg.biases.LearnedTable)(2, 3)},
    "the term of KERPLE": lambda: {"bias": by_place(rg.biases.KERPLEBias)(2)},
    "the term of FIRE": lambda: {"bias": by_place(rg.biases.FIREBias)(2, fixed_length=9)},
    "the transform of a filter": taps,
    "the weights of softmax": lambda: {"normalizer": own_weights(rg.normalizers.Softmax)()},
    "the weights of softmax with a sink": lambda: {"normalizer": own_weights(rg.normalizers.Softmax)(sink=0.5)},
    "the weights of a learned sink": lambda: sink(own_weights(rg.normalizers.LearnedSink)),
    "the weights of sigmoid": lambda: {"normalizer": own_weights(rg.normalizers.Sigmoid)()},
    "the weights of a hard maximum": lambda: {"normalizer": own_weights(rg.normalizers.Hardmax)()},
    "the weights of top-k": lambda: {"normalizer": own_weights(rg.normalizers.TopK)(3)},
    "the weights of a sum": lambda: {
        "score": rg.scores.FeatureScore(),
        "normalizer": own_weights(rg.normalizers.SumNormalizer)(),
    },
    "the features of a score": lambda: {
        "score": rg.scores.FeatureScore(Relu()),
        "normalizer": rg.normalizers.SumNormalizer(),
    },
    "the statistic of softmax": lambda: {"normalizer": own_statistic(rg.normalizers.Softmax)()},
    "the statistic of entmax": lambda: {"normalizer": own_statistic(rg.normalizers.Entmax15)()},
    "the temperature of softmax": lambda: {"normalizer": Warmer()},
    "the end of a softmax": lambda: {"normalizer": halved(rg.normalizers.Softmax)()},
    "the end of a softmax with a sink": lambda: {"normalizer": halved(rg.normalizers.Softmax)(sink=0.5)},
    "the end of a learned sink": lambda: sink(halved(rg.normalizers.LearnedSink)),
    "the queries of RoPE": lambda: {"position": Later(WIDTH)},
    "the frequencies of RoPE": lambda: {"position": Slow(WIDTH)},
    "the scaling of RoPE": lambda: {"position": rg.RoPE(WIDTH, scaling=Halves(5.0))},
    "the magnitude of RoPE": lambda: {"position": rg.RoPE(WIDTH, scaling=Loud(5.0))},
    "the keys of a norm": lambda: {"position": Doubled(WIDTH)},
    "the rule of documents": lambda: {"mask": every_second(rg.masks.documents)([2, 4])},
}


def by_definition(attention, query, key, value):
    """The output from the methods of the pieces, on all pairs."""
    grid, columns = rg.types.Grid.whole(POSITIONS, 2, 2, N), torch.arange(N)
    if attention.position is not None:
        query, key = attention.position.encode_both(query, key, POSITIONS)
    scores = attention.score.tile(*attention.score.prepare(query, key), grid)
    for bias in attention.bias:
        scores = bias.transform(scores.clone(), grid, *bias.prepare(query, key, POSITIONS))
    if attention.mask is not None:
        scores = scores.masked_fill(~attention.mask.allowed(grid), attention.normalizer.masked_score)
    return attention.normalizer.weights(scores, attention.normalizer.row_statistic(scores, columns), columns) @ value


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


class Faster(rg.transitions.Decay):
    def prepare(self, query, key):
        return rg.transitions.Decay(3 * self.log_decay).prepare(query, key)


class Longer(rg.transitions.Delta):
    def normalized(self, query, key):
        return 0.5 * query, 0.5 * key


@pytest.mark.parametrize(
    ("own", "equal", "tensors"),
    [
        (Faster(-0.2), rg.transitions.Decay(-0.2 * 3), {}),
        (Longer(unit=False), rg.transitions.Delta(unit=False), {"beta": torch.rand(1, 2, N)}),
    ],
)
@torch.no_grad()
def test_a_transition_is_computed_as_it_says(own, equal, tensors):
    q, k, v = torch.randn(3, 1, 2, N, WIDTH)
    shorter = 0.5 if isinstance(own, Longer) else 1.0
    expected = rg.attend(shorter * q, shorter * k, v, attention=rg.Attention(transition=equal), **tensors).output
    for name in ["auto", *ENGINES]:
        try:
            seen = rg.attend(q, k, v, attention=rg.Attention(transition=own), engine=name, **tensors)
        except rg.RegardError:
            assert name != "auto"
            continue
        torch.testing.assert_close(seen.output, expected, atol=1e-5, rtol=1e-5, msg=name)


SHORTCUTS = ("log_weights", "tile_weights", "normalize_rows", "normalize_with_logs", "rows_with_logs")


@pytest.mark.parametrize("method", SHORTCUTS)
@pytest.mark.parametrize("kind", ["Softmax", "LearnedSink", "Sparsemax", "TopK", "SumNormalizer", "Sigmoid"])
def test_a_shortcut_alone_is_no_new_normalizer(kind, method):
    """It would change the output of one engine, and no map."""
    base = getattr(rg.normalizers, kind)
    shortcut = getattr(base, method)
    with pytest.raises(rg.RegardError, match=rf"Own: {method} .* Override these instead: .*row_statistic.*weights"):
        type("Own", (base,), {method: lambda self, *of: shortcut(self, *of)})


def test_a_shortcut_beside_rules_of_ones_own_is_used():
    class Own(own_weights(rg.normalizers.Softmax)):
        def normalize_rows(self, scores, columns):
            calls.append(scores.shape)
            return super().normalize_rows(scores, columns)

    calls, x = [], torch.randn(3, 1, 2, N, WIDTH)
    rg.attend(*x, attention=rg.Attention(normalizer=Own()), engine="dense")
    assert calls == [(1, 2, N, N)]


@pytest.mark.parametrize("method", ["weights", "row_statistic", "tempered", "finish", "normalize_rows"])
def test_a_method_of_one_learned_sink_is_not_replaced(method):
    normalizer = rg.normalizers.LearnedSink(2)
    with pytest.raises(rg.RegardError, match=rf"LearnedSink.{method} = .* Define a subclass"):
        replaced(normalizer, method, lambda *of: 0)
    normalizer.sink.data = torch.ones(2)  # and its parameter is an attribute as any
    normalizer.forward = print
