/* Attention of few queries, as in decoding: keys and values are read once, in their own layout.

   forward.c packs keys and values first. That is one more pass over them, which few queries do not pay back. Here a
   unit of work is a part, PART_KEYS keys of one key head, and its rows: the queries of a tile in all query heads that
   share the key head. Each part has the greatest score, the sum of weights and the weighted values of its rows. The
   thread that finishes the last part of a key head adds the parts in order (Flash-Decoding: Dao, Haziza, Massa and
   Sizov 2023). Parts depend on the sizes alone, so the result does not depend on the number of threads.

   Memory limits the speed. So all rows take CHUNK keys before the next ones are read, and while KEYS keys are read,
   their values are fetched into the L2 cache; while these are read, the next keys are. */
#include "matrix.h"
#include "rows.h"

/* Keys that are read together, and stay in the L1 cache for all rows: a multiple of LANES that divides KEYS. */
#define CHUNK 16

/* The scratch memory of a thread: queries as rows, scores of KEYS keys, a factor for each row, a copy of CHUNK keys. */
typedef struct {
    int64_t query_width, value_width, num_rows, num_parts;
    float *queries, *scores, *factors, *copy;
} Workspace;

static Workspace sizes_of(const Call *call) {
    const int64_t num_rows = call->H / call->G * call->I, num_parts = (call->J + PART_KEYS - 1) / PART_KEYS;
    return (Workspace){rounded_up(call->D, LANES), rounded_up(call->E, LANES), num_rows, num_parts, 0, 0, 0, 0};
}

static Workspace workspace_in(const Call *call, float *memory) {
    Workspace w = sizes_of(call);
    w.queries = memory;
    w.scores = w.queries + w.num_rows * w.query_width;
    w.factors = w.scores + w.num_rows * KEYS;
    w.copy = w.factors + w.num_rows;
    return w;
}

/* Floats of scratch memory that one thread needs. */
EXPORT int64_t NAMED(decode_workspace)(const Call *call) {
    const Workspace w = sizes_of(call);
    return w.num_rows * (w.query_width + KEYS + 1) + CHUNK * max(w.query_width, w.value_width);
}

/* Pairs of a key head and a tile: each has its own parts, and a counter of finished parts. */
static int64_t num_heads(const Call *call) {
    return (call->tiles_have_entries ? 1 : call->B) * call->num_tiles * call->G;
}

/* A row of a part: weighted values, the greatest score, the sum of weights. */
INLINE int64_t partial_row(const Workspace *w) { return w->value_width + 2; }

/* Floats of `partials`. */
EXPORT int64_t NAMED(decode_partials)(const Call *call) {
    const Workspace w = sizes_of(call);
    return num_heads(call) * w.num_parts * w.num_rows * partial_row(&w);
}

/* Numbers of `counters`: one of units, and one a key head. */
EXPORT int64_t NAMED(decode_counters)(const Call *call) { return 1 + num_heads(call); }

/* Products of N rows with `count` keys: products[r KEYS + k]. LANES products at a time have a vector of sums each.
   Meanwhile the `next` vectors with the same numbers are fetched. */
INLINE void products_of(const int N, const int64_t dtype, const float *rows, int64_t width, Matrix keys, Later next,
                        int64_t count, float *products) {
    const int K = LANES / N, wide = dtype == PAIRS ? 2 * LANES : LANES;
    for (int64_t first = 0; first < count; first += K) {
        Vector sums[LANES] = {{0}};
        for (int64_t c = 0; c < width; c += wide) {
            Vector vectors[LANES];
            UNROLL for (int k = 0; k < K; k++) {
                vectors[k] = load_as(dtype, keys.data, min(first + k, count - 1) * keys.step + c);
                UNROLL for (int n = 0; n < wide; n += LANES) fetch(next, first + k, (c + n) * bytes_of(dtype));
            }
            UNROLL for (int r = 0; r < N; r++) {
                const Vector row = load(rows + r * width + c * LANES / wide);
                UNROLL for (int k = 0; k < K; k++)
                    sums[r * K + k] = plus_products(dtype, sums[r * K + k], row, vectors[k]);
            }
        }
        const Vector sum = sums_of(sums);
        UNROLL for (int n = 0; n < LANES; n++) products[n / K * KEYS + first + n % K] = sum[n];
    }
}

INLINE void all_products(const int64_t dtype, const Workspace *w, Matrix keys, Later next, int64_t count,
                         float *products) {
    const int64_t width = w->query_width;
    int64_t r = 0;
    for (; r + 4 <= w->num_rows; r += 4)
        products_of(4, dtype, w->queries + r * width, width, keys, next, count, products + r * KEYS);
    for (; r + 2 <= w->num_rows; r += 2)
        products_of(2, dtype, w->queries + r * width, width, keys, next, count, products + r * KEYS);
    if (r < w->num_rows) products_of(1, dtype, w->queries + r * width, width, keys, next, count, products + r * KEYS);
}

/* sums[r row + e] = sums[...] * factors[r] + the sum over keys of weights[r KEYS + k] * values[k step + e], for N rows
   and M vectors of channels from `e` on. */
