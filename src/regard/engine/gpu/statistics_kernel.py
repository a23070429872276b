"""Statistics of weights on a GPU in one pass over the keys: what kernels/statistics.c computes on a CPU.

One program computes a tile of queries of one head. The log-sum-exp of each row is known, so a weight is final at once:
w = exp(s - logsumexp). Where it is not known, `logsumexp_kernel` computes it before. Sums over keys stay in registers.
Sums over queries are atomic additions to the memory of the device, so their last bits may differ from run to run.
Only engine/gpu/statistics.py imports this file: it needs Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
#: A finite logarithm of a weight that rounds to 0, so that weight times logarithm is 0.
NEARLY_ZERO = tl.constexpr(-1e30)


class Scores(NamedTuple):
    """What scores and weights are computed from. `before` and `after` the soft cap, a number is added, or None.

    Index 0 of `before` and `after` is the distance j - i = 1 - I.
    """

    query: Any  # (B, H, I, D)
    query_strides: Any
    key: Any  # (B, G, J, D)
    key_strides: Any
    logsumexp: Any  # (B, H, I), inf in rows without keys
    before: Any  # (H, I + J - 1)
    after: Any
    scale: Any
    cap: Any  # None: no soft cap


class Pattern(NamedTuple):
    """The tables of `Layout`, and the allowed distances of indices, [low, high).

    Rows of the tables have the fields of `Tile` and `Segment` of kernels/regard.h.
    """

    tiles: Any  # (n, 5): batch entry (-1: every one), first and stop query, first and stop segment
    segments: Any  # (n, 4): first and stop key, the place of its bytes (-1: none), bytes of a query
    allowed: Any  # None: no segment has bytes
    head_stride: Any  # of `allowed`, 0 if all heads share the bytes
    low: Any
    high: Any


class KernelSizes(NamedTuple):
    """The sizes of the call. Statistics are computed of the queries [first_query, stop_query)."""

    num_tiles: Any
    num_heads: Any
    heads_per_key_head: Any
    num_queries: Any
    num_keys: Any
    width: Any
    first_query: Any
    stop_query: Any


class Sums(NamedTuple):
    """The statistics by their names in `regard.engine.kernel.statistics.Parts`; None leaves one out.

    `mass` is the weight of each row on keys, each times its number in `flags`.
    """

    entropy: Any  # (B, H, I), and so are `distance` and `mass`
    distance: Any
    mass: Any
    flags: Any  # (B, J)
    received: Any  # (B, H, J)
    cells: Any  # (B, H, cell_rows, cell_columns)
    top_weights: Any  # (B, H, I, k)
    top_keys: Any
    cell_rows: Any
    cell_columns: Any
    k: Any
    shift: Any


@triton.jit
def tanh_of(x):
    """The hyperbolic tangent: below 5/8 a polynomial (S. L. Moshier's Cephes library, tanhf.c), above by exp.

    By exp it would lose digits near 0, where two nearly equal numbers are subtracted. A soft cap multiplies the result,
    so its relative error counts. kernels/rows.h has the same polynomial.
    """
    x2 = x * x
    p = -5.70498872745e-3 * x2 + 2.06390887954e-2
    p = p * x2 - 5.37397155531e-2
    p = p * x2 + 1.33314422036e-1
    p = p * x2 - 3.33332819422e-1
    power = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    large = (1 - power) / (1 + power)
    return tl.where(x2 < 0.390625, p * x2 * x + x, tl.where(x < 0, -large, large))


@triton.jit
def final_scores(scores, sizes, products, head, queries, keys, is_valid):
    """after(cap(scale q.k + before)) of the valid pairs: (queries, keys), from the products q.k."""
    s = products * scores.scale
    first = head * (sizes.num_queries + sizes.num_keys - 1) + sizes.num_queries - 1
    places = first + keys[None, :] - queries[:, None]
    if scores.before is not None:
        s += tl.load(scores.before + places, mask=is_valid, other=0.0)
    if scores.cap is not None:
        s = tanh_of(s / scores.cap) * scores.cap
    if scores.after is not None:
        s += tl.load(scores.after + places, mask=is_valid, other=0.0)
    return s


@triton.jit
def is_allowed(pattern, segment, tile, queries, keys, is_valid):
    """The valid pairs that the mask allows. `segment` points to the segment of `keys`, `tile` is that of `tile_of`."""
    _entry, head, _unit, first_query = tile
    steps = keys[None, :] - queries[:, None]
    is_valid = is_valid & (steps >= pattern.low) & (steps < pattern.high)
    if pattern.allowed is not None:
        first_key, offset, stride = tl.load(segment), tl.load(segment + 2), tl.load(segment + 3)
        places = offset + (queries - first_query)[:, None] * stride + (keys - first_key)[None, :]
        if offset >= 0:
            flags = tl.load(pattern.allowed + head * pattern.head_stride + places, mask=is_valid, other=0)
            is_valid = is_valid & (flags != 0)
    return is_valid


@triton.jit
def load_vectors(pointer, strides, entry, head, tokens, is_token, width, WIDTH: tl.constexpr):
    """Queries or keys of some tokens, (tokens, WIDTH), padded with zeros. Places are 64-bit: tensors may be large."""
    channels = tl.arange(0, WIDTH)
    first = pointer + entry.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    places = tokens.to(tl.int64)[:, None] * strides[2] + channels[None, :] * strides[3]
    return tl.load(first + places, mask=is_token[:, None] & (channels < width)[None, :], other=0.0)


@triton.jit
def scores_of(scores, pattern, sizes, tile, query, segment, queries, keys, is_query, end):
    """The scores (queries, keys) of the keys before `end`; -inf where a query may not attend.

    `query` has the vectors (queries, WIDTH), `queries` and `keys` the indices. `segment` points to the segment of keys.
    """
    entry, head, _unit, _first_query = tile
    key_head, is_key = head // sizes.heads_per_key_head, keys < sizes.num_keys
    key = load_vectors(scores.key, scores.key_strides, entry, key_head, keys, is_key, sizes.width, query.shape[1])
    products = tl.dot(query, tl.trans(key), input_precision="ieee")  # the default rounds float32 to TF32
    is_valid = is_query[:, None] & (keys < end)[None, :]
    is_valid = is_allowed(pattern, segment, tile, queries, keys, is_valid)
    s = final_scores(scores, sizes, products, head, queries, keys, is_valid)
    return tl.where(is_valid, s, float("-inf"))


@triton.jit
def weights_of(s, logsumexp):
    """Weights, and their natural logarithms, from scores (queries, keys) and the log-sum-exp (queries,)."""
    difference = s - logsumexp[:, None]
    log_weights = tl.where(difference > 0, 0.0, difference)  # the log-sum-exp is rounded, but no weight is above 1
    return tl.exp2(log_weights * LOG2_E), log_weights


@triton.jit
def add_to_rows(sums, sizes, tile, weights, log_weights, queries, keys, entropy, distance, mass):
    """The sums over keys (queries,), `entropy`, `distance` and `mass`, with the weights of more keys."""
    if sums.entropy is not None:
        entropy -= tl.sum(weights * tl.maximum(log_weights, NEARLY_ZERO), 1)
    if sums.distance is not None:
        steps = tl.abs(keys[None, :] - queries[:, None] + sums.shift)
        distance += tl.sum(weights * steps.to(tl.float32), 1)
    if sums.mass is not None:
        places = tile[0].to(tl.int64) * sizes.num_keys + keys
        flags = tl.load(sums.flags + places, mask=keys < sizes.num_keys, other=0.0)
        mass += tl.sum(weights * flags[None, :], 1)
    return entropy, distance, mass


@triton.jit
def add_cells(sums, sizes, tile, weights, queries, keys, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds weights to their cells. Query i belongs to row i rows / I, key j to column j columns / J, rounded down.

    The sums are two products with matrices of 0 and 1, for ROWS x COLUMNS cells from the first cell of the block on.
    """
    row_of = (queries.to(tl.int64) * sums.cell_rows // sizes.num_queries).to(tl.int32)
    column_of = (keys.to(tl.int64) * sums.cell_columns // sizes.num_keys).to(tl.int32)
    rows = tl.min(row_of, 0) + tl.arange(0, ROWS)
    columns = tl.min(column_of, 0) + tl.arange(0, COLUMNS)
    in_column = (column_of[:, None] == columns[None, :]).to(tl.float32)
    in_row = (rows[:, None] == row_of[None, :]).to(tl.float32)
    cells = tl.dot(in_row, tl.dot(weights, in_column, input_precision="ieee"), input_precision="ieee")
    places = (tile[2] * sums.cell_rows + rows[:, None]) * sums.cell_columns + columns[None, :]
    is_cell = (rows < sums.cell_rows)[:, None] & (columns < sums.cell_columns)[None, :] & (cells != 0)
    tl.atomic_add(sums.cells + places, cells, mask=is_cell, sem="relaxed")


@triton.jit
def keep_largest(weights, keys, top_weights, top_keys):
    """Replaces the least of the largest weights of each row, as long as a new weight of a row is larger.

    `top_weights` and `top_keys` are (queries, TOP). A weight that was taken is no candidate any more.
    """
    slots = tl.arange(0, top_weights.shape[1])[None, :]
    columns = tl.arange(0, weights.shape[1])[None, :]
    least = tl.min(top_weights, 1)
    candidates = tl.where(weights > least[:, None], weights, -1.0)  # NaN is no candidate
    best = tl.max(candidates, 1)
    while tl.sum((best > least).to(tl.int32), 0) > 0:
        place = tl.argmax(candidates, 1)[:, None]
        key = tl.sum(tl.where(columns == place, keys[None, :], 0), 1)
        is_replaced = (slots == tl.argmin(top_weights, 1)[:, None]) & (best > least)[:, None]
        top_keys = tl.where(is_replaced, key[:, None], top_keys)
        top_weights = tl.where(is_replaced, best[:, None], top_weights)
        candidates = tl.where(columns == place, -1.0, candidates)
        best, least = tl.max(candidates, 1), tl.min(top_weights, 1)
    return top_weights, top_keys


@triton.jit
def tile_of(pattern, sizes):
    """The tile of this program: (batch entry, head, entry * H + head, first query); then its stop query and segments.

    A tile of every entry has the entry -1; then the number of the program says which entry it computes.
    """
    row = pattern.tiles + 5 * (tl.program_id(0) % sizes.num_tiles)
    place = tl.program_id(0) // sizes.num_tiles
    head, entry = place % sizes.num_heads, tl.load(row).to(tl.int32)
    entry = tl.where(entry < 0, place // sizes.num_heads, entry)
    first_query, stop_query = tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
    tile = entry, head, entry.to(tl.int64) * sizes.num_heads + head, first_query
    return tile, stop_query, tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)


@triton.jit
def keys_of(pattern, segment, first_query, stop):
    """The keys [start, end) of a segment that a query of [first_query, stop) may attend to."""
    start = tl.maximum(tl.load(segment).to(tl.int32), first_query + pattern.low)
    return start, tl.minimum(tl.load(segment + 1).to(tl.int32), stop - 1 + pattern.high)


@triton.jit
def store_rows(sums, rows, is_query, entropy, distance, mass, top_weights, top_keys):
    """Writes the statistics of rows, whose places in (B, H, I) are `rows`."""
    if sums.entropy is not None:
        tl.store(sums.entropy + rows, entropy, mask=is_query)
    if sums.distance is not None:
        tl.store(sums.distance + rows, distance, mask=is_query)
    if sums.mass is not None:
        tl.store(sums.mass + rows, mass, mask=is_query)
    if sums.top_weights is not None:
        slots = tl.arange(0, top_weights.shape[1])[None, :]
        places, is_kept = rows[:, None] * sums.k + slots, is_query[:, None] & (slots < sums.k)
        tl.store(sums.top_weights + places, top_weights, mask=is_kept)
        tl.store(sums.top_keys + places, top_keys.to(tl.int64), mask=is_kept)


@triton.jit
def statistics_kernel(
    scores, pattern, sizes, sums,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr,
    CELL_ROWS: tl.constexpr, CELL_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The statistics of one tile of queries of one head. TOP slots hold the k largest weights, in no order."""
    tile, stop, first_segment, stop_segment = tile_of(pattern, sizes)
    entry, head, unit, first_query = tile
    queries = first_query + tl.arange(0, QUERIES)
    is_query = (queries < tl.minimum(stop, sizes.stop_query)) & (queries >= sizes.first_query)
    query = load_vectors(scores.query, scores.query_strides, entry, head, queries, is_query, sizes.width, WIDTH)
    rows = unit * sizes.num_queries + queries
    logsumexp = tl.load(scores.logsumexp + rows, mask=is_query, other=float("inf"))
    entropy, distance, mass = (
        tl.zeros([QUERIES], tl.float32),
        tl.zeros([QUERIES], tl.float32),
        tl.zeros([QUERIES], tl.float32),
    )
    # slots beyond k hold inf, so nothing replaces them
    top_weights = (
        tl.zeros([QUERIES, TOP], tl.float32) + tl.where(tl.arange(0, TOP) < sums.k, 0.0, float("inf"))[None, :]
    )
    top_keys = tl.full([QUERIES, TOP], -1, tl.int32)
    for number in range(first_segment, stop_segment):
        segment = pattern.segments + 4 * number
        start, end = keys_of(pattern, segment, first_query, stop)
        for key in range(start, end, KEYS):
            keys = key + tl.arange(0, KEYS)
            s = scores_of(scores, pattern, sizes, tile, query, segment, queries, keys, is_query, end)
            weights, logs = weights_of(s, logsumexp)
            entropy, distance, mass = add_to_rows(
                sums, sizes, tile, weights, logs, queries, keys, entropy, distance, mass
            )
            if sums.received is not None:
                received = sums.received + unit * sizes.num_keys + keys
                tl.atomic_add(received, tl.sum(weights, 0), mask=keys < end, sem="relaxed")
            if sums.cells is not None:
                add_cells(sums, sizes, tile, weights, queries, keys, CELL_ROWS, CELL_COLUMNS)
            if sums.top_weights is not None:
                top_weights, top_keys = keep_largest(weights, keys, top_weights, top_keys)
    store_rows(sums, rows, is_query, entropy, distance, mass, top_weights, top_keys)


@triton.jit
def logsumexp_kernel(scores, pattern, sizes, logsumexp, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr):
    """The log-sum-exp of the rows of one tile, from scores relative to the greatest so far."""
    tile, stop, first_segment, stop_segment = tile_of(pattern, sizes)
    entry, head, unit, first_query = tile
    queries = first_query + tl.arange(0, QUERIES)
    is_query = queries < stop
    query = load_vectors(scores.query, scores.query_strides, entry, head, queries, is_query, sizes.width, WIDTH)
    greatest, total = tl.full([QUERIES], float("-inf"), tl.float32), tl.zeros([QUERIES], tl.float32)
    for number in range(first_segment, stop_segment):
        segment = pattern.segments + 4 * number
        start, end = keys_of(pattern, segment, first_query, stop)
        for key in range(start, end, KEYS):
            keys = key + tl.arange(0, KEYS)
            s = scores_of(scores, pattern, sizes, tile, query, segment, queries, keys, is_query, end)
            now = tl.maximum(greatest, tl.max(s, 1))
            base = tl.where(now == float("-inf"), 0.0, now)  # -inf - -inf would be NaN
            weights = tl.exp2((s - base[:, None]) * LOG2_E)
            total = total * tl.exp2((greatest - base) * LOG2_E) + tl.sum(weights, 1)
            greatest = now
    rows = unit * sizes.num_queries + queries
    total = tl.where(total == 0, 1.0, total)  # no key: the greatest is -inf
    tl.store(logsumexp + rows, greatest + tl.log2(total) / LOG2_E, mask=is_query)
