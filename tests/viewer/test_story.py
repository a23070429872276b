"""Stories: refused in words if they are bad, with links that the page has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pages import reading, told, translation
from regard.base.errors import RegardError
from regard.viewer import Sheet, Step, Story, load_run, save_run, write_page
from regard.viewer.saved import STORY
from regard.viewer.story import VIEWS, story_of, tour

STEP = {"link": "#head?layer=1&head=2&query=3&key=-1", "sentence": "One head."}


@pytest.fixture(scope="module")
def sheets():
    return [Sheet.of(told(reading())), Sheet.of(translation())]


def test_the_views_are_those_of_the_page():
    sources = Path(__file__).parents[2] / "frontend" / "src"
    assert set(VIEWS) == {path.stem for path in (sources / "views").iterdir()}
    opened = {name for path in sources.rglob("*.ts") for name in re.findall(r'view: "(\w+)"', path.read_text())}
    assert len(opened) > 4 and opened <= set(VIEWS), "a button opens a view that does not exist"


def test_a_story_is_in_the_file_and_in_the_folder(sheets, tmp_path):
    (tmp_path / "story.json").write_text(json.dumps({"title": "Mine", "steps": [STEP]}))
    page = write_page(tmp_path / "page.html", sheets, tmp_path / "story.json").read_text()
    data = json.loads(re.findall(r'id="regard-data">(.*?)</script>', page, re.DOTALL)[0])
    assert data["story"] == {"title": "Mine", "steps": [STEP]}
    save_run(tmp_path / "kept", sheets, story=Story.read(tmp_path / "story.json"))
    assert story_of(tmp_path / "kept" / STORY, load_run(tmp_path / "kept")) == Story("Mine", (Step(**STEP),))
    save_run(tmp_path / "kept", sheets)
    assert not (tmp_path / "kept" / STORY).exists(), "the story of other texts"


def test_an_address_may_be_pasted_and_a_list_is_a_story():
    (step,) = Story.of([{"link": "http://127.0.0.1:8321/?token=x#head?query=3", "sentence": ""}]).steps
    assert step.link == "#head?query=3"
    old = "#pins?pins=0.0.0,0.1.1"
    assert Story.of([{"link": old, "sentence": ""}]).steps[0].link == old, "a view of earlier pages"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON. Example"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "needs 1 to 50 steps"),
        ("3", "needs 1 to 50 steps"),
        (json.dumps([STEP] * 51), "needs 1 to 50 steps"),
        (json.dumps({"title": "", "steps": [STEP]}), "the title of .* must be a text of 1 to 80"),
        (json.dumps({"title": 3, "steps": [STEP]}), "the title of"),
        (json.dumps([STEP, "text"]), "step 2 of .* must be"),
        (json.dumps([{"link": 3, "sentence": ""}]), "step 1 of .* must be"),
        (json.dumps([{"link": "#head"}]), "both texts"),
        (json.dumps([{"link": "javascript:alert(1)", "sentence": ""}]), "Copy it from the address"),
        (json.dumps([STEP | {"link": "#haed?layer=1"}]), "Did you mean 'head'"),
        (json.dumps([STEP | {"sentence": "a" * 1001}]), "more than 1,000 characters"),
        (json.dumps([STEP | {"link": "#head?text=2"}]), "step 1 has text=2; there are 2, numbered from 0"),
        (json.dumps([STEP, STEP | {"link": "#head?layer=2"}]), "step 2 has layer=2; there are 2"),
        (json.dumps([STEP | {"link": "#head?text=1&head=2"}]), "head=2; there are 2"),
        (json.dumps([STEP | {"link": "#head?text=1&query=4"}]), "query=4; there are 4"),
        (json.dumps([STEP | {"link": "#head?text=1&key=5"}]), "key=5; there are 5"),
        (json.dumps([STEP | {"link": "#head?query=1e9"}]), "query=1e9"),
        (json.dumps([STEP | {"link": "#compare?other=7"}]), "other=7; there are 2"),
    ],
)
def test_bad_stories_are_refused_in_words(sheets, tmp_path, content, words):
    (tmp_path / "story.json").write_text(content)
    with pytest.raises(RegardError, match=words):
        write_page(tmp_path / "page.html", sheets, tmp_path / "story.json")
    assert not (tmp_path / "page.html").exists()


def test_a_file_that_is_too_large_is_no_story(tmp_path):
    (tmp_path / "story.json").write_text(" " * ((1 << 20) + 1))
    with pytest.raises(RegardError, match="larger than 1,048,576 bytes"):
        Story.read(tmp_path / "story.json")


def test_a_story_that_is_not_there_or_no_path_is_refused(sheets, tmp_path):
    with pytest.raises(RegardError, match="cannot be read: No such file"):
        write_page(tmp_path / "page.html", sheets, tmp_path / "none.json")
    with pytest.raises(RegardError, match="got dict"):
        write_page(tmp_path / "page.html", sheets, {"steps": []})


def test_see_needs_a_folder_for_a_story_and_reads_it_first(tmp_path):
    from typer.testing import CliRunner

    from regard.cli.app import app

    (tmp_path / "story.json").write_text("[]")
    for options, words in ((("--save", str(tmp_path / "kept")), "needs 1 to 50 steps"), ((), "--story needs --save")):
        result = CliRunner().invoke(app, ["analyze", "A text.", "--story", str(tmp_path / "story.json"), *options])
        assert result.exit_code == 2 and words in " ".join(result.stderr.split())


def test_the_tour_is_true_of_its_texts(sheets):
    story = tour(sheets)
    assert story is not None and 2 <= len(story.steps) <= 6 and story.check(sheets) == story
    for step in story.steps[:1]:
        places = dict(part.split("=") for part in step.link.partition("?")[2].split("&"))
        sheet = sheets[int(places["text"])]
        row = sheet.maps[int(places["layer"])][0, int(places["head"]), int(places["query"])]
        assert f"{float(row[int(places['key'])]):.3f}" in step.sentence
        assert f'"{sheet.about["tokens"][int(places["key"])]}"' in step.sentence
    views = [step.link.partition("&key")[0] for step in story.steps]
    assert len(set(views)) == len(views) and "The same word" not in "".join(step.sentence for step in story.steps)
    assert tour([]) is None
