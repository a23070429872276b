"""Pictures of every view of the page, at four widths, light and dark: `make screenshots`.

The page is the one that `regard demo` writes. Every picture goes to build/screenshots; those at 1,440 px in the light
theme, which the documentation shows, go to docs/images too, with 8 bits a pixel.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUT, IMAGES = ROOT / "build" / "screenshots", ROOT / "docs" / "images"
WIDTHS = {1920: 1080, 1440: 900, 768: 1024, 390: 844}
THEMES = ("light", "dark")
#: The name of a picture, and the link that it shows: texts of the demo are 0 and 1 (sentences), 2 (512 tokens), 3 (a
#: translation). Views that are not here are shown as they open.
LINKS = {
    "overview": "overview",
    "map": "head?text=2&layer=3&head=10&query=118&key=111&x=114&y=116&zoom=5.4",
    "head": "head?text=0&layer=2&head=1&query=10",
    "lines": "head?text=0&layer=2&head=1&query=10&way=lines",
    "line-grid": "overview?text=0&layer=2&head=1&grid=lines",
    "tiles": "head?text=0&layer=2&head=1&query=10&key=2&heads=2.1%2C3.1%2C4.2",
    "neurons": "head?text=0&layer=2&head=1&query=10&why=yes",
    "alignment": "alignment?text=3",
    "statistics": "statistics?text=2",
    "table": "statistics?text=0&table=head&find=it",
    "compare": "compare?text=0&layer=2&head=1&query=10",
    "pins": "compare?pair=heads&text=0&layer=2&head=1&query=10&key=13&pins=0.2.1%2C0.4.3",
    "whatif": "whatif?text=1&layer=2&head=1&query=10",
    "picture": "picture?layer=1&head=2&query=215",
}
#: The demo has none of these: docs/guides/images.md writes a page that has, for `--page portrait.html --only picture`,
#: and `regard analyze TEXT --knock-out "L2.H1: it -> tired" --save DIR` one for `--only whatif`.
OF_OTHER_PAGES = {"picture", "whatif"}


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="a page that is already written; by default that of `regard demo`")
    parser.add_argument("--only", help="names of pictures, with commas")
    parser.add_argument("--docs", action="store_true", help="only those of the documentation")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    links = links_of_views()
    chosen = options.only.split(",") if options.only else [name for name in links if name not in OF_OTHER_PAGES]
    address = (options.page or demo_page()).resolve().as_uri()
    looks = [("light", 1440)] if options.docs else [(theme, width) for theme in THEMES for width in WIDTHS]
    for name in take(address, {name: links[name] for name in chosen}, looks):
        shutil.copy(OUT / f"{name}-1440-light.png", IMAGES / f"page-{name}.png")
    print(f"{len(list(OUT.glob('*.png')))} pictures are in {OUT}; those of the documentation are in {IMAGES}.")


def links_of_views() -> dict[str, str]:
    """The links above, and those of all other views of the page."""
    from regard.viewer.story import VIEWS

    shown = {link.split("?")[0] for link in LINKS.values()}
    return LINKS | {view: view for view in VIEWS if view not in shown}


def demo_page() -> Path:
    """The page of `regard demo`."""
    folder = OUT / "demo"
    subprocess.run([sys.executable, "-m", "regard.cli.main", "demo", "--out", folder], check=True, stdout=sys.stderr)
    return folder / "index.html"


def take(address: str, links: dict[str, str], looks: list[tuple[str, int]]) -> list[str]:
    """Write the pictures of some links, each in some themes and widths, and return their names."""
    from playwright.sync_api import sync_playwright

    browser_path = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
    if browser_path is None:
        raise SystemExit("Pictures need a browser: apt-get install chromium.")
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        for theme, width in looks:
            page = browser.new_context(color_scheme=theme).new_page()
            for name, link in links.items():
                picture(page, f"{address}#{link}", OUT / f"{name}-{width}-{theme}.png")
            page.context.close()
        browser.close()
    return list(links)


def picture(page: Any, address: str, path: Path) -> None:
    """One view in a window as high as its content, or twice as high as a screen if that is less."""
    from PIL import Image

    width = int(path.stem.split("-")[-2])
    height = WIDTHS[width]
    page.set_viewport_size({"width": width, "height": height})
    page.goto(address)
    page.wait_for_selector(".view > *")
    page.wait_for_timeout(700)
    content = page.evaluate("Math.ceil(document.querySelector('#regard').getBoundingClientRect().height)")
    page.set_viewport_size({"width": width, "height": max(height, min(content, 2 * height))})
    page.wait_for_timeout(300)
    page.screenshot(path=path)
    # The palette has each color of the scale: where it has few, weights look equal that are not.
    image = Image.open(path).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, 2, dither=Image.Dither.NONE)
    image.save(path, optimize=True)


if __name__ == "__main__":
    main()
