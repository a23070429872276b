/* The keys of the greatest index scores of each query (DeepSeek sparse attention, arXiv:2512.02556).

   score_ij = sum over index heads n of weights_in relu(query_in . key_j). ROWS queries take all keys of their tile, so
   their scores stay in the L2 cache. The k-th greatest score of a row is found by bisection: floats are compared as
   integers in the same order, and some 25 comparisons of a whole row take less time than to sort a part of it. */
#include "rows.h"

/* What to compute. The query heads of Call are the index heads, and its values are not read. */
typedef struct {
    const float *weights; /* (B, I, H) */
    int32_t *ids;         /* (B, I, k): indices of keys, which ascend; `no_id` behind the last */
    int64_t k, no_id;
} Index;

/* The scratch memory of a thread, for ROWS queries: queries of all heads as columns, weights, scores. */
typedef struct {
    float *queries, *weights, *scores, *buffer;
} Workspace;

/* Floats of scratch memory that one thread needs. */
EXPORT int64_t NAMED(index_workspace)(const Call *call) {
    return ROWS * (call->H * (call->D + 1) + padded_keys(call)) + MOST_COLUMNS * call->D;
}

static Workspace workspace_in(const Call *call, float *memory) {
    Workspace w = {memory, 0, 0, 0};
    w.weights = w.queries + call->H * ROWS * call->D;
    w.scores = w.weights + call->H * ROWS;
    w.buffer = w.scores + ROWS * padded_keys(call);
    return w;
}

/* Queries from `query` on, and their weights: ROWS numbers a head. Rows behind the last repeat its weights. */
static void start_rows(const Call *call, const Index *index, const Tile *tile, int64_t entry, int64_t query,
                       const Workspace *w) {
    for (int64_t head = 0; head < call->H; head++) {
        pack_columns(&call->query, entry, head, query, ROWS, tile->stop_query, call->D, w->buffer,
                     w->queries + head * ROWS * call->D);
        for (int64_t r = 0; r < ROWS; r++)
            w->weights[head * ROWS + r] =
                index->weights[(entry * call->I + min(query + r, tile->stop_query - 1)) * call->H + head];
    }
}

/* Adds weight relu(product) of one head and a panel of keys to `sums`. */
INLINE void add_head(const Call *call, const float *queries, const float *panel, const float *weights,
                     Vector sums[ROWS][2]) {
    Vector products[ROWS][2] = {{{0}}};
    product_2(queries, 1, ROWS, panel, PANEL, call->D, products);
    UNROLL for (int r = 0; r < ROWS; r++) {
        UNROLL for (int n = 0; n < 2; n++) {
            const Vector product = choose(products[r][n] < 0.0f, broadcast(0), products[r][n]); /* NaN stays */
            sums[r][n] += weights[r] * product;
        }
    }
}

/* The scores of ROWS queries and the given keys of a segment. */
static void add_scores(const Rows *rows, const Workspace *w, int64_t entry, Range keys) {
    const Call *call = rows->call;
    const float *panels = call->packed_keys + entry * padded_keys(call) * call->D;
    for (int64_t key = keys.first; key < keys.stop; key += PANEL) {
        Vector sums[ROWS][2] = {{{0}}};
        for (int64_t head = 0; head < call->H; head++)
            add_head(call, w->queries + head * ROWS * call->D, panels + key * call->D, w->weights + head * ROWS, sums);
        for (int64_t r = 0; r < min(ROWS, rows->stop_query - rows->query); r++) {
            const Row row = row_of(rows, rows->query + r);
            for (int n = 0; n < 2; n++) {
                float *score = w->scores + r * padded_keys(call) + key + n * LANES;
                const Vector now = final_score(rows, &row, sums[r][n] + 0.0f, key + n * LANES); /* -0 becomes 0 */
                store(score, choose(now == -INFINITE, load(score), now)); /* another segment may have its score */
            }
        }
    }
}

/* Numbers of the order of floats as integers; NaN is the greatest, and -inf is LEAST. */
#define LEAST ((int32_t)0x807fffff)
INLINE Integers ordered(Vector x) {
    const Integers bits = (Integers)x, greatest = (Integers){0} + 0x7fffffff;
    const Integers is_nan = (Integers)(x != x);
    return (is_nan & greatest) | (~is_nan & (bits ^ ((bits >> 31) & greatest)));
}

