/* The keys of the greatest index scores of each query (DeepSeek sparse attention, arXiv:2512.02556).

   score_ij = sum over index heads n of weights_in relu(query_in . key_j). ROWS queries take all keys of their tile, so
   their scores stay in the L2 cache. The k-th greatest score of a row is found by counting: floats are compared as
   integers in the same order, and some ten comparisons of a whole row take less time than to sort a part of it. */
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
            sums[r][n] += weights[r] * larger(broadcast(0), products[r][n]); /* NaN stays */
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
        const int64_t num_rows = min(ROWS, rows->stop_query - rows->query);
        for (int64_t r = 0; r < num_rows; r++) {
            const Row row = row_of(rows, rows->query + r);
            for (int n = 0; n < 2; n++) {
                float *score = w->scores + r * padded_keys(call) + key + n * LANES;
                const Vector now = final_score(rows, &row, sums[r][n] + 0.0f, key + n * LANES); /* -0 becomes 0 */
                store(score, choose(now == -INFINITE, load(score), now)); /* another segment may have its score */
            }
        }
    }
}

/* A row of scores as integers in the same order, in the place of the scores; NaN is the greatest, -inf is LEAST. */
#define LEAST ((int32_t)0x807fffff)
typedef struct {
    const int32_t *numbers;
    int64_t length, least, greatest; /* of the numbers above LEAST */
} Ordered;

INLINE Integers select(Integers condition, Integers yes, Integers no) { return (condition & yes) | (~condition & no); }

static Ordered ordered(float *scores, int64_t length) {
    const Integers last = (Integers){0} + 0x7fffffff;
    Integers least = last, greatest = (Integers){0} + LEAST;
    for (int64_t n = 0; n < length; n += LANES) {
        const Vector score = load(scores + n);
        const Integers bits = (Integers)score, now = select((Integers)(score != score), last, bits ^ ((bits >> 31) & last));
        greatest = select(now > greatest, now, greatest);
        least = select((now > LEAST) & (now < least), now, least);
        *(Integers *)(scores + n) = now;
    }
    Ordered row = {(const int32_t *)scores, length, least[0], greatest[0]};
    for (int lane = 1; lane < LANES; lane++) {
        row.least = min(row.least, least[lane]);
        row.greatest = max(row.greatest, greatest[lane]);
    }
    return row;
}

/* How many numbers are at least `least`. */
INLINE int64_t count_from(const Ordered *row, int64_t least) {
    Integers count[2] = {{0}, {0}};
    for (int64_t n = 0; n < row->length; n += PANEL) {
        count[0] -= *(const Integers *)(row->numbers + n) >= (int32_t)least;
        count[1] -= *(const Integers *)(row->numbers + n + LANES) >= (int32_t)least;
    }
    int64_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += count[0][lane] + count[1][lane];
    return total;
}

/* The k-th greatest of `count` numbers, which are more than k, and in `equal` how many of those equal to it are among the
   k. Interpolation of the counts takes a few steps where scores are spread evenly; every third step halves the
   interval. */
static int64_t kth_greatest(const Ordered *row, int64_t k, int64_t count, int64_t *equal) {
    int64_t low = row->least, high = row->greatest + 1, above = 0; /* `count` from low on, `above` from high on */
    for (int step = 0; high - low > 1 && count > k; step++) {
        const double share = step % 3 == 2 ? 0.5 : (double)(count - k) / (double)(count - above);
        const int64_t middle = max(low + 1, min(high - 1, low + (int64_t)(share * (double)(high - low))));
        const int64_t found = count_from(row, middle);
        if (found >= k)
            low = middle, count = found;
        else
            high = middle, above = found;
    }
    *equal = count == k ? k : k - above;
    return low;
}

/* Writes the places of the k greatest numbers, plus `first`; of equal ones the first. */
static void write_greatest(const Index *index, const Ordered *row, int64_t first, int32_t *ids) {
    const int64_t k = index->k, valid = row->greatest == LEAST ? 0 : count_from(row, (int64_t)LEAST + 1);
    int64_t least = (int64_t)LEAST + 1, equal = k, count = 0;
    if (valid > k) least = kth_greatest(row, k, valid, &equal);
    for (int64_t n = 0; n < row->length && count < k; n += LANES) {
        const Integers some = *(const Integers *)(row->numbers + n) >= (int32_t)least;
        for (uint64_t bits = lane_bits(some); bits && count < k; bits &= bits - 1) {
            const int64_t at = n + __builtin_ctzll(bits);
            if (row->numbers[at] == least && equal-- <= 0) continue;
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
    for (int64_t r = 0; r < num_rows && all.first < all.stop; r++) {
        const Ordered row = ordered(w->scores + r * padded + all.first, all.stop - all.first);
        write_greatest(index, &row, all.first, index->ids + (entry * call->I + query + r) * index->k);
    }
    for (int64_t n = 0; n < num_rows * index->k && all.first >= all.stop; n++)
        index->ids[(entry * call->I + query) * index->k + n] = (int32_t)index->no_id;
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
