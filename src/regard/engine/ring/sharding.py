"""The share of each rank: which tokens of a sequence it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from regard.base.errors import RegardError, nearest
from regard.base.positions import Positions
from regard.base.spans import Spans

LAYOUTS = ("zigzag", "contiguous")


def shares(length: int, ranks: int, layout: str) -> list[Spans]:
    """The tokens of each rank, of as equal lengths as possible.

    "contiguous": the first rank has the first tokens. "zigzag": of 2 x ranks pieces, rank r has the r-th from
    the start and the r-th from the end. So all ranks have the same number of pairs under a causal mask.

    >>> [share.intervals for share in shares(10, 2, "zigzag")]
    [((0, 2), (7, 10)), ((2, 7),)]
    """
    if layout not in LAYOUTS:
        raise RegardError(f"Ring: there is no layout {layout!r}. {nearest(str(layout), LAYOUTS)}")
    if length < ranks:
        raise RegardError(f"Ring: {length} tokens are too few for {ranks} ranks. Use at most {length} ranks.")
    count = ranks if layout == "contiguous" else 2 * ranks
    pieces = list(pairwise(length * n // count for n in range(count + 1)))
    return [Spans.of(pieces[r], pieces[count - 1 - r if count > ranks else r]) for r in range(ranks)]


def shares_of(lengths: Sequence[int], layout: str, what: str) -> list[Spans]:
    """The tokens of ranks that hold these numbers of tokens. Zigzag shares must have the lengths of `shares`.

    `layout` is one of `LAYOUTS`. `what` names the tokens in the error: "queries" or "keys".
    """
    if layout == "contiguous":
        return [Spans.of(ends) for ends in pairwise([0, *accumulate(lengths)])]
    held = shares(sum(lengths), len(lengths), layout)
    for rank, (share, length) in enumerate(zip(held, lengths, strict=True)):
        if len(share) != length:
            raise RegardError(
                f"attend: rank {rank} holds {length} {what}, but the layout {layout!r} gives it {len(share)} of "
                f"{sum(lengths)} over {len(lengths)} ranks. Cut the whole tensor with ring.share(x), or use layout="
                "'contiguous', whose shares may have any length."
            )
    return held


@dataclass(frozen=True)
class ShardPositions(Positions):
    """Positions of one rank: its queries stand at the integers of `rows`, which may be several intervals."""

    rows: Spans

    def queries(self, num_queries: int) -> Spans:
        return self.rows

    def query(self, rows: slice, device: torch.device | str = "cpu") -> Tensor:
        return self.rows.tensor(device)[rows]
