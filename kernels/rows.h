/* Keys and scores as every kernel needs them: packed keys, which keys a query may attend to, and their scores.

   Queries are computed in groups of ROWS. A group reads whole panels of keys; the scores of keys in them that a query
   may not attend to become -inf. */
#ifndef ROWS_H
#define ROWS_H

#include "dropout.h"
#include "pack.h"
#include "product.h"

/* Keys whose scores are held together: with ROWS queries they stay in the L1 cache. */
#define KEYS 256

/* Most vectors that are packed as columns together: keys of a panel, or ROWS queries. The buffer has room for them. */
#define MOST_COLUMNS (PANEL > ROWS ? PANEL : ROWS)

/* Keys [first, stop). */
typedef struct {
    int64_t first, stop;
} Range;

/* Keys in whole panels. */
INLINE int64_t padded_keys(const Call *call) { return rounded_up(call->J, PANEL); }

/* The key head of a query head, counted through all batch entries. */
INLINE int64_t key_unit(const Call *call, int64_t entry, int64_t head) {
    return entry * call->G + head / (call->H / call->G);
}

/* The index of a query in arrays (B, H, I). */
INLINE int64_t row_index(const Call *call, int64_t entry, int64_t head, int64_t query) {
    return (entry * call->H + head) * call->I + query;
}

/* The log-sum-exp for the weights exp(score - logsumexp). A row without keys has -inf, and gets inf: weights of 0. */
INLINE float row_logsumexp(const Call *call, int64_t row) {
    return call->logsumexp[row] == -INFINITE ? INFINITE : call->logsumexp[row];
}

/* The logarithm of a weight. The log-sum-exp is rounded, but no weight may be above 1. */
INLINE Vector log_weight_of(Vector score, float logsumexp) {
    const Vector difference = score - logsumexp;
    return choose(difference > 0.0f, broadcast(0), difference);
}

/* Packs the keys [first, stop) of the key head `unit` (see key_unit). */
typedef void PackBlock(const Call *call, int64_t unit, int64_t first, int64_t stop, float *buffer);

/* Packs all keys, a block of KEYS at a time, and waits until other threads have packed theirs. */
INLINE void pack_all(const Call *call, PackBlock *pack_block, float *buffer) {
    const int64_t blocks = (call->J + KEYS - 1) / KEYS, units = call->B * call->G * blocks;
    for (int64_t n = next_unit(call->counters); n < units; n = next_unit(call->counters)) {
        const int64_t first = n % blocks * KEYS;
        pack_block(call, n / blocks, first, min(first + KEYS, padded_keys(call)), buffer);
        __atomic_fetch_add(call->counters + 1, 1, __ATOMIC_RELEASE);
    }
    while (__atomic_load_n(call->counters + 1, __ATOMIC_ACQUIRE) < units) wait_a_moment();
}

/* Vectors [first, stop) of keys or values as panels: PANEL vectors as columns. */
INLINE void pack_panels(const Call *call, const Tensor *t, int64_t unit, int64_t first, int64_t stop, int64_t channels,
                        float *buffer, float *panels) {
    for (int64_t key = first; key < stop; key += PANEL)
        pack_columns(t, unit / call->G, unit % call->G, key, PANEL, call->J, channels, buffer,
                     panels + (unit * padded_keys(call) + key) * channels);
}

/* Vectors [first, stop) of keys or values as rows, padded to whole registers. */
INLINE void pack_padded_rows(const Call *call, const Tensor *t, int64_t unit, int64_t first, int64_t stop,
                             int64_t channels, float *rows) {
    const int64_t width = rounded_up(channels, LANES);
    pack_rows(t, unit / call->G, unit % call->G, first, stop - first, call->J, channels, width,
              rows + (unit * padded_keys(call) + first) * width);
}

/* Vectors of the queries of a tile as columns, one group after the other. `buffer`: ROWS x channels. */
INLINE void pack_groups(const Tensor *t, const Tile *tile, int64_t entry, int64_t head, int64_t channels, float *buffer,
                        float *columns) {
    for (int64_t group = 0; tile->first_query + group < tile->stop_query; group += ROWS)
        pack_columns(t, entry, head, tile->first_query + group, ROWS, tile->stop_query, channels, buffer,
                     columns + group * channels);
}

/* The keys of a segment that any query of the tile may attend to. */
INLINE Range keys_of_tile(const Call *call, const Tile *tile, const Segment *segment) {
    return (Range){max(segment->first_key, tile->first_query + call->low),
                   min(segment->stop_key, tile->stop_query - 1 + call->high)};
}

/* ROWS queries from `query` on, with a segment of their tile. */
typedef struct {
    const Call *call;
    const Segment *segment;
    const float *before, *after; /* of this head: index j - i */
    const float *clipped;        /* of query 0 of this head */
    const uint8_t *allowed;      /* of the first query of the tile and key 0 */
    int64_t query, tile_query, stop_query;
    uint32_t word; /* of dropout */
} Rows;

