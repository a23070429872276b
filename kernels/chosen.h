/* Attention to chosen keys: for each query some keys, or some blocks of keys, and no others.

   Two ways to read them. Blocks of many keys are shared: the rows of a tile that chose a block are collected, and take
   the block as a matrix product does. Single keys are gathered: a row reads the vectors of its keys where they are, and
   all query heads that share keys and choice read them together. */
#ifndef CHOSEN_H
#define CHOSEN_H

#include "rows.h"

/* Keys behind the last of `grad_key`: ROWS are added to at once, 12 at most. As in backward.c. */
#define SPARE_KEYS 12
/* Most rows of a tile: its queries, in all query heads of a unit. */
#define MOST_ROWS 1024
/* Rows that read the same gathered keys together. */
#define TOGETHER 4
/* Vectors of channels whose sums are in registers for TOGETHER rows. */
#define CHANNEL_VECTORS (REGISTERS == 32 ? 4 : 2)

/* The choice. Row i of `ids` has at most K ids, which ascend; an id that is `num_blocks` or greater is none. Id n has the
   keys from starts[n] to starts[n + 1] - 1. */
typedef struct {
    const int32_t *ids; /* (entries, heads, queries, K) */
    int64_t ids_entry_stride, ids_head_stride, K, num_heads;
    const int32_t *starts; /* (entries, num_blocks + 1); null: id n is key n */
    int64_t starts_entry_stride, num_blocks;
    int64_t shared;  /* query heads of a unit: they have the same keys and ids */
    int64_t gathers; /* whether keys are gathered */
} Choice;

/* The rows of a tile in `shared` query heads from `head` on. Row n is head n % shared of query n / shared. */
typedef struct {
    const Call *call;
    const Choice *choice;
    const Tile *tile;
    int64_t entry, head, num_queries;
    const int32_t *ids, *starts; /* of the first query, of the entry */
} Unit;

INLINE Unit unit_of(const Call *call, const Choice *choice, const Tile *tile, int64_t entry, int64_t head) {
    const int64_t ids_head = head / (call->H / choice->num_heads);
    const int32_t *ids = choice->ids + entry * choice->ids_entry_stride + ids_head * choice->ids_head_stride;
    return (Unit){call,
                  choice,
                  tile,
                  entry,
                  head,
                  tile->stop_query - tile->first_query,
                  ids + tile->first_query * choice->K,
                  choice->starts ? choice->starts + entry * choice->starts_entry_stride : 0};
}

INLINE int64_t query_of(const Unit *unit, int64_t row) { return unit->tile->first_query + row / unit->choice->shared; }
INLINE int64_t head_of(const Unit *unit, int64_t row) { return unit->head + row % unit->choice->shared; }
INLINE int64_t index_of(const Unit *unit, int64_t row) {
    return row_index(unit->call, unit->entry, head_of(unit, row), query_of(unit, row));
}

/* A row with a segment, in the terms of rows.h. */
INLINE Rows row_in(const Unit *unit, const Segment *segment, int64_t row) {
    return rows_of(unit->call, unit->tile, segment, unit->entry, head_of(unit, row), query_of(unit, row));
}

/* The keys [first, stop) of a segment that a query of the tile may attend to. */
INLINE Segment part_of(const Unit *unit, const Segment *segment, int64_t first, int64_t stop) {
    const Range keys = keys_of_tile(unit->call, unit->tile, segment);
    Segment part = {max(keys.first, first), min(keys.stop, stop), segment->allowed, segment->stride};
    if (part.allowed >= 0) part.allowed += part.first_key - segment->first_key;
    return part;
}

/* Copies a tensor's vectors of all rows of a unit, padded to whole registers. */
INLINE void pack_unit(const Unit *unit, const Tensor *t, int64_t channels, int64_t width, float *to) {
    for (int64_t n = 0; n < unit->num_queries * unit->choice->shared; n++)
        pack_rows(t, unit->entry, head_of(unit, n), query_of(unit, n), 1, unit->call->I, channels, width, to + n * width);
}

/* The smallest block at which a query of the tile stands, or num_blocks. `places`: where each query is in its ids. */
INLINE int64_t next_block(const Unit *unit, const int32_t *places) {
    const int64_t K = unit->choice->K;
    int64_t block = unit->choice->num_blocks;
    for (int64_t n = 0; n < unit->num_queries; n++)
        if (places[n] < K) block = min(block, unit->ids[n * K + places[n]]);
    return block;
}

