/* Attention without the matrix of weights: output and log-sum-exp of every query.

   ROWS queries take KEYS keys at a time. Their scores become weights exp(score - greatest), with the greatest score so
   far, and the weighted values are added to sums. If a later score is greater, the sums are scaled (online softmax:
   Milakov and Gimelshein 2018, arXiv:1805.02867; FlashAttention: Dao et al. 2022, arXiv:2205.14135). Keys and values
   are packed once, before the first product. */
#include "additive.h"
#include "folds.h"

/* So many keys, with their values, stay in the L2 cache while a tile of queries is computed. */
#define FEW_KEYS (5 * KEYS)

/* Most keys that ROWS queries take at a time: a multiple of PANEL. The keys of a window of 256 are one piece. */
#define PIECE 384

/* Most distances of a window whose keys each thread packs for itself, and most tiles of a run of them. */
#define NEAR 2048
#define MOST_TILES 16
/* Runs that all threads share: a run has fewer tiles where there would be fewer runs. */
#define MANY_RUNS 64

/* The tiles of a run of a window; 0: keys and values are packed once, for all tiles and threads.

   A run packs the keys of its tiles into scratch memory, which stays in the cache. Neighboring runs pack some keys
   twice, but packed keys of a long text would go to memory and come back. */
static int64_t run_tiles(const Call *call) {
    const int64_t reach = call->high - call->low, tiles = call->B * call->G * call->num_tiles;
    if (reach > NEAR || call->tiles_have_entries || call->J < 2 * (reach + MOST_TILES * TILE_QUERIES)) return 0;
    return min(MOST_TILES, max(4, tiles / MANY_RUNS));
}

/* Keys of a run. */
static int64_t run_keys(const Call *call) {
    const int64_t length = run_tiles(call);
    return length ? call->high - call->low + length * TILE_QUERIES + 2 * PANEL : 0;
}

/* The scratch memory of a thread: the queries and the sums of a tile, and the scores of ROWS queries; packed keys and
   values of a run. */
typedef struct {
    float *queries, *sums, *scores, *greatest, *totals, *factors, *buffer, *keys, *values;
    Folds folds;
} Workspace;

/* Floats of scratch memory that one thread needs. */
EXPORT int64_t NAMED(forward_workspace)(const Call *call) {
    const int64_t width = rounded_up(call->E, LANES);
    return TILE_QUERIES * (call->D + width + 2) + FOLD_FLOATS + ROWS * (PIECE + 1) + PANEL * max(call->D, width) +
           run_keys(call) * (call->D + width);
}

static Workspace workspace_in(const Call *call, float *memory) {
    Workspace w;
    w.queries = memory;
    w.sums = w.queries + TILE_QUERIES * call->D;
    w.scores = w.sums + TILE_QUERIES * rounded_up(call->E, LANES);
    w.greatest = w.scores + ROWS * PIECE;
    w.totals = w.greatest + TILE_QUERIES;
    w.factors = w.totals + TILE_QUERIES;
    w.folds = folds_in(w.factors + ROWS);
    w.buffer = w.folds.weights + FOLD_FLOATS;
    w.keys = w.buffer + PANEL * max(call->D, rounded_up(call->E, LANES));
    w.values = w.keys + run_keys(call) * call->D;
    return w;
}

/* Turns the products of ROWS queries into weights, and adds them to the statistics of the rows. */
static void fold_keys(const Rows *rows, const Workspace *w, int64_t entry, int64_t head, int64_t group, int64_t first,
                      int64_t stop) {
    const int bounded = is_bounded(rows);
    for (int r = 0; r < ROWS; r++) {
        const int64_t n = group + r, query = rows->query + r, row = row_index(rows->call, entry, head, query);
        float *scores = w->scores + r * PIECE, *greatest = w->greatest + n, *total = w->totals + n;
        if (bounded)
            folded_weights_of_row(rows, 1, query, first, stop, scores, greatest, total, w->factors + r, &w->folds, n,
                                  row);
        else
            folded_weights_of_row(rows, 0, query, first, stop, scores, greatest, total, w->factors + r, &w->folds, n,
                                  row);
    }
}

/* Whether the values need no copy: they have the layout of packed ones. */
INLINE int are_packed(const Call *call) {
    const Tensor *value = &call->value;
    return value->dtype == FLOAT32 && value->strides[3] == 1 && value->strides[2] == call->E && call->E % LANES == 0;
}

/* The values of a head: rows of whole vectors. */
INLINE const float *value_rows(const Call *call, int64_t entry, int64_t head) {
    const int64_t key_head = head / (call->H / call->G);
    if (are_packed(call)) return (const float *)call->value.data + place(&call->value, entry, key_head, 0);
    return call->packed_values + key_unit(call, entry, head) * padded_keys(call) * rounded_up(call->E, LANES);
}

