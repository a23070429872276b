"""A selection over the ranks of a ring: each rank chooses the keys of its queries, and all ranks get all choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.spans import Spans
from regard.engine.ring.exchange import Exchange
from regard.engine.ring.rank_share import RankShare, of_all_keys, of_queries, unread_keys
from regard.pieces.call_tensors import needs_of
from regard.pieces.chosen import chosen_keys


@torch.no_grad()
def with_chosen_keys(
    share: RankShare, exchange: Exchange, number: int, queries: Sequence[Spans], keys: Sequence[Spans]
) -> RankShare:
    """The share with the chosen keys of all queries as a part of its mask, in place of its selection. Collective.

    `queries` and `keys` are the tokens of each rank, counted from 0, and `number` is that of the operation. The tensors
    of the selection for all keys, and the ids of all choices, are on every rank. So the mask is the same everywhere,
    and the route sends only chosen keys.
    """
    attention, selection = share.attention, share.attention.selection
    if selection is None:
        return share
    I, J = (sum(map(len, held)) for held in (queries, keys))
    positions = share.positions or Positions.aligned_to_end(I, J)
    positions.check(J)
    whole = of_all_keys(share, [selection], exchange, number, keys)
    masks, num_done = [], 0
    for start, stop in queries[exchange.rank]:
        part = slice(num_done, num_done := num_done + stop - start)
        query, query_tensors = share.query[:, :, part], of_queries(selection, whole, part)
        part_positions = Positions(positions.start + start, positions.keys)
        stand_in = unread_keys(share.key, J)
        masks.append(selection.choose(query, stand_in, part_positions, attention.mask, **query_tensors))
    chosen = _of_all_ranks(masks, selection, exchange, queries, positions.start)
    resolved = attention.with_mask_too(chosen)
    resolved.selection = None
    tensors = {name: x for name, x in share.tensors.items() if name not in needs_of(selection)}
    return replace(share, attention=resolved, tensors=tensors)


def _of_all_ranks(
    masks: Sequence[object], selection: object, exchange: Exchange, queries: Sequence[Spans], start: int
) -> chosen_keys:
    """The mask of the choices of all ranks, from those of this rank: one for each interval of its queries. Collective.

    Ranks gather in their order. `order` brings the rows into that of the queries, the first at position `start`.
    """
    own: list[Tensor] = []
    for mask in masks:
        if not isinstance(mask, chosen_keys):
            raise RegardError(
                f"attend: in a ring {type(selection).__name__}.choose must return regard.masks.chosen_keys(ids), got "
                f"{type(mask).__name__}."
            )
        own.append(mask.ids)
    first = masks[0]
    assert isinstance(first, chosen_keys)
    order = torch.cat([held.tensor(own[0].device) for held in queries]).argsort()
    ids = exchange.gathered(torch.cat(own, 2), [len(held) for held in queries]).index_select(2, order)
    return chosen_keys.of_sorted(ids, first.size, first.num_heads or ids.shape[1], start, first.blocks)
