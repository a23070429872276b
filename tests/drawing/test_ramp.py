"""The ramp of colors: one for figures and page, even in lightness, readable with color blindness and below text."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch

import regard as rg
from ramps import BLINDNESS, SOURCES, contrast, lab, ramp, rgb, seen_with, stops, variables
from regard.drawing.color import RAMP, colormap, text_color
from regard.drawing.paper import GOLD

ALL = ramp(np.linspace(0, 1, 255))


def test_figures_and_page_have_the_same_ramp():
    np.testing.assert_array_equal([rgb(color) for color in RAMP], stops())


def test_the_colormap_interpolates_between_the_colors_of_the_ramp():
    pytest.importorskip("matplotlib")
    places = np.linspace(0, 1, 1001)
    np.testing.assert_allclose(255 * colormap()(places)[:, :3], ramp(places), atol=2)


def test_lightness_falls_evenly():
    steps = -np.diff(lab(stops())[:, 0])
    assert steps.min() > 0 and steps.max() / steps.min() < 1.1
    assert (np.diff(lab(ALL)[:, 0]) < 0).all(), "also between the colors: in gray each is darker than the one before"


@pytest.mark.parametrize("kind", BLINDNESS)
def test_color_blindness_keeps_the_order_of_lightness(kind):
    assert (np.diff(lab(seen_with(kind, stops()))[:, 0]) < -4).all()


@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("name", ["accent", "gold"])
def test_marks_are_visible_on_every_color(name, is_dark):
    """A mark is a line with a line of the paper beside it; it differs from the ramp for every eye."""
    colors = variables(is_dark)
    mark, paper = colors[name], colors["paper"]
    assert contrast(mark, paper) >= 3
    for kind in BLINDNESS:
        apart = np.linalg.norm(lab(seen_with(kind, mark)) - lab(seen_with(kind, ALL)), axis=-1)
        assert apart.min() > 15, (kind, apart.min())


def test_text_on_a_color_can_be_read():
    every = np.stack(np.meshgrid(*[np.linspace(0, 255, 12)] * 3), -1).reshape(-1, 3)
    for color in np.concatenate([ALL, every]):
        text = {"black": "#000000", "white": "#ffffff"}[text_color(tuple(color / 255))]
        assert contrast(rgb(text), color) >= 4.5


def test_a_heatmap_has_the_colors_of_the_ramp_and_numbers_that_can_be_read():
    pytest.importorskip("matplotlib")
    weights = torch.tensor([[0.9, 0.1], [0.36, 0.64]])
    figure = rg.heatmap(weights, ["a", "b"])
    figure.savefig(io.BytesIO())
    image = figure.axes[0].images[0]
    drawn = 255 * image.to_rgba(weights.numpy())[..., :3]
    np.testing.assert_allclose(drawn, ramp(np.sqrt(weights.numpy())), atol=3)
    for text, color in zip(figure.axes[0].texts, drawn.reshape(-1, 3), strict=True):
        assert contrast(rgb({"black": "#000000", "white": "#ffffff"}[text.get_color()]), color) >= 4.5


def test_the_accent_color_marks_only_what_is_chosen():
    chosen = (
        ":focus-visible",
        "[aria-current",
        "[aria-selected",
        "[aria-pressed",
        "[data-chosen",
        ".chosen",
        ".lead-query",
    )
    for path in SOURCES.glob("*.css"):
        for before in path.read_text().split("var(--accent)")[:-1]:
            selector = before[: before.rindex("{")].split("{")[-1].split("}")[-1].split(";")[-1]
            assert any(part in selector for part in chosen), f"{path.name}: {selector.strip()}"


def test_reference_links_have_one_gold():
    sheet = re.search(r"LINE, GOLD\] = \[.*(#\w{6})\"\];", (SOURCES / "figure_frame.ts").read_text())
    drawn = rgb(sheet[1])
    np.testing.assert_array_equal([drawn, rgb(GOLD)], [variables()["gold"]] * 2)
