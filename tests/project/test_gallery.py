"""The pictures of docs/gallery.md on a phone and on a wide screen, with the style sheet of the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import FLAGS, chromium

ROOT = Path(__file__).parents[2]
PICTURE = "<svg xmlns='http://www.w3.org/2000/svg' width='360' height='240'></svg>"


def page_of_tables():
    """The tables as the site has them: a head without words, rows of three cells, and empty cells at the end."""
    rows = re.findall(r"^\| .*images/.*\|$", (ROOT / "docs" / "gallery.md").read_text(), re.M)
    assert len(rows) >= 6
    cells = [[re.findall(r"`([^`]*)`", cell) for cell in row.strip("|").split(" | ")] for row in rows]
    image = f'<img src="data:image/svg+xml,{PICTURE}" width="360">'.replace("'", "%27").replace("<svg", "%3Csvg")
    shown = [
        "".join(f"<td>{image}<br><code>{code[0]}</code></td>" if code else "<td></td>" for code in row) for row in cells
    ]
    head = "<thead><tr><th></th><th></th><th></th></tr></thead>"
    body = "".join(f"<tr>{row}</tr>" for row in shown)
    style = (ROOT / "docs" / "stylesheets" / "regard.css").read_text()
    plain = "html { font-size: 125% } * { box-sizing: border-box } img { max-width: 100% }"  # as the theme has it
    return f"""<style>{plain} {style}</style>
<div class="md-typeset"><div class="md-typeset__table"><table>{head}<tbody>{body}</tbody></table></div></div>"""


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="needs chromium: apt-get install chromium-headless-shell")
@pytest.mark.parametrize(("width", "columns"), [(390, 2), (900, 3)])
def test_pictures_of_the_gallery_have_one_width_and_fit(width, columns):
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium(), args=FLAGS)
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.set_content(page_of_tables())
        boxes = page.evaluate("[...document.images].map(i => i.getBoundingClientRect()).map(b => [b.left, b.right])")
        past = "c => c.getBoundingClientRect().right > c.closest('td').getBoundingClientRect().right"
        cut = page.evaluate(f"[...document.querySelectorAll('code')].filter({past}).map(c => c.textContent)")
        browser.close()
    assert cut == [], "no code reaches into the next cell"
    assert all(left >= 0 and right <= width for left, right in boxes), "no picture is outside of the screen"
    widths = [right - left for left, right in boxes]
    assert max(widths) - min(widths) < 1 and len({round(left) for left, _ in boxes}) == columns
