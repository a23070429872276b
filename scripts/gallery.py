"""The thumbnails of docs/gallery.md: each picture of docs/images in it, 360 pixels wide, at most 40 kB.

python scripts/gallery.py
"""

from __future__ import annotations

import re
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
IMAGES, THUMBNAILS = ROOT / "docs/images", ROOT / "docs/images/gallery"
NAMED = re.compile(r"images/gallery/([\w-]+\.png)")
WIDTH, HEIGHT, LARGEST = 360, 240, 40_000


def write_thumbnail(name: str) -> Path:
    """A picture in 360 x 240 pixels on white, with as many colors as 40 kB hold."""
    picture = Image.open(IMAGES / name).convert("RGB")
    shrink = WIDTH / picture.width
    if not name.startswith("page-"):  # a view of the page shows its top, any other picture all of it
        shrink = min(shrink, HEIGHT / picture.height)
    size = (round(picture.width * shrink), round(picture.height * shrink))
    picture = picture.resize(size, Image.Resampling.LANCZOS)
    sheet = Image.new("RGB", (WIDTH, HEIGHT), "white")
    sheet.paste(picture, ((WIDTH - size[0]) // 2, max(0, (HEIGHT - size[1]) // 2)))
    path = THUMBNAILS / name
    for colors in (256, 128, 64, 32, 16):
        sheet.quantize(colors).save(path, optimize=True)
        if path.stat().st_size <= LARGEST:
            return path
    raise SystemExit(f"{name} is larger than {LARGEST} bytes with 16 colors")


def main() -> None:
    """Write each thumbnail that the page names."""
    THUMBNAILS.mkdir(exist_ok=True)
    for name in NAMED.findall((ROOT / "docs/gallery.md").read_text()):
        print(write_thumbnail(name).stat().st_size, name)


if __name__ == "__main__":
    main()
