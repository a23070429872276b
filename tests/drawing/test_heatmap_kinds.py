"""What the cells of a heatmap are, on which scale they have their colors, and that the color bar says so."""

from __future__ import annotations

import pytest
import torch

import regard as rg

matplotlib = pytest.importorskip("matplotlib")
WEIGHTS = torch.tensor([[0.81, 0.16, 0.03], [0.25, 0.25, 0.5]])


def parts(figure):
    """The panels and the color bar."""
    *panels, bar = figure.axes
    return panels, bar


def color(axes, i, j):
    image = axes.images[0]
    return tuple(image.to_rgba(image.get_array())[i, j].tolist())


def texts(axes):
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(
    ("scale", "place", "said"),
    [
        ("sqrt", lambda w: w**0.5, "weight, square root scale"),
        ("linear", lambda w: w, "weight"),
        (None, lambda w: w**0.5, "weight, square root scale"),
    ],
)
@pytest.mark.parametrize("cmap", ["viridis", matplotlib.colormaps["magma"]])
def test_a_weight_has_the_color_of_its_place_on_the_scale(scale, place, said, cmap):
    (axes,), bar = parts(rg.heatmap(WEIGHTS, scale=scale, cmap=cmap))
    colors = matplotlib.colormaps[cmap] if isinstance(cmap, str) else cmap
    for i in range(2):
        for j in range(3):
            assert color(axes, i, j) == pytest.approx(colors(place(float(WEIGHTS[i, j]))), abs=0.02)
    assert bar.get_ylabel() == said


def test_the_logarithmic_scale_has_a_decade_more_than_uniform_weights():
    weights = torch.tensor([[1.0, 0.1], [0.01, 0.0]])
    (axes,), bar = parts(rg.heatmap(weights, scale="log", cmap="gray"))
    shades = [color(axes, i, j)[0] for i in range(2) for j in range(2)]
    assert shades == pytest.approx([1.0, 0.5, 0.0, 0.0], abs=0.02)
    assert bar.get_ylabel() == "weight, logarithmic scale"


@pytest.mark.parametrize("vmax", ["auto", 0.3, 0.25, 0.01, 2.0, None])
def test_the_ticks_of_the_bar_are_weights_within_the_scale(vmax):
    _, bar = parts(rg.heatmap(WEIGHTS, vmax=vmax))
    largest = {"auto": 1.0, None: 0.81}.get(vmax, vmax)
    low, high = bar.get_ylim()
    assert (low, high) == pytest.approx((0.0, largest))
    inside = [tick for tick in bar.get_yticks() if low <= tick <= high]
    assert len(inside) > 1 and 0.0 in inside
    if vmax == "auto":
        assert [label.get_text() for label in bar.get_yticklabels()] == ["0", "0.01", "0.1", "0.25", "0.5", "1"]


@pytest.mark.parametrize(
    "mask",
    [
        rg.causal().dense(4),
        rg.causal().dense(4).numpy(),
        rg.causal().dense(4).tolist(),
        rg.causal().dense(4)[None, None],
    ],
)
def test_a_mask_has_two_colors_and_check_marks(mask):
    (axes,), bar = parts(rg.heatmap(mask))
    assert texts(axes) == ["\N{CHECK MARK}"] * 10
    assert len({color(axes, i, j) for i in range(4) for j in range(4)}) == 2
    assert bar.get_ylabel() == "may attend" and [label.get_text() for label in bar.get_yticklabels()] == ["no", "yes"]


def test_numbers_of_0_and_1_are_a_mask_if_they_are_called_so():
    (axes,), _ = parts(rg.heatmap(torch.eye(3), kind="mask"))
    assert texts(axes) == ["\N{CHECK MARK}"] * 3
    (axes,), _ = parts(rg.heatmap(torch.eye(3)))
    assert texts(axes)[:2] == ["1.00", "0.00"]


@pytest.mark.parametrize("tokens", [None, ["a", "b", "c", "d"]])
def test_a_table_of_positions_has_rows_of_positions(tokens):
    table = rg.encodings.Sinusoidal().table(torch.arange(4), 6)
    (axes,), bar = parts(rg.heatmap(table, tokens, kind="position"))
    assert (axes.get_ylabel(), axes.get_xlabel(), bar.get_ylabel()) == ("position", "channel", "value")
    torch.testing.assert_close(torch.tensor(axes.images[0].get_array().filled()), table.float())
    assert bar.get_ylim() == pytest.approx((-1.0, 1.0))
    if tokens:
        assert [label.get_text() for label in axes.get_yticklabels()] == tokens


def test_scores_are_drawn_before_the_softmax_and_hidden_pairs_are_gray():
    scores = torch.tensor([[1.0, -torch.inf], [-3.0, 2.0]])
    (axes,), bar = parts(rg.heatmap(scores, kind="score"))
    assert texts(axes) == ["1.00", "-3.00", "2.00"]
    assert color(axes, 0, 1)[:3] == pytest.approx((0.8, 0.8, 0.8), abs=0.01)
    assert bar.get_ylabel() == "score (gray: hidden by -inf)" and bar.get_ylim() == pytest.approx((-3.0, 3.0))


def test_every_panel_may_have_its_title_and_its_axes():
    weights = torch.stack([WEIGHTS, WEIGHTS.flip(1)])
    panels, _ = parts(rg.heatmap(weights, title=["one", "two"]))
    assert [axes.get_title() for axes in panels] == ["one", "two"]
    own = matplotlib.figure.Figure()
    axes = own.subplots(1, 2)
    assert rg.heatmap(weights, axes=axes, title=["one", "two"]) is own
    assert [place.get_title() for place in axes] == ["one", "two"] and len(own.axes) == 3
    for place, matrix in zip(axes, weights, strict=True):
        torch.testing.assert_close(torch.tensor(place.images[0].get_array().filled()), matrix)


MISTAKES = {
    "scores as weights": (lambda: rg.heatmap(-WEIGHTS), r'softmax\(-1\), or are drawn with kind="score"'),
    "weights as a mask": (
        lambda: rg.heatmap(WEIGHTS, kind="mask"),
        "a mask holds booleans, or 0 and 1; .* 0.03 to 0.81",
    ),
    "infinite scores": (lambda: rg.heatmap(WEIGHTS / 0, kind="score"), "inf"),
    "a mask that is no tensor": (
        lambda: rg.heatmap(rg.causal()),
        r"mask\.dense\(length\), such as causal\(\)\.dense\(6\)",
    ),
    "a colormap": (lambda: rg.heatmap(WEIGHTS, cmap="viridi"), "Did you mean 'viridis'"),
    "a scale": (lambda: rg.heatmap(WEIGHTS, scale="square"), "scale must be 'linear' or 'sqrt' or 'log'"),
    "a kind": (lambda: rg.heatmap(WEIGHTS, kind="masks"), "kind must be 'weight' or 'mask'"),
    "a log of scores": (lambda: rg.heatmap(WEIGHTS, kind="score", scale="log"), "no place for numbers below 0"),
    "too few titles": (lambda: rg.heatmap(torch.stack([WEIGHTS] * 2), title=["one"]), "1 titles for 2 panels"),
    "too few axes": (lambda: rg.heatmap(torch.stack([WEIGHTS] * 3), axes=two_axes()), "2 pairs of axes for 3 heads"),
}


def two_axes():
    return matplotlib.figure.Figure().subplots(1, 2)


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_name_the_remedy(case):
    call, words = MISTAKES[case]
    with pytest.raises(rg.RegardError, match=words):
        call()
