"""What every test may rely on: a home of its own, and drawn examples that can be drawn again."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import drawn
from regard.base.texts.cache_folder import cache_folder

FIRST = []


def test_no_test_reads_the_home_of_a_developer():
    assert Path.home().name.startswith("home") and Path.home().parent == Path(tempfile.gettempdir())
    assert cache_folder().is_relative_to(Path.home())


@drawn.examples(20)
@given(st.integers())
def test_torch_draws_the_same_numbers_whenever_an_example_is_drawn(number):
    FIRST.append(torch.rand(3))
    assert torch.equal(FIRST[0], FIRST[-1])


def test_a_drawn_test_that_fails_prints_how_to_draw_its_example_again():
    assert settings.default.print_blob and drawn.examples(1).print_blob
