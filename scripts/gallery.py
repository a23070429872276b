"""The thumbnails of docs/gallery.md: each picture of docs/images in it, 360 pixels wide, at most 40 kB.

python scripts/gallery.py
"""

from __future__ import annotations

import re
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
IMAGES, THUMBNAILS = ROOT / "docs/images", ROOT / "docs/images/gallery"
WIDTH, HEIGHT, LARGEST = 360, 240, 40_000


def write_thumbnail(name: str) -> Path:
    """The top of a picture in 360 x 240 pixels on white, with as many colors as 40 kB hold."""
    picture = Image.open(IMAGES / name).convert("RGB")
    picture = picture.resize((WIDTH, max(1, round(picture.height * WIDTH / picture.width))), Image.Resampling.LANCZOS)
    sheet = Image.new("RGB", (WIDTH, HEIGHT), "white")
    sheet.paste(picture, (0, max(0, (HEIGHT - picture.height) // 2)))
    path = THUMBNAILS / name
    for colors in (256, 128, 64, 32, 16):
        sheet.quantize(colors).save(path, optimize=True)
        if path.stat().st_size <= LARGEST:
            return path
    raise SystemExit(f"{name} is larger than {LARGEST} bytes with 16 colors")


def main() -> None:
    THUMBNAILS.mkdir(exist_ok=True)
    for name in re.findall(r"images/gallery/([\w-]+\.png)", (ROOT / "docs/gallery.md").read_text()):
        print(write_thumbnail(name).stat().st_size, name)


if __name__ == "__main__":
    main()
