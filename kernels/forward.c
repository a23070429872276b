/* Attention without the matrix of weights: output and log-sum-exp of every query.

   ROWS queries take KEYS keys at a time. Their scores become weights exp(score - greatest), with the greatest score so
   far, and the weighted values are added to sums. If a later score is greater, the sums are scaled (online softmax:
   Milakov and Gimelshein 2018, arXiv:1805.02867; FlashAttention: Dao et al. 2022, arXiv:2205.14135). Keys and values
   are packed once, before the first product. */
#include "additive.h"
#include "folds.h"

/* So many keys, with their values, stay in the L2 cache while a tile of queries is computed. */
#define FEW_KEYS (4 * KEYS)

/* The scratch memory of a thread: the queries and the sums of a tile, and the scores of ROWS queries. */
typedef struct {
    float *queries, *sums, *scores, *greatest, *totals, *factors, *buffer;
    Folds folds;
} Workspace;

/* Floats of scratch memory that one thread needs. */
EXPORT int64_t NAMED(forward_workspace)(const Call *call) {
    const int64_t width = rounded_up(call->E, LANES);
    return TILE_QUERIES * (call->D + width + 2) + FOLD_FLOATS + ROWS * (KEYS + 1) + PANEL * max(call->D, width);
}

static Workspace workspace_in(const Call *call, float *memory) {
    Workspace w;
    w.queries = memory;
    w.sums = w.queries + TILE_QUERIES * call->D;
    w.scores = w.sums + TILE_QUERIES * rounded_up(call->E, LANES);
    w.greatest = w.scores + ROWS * KEYS;
    w.totals = w.greatest + TILE_QUERIES;
    w.factors = w.totals + TILE_QUERIES;
    w.folds = folds_in(w.factors + ROWS);
    w.buffer = w.folds.weights + FOLD_FLOATS;
    return w;
}

/* Turns the products of ROWS queries into weights, and adds them to the statistics of the rows. */
static void fold_keys(const Rows *rows, const Workspace *w, int64_t entry, int64_t head, int64_t group, int64_t first,
                      int64_t stop) {
    const int plain = is_plain(rows, first, stop);
    for (int r = 0; r < ROWS; r++) {
        const int64_t n = group + r, query = rows->query + r, row = row_index(rows->call, entry, head, query);
        float *scores = w->scores + r * KEYS, *greatest = w->greatest + n, *total = w->totals + n;
        if (plain)
            folded_weights_of_row(rows, 1, query, first, stop, scores, greatest, total, w->factors + r, &w->folds, n,
                                  row);
        else
            folded_weights_of_row(rows, 0, query, first, stop, scores, greatest, total, w->factors + r, &w->folds, n,
                                  row);
    }
}

/* Adds the keys [first, stop) to the sums of ROWS queries. */
static void add_keys(const Rows *rows, const Workspace *w, int64_t entry, int64_t head, int64_t group, int64_t first,
                     int64_t stop) {
    const Call *call = rows->call;
    const int64_t width = rounded_up(call->E, LANES), values = key_unit(call, entry, head) * padded_keys(call) + first;
    pair_scores(rows, entry, head, w->queries + group * call->D, first, stop, w->scores, KEYS, w->buffer);
    float *greatest = w->greatest + group, *totals = w->totals + group;
    if (has_folds(call))
        fold_keys(rows, w, entry, head, group, first, stop);
    else if (is_plain(rows, first, stop))
        for (int r = 0; r < ROWS; r++)
            weights_of_row(rows, 1, rows->query + r, first, stop, w->scores + r * KEYS, greatest + r, totals + r,
                           w->factors + r);
    else
        for (int r = 0; r < ROWS; r++)
            weights_of_row(rows, 0, rows->query + r, first, stop, w->scores + r * KEYS, greatest + r, totals + r,
                           w->factors + r);
    if (call->dropped_words)
        for (int r = 0; r < ROWS; r++) drop(call, rows->word, rows->query + r, first, stop, w->scores + r * KEYS);
    add_product(w->scores, KEYS, 1, call->packed_values + values * width, width, stop - first, w->sums + group * width,
                width, width, w->factors);
}

