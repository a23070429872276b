"""Pieces whose methods are called by hand, and pieces of one's own with a method that is wrong: errors in words."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.base.shapes import Sizes
from regard.pieces.bias import by_distance

q = torch.randn(2, 4, 6, 8)
POSITIONS = rg.types.Positions.aligned_to_end(6, 6)
GRID = rg.types.Grid.whole(POSITIONS, 2, 4, 6)
#: The same tile, whose distances are computed pair by pair, because its keys have a gap.
GAPS = rg.types.Grid.whole(rg.types.Positions(0, rg.types.Spans(((0, 3), (5, 8)))), 2, 4, 6)
UNPLACED = rg.types.Grid(*(torch.arange(n) for n in (2, 4, 6, 6)))
SIZES = Sizes.of(q, q, q)
narrow, cells = q[..., :4], rg.nn.Cells(4, 8, feed_size=3)
LATENT = {"latent_dim": 4, "head_dim": 3, "rotary_dim": 2, "value_dim": 3}


class OwnScore(rg.scores.Score):
    def check(self, sizes, key_dim):
        pass


class OwnFilter(rg.transitions.ConvolutionFilter):
    def __init__(self, numbers):
        super().__init__()
        self.numbers = numbers

    def taps(self):
        return self.numbers


class ValuesOfNothing(rg.composites.Composite):
    """A composite whose first part reads the output of a part before it."""

    def prepare(self, call):
        part = rg.composites.Part(rg.Attention(), call.query, call.key, lambda output: output, call.positions)
        return rg.composites.PreparedParts([part], lambda seen: (seen[0].output, seen[0].weights))


def filtered(numbers):
    x = torch.ones(1, 2, 5, 1)
    attention = rg.Attention(rg.Dot(1.0), bias=OwnFilter(numbers), normalizer=rg.normalizers.Unnormalized())
    return attention(x, x, x)


def latent():
    return rg.nn.MultiHeadLatentAttention(8, 2, **LATENT)


def with_another_score():
    layer = latent()
    layer.attention = rg.Attention(mask=rg.causal())
    layer(torch.randn(2, 5, 8))


WRONG = {
    "the term of ShawBias alone": (
        lambda: rg.biases.ShawBias(8, 2).term(GRID, None, None),
        r"ShawBias\.term\(grid, None, None\): .* bias\.term\(grid, \*bias\.prepare\(query, key, positions\)\)",
    ),
    "the term of TransformerXLBias alone": (
        lambda: rg.biases.TransformerXLBias(4, 8).term(GRID, None, None),
        r"TransformerXLBias\.term\(grid, None, None\): ",
    ),
    "the term of ForgettingBias alone": (
        lambda: rg.biases.ForgettingBias().term(GRID, None, None),
        r"ForgettingBias\.term\(grid, None, None\): ",
    ),
    "no gates": (
        lambda: rg.biases.ForgettingBias().prepare(q, q, POSITIONS),
        r"ForgettingBias\.prepare: needs log_forget \(batch, heads, keys\)",
    ),
    "no decay": (
        lambda: rg.transitions.Decay().prepare(q, q),
        r"Decay\.prepare: needs log_decay \(batch, heads, keys\)",
    ),
    "numbers of a filter without heads": (
        lambda: filtered(torch.ones(2)),
        r"OwnFilter\.taps: must return numbers \(heads, K\), .* got \(2,\)",
    ),
    "numbers of a filter with three axes": (lambda: filtered(torch.ones(2, 3, 1)), r"got \(2, 3, 1\)"),
    "no numbers of a filter": (lambda: filtered(None), "got NoneType"),
    "numbers by distance without heads": (
        lambda: by_distance(GRID, lambda distance: -distance.abs().float()),
        r"of distances \(11,\) a bias returned numbers \(11,\); they must be .* = \(4, 11\)",
    ),
    "numbers by distance of other heads": (
        lambda: by_distance(GRID, lambda distance: distance.expand(3, -1)),
        r"returned numbers \(3, 11\)",
    ),
    "numbers of pairs without heads": (
        lambda: by_distance(GAPS, lambda distance: distance),
        r"of distances \(6, 6\) a bias returned numbers \(6, 6\)",
    ),
    "a score without a scale and a tile": (
        lambda: rg.Attention(OwnScore())(q, q, q),
        r"OwnScore\.tile: .* Define tile\(query, key, grid\)",
    ),
    "a plan of values of nothing": (
        lambda: rg.plan(q, q, q, attention=ValuesOfNothing()),
        "PreparedParts: the value of the first part is a function",
    ),
    "values of nothing": (
        lambda: rg.attend(q, q, q, attention=ValuesOfNothing()),
        "PreparedParts: the value of the first part is a function",
    ),
    "a map on a grid without positions": (
        lambda: rg.maps.DenseMap(lambda: q, grid=UNPLACED),
        "DenseMap: the grid has no positions",
    ),
    "a predicate for single numbers": (
        lambda: rg.Attention(mask=rg.mask_mod(lambda b, h, i, j: i >= j and j > 2))(q, q, q),
        r"mask_mod\(predicate\): .* Write & for and, \| for or, ~ for not",
    ),
    "a predicate that decides by if": (
        lambda: rg.mask_mod(lambda b, h, i, j: j > 2 if h > 0 else j > 1).dense(6, num_heads=4),
        r"mask_mod\(predicate\): .* torch\.where\(condition, a, b\) for if",
    ),
    "a mask in the slot of the score": (lambda: rg.Attention(rg.causal()), r"expected a Score, .* Its slot is mask="),
    "a score in the slot of the bias": (lambda: rg.Attention(bias=rg.Dot()), r"expected a Bias, .* Its slot is score="),
    "groups on a grid without positions": (
        lambda: rg.composites.MeanGroups(2).visible(rg.padding([6, 6]), SIZES, UNPLACED),
        r"MeanGroups\.visible: the grid has no positions",
    ),
    "keys of another width for TransformerXLBias": (
        lambda: rg.Attention(rg.scores.Additive(8, 4, 3), bias=rg.biases.TransformerXLBias(4, 8))(q, narrow, q),
        "TransformerXLBias: made for width 8, the keys have 4",
    ),
    "queries of another width for TransformerXLBias": (
        lambda: rg.Attention(bias=rg.biases.TransformerXLBias(4, 4))(q, q, q),
        "TransformerXLBias: made for width 4, the queries have 8",
    ),
    "all steps of cells with a second input": (
        lambda: cells.whole(torch.randn(1, 5, 4), cells.first(torch.randn(1, 8))),
        r"Cell\.whole: this cell has a second input of width 3, .* one step at a time",
    ),
    "another score for latents": (with_another_score, "the score of its attention must be LatentDot, .* got Dot"),
    "another cache for latents": (
        lambda: latent().advance(torch.randn(2, 5, 8), rg.GrowingCache()),
        r"MultiHeadLatentAttention\.advance: past must be a LatentCache, got GrowingCache",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_piece_that_is_used_wrongly_says_so(case):
    call, words = WRONG[case]
    with pytest.raises(rg.RegardError, match=words):
        call()


@pytest.mark.parametrize("bias", [rg.biases.ShawBias(8, 2), rg.biases.TransformerXLBias(4, 8)])
def test_a_term_by_hand_is_what_the_call_adds_to_its_scores(bias):
    """As the error says: the term of what `prepare` returns."""
    with_bias, without = (one(q, q, q).weights.dense() for one in (rg.Attention(bias=bias), rg.Attention()))
    term = bias.term(GRID, *bias.prepare(q, q, POSITIONS))
    torch.testing.assert_close((without.log() + term).softmax(-1), with_bias)


COMPOSITES = [
    rg.composites.Nystrom(2),
    rg.composites.ThroughLatents(2, 8, 4),
    rg.composites.SegmentMemory(2),
    rg.composites.Sum([rg.Attention(), rg.Attention()], [0.5, 0.5]),
    rg.composites.Grouped(rg.Attention(), rg.composites.MeanGroups(2)),
]


@pytest.mark.parametrize("composite", COMPOSITES, ids=lambda composite: type(composite).__name__)
def test_a_composite_refuses_a_mask_that_its_parts_would_ignore(composite):
    with pytest.raises(rg.RegardError, match=rf"{type(composite).__name__}\.mask = causal\(\): .* Give each part"):
        composite.mask = rg.causal()


def test_a_composite_of_ones_own_may_have_a_mask():
    class Masked(rg.composites.Composite):
        mask = None

        def prepare(self, call):
            part = call.part(rg.Attention(mask=self.mask))
            return rg.composites.PreparedParts([part], lambda seen: (seen[0].output, seen[0].weights))

    masked = Masked()
    masked.mask = rg.causal()
    assert torch.equal(masked(q, q, q).output, rg.Attention(mask=rg.causal())(q, q, q).output)