INLINE Rows rows_of(const Call *call, const Tile *tile, const Segment *segment, int64_t entry, int64_t head,
                    int64_t query) {
    const int64_t shift = head * call->diagonals_stride + call->I - 1;
    Rows rows = {call, segment, 0, 0, 0, 0, query, tile->first_query, tile->stop_query, 0};
    if (call->dropped_words) rows.word = head_word(call, entry, head);
    if (call->before) rows.before = call->before + shift;
    if (call->after) rows.after = call->after + shift;
    if (call->clipped) rows.clipped = call->clipped + row_index(call, entry, head, 0) * call->clipped_width;
    if (segment->allowed >= 0)
        rows.allowed = call->allowed + segment->allowed + head * call->allowed_head_stride - segment->first_key;
    return rows;
}

/* The keys of [start, stop) that any of the ROWS queries may attend to. */
INLINE Range keys_of_rows(const Rows *rows, int64_t start, int64_t stop) {
    const int64_t last_query = min(rows->query + ROWS, rows->stop_query) - 1;
    return (Range){max(start, max(rows->segment->first_key, rows->query + rows->call->low)),
                   min(stop, min(rows->segment->stop_key, last_query + rows->call->high))};
}

/* Keys, rounded out to whole units of keys, whose first is a multiple of the unit. */
INLINE Range rounded_out(Range keys, int64_t unit) {
    return (Range){keys.first / unit * unit, rounded_up(keys.stop, unit)};
}

/* Whether a query may attend to every key of the segment in its distances, and no number is added to a score. */
INLINE int is_bounded(const Rows *rows) {
    const Call *call = rows->call;
    return !(call->before || call->after || call->clipped || rows->allowed || call->cap != 0) && call->scale > 0;
}

/* The same, and every query may attend to every key of [first, stop). */
INLINE int is_plain(const Rows *rows, int64_t first, int64_t stop) {
    const Call *call = rows->call;
    return is_bounded(rows) && first >= rows->segment->first_key && stop <= rows->segment->stop_key &&
           first >= rows->query + ROWS - 1 + call->low && stop <= rows->query + call->high;
}

/* The hyperbolic tangent. Its relative error is below 3e-7, because a soft cap multiplies it by a number that may be
   large.

   Below 5/8 a polynomial (S. L. Moshier's Cephes library, tanhf.c), above it by the exponential. */
INLINE Vector tanh_of(Vector x) {
    const Vector limited = choose(x > 20.0f, broadcast(20), choose(x < -20.0f, broadcast(-20), x)), x2 = x * x;
    const Vector power = exp2_of(limited * (2 * LOG2_E));
    Vector p = broadcast(-5.70498872745e-3f);
    p = p * x2 + 2.06390887954e-2f;
    p = p * x2 - 5.37397155531e-2f;
    p = p * x2 + 1.33314422036e-1f;
    p = p * x2 - 3.33332819422e-1f;
    return choose(x2 < 0.390625f, p * x2 * x + x, (power - 1.0f) / (power + 1.0f));
}

/* The keys that one query may attend to: those of the segment within its distances. */
typedef struct {
    int64_t query, first, stop;
    const float *clipped;
    const uint8_t *allowed; /* index: key; null if none is forbidden */
} Row;

INLINE Row row_of(const Rows *rows, int64_t query) {
    const Call *call = rows->call;
    Row row = {query, max(rows->segment->first_key, query + call->low),
               min(rows->segment->stop_key, query + call->high), 0, 0};
    const int64_t last_query = rows->stop_query - 1; /* rows behind it repeat it */
    if (rows->allowed)
        row.allowed = rows->allowed + (min(query, last_query) - rows->tile_query) * rows->segment->stride;
    if (rows->clipped) row.clipped = rows->clipped + min(query, last_query) * call->clipped_width;
    return row;
}

/* The index in a row of `clipped` of the numbers of LANES keys from `key` on. All lanes are in a margin if they are
   beyond the first or the last distance. */
INLINE int64_t clipped_index(const Call *call, int64_t query, int64_t key) {
    return max(0, min(key - query - call->first_clipped, call->clipped_width - LANES));
}

/* score + before + clipped of LANES keys from `key` on. */
INLINE Vector score_before_cap(const Rows *rows, const Row *row, Vector score, int64_t key) {
    if (rows->before) score += load(rows->before + key - row->query);
    if (row->clipped) score += load(row->clipped + clipped_index(rows->call, row->query, key));
    return score;
}

/* after(cap(score + before + clipped)) of LANES keys from `key` on; -inf where the query may not attend. */
INLINE Vector final_score(const Rows *rows, const Row *row, Vector score, int64_t key) {
    const Call *call = rows->call;
    score = score_before_cap(rows, row, score, key);
    if (call->cap != 0) score = tanh_of(score * (1 / call->cap)) * call->cap;
    if (rows->after) score += load(rows->after + key - row->query);
    if (key < row->first || key + LANES > row->stop) {
        const int32_t first = (int32_t)max(row->first - key, 0), stop = (int32_t)min(row->stop - key, LANES);
        const Integers lanes = lane_numbers();
        score = choose((lanes >= (first < LANES ? first : LANES)) & (lanes < (stop > 0 ? stop : 0)), score,
                       broadcast(-INFINITE));
    }
    if (row->allowed) {
        const Bytes bytes = *(const Bytes *)(row->allowed + key);
        score = choose(__builtin_convertvector(bytes, Integers) != 0, score, broadcast(-INFINITE));
    }
    return score;
}

