/* The keys of the greatest index scores of each query (DeepSeek sparse attention, arXiv:2512.02556).

   score_ij = sum over index heads n of weights_in relu(query_in . key_j). ROWS queries take all keys of their tile, so
   their scores stay in the L2 cache. */
#include "ordered.h"
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

static void run_rows(const Call *call, const Index *index, const Tile *tile, int64_t entry, int64_t query,
                     const Workspace *w) {
    const int64_t num_rows = min(ROWS, tile->stop_query - query), padded = padded_keys(call);
    Range all = {padded, 0};
    start_rows(call, index, tile, entry, query, w);
    for (int scores = 0; scores < 2; scores++) { /* first the range of keys */
        for (int64_t s = tile->first_segment; s < tile->stop_segment; s++) {
            const Rows rows = rows_of(call, tile, call->segments + s, entry, 0, query);
            const Range keys = rounded_out(keys_of_rows(&rows, 0, padded), PANEL);
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
        write_greatest(&row, index->k, all.first, index->ids + (entry * call->I + query + r) * index->k, (int32_t)index->no_id);
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