/* How many of `length` numbers are at least `least`. */
INLINE int64_t count_from(const int32_t *numbers, int64_t length, int32_t least) {
    Integers count[2] = {{0}, {0}};
    for (int64_t n = 0; n < length; n += PANEL) {
        count[0] -= *(const Integers *)(numbers + n) >= least;
        count[1] -= *(const Integers *)(numbers + n + LANES) >= least;
    }
    int64_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += count[0][lane] + count[1][lane];
    return total;
}

/* The k-th greatest of `length` numbers, of which more than k are above LEAST. */
INLINE int32_t kth_greatest(const int32_t *numbers, int64_t length, int64_t k) {
    int64_t low = (int64_t)LEAST + 1, high = (int64_t)0x7fffffff + 1; /* at least k from low on, fewer from high on */
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2, count = count_from(numbers, length, (int32_t)middle);
        if (count >= k) low = middle;
        if (count == k) break;
        if (count < k) high = middle;
    }
    return (int32_t)low;
}

/* Writes the places of the k greatest of `length` numbers; of equal ones the first. `first` is added to each. */
static void write_greatest(const Index *index, const int32_t *numbers, int64_t first, int64_t length, int32_t *ids) {
    const int64_t k = index->k;
    int32_t least = LEAST + 1;
    int64_t missing = k, count = 0; /* missing: of numbers equal to `least` */
    if (count_from(numbers, length, least) > k) {
        least = kth_greatest(numbers, length, k);
        missing = least == 0x7fffffff ? k : k - count_from(numbers, length, least + 1);
    }
    for (int64_t n = 0; n < length; n += LANES) {
        const Integers some = *(const Integers *)(numbers + n) >= least;
        if (!any_of(some)) continue;
        for (uint64_t bits = lane_bits(some); bits && count < k; bits &= bits - 1) {
            const int64_t at = n + __builtin_ctzll(bits);
            if (numbers[at] == least && missing-- <= 0) continue;
            ids[count++] = (int32_t)(first + at);
        }
    }
    for (; count < k; count++) ids[count] = (int32_t)index->no_id;
}

static void run_rows(const Call *call, const Index *index, const Tile *tile, int64_t entry, int64_t query,
                     const Workspace *w) {
    const int64_t num_rows = min(ROWS, tile->stop_query - query), padded = padded_keys(call);
    Range all = {padded, 0};
    start_rows(call, index, tile, entry, query, w);
    for (int scores = 0; scores < 2; scores++) { /* first the range of keys */
        for (int64_t s = tile->first_segment; s < tile->stop_segment; s++) {
            const Rows rows = rows_of(call, tile, call->segments + s, entry, 0, query);
            const Range keys = keys_of_rows(&rows, call->segments[s].first_key / PANEL * PANEL, padded);
            if (keys.first >= keys.stop) continue;
            if (scores)
                add_scores(&rows, w, entry, keys);
            else
                all = (Range){min(all.first, keys.first), max(all.stop, keys.stop)};
        }
        for (int64_t r = 0; r < num_rows && !scores; r++)
            for (int64_t key = all.first; key < all.stop; key += LANES)
                store(w->scores + r * padded + key, broadcast(-INFINITE));
    }
    for (int64_t r = 0; r < num_rows; r++) {
        float *scores = w->scores + r * padded;
        for (int64_t key = all.first; key < all.stop; key += LANES)
            *(Integers *)(scores + key) = ordered(load(scores + key));
        write_greatest(index, (const int32_t *)(scores + all.first), all.first, max(0, all.stop - all.first),
                       index->ids + (entry * call->I + query + r) * index->k);
    }
}

static void pack_block(const Call *call, int64_t unit, int64_t first, int64_t stop, float *buffer) {
    pack_panels(call, &call->key, unit, first, stop, call->D, buffer, call->packed_keys);
}

/* Packs the keys, then computes the rows of tiles until none is left. */
EXPORT void NAMED(index)(const Call *call, float *memory, const Index *index) {
    const Workspace w = workspace_in(call, memory);
    pack_all(call, pack_block, w.buffer);
    const int64_t entries = call->tiles_have_entries ? 1 : call->B, units = entries * call->num_tiles;
    for (int64_t n = next_unit(call->counters + 2); n < units; n = next_unit(call->counters + 2)) {
        const Tile *tile = call->tiles + (call->num_tiles - 1 - n % call->num_tiles);
        const int64_t entry = call->tiles_have_entries ? tile->entry : n / call->num_tiles;
        for (int64_t query = tile->first_query; query < tile->stop_query; query += ROWS)
            run_rows(call, index, tile, entry, query, &w);
    }
}
