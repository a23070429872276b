"""A report says what is in the folder: its numbers against independent computation, its files against their formats."""

from __future__ import annotations

import html
import json
import re
import shutil
import statistics
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

import regard as rg
from fabricated import fabricate
from pages import FLAGS, chromium

sacrebleu = pytest.importorskip("sacrebleu")
pytest.importorskip("matplotlib")
report = pytest.importorskip("regard.lab.report")

VOID = {"meta", "link", "br", "img", "hr", "input"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("comparison")
    fabricate(path, sentences=40, unfinished=("transformer-2",), unseen=("luong_general-2",))
    (path / "trials" / "transformer-2" / "failed.json").write_text('{"code": 1, "message": "the loss is NaN"}')
    report.write_report(path)
    return path


@pytest.fixture(scope="module")
def found(folder):
    data = json.loads((folder / "report.json").read_text())
    return data | {"by_label": {system["label"]: system for system in data["systems"]}}


def read(folder, label, seed, name="evaluation.json"):
    return json.loads((folder / "trials" / f"{label}-{seed}" / name).read_text())


def texts(folder):
    return json.loads((folder / "test.json").read_text())


def rows_of(markdown, first):
    """The cells of the rows of the Markdown table whose head begins with a name and holds `first`."""
    from regard.lab.report.markdown import cells

    lines = markdown.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| system") and first in line)
    end = next(n for n in range(start, len(lines)) if not lines[n].startswith("|"))
    head = cells(lines[start])
    return {row[0]: dict(zip(head, row, strict=True)) for row in map(cells, lines[start + 2 : end])}


def test_the_main_table_has_mean_and_deviation_of_what_sacrebleu_says(folder):
    rows = rows_of((folder / "report.md").read_text(), "perplexity")
    references = texts(folder)["references"]
    for label, title in (("none", "No attention"), ("bahdanau", "Bahdanau"), ("luong_general", "Luong general")):
        outs = [read(folder, label, seed)["translations"] for seed in (1, 2)]
        for column, measure in (("BLEU", sacrebleu.corpus_bleu), ("chrF", sacrebleu.corpus_chrf)):
            scores = [measure(out, [references]).score for out in outs]
            assert rows[title][column] == f"{statistics.mean(scores):.1f} ± {statistics.stdev(scores):.1f}"
    assert "±" not in rows["Transformer"]["BLEU"], "one seed has no deviation"
    assert rows["Nearest source, copied"]["BLEU"] == "15.8"
    assert rows["Nearest source, copied"]["BLEU, novel part"] == "5.6"


def test_bleu_of_the_novel_part_is_of_the_novel_sentences(folder, found):
    similar = json.loads((folder / "retrieval.json").read_text())["similarities"]
    novel = [n for n, each in enumerate(similar) if each < 0.3]
    references = [texts(folder)["references"][n] for n in novel]
    for seed, value in zip((1, 2), found["by_label"]["bahdanau"]["quality"]["bleu_novel"]["values"], strict=True):
        out = read(folder, "bahdanau", seed)["translations"]
        assert value == pytest.approx(sacrebleu.corpus_bleu([out[n] for n in novel], [references]).score, abs=1e-6)
    assert found["by_label"]["bahdanau"]["quality"]["novel"] == len(novel)


def test_three_seeds_tell_systems_apart(tmp_path):
    fabricate(tmp_path, {"none": 0.55, "luong_general": 0.2}, seeds=(1, 2, 3), sentences=30)
    page = report.write_report(tmp_path).read_text()
    data = json.loads((tmp_path / "report.json").read_text())
    from regard.lab.evaluation.bootstrap import RESAMPLES

    references = texts(tmp_path)["references"]
    whole = [
        sacrebleu.corpus_bleu(
            [text for seed in (1, 2, 3) for text in read(tmp_path, label, seed)["translations"]], [references * 3]
        ).score
        for label in ("luong_general", "none")
    ]
    pair = data["systems"][1]["p"]["all"]
    assert pair["difference"] == pytest.approx(whole[0] - whole[1], abs=1e-6)
    assert pair["p"] == pytest.approx(1 / (RESAMPLES + 1)) and pair["resamples"] == RESAMPLES
    assert data["systems"][0]["p"] is None, "the baseline is not held against itself"
    assert "Luong general translates best" in page and "p of the difference:" in page and "In this run" not in page
    rows = rows_of((tmp_path / "report.md").read_text(), "perplexity")
    assert rows["Luong general"]["p"] == "≤ 0.001"
    assert f"**{rows['Luong general']['BLEU']}**" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("seeds", [(1,), (1, 2)])
def test_fewer_than_three_seeds_are_one_run_and_give_no_p(tmp_path, seeds):
    fabricate(tmp_path, {"none": 0.55, "luong_general": 0.2}, seeds=seeds, sentences=30)
    report.write_report(tmp_path)
    data = json.loads((tmp_path / "report.json").read_text())
    headlines = " ".join(findings_of(data))
    assert not re.search("best|highest|fastest|next is|learned|better", headlines, re.I), headlines
    assert re.search(r"BLEU on the novel part: No attention [\d.]+.*, Luong general [\d.]+", headlines)
    assert all(system["p"] is None for system in data["systems"]) and data["lead"] is None
    markdown = (tmp_path / "report.md").read_text()
    rows = rows_of(markdown, "perplexity")
    assert "p" not in rows["Luong general"]
    assert not any("**" in line for line in markdown.splitlines() if line.startswith("|"))
    assert "With fewer than 3 seeds per system, other seeds may give another ranking" in markdown


def findings_of(data):
    from regard.lab.report.sections import findings

    return findings(data)


@pytest.mark.parametrize(("noises", "says"), [((0.40, 0.41), "scores highest"), ((0.55, 0.2), "translates best")])
def test_only_a_clear_difference_makes_a_best_system(tmp_path, noises, says):
    fabricate(tmp_path, dict(zip(("none", "luong_general"), noises, strict=True)), seeds=(1, 2, 3), sentences=30)
    report.write_report(tmp_path)
    data = json.loads((tmp_path / "report.json").read_text())
    said = findings_of(data)[0]
    assert (data["lead"]["novel"]["p"] < 0.05) == (says == "translates best")
    assert says in said and ("which is not clear" in said) == (says == "scores highest")


@pytest.mark.parametrize("seeds", [(1, 2), (1, 2, 3)])
def test_headlines_about_cost_and_heads_need_three_seeds(tmp_path, seeds):
    fabricate(tmp_path, {"transformer": 0.3, "none": 0.6}, seeds, 20, "prune", {})
    for path in tmp_path.glob("trials/none-*/evaluation.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 0.5}))
    report.write_report(tmp_path)
    said = " ".join(findings_of(json.loads((tmp_path / "report.json").read_text())))
    assert ("of the heads" in said and "Fastest decoding: No attention" in said) == (len(seeds) == 3), said
    assert ("of the heads" in said or "Fastest decoding" in said) == (len(seeds) == 3), said


@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
def test_systems_that_say_the_same_are_not_told_apart(tmp_path, seeds):
    fabricate(tmp_path, {"none": 0.4, "bahdanau": 0.4, "transformer": 0.8}, seeds=seeds, sentences=20)
    for seed in seeds:
        shutil.copy(tmp_path / f"trials/none-{seed}/evaluation.json", tmp_path / f"trials/bahdanau-{seed}")
    report.write_report(tmp_path)
    data = json.loads((tmp_path / "report.json").read_text())
    assert len(seeds) < 3 or data["systems"][1]["p"]["all"]["p"] > 0.3
    assert data["systems"][1]["sentences"] == {"seed": 1, "better": 0, "alike": 20, "worse": 0}
    assert data["examples"] is None or not data["examples"]["wins"]
    said = findings_of(data)[0]
    assert ("No attention and Bahdanau reach the same score" in said) == (len(seeds) == 3)
    assert ("Next is Transformer" in said) == (len(seeds) == 3)
    markdown = (tmp_path / "report.md").read_text()
    chrf = rows_of(markdown, "perplexity")["Bahdanau"]["chrF"]
    assert markdown.count(f"| **{chrf}** |") == (2 if len(seeds) == 3 else 0)


def test_equal_time_says_which_steps_it_came_to(folder, found):
    text = (folder / "report.md").read_text()
    assert "Steps in this time: No attention 100 ± 0, Bahdanau 100 ± 0" in text
    row = rows_of(text, "parameters")["Bahdanau"]
    assert row["minutes to best"].startswith("3.50") and row["steps to best"].startswith("350")
    assert found["tokenizer"] == "13a" and "the tokenizer 13a of sacrebleu" in text


def test_costs_come_from_the_training(folder, found):
    cost = found["by_label"]["bahdanau"]["cost"]
    assert cost["tokens_per_second"]["mean"] == pytest.approx(1000 * 1.25)
    assert cost["minutes"]["mean"] == pytest.approx(4.0)
    assert cost["minutes_to_best"]["mean"] == pytest.approx(3.5), "the validation of highest BLEU is the seventh"
    assert cost["parameters"] == 1_250_000 and cost["peak_memory_mib"]["mean"] == 300.5
    assert cost["sentences_per_second"]["values"] == pytest.approx([40 / 3, 40 / 4])


def test_wins_are_sentences_by_sacrebleu_and_the_outcomes_add_up(folder, found):
    given, best = texts(folder), found["examples"]
    ours, base = (read(folder, label, best["seed"])["translations"] for label in (best["label"], "none"))
    similar = json.loads((folder / "retrieval.json").read_text())["similarities"]
    differences = {
        n: sacrebleu.sentence_bleu(ours[n], [reference]).score - sacrebleu.sentence_bleu(base[n], [reference]).score
        for n, reference in enumerate(given["references"])
        if similar[n] < 0.3
    }
    assert best["wins"][0]["difference"] == pytest.approx(max(differences.values()), abs=1e-6)
    for each in best["wins"] + best["losses"]:
        assert each["difference"] == pytest.approx(differences[each["sentence"]], abs=1e-6)
        assert (each["source"], each["system"]) == (given["sources"][each["sentence"]], ours[each["sentence"]])
    assert all(
        sum(system["sentences"][name] for name in ("better", "alike", "worse")) == 40
        for system in found["systems"]
        if system["sentences"]
    )


def test_the_best_system_is_the_one_of_highest_novel_bleu(folder, found):
    means = {system["label"]: system["quality"]["bleu_novel"]["mean"] for system in found["systems"]}
    assert found["ranking"] == sorted(means, key=lambda label: -means[label])
    title = found["by_label"][found["ranking"][0]]["title"]
    assert f"Sentences with the largest gains of {title}" in (folder / "report.md").read_text()


def test_systems_below_copying_are_not_said_to_translate(tmp_path):
    fabricate(tmp_path, {"none": 0.95, "bahdanau": 0.95}, seeds=(1,), sentences=30)
    retrieval = json.loads((tmp_path / "retrieval.json").read_text())
    (tmp_path / "retrieval.json").write_text(json.dumps(retrieval | {"bleu": 99.0, "bleu_novel": 98.0}))
    page = report.write_report(tmp_path).read_text()
    assert "No system has learned to translate" in page and "translates best" not in page


def test_near_duplicates_that_are_left_out_are_said_to_be(tmp_path):
    fabricate(tmp_path, {"none": 0.95, "bahdanau": 0.5}, seeds=(1,), sentences=30)
    about = json.loads((tmp_path / "comparison.json").read_text())
    assert "left out of the test" not in report.write_report(tmp_path).read_text()
    left_out = {"without_near": True, "left_out": {"of test too near to training": 1103}}
    (tmp_path / "comparison.json").write_text(json.dumps(about | left_out))
    page = report.write_report(tmp_path).read_text()
    assert "1,103 sentences are left out of the test" in page and "1,103 of test too near to training" in page


def test_a_partial_comparison_says_what_is_missing_and_what_failed(folder):
    for name in ("report.md", "report.html"):
        text = (folder / name).read_text().replace("\\", "")
        assert "7 of 8 trials have finished; missing: transformer-2" in text
        assert "transformer-2 failed: the loss is NaN" in text


def test_seeds_without_looking_json_are_left_out_of_what_it_says(folder, found):
    assert found["by_label"]["luong_general"]["looks"]["entropy"]["values"] == [1.2]
    assert found["by_label"]["none"]["looks"]["entropy"] is None
    assert found["by_label"]["none"]["gradient"]["relative"][0] == 2.0
    assert len(found["by_label"]["none"]["gradient"]["position"]) == 9, "an empty bin is no zero"


@pytest.mark.parametrize("keep", ["nothing", "metrics", "one", "no_test", "no_looking"])
def test_any_state_of_the_folder_gives_a_report(folder, tmp_path, keep):
    path = shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(path / "figures")
    if keep == "nothing":
        shutil.rmtree(path / "trials")
        (path / "retrieval.json").unlink()
    patterns = {"metrics": "*/[!m]*", "one": "[!n]*/evaluation.json", "no_looking": "*/looking.json"}
    for file in (path / "trials").glob(patterns.get(keep, "none")) if keep in patterns else ():
        file.unlink()
    if keep == "no_test":
        (path / "test.json").unlink()
    page = report.write_report(path)
    assert page == path / "report.html" and page.exists()
    data = json.loads((path / "report.json").read_text())
    assert data["progress"]["finished"] == {"nothing": 0, "metrics": 0, "one": 2}.get(keep, 7)
    if keep in ("nothing", "metrics"):
        assert "No trial has finished yet." in page.read_text()
    if keep == "no_test":
        assert all(system["p"] is None for system in data["systems"])


def test_test_sentences_of_another_corpus_are_not_used(folder, tmp_path):
    path = shutil.copytree(folder, tmp_path / "copy")
    given = texts(path)
    (path / "test.json").write_text(json.dumps(given | {"references": given["references"][::-1]}))
    report.write_report(path)
    assert json.loads((path / "report.json").read_text())["examples"] is None


class Page(HTMLParser):
    """What a page refers to, its open elements, and its ids."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.tags = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [value for name, value in given.items() if name in ("src", "href", "xlink:href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_from_elsewhere_and_is_well_formed(folder):
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert not page.open, "every element is closed"
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "script" not in page.tags and "@import" not in text and not re.search(r"url\((?!#)", text)
    assert "<ville>" not in text and "&lt;ville&gt;" in text, "sentences are text, never markup"


def test_figures_are_xml_with_title_and_description(folder):
    inline = re.findall(r"<svg.*?</svg>", (folder / "report.html").read_text(), re.S)
    files = sorted((folder / "figures").glob("*.svg"))
    assert len(inline) == len(files) > 10
    for svg in [*inline, *(file.read_text() for file in files)]:
        root = ElementTree.fromstring(svg.encode())
        ids = {element.get("id") for element in root.iter()}
        assert root[0].text and set(root.get("aria-labelledby").split()) <= ids
        assert any(element.tag.endswith("desc") and element.text for element in root)
    used = set(re.findall(r"\(figures/(.+?)\)", (folder / "report.md").read_text()))
    assert used == {file.name for file in files}


def test_no_table_of_the_first_section_is_wider_than_the_page(folder):
    """A column takes at least 7 letters of 7.5 pixels and 13 pixels beside them; the page has 1,152 pixels."""
    page = (folder / "report.html").read_text()
    for table in page.split("<h2")[1].split("<table")[1:3]:
        heads = re.findall(r"<th scope=\"col\"[^>]*>(.*?)</th>", table)
        cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in table.split("<tr>")[2:]]
        words = [max(len(word) for word in re.split(r" ", head)) for head in heads]
        widest = [max(w, *(len(row[n]) for row in cells)) for n, w in enumerate(words)]
        assert len(heads) > 4 and sum(7.5 * width + 13 for width in widest) < 1152


def test_every_figure_says_what_to_see_in_it(folder):
    page, text = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    shown = re.findall(r"<figure><figcaption>(.*?)</figcaption>.*?</svg>(.*?)</figure>", page, re.S)
    assert len(shown) > 5
    for title, below in shown:
        said = html.unescape(re.fullmatch(r'<p class="look">(.*\.)</p>', below)[1])
        assert said[:20] in text, title


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="needs a browser: chromium-headless-shell")
def test_the_slides_are_the_captioned_figures_one_a_screen_and_one_a_printed_page(folder):
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium(), args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 700})
        page.goto((folder / "report.html").as_uri())
        captioned = page.locator("figcaption").count()
        assert page.locator("main table:visible").count() > 0
        page.get_by_role("link", name="Slides").click()
        assert page.locator("main :is(table, p:not(.look), h2, details):visible").count() == 0
        heights = page.locator("figure:visible").evaluate_all("all => all.map((one) => one.scrollHeight)")
        assert heights == [700] * captioned
        assert len(re.findall(rb"/Type /Page\b(?!s)", page.pdf(landscape=True))) == captioned
        page.locator("nav a").first.click()
        assert page.locator("main table:visible").count() > 0, "a link to a section leaves the slides"
        browser.close()


@pytest.mark.parametrize(("count", "is_few"), [(2, True), (29, True), (30, False), (486, False)])
def test_buckets_of_few_sentences_are_hollow_and_not_joined(count, is_few):
    from regard.drawing.canvas import new_figure
    from regard.lab.report.charts import _bucket_line

    buckets = [
        {"label": "1 to 10", "count": 486, "bleu": 30.0, "low": 28.0, "high": 32.0},
        {"label": "11 to 20", "count": count, "bleu": 10.0, "low": 1.0, "high": 40.0},
    ]
    axes = new_figure(3, 3).subplots()
    _bucket_line(axes, {"title": "x", "by_length": buckets}, ["1 to 10", "11 to 20"], "by_length", 0.0, ("black", "o"))
    joined, *hollow = axes.lines
    assert [y == y for y in joined.get_ydata()] == [True, not is_few]
    assert [(line.get_fillstyle(), [*line.get_ydata()]) for line in hollow] == [("none", [10.0])] * is_few


def test_an_alignment_shows_every_weight(folder):
    from regard.lab.report.alignments import alignment_figure

    weights = [[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]]
    alignment = {"source": ["a", "b<", "c"], "target": ["x", "y"], "weights": weights, "gold": [[1, 0]]}
    svg = alignment_figure("it", "A & B", alignment).svg
    opacities = [float(each) for each in re.findall(r'fill-opacity="([\d.]+)"', svg)]
    assert opacities == pytest.approx([0.5, 0.75**0.5, 1.0], abs=0.01)
    assert "x – b&lt;; y – a" in svg and svg.count("#d55e00") == 1


def test_writing_again_changes_nothing_and_leaves_no_drafts(folder):
    files = [*folder.glob("report.*"), *(folder / "figures").iterdir()]
    before = {file: file.read_bytes() for file in files}
    stray = folder / "figures" / "alignment-9-old.svg"
    stray.write_text("<svg/>")
    report.write_report(folder)
    assert {file: file.read_bytes() for file in files} == before
    assert not stray.exists() and not list(folder.rglob(".regard-*"))


def test_json_holds_the_numbers_of_the_tables(folder, found):
    from regard.lab.report.sections import document
    from regard.lab.report.tables import cost_table, quality_table

    data = {name: value for name, value in found.items() if name != "by_label"}
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    for table, first in ((quality_table(data), "perplexity"), (cost_table(data), "parameters")):
        rows = rows_of((folder / "report.md").read_text(), first)
        for row in table.rows:
            assert list(rows[row[0]].values()) == list(row)
    assert document(data).title == "Comparison: invented"


@pytest.mark.parametrize(
    ("sweep", "settings", "figure"),
    [
        ("heads", {"heads-1": {"num_heads": 1}, "heads-4": {"num_heads": 4}}, "heads"),
        (
            "positions",
            {"positions-rope": {"positions": "rope"}, "positions-alibi": {"positions": "alibi"}},
            "positions",
        ),
        ("attention", {"attention-full": {}, "attention-linear": {}}, "sweep-attention"),
        ("scaled", {"scaled": {"scaled": True}, "unscaled": {"scaled": False}}, "sweep-scaled"),
        ("prune", {"transformer": {}}, "pruning"),
    ],
)
def test_a_sweep_has_its_own_figure(tmp_path, sweep, settings, figure):
    fabricate(tmp_path, dict.fromkeys(settings, 0.3), (1, 2, 3), 20, sweep, settings)
    page = report.write_report(tmp_path).read_text()
    assert (tmp_path / "figures" / f"{figure}.svg").exists()
    wanted = {"heads": "Vaswani", "positions": "longer than 10 words", "prune": "25 % of the heads"}
    assert wanted.get(sweep, f"The sweep: {sweep}") in page


def test_a_folder_that_is_no_comparison_is_refused(tmp_path):
    with pytest.raises(rg.RegardError, match=r"has no comparison\.json.*regard compare"):
        report.write_report(tmp_path)
    (tmp_path / "comparison.json").write_text('{"systems": []}')
    with pytest.raises(rg.RegardError, match="has no systems or no seeds"):
        report.write_report(tmp_path)


def test_a_broken_evaluation_is_named(tmp_path):
    fabricate(tmp_path, {"none": 0.4}, (1,), 10)
    broken = tmp_path / "trials/none-1/evaluation.json"
    broken.write_text('{"bleu": 3}')
    with pytest.raises(rg.RegardError, match=r"none-1/evaluation\.json cannot be read"):
        report.write_report(tmp_path)