/* Rows of a unit, which ascend, and the query of each. */
typedef struct {
    int32_t *rows, *queries;
    int64_t count;
} Listed;

/* Rows from `first` on, at most `count`. */
INLINE Listed listed_from(Listed list, int64_t first, int64_t count) {
    return (Listed){list.rows + first, list.queries + first, min(count, list.count - first)};
}

/* The keys of a segment that any of some rows may attend to, rounded out to whole panels. */
INLINE Range panels_of(const Unit *unit, const Segment *segment, Listed list) {
    const int64_t first = max(segment->first_key, list.queries[0] + unit->call->low);
    const int64_t stop = min(segment->stop_key, list.queries[list.count - 1] + unit->call->high);
    return (Range){first / PANEL * PANEL, rounded_up(stop, PANEL)};
}

/* Lists the rows that chose a block, which they leave behind. */
INLINE void list_block(const Unit *unit, int64_t block, int32_t *places, Listed *list) {
    const int64_t K = unit->choice->K, shared = unit->choice->shared;
    list->count = 0;
    for (int64_t n = 0; n < unit->num_queries; n++) {
        if (places[n] >= K || unit->ids[n * K + places[n]] != block) continue;
        for (int64_t h = 0; h < shared; h++) {
            list->rows[list->count] = (int32_t)(n * shared + h);
            list->queries[list->count++] = (int32_t)(unit->tile->first_query + n);
        }
        places[n]++;
    }
}

/* The first place from `place` on, before `stop`, whose id is not below `id`. */
INLINE int64_t place_of(const int32_t *ids, int64_t place, int64_t stop, int64_t id) {
    while (place < stop) {
        const int64_t middle = place + (stop - place) / 2;
        if (ids[middle] < id)
            place = middle + 1;
        else
            stop = middle;
    }
    return place;
}

/* Chosen keys of a query, which ascend. */
typedef struct {
    const int32_t *keys;
    int64_t count;
} Gathered;

/* The next chosen keys of query n inside of a segment, at most KEYS; none: there are no more. `place` is where the query
   is in its ids; a block that goes on behind the segment stays. `from`: the first key that may come, which the caller
   sets to the first key of the segment. Keys are written to `buffer` if they are not the ids. */
INLINE Gathered gather_keys(const Unit *unit, const Segment *segment, int64_t n, int32_t *place, int64_t *from,
                            int32_t *buffer) {
    const int64_t K = unit->choice->K;
    const int32_t *ids = unit->ids + n * K;
    if (!unit->starts) {
        const int64_t first = *place < K && ids[*place] < *from ? place_of(ids, *place, K, *from) : *place;
        *place = (int32_t)place_of(ids, first, min(K, first + KEYS), segment->stop_key);
        return (Gathered){ids + first, *place - first};
    }
    int64_t count = 0;
    for (; *place < K && ids[*place] < unit->choice->num_blocks; ++*place) {
        const int64_t first = max(unit->starts[ids[*place]], *from), last = unit->starts[ids[*place] + 1];
        const int64_t stop = min(last, segment->stop_key);
        int64_t key = first;
        for (; key < stop && count < KEYS; key++) buffer[count++] = (int32_t)key;
        *from = max(*from, key);
        if (key < last) break;
    }
    return (Gathered){buffer, count};
}

/* Products of ROWS rows with the panels of `length` keys. Rows of products are `stride` apart. */
APART void row_products(const float *rows, int64_t width, const float *panels, int64_t channels, int64_t length,
                        float *products, int64_t stride) {
    for (int64_t key = 0; key < length; key += PANEL) {
        Vector sums[ROWS][2] = {{{0}}};
        product_2(rows, width, 1, panels + key * channels, PANEL, channels, sums);
        UNROLL for (int r = 0; r < ROWS; r++) {
            store(products + r * stride + key, sums[r][0]);
            store(products + r * stride + key + LANES, sums[r][1]);
        }
    }
}

/* Whether a query may attend to all keys of [first, stop). */
INLINE int sees_all(const Unit *unit, const Segment *segment, int64_t query, int64_t first, int64_t stop) {
    if (segment->allowed >= 0 || unit->call->after) return 0;
    return first >= max(segment->first_key, query + unit->call->low) &&
           stop <= min(segment->stop_key, query + unit->call->high);
}