INLINE void add_values(const int N, const int M, const int64_t dtype, const float *weights, Matrix values, Later next,
                       int64_t e, int64_t count, const float *factors, float *sums, int64_t row) {
    Vector totals[4][8];
    UNROLL for (int r = 0; r < N; r++) {
        UNROLL for (int m = 0; m < M; m++) totals[r][m] = load(sums + r * row + e + m * LANES) * factors[r];
    }
    for (int64_t k = 0; k < count; k++) {
        Vector value[8];
        UNROLL for (int m = 0; m < M; m++) {
            value[m] = load_as(dtype, values.data, k * values.step + e + m * LANES);
            fetch(next, k, (e + m * LANES) * bytes_of(dtype));
        }
        UNROLL for (int r = 0; r < N; r++) {
            const Vector weight = broadcast(weights[r * KEYS + k]);
            UNROLL for (int m = 0; m < M; m++) totals[r][m] += weight * value[m];
        }
    }
    UNROLL for (int r = 0; r < N; r++) {
        UNROLL for (int m = 0; m < M; m++) store(sums + r * row + e + m * LANES, totals[r][m]);
    }
}

/* Adds M vectors of channels to all rows, N at a time: N x M sums and M vectors fit in the registers. */
INLINE void add_channels(const int N, const int M, const int64_t dtype, const Workspace *w, const float *weights,
                         Matrix values, Later next, int64_t e, int64_t count, float *sums) {
    const int64_t row = partial_row(w);
    int64_t r = 0;
    for (; r + N <= w->num_rows; r += N)
        add_values(N, M, dtype, weights + r * KEYS, values, next, e, count, w->factors + r, sums + r * row, row);
    for (; r < w->num_rows; r++)
        add_values(1, M, dtype, weights + r * KEYS, values, next, e, count, w->factors + r, sums + r * row, row);
}

INLINE void add_all_values(const int64_t dtype, const Workspace *w, const float *weights, Matrix values, Later next,
                           int64_t count, float *sums) {
    const int64_t width = w->value_width;
    int64_t e = 0;
    if (REGISTERS == 32) {
        for (; dtype == FLOAT32 && e + 8 * LANES <= width; e += 8 * LANES) /* whole lines in order */
            add_channels(2, 8, dtype, w, weights, values, next, e, count, sums);
        for (; e + 4 * LANES <= width; e += 4 * LANES)
            add_channels(4, 4, dtype, w, weights, values, next, e, count, sums);
    }
    for (; e + 4 * LANES <= width; e += 4 * LANES) add_channels(2, 4, dtype, w, weights, values, next, e, count, sums);
    for (; e < width; e += LANES) add_channels(4, 1, dtype, w, weights, values, next, e, count, sums);
}

/* Products of all rows with the keys [first, stop), at most KEYS. */
static void score_keys(const Call *call, const Workspace *w, int64_t entry, int64_t head, int64_t first, int64_t stop) {
    for (int64_t start = first; start < stop; start += CHUNK) {
        const int64_t count = min(CHUNK, stop - start);
        const Matrix keys = matrix_of(&call->key, entry, head, start, count, call->D, w->query_width, w->copy);
        const Later next = later(&call->value, entry, head, start);
        float *scores = w->scores + start - first;
        if (keys.dtype == FLOAT32) all_products(FLOAT32, w, keys, next, count, scores);
        if (in_pairs(call)) all_products(PAIRS, w, keys, next, count, scores);
        else if (keys.dtype == BFLOAT16) all_products(BFLOAT16, w, keys, next, count, scores);
        if (keys.dtype == FLOAT16) all_products(FLOAT16, w, keys, next, count, scores);
    }
}

/* Turns the products of every row into weights. */
static void weigh_keys(const Call *call, const Tile *tile, const Segment *segment, const Workspace *w, int64_t entry,
                       int64_t head, int64_t first, int64_t stop, float *partial) {
    const int64_t num_queries = tile->stop_query - tile->first_query, last = first + rounded_up(stop - first, LANES);
    for (int64_t r = 0; r < w->num_rows; r++) {
        const int64_t query_head = head * (call->H / call->G) + r / num_queries;
        const int64_t query = tile->first_query + r % num_queries;
        const Rows rows = rows_of(call, tile, segment, entry, query_head, query);
        float *greatest = partial + r * partial_row(w) + w->value_width;
        if (is_bounded(&rows))
            weights_of_row(&rows, 1, query, first, last, w->scores + r * KEYS, greatest, greatest + 1, w->factors + r);
        else
            weights_of_row(&rows, 0, query, first, last, w->scores + r * KEYS, greatest, greatest + 1, w->factors + r);
        if (call->dropped_words) drop(call, rows.word, query, first, last, w->scores + r * KEYS);
    }
}

