"""`merged_map`: the calls of a generation as one `ScoredMap`, with one tensor of queries and one of keys.

Most generations are that: a key never changes after its token was read, whatever the cache does with it. Then memory is
O(n), reductions run in the compiled kernels, and the map is stored as queries and keys. If a key did change (a
quantized cache), or if no rule describes the masks of all calls, there is no such map.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.attention import Attention, Prepared
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes
from regard.hf.capture.captured_calls import Capture
from regard.maps.scored_map import ScoredMap
from regard.pieces.bias import Softcap
from regard.pieces.contents import tensors_of
from regard.pieces.grid import Grid
from regard.pieces.mask import Mask, causal, window


@dataclass(frozen=True, eq=False)
class CallRows:
    """Some rows of a call and their place in the joined map; the fields are those of `MapRows`."""

    call: Capture
    rows: range
    start: int
    offset: int
    entries: Tensor

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)

    def key(self, columns: range) -> Tensor:
        """Keys (N, G, J', D) of some columns of the joined map."""
        tensor, entries = self.call.keys.tensor, self.entries.to(self.call.keys.tensor.device)
        return tensor[:, :, columns.start - self.offset : columns.stop - self.offset].index_select(0, entries)

    def allowed(self, num_keys: int) -> Tensor:
        """Which keys of the joined map the call allows for these rows: (N or 1, H or 1, I', J)."""
        positions, mask, J = self.call.positions, self.call.attention.mask, self.call.shape[3]
        columns = range(max(0, self.offset), min(num_keys, self.offset + J))
        device = self.call.query.device
        entries, heads = self.entries.to(device), torch.arange(self.call.shape[1], device=device)
        queries = positions.query(slice(self.rows.start, self.rows.stop), device)
        keys = positions.key(device)[columns.start - self.offset : columns.stop - self.offset]
        pairs = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        pairs = pairs if mask is None else mask.allowed(Grid(entries, heads, queries, keys))
        allowed = torch.zeros(*pairs.shape[:2], len(self.rows), num_keys, dtype=torch.bool, device=device)
        allowed[..., columns.start : columns.stop] = pairs
        return allowed


def merged_map(parts: Sequence[CallRows], num_queries: int, num_keys: int, is_cross: bool) -> ScoredMap | None:
    """One map of all rows, if the calls have the same pieces and keys, and one rule for their masks; else None."""
    if not all(_is_plain(part) for part in parts):
        return None
    if sum(len(part.rows) for part in parts) != num_queries or not _have_same_pieces([p.call.attention for p in parts]):
        return None
    key = _keys(parts, num_queries, num_keys, is_cross)
    if key is None:
        return None
    positions = Positions.aligned_to_end(num_queries, num_keys)
    found = _common_mask(parts, positions, num_keys, is_cross)
    if not found:
        return None
    first = parts[0].call.attention
    attention = Attention(first.score, bias=first.bias, mask=found[0], normalizer=first.normalizer).eval()
    query = torch.cat([_queries(part) for part in parts], 2)
    prepared = Prepared.of(attention, query, key, positions)
    grid = Grid.whole(positions, len(query), query.shape[1], num_queries, query.device)
    return ScoredMap(attention, prepared, positions, grid, None)


def _is_plain(part: CallRows) -> bool:
    """Whether all its rows are those of queries and keys without graphs, whose weights no edit changed."""
    return (
        type(part.call) is Capture
        and not part.call.is_live
        and part.call.edits is None
        and bool((part.entries >= 0).all())
    )


def _queries(part: CallRows) -> Tensor:
    query = part.call.query[:, :, part.rows.start : part.rows.stop]
    return query.index_select(0, part.entries.to(query.device))


def _have_same_pieces(attentions: Sequence[Attention]) -> bool:
    """Whether the calls differ in nothing but their masks: no bias of pairs, the same scale and the same sinks."""
    first = attentions[0]
    tensors = [tensors_of(a.normalizer) for a in attentions]
    if not all(all(map(torch.equal, own, tensors[0])) for own in tensors):
        return False
    return all(
        a.position is None
        and all(isinstance(bias, Softcap) for bias in a.bias)
        and (repr(a.bias), repr(a.score), repr(a.normalizer))
        == (repr(first.bias), repr(first.score), repr(first.normalizer))
        for a in attentions
    )


def _keys(parts: Sequence[CallRows], num_queries: int, num_keys: int, is_cross: bool) -> Tensor | None:
    """The keys of all columns, each from the call that read its token; None if a later call has another key there."""
    if is_cross:
        key, shift = parts[0].key(range(num_keys)), num_keys
    else:
        shift = num_keys - num_queries
        starts = [0, *(part.start + shift for part in parts[1:])]
        if any(part.offset > start for part, start in zip(parts, starts, strict=True)):
            return None
        own = zip(parts, starts, [*starts[1:], num_keys], strict=True)
        key = torch.cat([part.key(range(start, stop)) for part, start, stop in own], 2)
    last = parts[-1]
    for part in parts:
        if part.call.keys is last.call.keys and torch.equal(part.entries, last.entries):
            continue  # calls with a growing cache share one tensor
        columns = range(max(0, part.offset), num_keys if is_cross else part.stop + shift)
        if not torch.equal(part.key(columns), key[:, :, columns.start : columns.stop]):
            return None
    if not torch.equal(last.key(range(max(0, last.offset), num_keys)), key[:, :, max(0, last.offset) :]):
        return None
    return key


def _common_mask(
    parts: Sequence[CallRows], positions: Positions, num_keys: int, is_cross: bool
) -> tuple[Mask | None] | tuple[()]:
    """The mask that agrees with those of all calls, in a tuple; empty if no candidate does."""
    B, H = len(parts[0].entries), parts[0].call.shape[1]
    sizes = Sizes(B, H, H, sum(len(part.rows) for part in parts), num_keys, 1, 1)
    for candidate in _candidates(parts, is_cross):
        if _fits(candidate, sizes, positions) and all(_agrees(candidate, part, positions, num_keys) for part in parts):
            return (candidate,)
    return ()


def _candidates(parts: Sequence[CallRows], is_cross: bool) -> Iterator[Mask | None]:
    last = parts[-1]
    own = None if last.call.attention.mask is None else last.call.attention.mask.select(last.entries)
    if is_cross:
        yield from (None, *([] if own is None else [own]))
        return
    rules: list[Mask] = [causal()]
    if last.offset > 0:
        rules.append(causal() & window(last.call.shape[3]))
    rules += [mask for part in parts[:2] if len(part.rows) > 1 and (mask := part.call.attention.mask) is not None]
    yield from rules
    yield from (rule & own for rule in rules if own is not None)


def _fits(candidate: Mask | None, sizes: Sizes, positions: Positions) -> bool:
    """Whether the mask has an answer for every key; padding of the prompt has none for later tokens."""
    try:
        if candidate is not None:
            candidate.check(sizes, positions)
    except RegardError:
        return False
    return True


def _agrees(candidate: Mask | None, part: CallRows, positions: Positions, num_keys: int) -> bool:
    allowed = part.allowed(num_keys)
    if candidate is None:
        return bool(allowed.all())
    device = allowed.device
    entries, heads = torch.arange(len(part.entries), device=device), torch.arange(part.call.shape[1], device=device)
    grid = Grid(entries, heads, positions.query(slice(part.start, part.stop), device), positions.key(device))
    return bool((candidate.allowed(grid) == allowed).all())