static void start_tile(const Call *call, const Tile *tile, int64_t entry, int64_t head, const Workspace *w) {
    const int64_t width = rounded_up(call->E, LANES);
    pack_query_groups(call, tile, entry, head, w->scores, w->queries);
    for (int64_t n = 0; n < TILE_QUERIES * width; n++) w->sums[n] = 0;
    for (int64_t n = 0; n < TILE_QUERIES; n++) {
        w->greatest[n] = call->sink ? call->sink[head] : -INFINITE;
        w->totals[n] = call->sink ? 1 : 0;
    }
    if (has_folds(call)) start_folds(call, tile, entry, head, &w->folds);
}

static void finish_tile(const Call *call, const Tile *tile, int64_t entry, int64_t head, const Workspace *w) {
    const int64_t width = rounded_up(call->E, LANES);
    for (int64_t n = 0; n < tile->stop_query - tile->first_query; n++) {
        const float total = w->totals[n], inverse = total == 0 ? 0 : call->kept_factor / total;
        float *sums = w->sums + n * width;
        for (int64_t e = 0; e < width; e++) sums[e] *= inverse;
        const int64_t query = tile->first_query + n, row = row_index(call, entry, head, query);
        write_vector(&call->output, place(&call->output, entry, head, query), call->E, sums);
        call->logsumexp[row] = w->greatest[n] + log_of(total);
        if (has_folds(call)) finish_folds(call, &w->folds, n, row, w->greatest[n], total);
    }
}

/* Adds the keys of [start, stop) to the sums of one group of queries. */
INLINE void add_to_group(const Call *call, const Tile *tile, const Segment *segment, int64_t entry, int64_t head,
                         int64_t start, int64_t stop, int64_t group, const Workspace *w) {
    const Rows rows = rows_of(call, tile, segment, entry, head, tile->first_query + group);
    const Range keys = keys_of_rows(&rows, start, stop);
    for (int64_t first = keys.first; first < keys.stop; first += KEYS)
        add_keys(&rows, w, entry, head, group, first, min(keys.stop, first + KEYS));
}

static void run_tile(const Call *call, const Tile *tile, int64_t entry, int64_t head, const Workspace *w) {
    start_tile(call, tile, entry, head, w);
    for (int64_t s = tile->first_segment; s < tile->stop_segment; s++) {
        const Segment *segment = call->segments + s;
        const Range keys = keys_of_tile(call, tile, segment);
        const int64_t first = keys.first / PANEL * PANEL;
        /* Few keys stay in the L2 cache, so a group takes all of its keys before the next group starts. */
        const int64_t size = keys.stop - first <= FEW_KEYS ? FEW_KEYS + PANEL : KEYS;
        for (int64_t start = first; start < keys.stop; start += size)
            for (int64_t group = 0; tile->first_query + group < tile->stop_query; group += ROWS)
                add_to_group(call, tile, segment, entry, head, start, start + size, group, w);
    }
    finish_tile(call, tile, entry, head, w);
}

static void pack_block(const Call *call, int64_t unit, int64_t first, int64_t stop, float *buffer) {
    pack_key_panels(call, unit, first, stop, buffer);
    pack_padded_rows(call, &call->value, unit, first, stop, call->E, call->packed_values);
}

/* Output and log-sum-exp: packs, then computes tiles until none is left. Tiles of one head follow each other. */
EXPORT void NAMED(forward)(const Call *call, float *memory) {
    const Workspace w = workspace_in(call, memory);
    pack_all(call, pack_block, w.buffer);
    const int64_t entries = call->tiles_have_entries ? 1 : call->B, units = entries * call->H * call->num_tiles;
    for (int64_t n = next_unit(call->counters + 2); n < units; n = next_unit(call->counters + 2)) {
        const int64_t head = n / call->num_tiles % call->H;
        const Tile *tile = call->tiles + (call->num_tiles - 1 - n % call->num_tiles);
        const int64_t entry = call->tiles_have_entries ? tile->entry : n / call->num_tiles / call->H;
        run_tile(call, tile, entry, head, &w);
    }
}