/* The whole vectors of [first, stop) that hold a key of a row. */
INLINE Range vectors_of_row(const Row *row, int64_t first, int64_t stop) {
    const int64_t start = min(stop, first + max(0, row->first - first) / LANES * LANES);
    return (Range){start, max(start, min(stop, first + rounded_up(max(0, row->stop - first), LANES)))};
}

/* For rows where is_bounded holds: sets the products of a row with keys that it may not attend to, of [first, stop), to
   -inf, or to the weight 0 if their whole vector holds no other key. Returns the other vectors. */
INLINE Range bound_row(const Rows *rows, int64_t query, int64_t first, int64_t stop, float *products) {
    const Row row = row_of(rows, query);
    const Range keys = vectors_of_row(&row, first, stop);
    float *low = products + keys.first - first, *high = products + keys.stop - LANES - first;
    for (int64_t key = first; key < keys.first; key += LANES) store(products + key - first, broadcast(0));
    for (int64_t key = keys.stop; key < stop; key += LANES) store(products + key - first, broadcast(0));
    if (keys.first == keys.stop) return keys;
    if (row.first > keys.first)
        store(low, choose(lane_numbers() >= (int32_t)(row.first - keys.first), load(low), broadcast(-INFINITE)));
    if (row.stop < keys.stop)
        store(high, choose(lane_numbers() < (int32_t)(row.stop - keys.stop + LANES), load(high), broadcast(-INFINITE)));
    return keys;
}

/* Turns the products of a row into scores, and returns the greatest of each lane. */
INLINE Vector scores_of_row(const Rows *rows, int plain, int64_t query, int64_t first, int64_t stop, float *scores) {
    const Row row = row_of(rows, query);
    Vector top = broadcast(-INFINITE);
    for (int64_t key = first; key < stop; key += LANES) {
        Vector score = load(scores + key - first) * rows->call->scale;
        if (!plain) score = final_score(rows, &row, score, key);
        store(scores + key - first, score);
        top = larger(top, score);
    }
    return top;
}

/* Raises the greatest score of a row so far, and returns what weights are relative to. `factor` scales the earlier
   sums, whose weights are relative to an earlier greatest score. */
INLINE float raise_greatest(Vector top, float *greatest, float *factor) {
    const float now = largest_of(larger(top, broadcast(*greatest)));
    const float base = now == -INFINITE ? 0 : now;
    *factor = exp2_of(broadcast((*greatest - base) * LOG2_E))[0];
    *greatest = now;
    return base;
}

/* Turns the products of a row into weights exp(score - greatest), with the greatest score so far. `bounded`: whether
   is_bounded holds. */
INLINE void weights_of_row(const Rows *rows, int bounded, int64_t query, int64_t first, int64_t stop, float *scores,
                           float *greatest, float *total, float *factor) {
    const Range keys = bounded ? bound_row(rows, query, first, stop, scores) : (Range){first, stop};
    scores += keys.first - first;
    const Vector top = scores_of_row(rows, bounded, query, keys.first, keys.stop, scores);
    const float base = raise_greatest(top, greatest, factor);
    Vector sum = broadcast(0);
    for (int64_t n = 0; n < keys.stop - keys.first; n += LANES) {
        const Vector weight = exp2_of((load(scores + n) - base) * LOG2_E);
        store(scores + n, weight);
        sum += weight;
    }
    *total = *total * *factor + sum_of(sum);
}

/* Products of ROWS queries (ROWS numbers for each channel) with N vectors of keys of a panel. Rows of products are
   `stride` apart. */
#define DEFINE_DOT_PRODUCTS(N)                                                                                   \
    INLINE void dot_products_##N(const float *queries, const float *panel, int64_t channels, float *products,     \
                                 int64_t stride) {                                                               \
        Vector sums[ROWS][N] = {{{0}}};                                                                          \
        product_##N(queries, 1, ROWS, panel, PANEL, channels, sums);                                             \
        UNROLL for (int r = 0; r < ROWS; r++) {                                                                  \
            UNROLL for (int n = 0; n < N; n++) store(products + r * stride + n * LANES, sums[r][n]);             \
        }                                                                                                        \
    }

DEFINE_DOT_PRODUCTS(1)
DEFINE_DOT_PRODUCTS(2)

/* Products of ROWS queries with the keys [first, stop) of panels: whole vectors, so half a panel at either end. */
APART void dot_products(const float *queries, const float *panels, int64_t channels, int64_t first, int64_t stop,
                        float *products, int64_t stride) {
    for (int64_t key = first, count; key < stop; key += count) {
        const int64_t lane = key % PANEL;
        const float *panel = panels + (key - lane) * channels + lane;
        count = lane == 0 && key + PANEL <= stop ? PANEL : LANES;
        if (count == PANEL)
            dot_products_2(queries, panel, channels, products + key - first, stride);
        else
            dot_products_1(queries, panel, channels, products + key - first, stride);
    }
}

#endif
