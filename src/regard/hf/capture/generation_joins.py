"""Joins the calls of each module in a generation: which rows of which call belong to which token of each sequence.

A row is computed by the map of the call that read its token, so every family of maps joins, and a quantized cache has
the keys of each step. The length of the cache after each pass says where its rows stand: a pass that begins before the
end of the last one replaces refused drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.attention import Attention, Prepared
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes
from regard.hf.capture.captured_calls import ModuleCalls
from regard.hf.capture.kept_calls import KeptCall, LazyCall, worst
from regard.hf.capture.module_statistics import ModuleStatistics
from regard.maps import Distance, Entropy, KeyTotals, MassOn, Reduction, RowLinks, TopLinks
from regard.maps.attention_map import AttentionMap
from regard.maps.joined import JoinedMap, MapRows
from regard.maps.scored_map import ScoredMap
from regard.pieces.bias import is_softcap
from regard.pieces.contents import tensors_of
from regard.pieces.grid import Grid
from regard.pieces.mask import Mask, causal, window


@dataclass(frozen=True, eq=False)
class CallRows:
    """Some rows of a call, and their place in the joined map.

    The rows `rows` of the call are the rows from `start` on of the joined map, and its first key is key `offset` there.
    `entries` (N,) has the batch entry of the call for each sequence of the joined map; -1: none.
    """

    call: Any
    rows: range
    start: int
    offset: int
    entries: Tensor

    @property
    def stop(self) -> int:
        """The row of the joined map after the last one."""
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
    """One map of all rows, if the calls have the same pieces and keys, and one rule for their masks; else None.

    Here and below `parts` are the rows of each call, in their order, and the joined map has `num_queries` and
    `num_keys`. With `is_cross` its keys are tokens of an encoder.

    In most generations a key never changes after its token was read. Then memory is O(n), reductions run in the
    compiled kernels, and the map is stored as queries and keys. If a key did change (a quantized cache), or if no rule
    describes the masks of all calls, there is no such map.
    """
    if not all(_is_plain(part) for part in parts):
        return None
    if sum(len(part.rows) for part in parts) != num_queries or not _are_mergeable([p.call.attention for p in parts]):
        return None
    key = _keys(parts, num_queries, num_keys, is_cross)
    if key is None:
        return None
    positions = Positions.aligned_to_end(num_queries, num_keys)
    common_mask = _common_mask(parts, positions, num_keys, is_cross)
    if not common_mask:
        return None
    first = parts[0].call.attention
    attention = Attention(first.score, bias=first.bias, mask=common_mask[0], normalizer=first.normalizer).eval()
    queries = (part.call.query[:, :, part.rows.start : part.rows.stop] for part in parts)
    query = torch.cat([x.index_select(0, part.entries.to(x.device)) for part, x in zip(parts, queries, strict=True)], 2)
    prepared = Prepared.of(attention, query, key, positions)
    grid = Grid.whole(positions, len(query), query.shape[1], num_queries, query.device)
    return ScoredMap(attention, prepared, positions, grid, None)


def _is_plain(part: CallRows) -> bool:
    """Whether all its rows are those of queries and keys without graphs, whose weights no edit changed."""
    return part.call.is_scored and bool((part.entries >= 0).all())


def _are_mergeable(attentions: Sequence[Attention]) -> bool:
    """Whether the attentions are equal but for their masks, and no piece beside the mask depends on a position.

    `translate` made them, so sinks are the only tensors of such attentions, and the text of a piece has its numbers.
    """
    sinks = [tensors_of(attention.normalizer) for attention in attentions]
    if not all(all(map(torch.equal, own, sinks[0])) for own in sinks):
        return False
    if any(a.position is not None or not all(map(is_softcap, a.bias)) for a in attentions):
        return False
    return len({(repr(a.bias), repr(a.score), repr(a.normalizer)) for a in attentions}) == 1


def _keys(parts: Sequence[CallRows], num_queries: int, num_keys: int, is_cross: bool) -> Tensor | None:
    """The keys of all columns, each from the call that read its token; None if a later call has another key there.

    Row r of the joined map is the token of column r + `shift`. Columns before the first row belong to the first call.
    """
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
    """Masks to try: causal, a window, those of the first two calls; then each with that of the last call (padding)."""
    last = parts[-1]
    last_mask = None if last.call.attention.mask is None else last.call.attention.mask.select(last.entries)
    if is_cross:
        yield from (None, *([] if last_mask is None else [last_mask]))
        return
    rules: list[Mask] = [causal()]
    if last.offset > 0:  # a sliding cache dropped the first keys
        rules.append(causal() & window(last.call.shape[3]))
    rules += [mask for part in parts[:2] if len(part.rows) > 1 and (mask := part.call.attention.mask) is not None]
    yield from rules
    yield from (rule & last_mask for rule in rules if last_mask is not None)


def _fits(candidate: Mask | None, sizes: Sizes, positions: Positions) -> bool:
    """Whether the mask has an answer for every key; padding of the prompt has none for later tokens."""
    try:
        if candidate is not None:
            candidate.check(sizes, positions)
    except RegardError:
        return False
    return True


def _agrees(candidate: Mask | None, part: CallRows, positions: Positions, num_keys: int) -> bool:
    """Whether a mask of the joined map allows the pairs that the call allowed, in these rows."""
    allowed = part.allowed(num_keys)
    if candidate is None:
        return bool(allowed.all())
    device = allowed.device
    entries, heads = torch.arange(len(part.entries), device=device), torch.arange(part.call.shape[1], device=device)
    grid = Grid(entries, heads, positions.query(slice(part.start, part.stop), device), positions.key(device))
    return bool((candidate.allowed(grid) == allowed).all())


#: Reductions with a result for each row, and the reduction with a sum over rows for each key.
OF_ROWS, OF_KEYS = (Distance, Entropy, MassOn, TopLinks), KeyTotals


def joined_statistics(
    module: ModuleCalls, parts: Sequence[CallRows], num_queries: int, num_keys: int
) -> ModuleStatistics:
    """The statistics of a module over a generation; only of reductions whose results are by row, or sums over all rows.

    A sum over rows cannot leave rows out, so there is none where drafts were refused, or where padding is cut off. In
    cross-attention there is no distance: the place of a query among the keys would be another one in each call.
    """
    statistics = module.statistics
    assert statistics is not None
    every_row = all(len(part.rows) == part.call.shape[2] for part in parts)
    kinds = (*OF_ROWS, OF_KEYS) if every_row else OF_ROWS
    without = Distance if module.part == "cross" else ()
    reductions = tuple(one for one in statistics.reductions if isinstance(one, kinds) and not isinstance(one, without))
    numbered = [(part, module.calls.index(part.call)) for part in parts]
    results = tuple(
        _joined(one, [(part, statistics.of(one, number)) for part, number in numbered], num_queries, num_keys)
        for one in reductions
    )
    return ModuleStatistics(statistics.name, reductions, [results])


def _joined(reduction: Reduction, parts: Sequence[tuple[CallRows, Any]], num_queries: int, num_keys: int) -> Any:
    """The result of a reduction for the joined map, from the rows and the result of each call.

    Keys of links are moved to those of the joined map; totals of keys are added.
    """
    if isinstance(reduction, TopLinks):
        weights = _rows([(part, links.weights) for part, links in parts], num_queries)
        return RowLinks(weights, _rows([(part, links.keys + part.offset) for part, links in parts], num_queries))
    if not isinstance(reduction, OF_KEYS):
        return _rows(parts, num_queries)
    first = parts[0][1]
    totals = first.new_zeros(len(parts[0][0].entries), first.shape[1], num_keys)
    for part, result in parts:
        present = (part.entries >= 0).nonzero().flatten()
        columns = range(max(0, part.offset), min(num_keys, part.offset + result.shape[2]))
        own = result[part.entries[present]][:, :, columns.start - part.offset : columns.stop - part.offset]
        totals[present, :, columns.start : columns.stop] += own
    return totals


def _rows(parts: Sequence[tuple[CallRows, Tensor]], num_queries: int) -> Tensor:
    """Results (B, H, I, ...) of each call as results (N, H, R, ...); 0 after the end of a sequence.

    Of k strongest links a call with fewer keys has fewer; the others are 0.
    """
    first, widest = parts[0][1], max((result for _, result in parts), key=lambda result: result.shape[3:])
    joined = first.new_zeros(len(parts[0][0].entries), first.shape[1], num_queries, *widest.shape[3:])
    for part, result in parts:
        present = (part.entries >= 0).nonzero().flatten()
        part_rows = result[part.entries[present]][:, :, part.rows.start : part.rows.stop].to(joined.dtype)
        if part_rows.ndim == 4:
            part_rows = pad(part_rows, (0, joined.shape[3] - part_rows.shape[3]))
        joined[present, :, part.start : part.stop] = part_rows
    return joined


#: Why a module has no map of a generation.
OTHER_TOKENS = (
    "the rows of its calls are not the tokens that the model read, so they form no map of the text; seen.calls(name) "
    "has the map of each call"
)


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One forward pass of the model: the places of the tokens that it read, and the calls that it made.

    `calls` has the numbers of the calls of each attention module. `num_cached` is the number of tokens in the cache
    after the pass, None without a cache. `positions` is None if the number of tokens is not known.
    """

    positions: range | None
    num_cached: int | None
    calls: dict[str, range]


