"""Maps of consecutive queries, for example of the steps of a generation, as one map."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from regard.attention import Prepared
from regard.errors import RegardError
from regard.maps.attention_map import AttentionMap
from regard.maps.scored_map import ScoredMap
from regard.pieces.grid import Grid
from regard.positions import Positions


def joined(maps: Sequence[AttentionMap]) -> ScoredMap:
    """One map from maps of consecutive queries: the rows of each map, over the keys of the last map.

    All maps must have the same batch and heads. Each must begin at the query after the last query of the previous one.

    >>> import torch, regard as rg
    >>> attention, q, k = rg.Attention(mask=rg.causal()), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    >>> steps = [rg.attend(attention, q[:, :, i : i + 1], k[:, :, : i + 1], k[:, :, : i + 1]) for i in range(3)]
    >>> joined([step.weights for step in steps])
    AttentionMap(1 x 2 heads x 3 queries x 3 keys)
    """
    if not maps:
        raise RegardError("joined: there are no maps to join.")
    scored = [part for part in maps if isinstance(part, ScoredMap)]
    if len(scored) < len(maps):
        raise RegardError("joined: only maps of scores can be joined. Read the map of each call.")
    last, place = scored[-1], scored[0].positions.start
    for part in scored:
        if part.positions.start != place or part.shape[:2] != last.shape[:2]:
            raise RegardError(
                f"joined: the maps must have consecutive queries and equal (batch, heads). Query {place} and "
                f"{last.shape[:2]} were expected, got query {part.positions.start} and {part.shape[:2]}. Watch one "
                "sequence of calls at a time."
            )
        place += part.shape[2]
    parts = [part._prepared for part in scored]
    rows = tuple(None if r is None else torch.cat([p.rows[n] for p in parts], 2) for n, r in enumerate(parts[0].rows))  # type: ignore[misc]
    prepared = Prepared(torch.cat([p.query for p in parts], 2), parts[-1].key, rows, parts[-1].cols)
    positions = Positions(maps[0].positions.start, last.positions.keys)
    grid = Grid(last.grid.batch, last.grid.head, torch.cat([part.grid.query for part in maps]), last.grid.key)
    return ScoredMap(last.attention, prepared, positions, grid, None)