/* Multiplies the products of a row with the keys [first, stop) by the scale; -inf where it may not attend. */
INLINE void finish_scores(const Unit *unit, const Segment *segment, int64_t row, int64_t query, int64_t first,
                          int64_t stop, float *scores) {
    if (sees_all(unit, segment, query, first, stop)) {
        for (int64_t n = 0; n < stop - first; n += LANES) store(scores + n, load(scores + n) * unit->call->scale);
        return;
    }
    const Rows rows = row_in(unit, segment, row);
    const Row keys = row_of(&rows, query);
    for (int64_t key = first; key < stop; key += LANES)
        store(scores + key - first, final_score(&rows, &keys, load(scores + key - first) * unit->call->scale, key));
}

/* The same for gathered keys, up to a whole vector. */
INLINE void finish_gathered(const Unit *unit, const Segment *segment, int64_t row, int64_t query, Gathered chosen,
                            float *scores) {
    const int64_t count = chosen.count;
    for (int64_t n = 0; n < count; n += LANES) store(scores + n, load(scores + n) * unit->call->scale);
    for (int64_t n = count; n < rounded_up(count, LANES); n++) scores[n] = -INFINITE;
    if (sees_all(unit, segment, query, chosen.keys[0], chosen.keys[count - 1] + 1)) return;
    const Rows rows = row_in(unit, segment, row);
    const Row keys = row_of(&rows, query);
    for (int64_t n = 0; n < count; n++) {
        const int64_t key = chosen.keys[n];
        if (rows.after) scores[n] += rows.after[key - query]; /* 0 or -inf */
        if (key < keys.first || key >= keys.stop || (keys.allowed && !keys.allowed[key])) scores[n] = -INFINITE;
    }
}

/* Products of N rows with gathered vectors: products[r KEYS + k]. LANES products at a time have a vector of sums each. */
INLINE void gathered_products(const int N, const float *rows, const float *vectors, int64_t width, Gathered chosen,
                              float *products) {
    const int K = LANES / N;
    for (int64_t first = 0; first < chosen.count; first += K) {
        Vector sums[LANES] = {{0}};
        UNROLL for (int k = 0; k < K; k++) {
            const float *vector = vectors + chosen.keys[min(first + k, chosen.count - 1)] * width;
            _Pragma("clang loop unroll_count(4)") for (int64_t c = 0; c < width; c += LANES) {
                const Vector channels = load(vector + c);
                UNROLL for (int r = 0; r < N; r++) sums[r * K + k] += load(rows + r * width + c) * channels;
            }
        }
        const Vector sum = sums_of(sums);
        UNROLL for (int n = 0; n < LANES; n++) products[n / K * KEYS + first + n % K] = sum[n];
    }
}

/* sums[r width + e] = sums[...] * factors[r] + the sum over gathered vectors of weights[r KEYS + k] * vector k, for N
   rows and M vectors of channels from `e` on. */
INLINE void add_channels(const int N, const int M, const float *weights, const float *vectors, int64_t width, int64_t e,
                         Gathered chosen, const float *factors, float *sums) {
    Vector totals[TOGETHER][CHANNEL_VECTORS];
    UNROLL for (int r = 0; r < N; r++) {
        UNROLL for (int m = 0; m < M; m++) totals[r][m] = load(sums + r * width + e + m * LANES) * factors[r];
    }
    for (int64_t k = 0; k < chosen.count; k++) {
        const float *vector = vectors + chosen.keys[k] * width + e;
        Vector channels[CHANNEL_VECTORS];
        UNROLL for (int m = 0; m < M; m++) channels[m] = load(vector + m * LANES);
        UNROLL for (int r = 0; r < N; r++) {
            const Vector weight = broadcast(weights[r * KEYS + k]);
            UNROLL for (int m = 0; m < M; m++) totals[r][m] += weight * channels[m];
        }
    }
    UNROLL for (int r = 0; r < N; r++) {
        UNROLL for (int m = 0; m < M; m++) store(sums + r * width + e + m * LANES, totals[r][m]);
    }
}

INLINE void add_gathered(const int N, const float *weights, const float *vectors, int64_t width, Gathered chosen,
                         const float *factors, float *sums) {
    int64_t e = 0;
    for (; e + CHANNEL_VECTORS * LANES <= width; e += CHANNEL_VECTORS * LANES)
        add_channels(N, CHANNEL_VECTORS, weights, vectors, width, e, chosen, factors, sums);
    for (; e < width; e += LANES) add_channels(N, 1, weights, vectors, width, e, chosen, factors, sums);
}

#endif