/* Adds the values of the keys [first, stop) to the sums of all rows. */
static void add_keys(const Call *call, const Workspace *w, int64_t entry, int64_t head, int64_t first, int64_t stop,
                     float *sums) {
    for (int64_t start = first; start < stop; start += CHUNK) {
        const int64_t count = min(CHUNK, stop - start);
        const Matrix values = matrix_of(&call->value, entry, head, start, count, call->E, w->value_width, w->copy);
        const Later next = later(&call->key, entry, head, start + KEYS);
        const float *weights = w->scores + start - first;
        if (values.dtype == FLOAT32) add_all_values(FLOAT32, w, weights, values, next, count, sums);
        if (values.dtype == BFLOAT16) add_all_values(BFLOAT16, w, weights, values, next, count, sums);
        if (values.dtype == FLOAT16) add_all_values(FLOAT16, w, weights, values, next, count, sums);
        for (int64_t r = 0; r < w->num_rows; r++) w->factors[r] = 1; /* the sums are scaled once */
    }
}

/* The rows of one key head and the keys of one part. */
static void run_part(const Call *call, const Tile *tile, const Workspace *w, int64_t entry, int64_t head, int64_t part,
                     float *partial) {
    const int64_t num_queries = tile->stop_query - tile->first_query, shared = call->H / call->G;
    for (int64_t n = 0; n < shared; n++)
        pack_rows(&call->query, entry, head * shared + n, tile->first_query, num_queries, tile->stop_query, call->D,
                  w->query_width, w->queries + n * num_queries * w->query_width);
    if (in_pairs(call)) narrow(w->queries, w->num_rows, w->query_width);
    for (int64_t r = 0; r < w->num_rows; r++) {
        float *row = partial + r * partial_row(w);
        for (int64_t e = 0; e < w->value_width; e++) row[e] = 0;
        row[w->value_width] = -INFINITE, row[w->value_width + 1] = 0;
    }
    for (int64_t s = tile->first_segment; s < tile->stop_segment; s++) {
        Segment segment = call->segments[s];
        const Range keys = keys_of_tile(call, tile, &segment);
        segment.stop_key = min(keys.stop, (part + 1) * PART_KEYS); /* scores of the next part become -inf */
        for (int64_t first = max(keys.first, part * PART_KEYS); first < segment.stop_key; first += KEYS) {
            const int64_t end = min(first + KEYS, segment.stop_key);
            score_keys(call, w, entry, head, first, end);
            weigh_keys(call, tile, &segment, w, entry, head, first, end, partial);
            add_keys(call, w, entry, head, first, end, partial);
        }
    }
}

/* Output and log-sum-exp of one row, from its parts, `step` apart. */
static void finish_row(const Call *call, const Workspace *w, int64_t entry, int64_t head, int64_t query,
                       const float *parts, int64_t step) {
    const int64_t width = w->value_width;
    float greatest = call->sink ? call->sink[head] : -INFINITE;
    for (int64_t p = 0; p < w->num_parts; p++) {
        const float other = parts[p * step + width];
        greatest = other > greatest ? other : greatest;
    }
    const float base = greatest == -INFINITE ? 0 : greatest;
    float total = call->sink ? exp2_of(broadcast((call->sink[head] - base) * LOG2_E))[0] : 0;
    for (int64_t e = 0; e < width; e++) w->copy[e] = 0;
    for (int64_t p = 0; p < w->num_parts; p++) {
        const float *part = parts + p * step;
        const float factor = exp2_of(broadcast((part[width] - base) * LOG2_E))[0];
        total += part[width + 1] * factor;
        for (int64_t e = 0; e < width; e++) w->copy[e] += part[e] * factor;
    }
    const float inverse = total == 0 ? 0 : call->kept_factor / total;
    for (int64_t e = 0; e < width; e++) w->copy[e] *= inverse;
    write_vector(&call->output, place(&call->output, entry, head, query), call->E, w->copy);
    call->logsumexp[row_index(call, entry, head, query)] = greatest + log_of(total);
}

/* Output and log-sum-exp of every query: computes parts until none is left. */
EXPORT void NAMED(decode)(const Call *call, float *memory) {
    Workspace w = workspace_in(call, memory);
    const int64_t size = w.num_rows * partial_row(&w), units = num_heads(call) * w.num_parts;
    const int64_t shared = call->H / call->G;
    for (int64_t n = next_unit(call->counters); n < units; n = next_unit(call->counters)) {
        const int64_t unit = n / w.num_parts, head = unit % call->G;
        const Tile *tile = call->tiles + unit / call->G % call->num_tiles;
        const int64_t entry = call->tiles_have_entries ? tile->entry : unit / call->G / call->num_tiles;
        float *partials = call->partials + unit * w.num_parts * size;
        const int64_t num_queries = tile->stop_query - tile->first_query;
        w.num_rows = shared * num_queries;
        run_part(call, tile, &w, entry, head, n % w.num_parts, partials + n % w.num_parts * size);
        if (__atomic_add_fetch(call->counters + 1 + unit, 1, __ATOMIC_ACQ_REL) < w.num_parts) continue;
        for (int64_t r = 0; r < w.num_rows; r++)
            finish_row(call, &w, entry, head * shared + r / num_queries, tile->first_query + r % num_queries,
                       partials + r * partial_row(&w), size);
    }
}
