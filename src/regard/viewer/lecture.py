"""A lecture as one file: figures with sliders that compute their numbers in the page, without a network."""

from __future__ import annotations

import os
from pathlib import Path

from regard.base.checks import checked
from regard.base.errors import RegardError, nearest
from regard.base.whole_files import write_whole
from regard.viewer.page import embed, html

#: The names of the lectures, which `frontend/src/lecture.ts` draws.
LECTURES = ("steps", "scores", "masks", "positions", "rope", "biases", "heads", "length")


@checked
def write_lecture(path: str | os.PathLike[str], lecture: str) -> Path:
    """Write a lecture to `path` as one file, completely or not at all. Missing folders are created.

    | lecture | what moves |
    |---|---|
    | `"steps"` | one query as a table: scores, scaling, mask, softmax, weighted sum |
    | `"scores"` | score, normalizer, temperature, and the direction and length of a query |
    | `"masks"` | every kind of mask, with its sizes |
    | `"positions"` | sinusoids: length, width, base |
    | `"rope"` | rotations by position, and the score by distance |
    | `"biases"` | ALiBi, KERPLE and T5's buckets: the bias and the weights by distance |
    | `"heads"` | the same width in 1 to 32 heads: their maps, and what they cost |
    | `"length"` | attention, a window, linear attention and a recurrence: their costs by length |

    >>> import tempfile, regard as rg
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = rg.viewer.write_lecture(Path(folder) / "steps.html", "steps")
    ...     page.name, page.read_text().startswith("<!doctype html>")
    ('steps.html', True)
    """
    if lecture not in LECTURES:
        raise RegardError(f"write_lecture: there is no lecture {lecture!r}. {nearest(lecture, LECTURES)}")
    write_whole(Path(path), html(embed({"lecture": lecture}), program="lecture.js"))
    return Path(path)