/* Adds the keys of a piece to the sums of ROWS queries. Scores are those of whole vectors of keys. */
static void add_keys(const Rows *rows, const Workspace *w, int64_t entry, int64_t head, int64_t group, Range keys) {
    const Call *call = rows->call;
    const int64_t width = rounded_up(call->E, LANES);
    const Range whole = rounded_out(keys, pair_unit(call));
    const int64_t first = whole.first, stop = whole.stop;
    pair_scores(rows, entry, head, w->queries + group * call->D, first, stop, w->scores, PIECE, w->buffer);
    float *greatest = w->greatest + group, *totals = w->totals + group;
    if (has_folds(call))
        fold_keys(rows, w, entry, head, group, first, stop);
    else if (is_bounded(rows))
        for (int r = 0; r < ROWS; r++)
            weights_of_row(rows, 1, rows->query + r, first, stop, w->scores + r * PIECE, greatest + r, totals + r,
                           w->factors + r);
    else
        for (int r = 0; r < ROWS; r++)
            weights_of_row(rows, 0, rows->query + r, first, stop, w->scores + r * PIECE, greatest + r, totals + r,
                           w->factors + r);
    if (call->dropped_words)
        for (int r = 0; r < ROWS; r++) drop(call, rows->word, rows->query + r, first, stop, w->scores + r * PIECE);
    add_product(w->scores + keys.first - first, PIECE, 1, value_rows(call, entry, head) + keys.first * width, width,
                keys.stop - keys.first, w->sums + group * width, width, width, w->factors);
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
    const Range keys = keys_of_rows(&rows, start, stop), whole = rounded_out(keys, PANEL);
    const int64_t pieces = (whole.stop - whole.first + PIECE - 1) / PIECE;
    const int64_t size = pieces > 0 ? rounded_up((whole.stop - whole.first) / pieces, PANEL) : PIECE;
    for (int64_t first = whole.first; first < keys.stop; first += size)
        add_keys(&rows, w, entry, head, group, (Range){max(keys.first, first), min(keys.stop, first + size)});
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
    if (!are_packed(call)) pack_padded_rows(call, &call->value, unit, first, stop, call->E, call->packed_values);
}

/* A unit of work: tiles [first, stop) of the query heads from `head` on. */
typedef struct {
    int64_t entry, head, num_heads, first, stop;
} Run;

/* The keys of a run in scratch memory: a call whose packed keys and values lie there. */
static Call packed_run(const Call *call, const Run *run, const Workspace *w) {
    const int64_t unit = key_unit(call, run->entry, run->head), width = rounded_up(call->E, LANES);
    const int64_t first = max(0, call->tiles[run->first].first_query + call->low) / PANEL * PANEL;
    const int64_t stop = min(padded_keys(call), rounded_up(call->tiles[run->stop - 1].stop_query + call->high, PANEL));
    const uint64_t before = (uint64_t)(unit * padded_keys(call) + first) * sizeof(float);
    Call own = *call;
    own.packed_keys = (float *)((uint64_t)w->keys - before * call->D);
    own.packed_values = (float *)((uint64_t)w->values - before * width);
    if (first < stop) pack_block(&own, unit, first, stop, w->buffer);
    return own;
}

static void compute_run(const Call *call, const Run *run, const Workspace *w) {
    for (int64_t head = run->head; head < run->head + run->num_heads; head++)
        for (int64_t t = run->stop - 1; t >= run->first; t--) run_tile(call, call->tiles + t, run->entry, head, w);
}

/* Run n of all, of `length` tiles: those of one head follow each other, the last tiles first. */
INLINE Run run_of(const Call *call, int64_t n, int64_t length, int64_t num_heads) {
    const int64_t runs = (call->num_tiles + length - 1) / length, heads = call->H / num_heads;
    const int64_t first = (runs - 1 - n % runs) * length, entry = n / runs / heads;
    return (Run){call->tiles_have_entries ? call->tiles[first].entry : entry, n / runs % heads * num_heads, num_heads,
                 first, min(first + length, call->num_tiles)};
}

/* Output and log-sum-exp: packs, unless each run does, then computes runs until none is left. */
EXPORT void NAMED(forward)(const Call *call, float *memory) {
    const Workspace w = workspace_in(call, memory);
    const int packs = run_tiles(call) > 0;
    const int64_t length = packs ? run_tiles(call) : 1, num_heads = packs ? call->H / call->G : 1;
    const int64_t entries = call->tiles_have_entries ? 1 : call->B;
    const int64_t units = entries * (call->H / num_heads) * ((call->num_tiles + length - 1) / length);
    if (!packs) pack_all(call, pack_block, w.buffer);
    for (int64_t n = next_unit(call->counters + 2); n < units; n = next_unit(call->counters + 2)) {
        const Run run = run_of(call, n, length, num_heads);
        Call own;
        if (packs) own = packed_run(call, &run, &w);
        compute_run(packs ? &own : call, &run, &w);
    }
}
