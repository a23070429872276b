"""Where two files of real translations that were damaged by chance begin to drift apart."""

from __future__ import annotations

import random

import pytest

from regard.base.errors import RegardError
from regard.lab.data import load_corpus
from regard.lab.data.drift import suspicious_line

#: Lines around the true break that are near enough to look at.
NEAR = 5
DRAWS = 40


@pytest.fixture(scope="module")
def verses():
    pairs = load_corpus("bible-en-fr").train
    return [pair.source for pair in pairs], [pair.target for pair in pairs]


def drop_one(draw, mine, theirs):
    place = draw.randrange(len(mine))
    del mine[place]
    return place


def add_an_empty_line(draw, mine, theirs):
    place = draw.randrange(len(mine))
    mine.insert(place, "")
    return place


def drop_three_apart(draw, mine, theirs):
    places = sorted(draw.sample(range(len(mine)), 3))
    for place in reversed(places):
        del mine[place]
    return places[0]


def drop_a_block(draw, mine, theirs):
    place = draw.randrange(len(mine) - 15)
    del mine[place : place + 15]
    return place


def drop_two_here_and_one_there(draw, mine, theirs):
    first, second = sorted(draw.sample(range(len(mine)), 2))
    del theirs[second], mine[first : first + 2]
    return first


DAMAGES = [drop_one, add_an_empty_line, drop_three_apart, drop_a_block, drop_two_here_and_one_there]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_the_first_break_is_found_within_a_few_lines_nearly_always(verses, damage):
    draw, near = random.Random(1), 0
    for number in range(DRAWS):
        size = draw.choice([200, 1000, 4000])
        start = draw.randrange(len(verses[0]) - size)
        sides = [list(side[start : start + size]) for side in verses]
        if number % 2:
            sides.reverse()
        place = damage(draw, *sides)
        near += abs(suspicious_line(*sides) - 1 - place) <= NEAR
    assert near >= 0.8 * DRAWS


def test_it_is_the_same_whichever_side_lacks_the_line(verses):
    source, target = (list(side[:300]) for side in verses)
    del target[120]
    assert suspicious_line(source, target) == suspicious_line(target, source)


def test_a_line_that_lacks_at_an_end():
    lines = [f"{'word ' * (1 + n * 7 % 11)}{n}" for n in range(60)]
    assert suspicious_line(lines, lines[1:]) == 1
    assert suspicious_line(lines, lines[:-1]) == 60


@pytest.mark.parametrize("lines_cut", [1, 10])
def test_a_file_that_is_cut_at_its_end_has_lines_before_it_that_fit_as_well(lines_cut):
    objects = [("a dog", "un chien"), ("the house", "la maison"), ("a red flower", "une fleur rouge")] * 20
    source, target = (
        [f"{number % 4 * 'so '}see {pair[side]}" for number, pair in enumerate(objects)] for side in (0, 1)
    )
    assert suspicious_line(source, target[:-lines_cut]) == 61 - lines_cut


def test_a_file_that_is_cut_is_told_so(tmp_path):
    sides = [tmp_path / "a.en", tmp_path / "a.fr"]
    lines = [f"{'word ' * (1 + n * 7 % 11)}{n}" for n in range(60)]
    for path, text in zip(sides, (lines, lines[:50]), strict=True):
        path.write_text("\n".join(text) + "\n")
    with pytest.raises(
        RegardError, match=r"suspicious line is 51: .* \| \(no line\)\. The shorter file ends before it"
    ):
        load_corpus(sides)
