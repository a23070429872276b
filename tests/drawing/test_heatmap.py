"""`rg.heatmap` and `rg.weight_table`: cells are the weights, labels the tokens, and what does not fit is refused."""

from __future__ import annotations

import io
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard as rg
from regard.drawing.picture import LARGEST

TOKENS = ["the", "cat", "sat", "on", "it"]
ODD = [
    "$x_1$",
    r"$\frac",
    "\n",
    "",
    " ",
    "\x00",
    "日本語",
    "שלום",
    "\u202eمرحبا",
    "👩\u200d🔬",
    "\ud800",
    "Ġthe",
    "e\u0301",
    "_" * 99,
]


@pytest.fixture(autouse=True)
def _needs_matplotlib():
    pytest.importorskip("matplotlib")


def attention_map(H=3, I=5, J=5, B=1, **pieces):
    return rg.Attention(**pieces)(torch.randn(B, H, I, 8), *torch.randn(2, B, H, J, 8)).weights


def panels(figure):
    """The panels of a figure, without the color bar."""
    return [axes for axes in figure.axes if axes.images]


def cells(axes):
    return torch.tensor(axes.images[0].get_array().filled(torch.nan))


def ticks(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def png(figure):
    """The bytes of the picture; which fonts are here decides which glyphs are missing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
    return picture.getvalue()


@settings(deadline=None, max_examples=12)
@given(data=st.data(), H=st.integers(1, 5), I=st.integers(1, 7), J=st.integers(1, 7))
def test_the_image_holds_the_weights_and_the_labels_the_tokens(data, H, I, J):
    weights = attention_map(H, I, J)
    dense = weights.dense()
    given_as = data.draw(st.sampled_from([weights, dense, dense[0], dense[0].numpy(), dense[0].double()]))
    queries, keys = [f"q{i}" for i in range(I)], [f"k{j}" for j in range(J)]
    heads = data.draw(
        st.none() | st.just("mean") | st.integers(-H, H - 1) | st.lists(st.integers(0, H - 1), min_size=1)
    )
    figure = rg.heatmap(given_as, (queries, keys), heads)
    numbers = range(H) if heads is None else [heads] if isinstance(heads, int) else heads
    expected = dense[0].mean(0, keepdim=True) if heads == "mean" else dense[0][list(numbers)]
    shown = panels(figure)
    torch.testing.assert_close(torch.stack([cells(axes) for axes in shown]).float(), expected)
    assert ticks(shown[0].yaxis) == queries and ticks(shown[-1].xaxis) == keys
    assert [t.get_text() for t in shown[-1].texts] == [f"{w:.2f}" for w in expected[-1].flatten()]
    assert len(figure.axes) > len(shown), "a color bar"
    if heads != "mean" and len(shown) > 1:
        assert [axes.get_title() for axes in shown] == [f"head {n % H}" for n in numbers]


#: Arrays with the same numbers, in memory that a tensor cannot share.
LAYOUTS_OF_NUMPY = {
    "reversed": lambda array: np.ascontiguousarray(array[::-1, ::-1])[::-1, ::-1],
    "read-only": lambda array: np.broadcast_to(array, (2, *array.shape))[1],
    "foreign bytes": lambda array: array.astype(array.dtype.newbyteorder("S")),
}


@pytest.mark.parametrize("layout", LAYOUTS_OF_NUMPY)
def test_arrays_of_any_layout_are_drawn(layout):
    weights = attention_map(H=1).dense()[0, 0]
    with warnings.catch_warnings(action="error"):
        figure = rg.heatmap(LAYOUTS_OF_NUMPY[layout](weights.numpy()))
    torch.testing.assert_close(cells(panels(figure)[0]).float(), weights)


@settings(deadline=None, max_examples=12)
@given(data=st.data(), H=st.integers(1, 3), I=st.integers(1, 6), J=st.integers(1, 6), digits=st.integers(0, 9))
def test_the_numbers_of_a_table_are_the_weights(data, H, I, J, digits):
    weights = attention_map(H, I, J)
    head = data.draw(st.none() | st.just("mean") | st.integers(0, H - 1))
    tokens = data.draw(st.sampled_from([None, ([f"q {i}" for i in range(I)], [f"k{j}" for j in range(J)])]))
    tables = rg.weight_table(weights, tokens, head, digits=digits).split("\n\n")
    dense = weights.dense()[0]
    expected = dense if head is None else dense.mean(0, keepdim=True) if head == "mean" else dense[[head]]
    for table, matrix in zip(tables, expected, strict=True):
        lines = table.splitlines()[-I:]
        read = torch.tensor([[float(number) for number in line.split()[-J:]] for line in lines])
        torch.testing.assert_close(read, matrix, atol=0.5 * 10**-digits + 1e-6, rtol=0)
        assert len({len(line) for line in table.splitlines()[-I - 1 :]}) == 1, "the columns are aligned"


def test_another_text_names_its_axes():
    of_two = rg.heatmap(attention_map(1, 2, 3), (["das", "Haus"], ["the", "house", "."]))
    assert (of_two.axes[0].get_xlabel(), of_two.axes[0].get_ylabel()) == ("key (source)", "query (target)")
    of_one = rg.heatmap(attention_map(1, 2, 4), (["cat", "sat"], ["the", "cat", "sat", "on"]))
    assert (of_one.axes[0].get_xlabel(), of_one.axes[0].get_ylabel()) == ("key", "query")
    assert rg.weight_table(attention_map(1, 1, 2), (["a"], ["b", "c"])).startswith("query (target)/key (source)")


def test_an_entry_of_the_batch_is_chosen():
    weights = attention_map(2, B=3)
    torch.testing.assert_close(cells(panels(rg.heatmap(weights, head=1, batch=2))[0]).float(), weights[2, 1])
    assert rg.weight_table(weights, batch=2) == rg.weight_table(weights.dense()[2])
    with pytest.raises(rg.RegardError, match="heatmap: batch 3 is out of range; the weights have a batch of 3"):
        rg.heatmap(weights, batch=3)


@pytest.mark.parametrize("draw", [rg.heatmap, rg.weight_table])
@pytest.mark.parametrize(
    ("weights", "arguments", "message"),
    [
        (torch.eye(5), {"tokens": TOKENS[:4]}, "4 tokens for 5 queries and 5 keys"),
        (torch.ones(2, 5), {"tokens": TOKENS}, r"one list of 5 tokens for 2 queries and 5 keys. Give two lists"),
        (
            torch.ones(2, 5),
            {"tokens": (TOKENS, TOKENS[:2])},
            "5 query tokens and 2 key tokens for 2 queries and 5 keys",
        ),
        (torch.eye(5), {"tokens": "the cat"}, r"Split it: text.split\(\)"),
        (torch.eye(5), {"tokens": 5}, "tokens must be a list, got int"),
        (torch.eye(5), {"head": 1}, "head 1 is out of range; the size of this axis is 1"),
        (torch.eye(5), {"head": "all"}, "head must be"),
        (torch.eye(5), {"head": []}, "the list of heads is empty"),
        (torch.ones(5), {}, r"got \(5,\)"),
        (torch.ones(1, 0, 0), {}, "nothing to show"),
        ({"weights": 1}, {}, "expected an AttentionMap or an array of weights, got dict"),
        (rg.Attention()(*torch.zeros(3, 1, 1, 2, 4)), {}, r"that of rg.attend is the second of output, weights"),
    ],
)
def test_what_does_not_fit_is_refused(draw, weights, arguments, message):
    with pytest.raises(rg.RegardError, match=message):
        draw(weights, **arguments)


@pytest.mark.parametrize("vmax", [0.0, -1.0, float("nan")])
def test_a_scale_of_colors_needs_a_range(vmax):
    with pytest.raises(rg.RegardError, match="vmax, so it must be above 0"):
        rg.heatmap(torch.eye(2), vmax=vmax)


def test_token_numbers_of_a_tensor_are_labels():
    assert rg.weight_table(torch.eye(2), torch.tensor([7, 8])) == rg.weight_table(torch.eye(2), [7, 8])


def test_scores_are_no_weights():
    with pytest.raises(rg.RegardError, match=r"at least 0; these go from -3 to 1\. Scores become weights by softmax"):
        rg.heatmap(torch.tensor([[1.0, -3.0]]))
    with pytest.raises(rg.RegardError, match="finite"):
        rg.heatmap(torch.tensor([[1.0, torch.inf]]))
    empty_row = rg.heatmap(torch.tensor([[0.5, 0.5], [torch.nan, torch.nan]]))
    assert [text.get_text() for text in empty_row.axes[0].texts] == ["0.50", "0.50"]


def test_the_color_bar_says_that_gray_is_nan():
    row = torch.tensor([[0.5, 0.5], [torch.nan, torch.nan]])
    assert rg.heatmap(row).axes[-1].get_ylabel() == "weight, square root scale (gray: NaN)"
    assert rg.heatmap(row[:1]).axes[-1].get_ylabel() == "weight, square root scale"
    assert rg.heatmap(torch.full((600, 600), torch.nan)).axes[-1].get_ylabel().endswith("(gray: NaN)")


@pytest.mark.parametrize("shape", [(1, 12, 90, 90), (1, 31, 9, 9), (1, 1, 1, 300), (1, 2, 300, 1), (1, 1, 2000, 700)])
def test_figures_are_bounded(shape):
    weights = torch.rand(shape).softmax(-1)
    figure = rg.heatmap(weights, ([f"query {i}" for i in range(shape[2])], [f"{j}" for j in range(shape[3])]))
    assert max(figure.get_size_inches()) < 20
    assert max(max(cells(axes).shape) for axes in panels(figure)) <= LARGEST
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize("shape", [(700, 700), (513, 40), (40, 1000)])
def test_large_maps_are_pooled_as_the_fold_pools_them(shape):
    weights = attention_map(2, *shape)
    pooled = weights.pool(512, 512)[0, 1]
    for given_as in (weights, weights.dense()):
        axes = panels(rg.heatmap(given_as, head=1))[0]
        torch.testing.assert_close(cells(axes), pooled)
        assert axes.images[0].get_extent() == [-0.5, shape[1] - 0.5, shape[0] - 0.5, -0.5] and not axes.texts


def test_odd_tokens_are_shown_or_escaped():
    figure = rg.heatmap(torch.eye(len(ODD)), ODD)
    assert png(figure).startswith(b"\x89PNG") and figure._repr_png_().startswith(b"\x89PNG")
    shown = ticks(figure.axes[0].yaxis)
    assert shown[:6] == ["$x_1$", r"$\frac", r"\n", "", "␣", r"\x00"] and shown[8] == r"\u202eمرحبا"
    assert shown[9] == ODD[9] and shown[10] == r"\ud800" and len(shown[-1]) == 14
    widths = {len(line) for line in rg.weight_table(torch.eye(2), ["日本", "ab"]).splitlines()}
    assert widths == {len("query/key  日本    ab"), len("       ab  0.00  1.00")}


def test_a_panel_on_axes_of_the_caller():
    plt = pytest.importorskip("matplotlib.pyplot")
    weights = attention_map()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4))
    try:
        assert rg.heatmap(weights, TOKENS, 2, axes=right, title="mine") is figure
        torch.testing.assert_close(cells(right).float(), weights[0, 2])
        assert right.get_title() == "mine" and not left.images and len(figure.axes) == 3
        with pytest.raises(rg.RegardError, match="one pair of axes for 3 heads"):
            rg.heatmap(weights, TOKENS, axes=left)
    finally:
        plt.close(figure)


def test_colors_go_to_the_largest_weight_when_asked():
    weights = torch.tensor([[0.25, 0.0], [0.1, 0.2]])
    assert rg.heatmap(weights).axes[0].images[0].norm.vmax == 1
    image = rg.heatmap(weights, vmax=None).axes[0].images[0]
    assert image.norm.vmax == 0.25 and float(image.norm(0.0625)) == pytest.approx(0.5)


def test_a_mask_is_drawn_too():
    torch.testing.assert_close(cells(rg.heatmap(rg.causal().dense(4)).axes[0]).float(), torch.ones(4, 4).tril())


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "regard.drawing.canvas", None)
    with pytest.raises(rg.RegardError, match=r"heatmap: matplotlib is not installed. pip install 'regard\[view\]'"):
        rg.heatmap(torch.eye(2))
    assert "1.00" in rg.weight_table(np.eye(2))


def test_a_notebook_shows_the_figure():
    formatters = pytest.importorskip("IPython.core.formatters")
    assert formatters.PNGFormatter()(rg.heatmap(torch.eye(2))).startswith(b"\x89PNG")