@dataclass(eq=False)
class GenerationRecord:
    """What was observed of one `generate()`.

    `prompt` (R, P) has a row for each row of the cache. `real` (R, P) and `source` (R, J) say which tokens of the
    decoder and of the encoder are no padding. `first` is the position of the first token of the prompt. `ends` are the
    tokens that end a text. `before` has the number of calls of each module before the first pass. `tokens` (N, L) are
    the returned sequences, and `beams` (N, T) the row of the cache that each generated token came from, -1 after the
    end. `is_nested`: another `generate()` ran inside of it. `is_dropped`: its first passes were dropped.
    """

    prompt: Tensor
    real: Tensor | None
    source: Tensor | None
    first: int
    ends: list[int]
    before: dict[str, int]
    passes: list[ForwardPass] = field(default_factory=list)
    tokens: Tensor | None = None
    beams: Tensor | None = None
    is_nested: bool = False
    is_dropped: bool = False

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of each returned sequence, with the prompt, without padding after its end."""
        assert self.tokens is not None
        P, L = self.prompt.shape[1], self.tokens.shape[1]
        if self.beams is not None:
            return [P + int(count) for count in (self.beams >= 0).sum(1)]
        is_end = torch.isin(self.tokens[:, P:].cpu(), torch.tensor(self.ends, dtype=torch.int64))
        return [P + int(row.int().argmax()) + 1 if bool(row.any()) else L for row in is_end]

    def starts(self) -> list[int]:
        """For each returned sequence the number of tokens of padding before it."""
        if self.real is None:
            return [0] * len(self.lengths)
        return [int(self.real[self.row(n, 0)].int().argmax()) for n in range(len(self.lengths))]

    def row(self, sequence: int, step: int) -> int:
        """The row of the cache that a sequence had at a step (0: the prompt).

        `beams` has at t the row that step t read, from which token t came. Steps after the end have the last row.
        """
        if self.beams is None:
            return sequence
        last = self.lengths[sequence] - self.prompt.shape[1] - 1
        return int(self.beams[sequence, min(step, last)])


@dataclass(frozen=True)
class TokenRange:
    """Tokens of some returned sequences: `rows`, positions in the decoder, and `source` in the encoder (None: all)."""

    sequences: tuple[int, ...]
    rows: range
    source: range | None = None


@dataclass(frozen=True, eq=False)
class ModuleJoin:
    """One attention module in a generation, and the tokens that are wanted of it.

    In the methods, `calls` are its calls in all passes. `starts` and `ends` have an entry for each call: the token of
    the text that its first query reads, and the token after its last query. `rows` and `keys` are the tokens that are
    the queries and the keys of the joined map.
    """

    record: GenerationRecord
    module: ModuleCalls
    name: str
    part: TokenRange

    @cached_property
    def _steps(self) -> list[list[KeptCall]]:
        """Its calls in each pass. Their numbers count dropped calls too, which the list of calls does not have."""
        numbers = [a_pass.calls.get(self.name, range(0)) for a_pass in self.record.passes]
        dropped = self.module.num_dropped
        return [[self.module.calls[n - dropped] for n in of_pass] for of_pass in numbers]

    @cached_property
    def _runs_in_every_pass(self) -> bool:
        """Whether it runs equally often in every pass, and at least once; an encoder does not."""
        counts = {len(calls) for calls in self._steps}
        return len(counts) == 1 and counts != {0}

    @cached_property
    def _reads_the_tokens(self) -> bool:
        """Whether each call has a row for each token that its pass read."""
        counted = zip(self.record.passes, self._steps, strict=True)
        return all(
            a_pass.positions is None or len(a_pass.positions) == call.shape[2]
            for a_pass, calls in counted
            for call in calls
        )

    @property
    def reads_other_tokens(self) -> bool:
        """Whether it runs in every pass, with rows that are not the tokens of the pass."""
        return self._runs_in_every_pass and len(self._steps) > 1 and not self._reads_the_tokens

    def joined(self) -> list[KeptCall]:
        """Its calls as one call, or one call for each time that it ran in a pass; of an encoder its only call."""
        if self._runs_in_every_pass and self._reads_the_tokens:
            return [self._joined(list(calls)) for calls in zip(*self._steps, strict=True)]
        return self._of_encoder(next((calls[-1] for calls in self._steps if calls), None))

    def _of_encoder(self, call: KeptCall | None = None) -> list[KeptCall]:
        """The last call before the first pass, or the given one: all its tokens, for each of the sequences.

        An encoder runs once for each text, and the cache has a row for each beam of a text, one after the other. So
        `row * B // R` is the text of a row. If padding is cut off, the keys are cut like the queries.
        """
        number = self.record.before.get(self.name, 0) - 1 - self.module.num_dropped
        call = self.module.calls[number] if call is None and number >= 0 else call
        if call is None:
            return []
        B, H, I, J = call.shape
        rows = [self.record.row(n, 0) * B // len(self.record.prompt) for n in self.part.sequences]
        real = self.part.source if self.part.source is not None and I == J == _width(self.record.source) else None
        tokens = range(I) if real is None else real
        entries, keys = torch.tensor(rows), J if real is None else len(real)
        if entries.tolist() == list(range(B)) and real is None:
            return [call]
        build = partial(_rows_of_one_map, call, tokens, entries, keys)
        values = partial(_values_of_one_call, call, tokens if real is not None else range(J), entries)
        return [LazyCall((len(rows), H, len(tokens), keys), call.check, build, values)]

    def _joined(self, calls: list[KeptCall]) -> LazyCall:
        """One call from the calls of all passes."""
        ends, starts, rows, keys = self._places(calls)
        shape = (len(self.part.sequences), calls[-1].shape[1], len(rows), len(keys))
        build = partial(self._map, calls, starts, ends, rows, keys)
        values = partial(self._values, calls, starts, ends, keys)
        return LazyCall(shape, worst([call.check for call in calls]), build, values)

    def _places(self, calls: list[KeptCall]) -> tuple[list[int], list[int], range, range]:
        """Where each call ends and starts in the text, and the rows and keys of the joined map."""
        ends = self._ends(calls)
        starts = [end - call.shape[2] for end, call in zip(ends, calls, strict=True)]
        rows = range(max(self.part.rows.start, starts[0]), self.part.rows.stop)
        return ends, starts, rows, self._keys(calls[-1].shape[3])

    @property
    def _is_cross(self) -> bool:
        """Whether its keys are tokens of the encoder."""
        return self.module.part == "cross"

    def _keys(self, num_keys: int) -> range:
        """The keys of the joined map: tokens of the decoder, or of the encoder."""
        if not self._is_cross:
            return self.part.rows
        return self.part.source if self.part.source is not None else range(num_keys)

    def _ends(self, calls: Sequence[KeptCall]) -> list[int]:
        """The number of tokens that were read after each call."""
        ends: list[int] = []
        for a_pass, call in zip(self.record.passes, calls, strict=True):
            before, (_, _, num_queries, num_keys) = ends[-1] if ends else 0, call.shape
            if a_pass.num_cached is not None:
                ends.append(a_pass.num_cached)
            elif call.has_state:
                ends.append(num_keys)
            else:  # without a cache each call reads the whole text
                ends.append(num_queries if num_queries > before else before + num_queries)
        return ends

    def _map(self, calls: list[KeptCall], starts: list[int], ends: list[int], rows: range, keys: range) -> AttentionMap:
        """One map of queries and keys where this is possible, the map of the only call, or the joined maps."""
        parts = self._parts(calls, starts, ends, rows, keys)
        merged = merged_map(parts, len(rows), len(keys), self._is_cross)
        if merged is not None:
            return merged
        has_all = [part.rows.stop > part.call.shape[2] for part in parts]  # the state of a recurrent layer
        if _is_one_map(parts, len(rows), len(keys)):
            return _source(parts[0].call, has_all[0])()
        sources = [_source(part.call, every) for part, every in zip(parts, has_all, strict=True)]
        of_maps = [
            MapRows(source, part.rows, part.start, part.offset, part.entries)
            for source, part in zip(sources, parts, strict=True)
        ]
        return JoinedMap(of_maps, len(rows), len(keys))

    def _parts(
        self, calls: list[KeptCall], starts: list[int], ends: list[int], rows: range, keys: range
    ) -> list[CallRows]:
        """The rows of each call that are rows of the map; of the last call alone, if it has the rows of all tokens."""
        if _last_call_has_all(calls, starts) and self._states_follow_beams(calls, starts, ends):
            return list(self._last_calls(calls, ends, rows, keys))
        return list(self._each_call(calls, starts, ends, rows, keys))

    def _states_follow_beams(self, calls: list[KeptCall], starts: list[int], ends: list[int]) -> bool:
        """Whether the states of a recurrent layer were reordered with the beams.

        Those of MiniMax are not: a text goes on with the state of another one, so its last call has other rows. The
        last call knows from which entry of each earlier call its state came, which must be the row of the beam.
        """
        record = self.record
        if record.beams is None or not calls[-1].has_state:
            return True
        # The numbers of the calls that read a generated token, and the row of each sequence in them.
        generated = [k for k, end in enumerate(ends) if end > record.first + record.prompt.shape[1]]
        rows = {k: self._entries(starts[k], ends[k]).tolist() for k in generated}
        for n, sequence in enumerate(self.part.sequences):
            last = self._last_call(sequence, ends)
            orders = {id(call): order for call, order in calls[last].run()}
            for k in (k for k in generated if k <= last):
                order, row = orders[id(calls[k])], rows[last][n]
                if (row if order is None else int(order[row])) != rows[k][n]:
                    return False
        return True

    def statistics(self) -> ModuleStatistics | None:
        """The results of its reductions for the whole text, if statistics were kept; of its first call in each pass."""
        if self.module.statistics is None or not (self._runs_in_every_pass and self._reads_the_tokens):
            return self.module.statistics
        calls = [of_pass[0] for of_pass in self._steps]
        ends, starts, rows, keys = self._places(calls)
        return joined_statistics(self.module, self._parts(calls, starts, ends, rows, keys), len(rows), len(keys))

    def _each_call(
        self, calls: list[KeptCall], starts: list[int], ends: list[int], rows: range, keys: range
    ) -> Iterator[CallRows]:
        """The rows of each call; those of tokens that a later call read again are left out."""
        for n, (call, start, end) in enumerate(zip(calls, starts, ends, strict=True)):
            first, stop = max(start, rows.start), min([end, rows.stop, *starts[n + 1 :]])
            if first < stop:
                local = range(first - start, stop - start)
                offset = self._first_key(call, end) - keys.start
                yield CallRows(call, local, first - rows.start, offset, self._entries(start, end))

    def _first_key(self, call: KeptCall, end: int) -> int:
        """The token that is the first key of a call: a sliding cache has the last tokens, a static one is not full."""
        return 0 if self._is_cross else max(end - call.shape[3], 0)

    def _last_calls(self, calls: list[KeptCall], ends: list[int], rows: range, keys: range) -> Iterator[CallRows]:
        """The last call of each sequence, which has all its rows."""
        last = torch.tensor([self._last_call(n, ends) for n in self.part.sequences])
        for number in last.unique().tolist():
            call, end = calls[number], ends[number]
            entries = torch.where(last == number, self._entries(0, end), -1)
            local = range(rows.start, min(rows.stop, end))
            yield CallRows(call, local, 0, -keys.start, entries)

    def _values(self, calls: list[KeptCall], starts: list[int], ends: list[int], keys: range) -> Tensor:
        """The values (N, G, J, E) of the keys, each from the call that read its token; 0 after the end of a text."""
        if self._is_cross:
            return _values_of_one_call(calls[0], keys, self._entries(starts[0], ends[0]))
        values = None
        for call, end, tokens, present in self._read_tokens(calls, starts, ends, keys):
            tokens = range(max(tokens.start, keys.start), min(tokens.stop, keys.stop))
            own, rows = call.read_values(), self._entries(0, end)[present]
            if values is None:
                values = own.new_zeros(len(present), own.shape[1], len(keys), own.shape[3])
            local = slice(tokens.start - self._first_key(call, end), tokens.stop - self._first_key(call, end))
            places = torch.arange(tokens.start - keys.start, tokens.stop - keys.start)
            values[present.nonzero(), :, places] = own[rows][:, :, local].transpose(1, 2)
        assert values is not None
        return values

    def _read_tokens(
        self, calls: list[KeptCall], starts: list[int], ends: list[int], keys: range
    ) -> Iterator[tuple[KeptCall, int, range, Tensor]]:
        """From which call the values of which tokens are read: the call, its end, the tokens, the sequences (N,)."""
        if _last_call_has_all(calls, starts):
            last = torch.tensor([self._last_call(n, ends) for n in self.part.sequences])
            yield from ((calls[n], ends[n], range(ends[n]), last == n) for n in last.unique().tolist())
            return
        for n, (call, start, end) in enumerate(zip(calls, starts, ends, strict=True)):
            first = start if n else keys.start  # the first call has the values of an earlier cache
            yield call, end, range(first, min([end, *starts[n + 1 :]])), self._entries(start, end) >= 0

    def _last_call(self, sequence: int, ends: list[int]) -> int:
        """The number of the call that read the last token of a sequence; its very last token is not read."""
        length = self.record.first + self.record.lengths[sequence] - 1
        return next((number for number, end in enumerate(ends) if end >= length), len(ends) - 1)

    def _entries(self, start: int, end: int) -> Tensor:
        """The row of the cache of each sequence in the pass that read these tokens; -1 after its end.

        Step 0 reads the prompt, and step t the token that step t - 1 predicted. The last token is not read.
        """
        record = self.record
        step = max(0, end - record.first - record.prompt.shape[1])
        stops = [record.first + record.lengths[n] - 1 for n in self.part.sequences]
        rows = [record.row(n, step) for n in self.part.sequences]
        return torch.tensor([row if start < stop else -1 for row, stop in zip(rows, stops, strict=True)])


def _last_call_has_all(calls: list[KeptCall], starts: list[int]) -> bool:
    """Whether the last call has the rows of all tokens: a recurrent layer, or a model without a cache."""
    return calls[-1].has_state or (len(calls) > 1 and not any(starts))


def _source(call: KeptCall, has_all: bool = False) -> Callable[[], AttentionMap]:
    """The map of a call, built once; of a recurrent layer, if `has_all`, with a row for every token so far."""
    return cache(call.whole_map if has_all else partial(getattr, call, "map"))


def _is_one_map(parts: Sequence[CallRows], num_queries: int, num_keys: int) -> bool:
    """Whether there is only one part, and it is the whole map of its call, with all batch entries in their order."""
    part = parts[0]
    B, _, num_rows, num_columns = part.call.shape
    if part.call.has_state:
        num_rows = num_columns  # the map of a recurrent layer has a row for every token so far (`_source`)
    whole = (part.rows, part.offset, num_rows, num_columns) == (range(num_rows), 0, num_queries, num_keys)
    return len(parts) == 1 and whole and torch.equal(part.entries, torch.arange(B))


def _rows_of_one_map(call: KeptCall, rows: range, entries: Tensor, num_keys: int) -> AttentionMap:
    """Some rows of the map of a call for these batch entries; as many keys as rows are the keys of the same tokens."""
    offset = -rows.start if num_keys == len(rows) else 0
    return JoinedMap([MapRows(_source(call), rows, 0, offset, entries)], len(rows), num_keys)


def _values_of_one_call(call: KeptCall, keys: range, entries: Tensor) -> Tensor:
    """The values (N, G, J', E) of some keys of a call, for these batch entries."""
    return call.read_values()[entries][:, :, keys.start : keys.stop]


def real_range(real: Tensor | None, row: int) -> range | None:
    """The range of tokens that are no padding; None if these are all tokens, or no range.

    `real` (R, J) says which tokens are no padding, and `row` is the sequence.
    """
    if real is None or bool(real[row].all()):
        return None
    places = real[row].nonzero().flatten().tolist()
    tokens = range(places[0], places[-1] + 1) if places else range(0)
    return tokens if len(tokens) == len(places) > 0 else None


def _width(real: Tensor | None) -> int | None:
    """The number of tokens in `real` (R, J), the padding of an encoder; None if it is not known."""
    return None if real is None else real.shape[1]
