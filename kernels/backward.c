/* Gradients of attention, without the matrix of weights.

   The forward pass has left the log-sum-exp of each row, so a weight is final at once: P = exp(S - lse). The gradient
   of a score is dS = P (dP - delta), where dP = dO V^T and delta_i = sum over channels of dO_i O_i (FlashAttention: Dao
   et al. 2022, arXiv:2205.14135). P and dS of a tile of queries and BLOCK keys are held in scratch memory.
   Then dQ = dS K, dK = dS^T Q and dV = P^T dO are calls of the same product. A unit of work is one key head and a part
   of the queries; each part has its own sums for keys. */
#include "additive_backward.h"
#include "folds.h"

/* Keys of a block: a multiple of PANEL and of ROWS for every vector width. */
#define BLOCK 96
/* Keys behind the last: ROWS are added to at once, 12 at most. The same for all variants, as emulation expects. */
#define SPARE_KEYS 12

/* The scratch memory of a thread, with widths of rows in whole vectors. `length`: keys of `grad_key` (see below). */
typedef struct {
    int64_t query_width, value_width, length;
    float *query_columns, *query_rows, *grad_columns, *grad_rows; /* of a tile */
    float *query_sums, *weights, *grads, *buffer;
} Workspace;

static Workspace workspace_in(const Call *call, float *memory) {
    Workspace w;
    w.query_width = rounded_up(call->D, LANES);
    w.value_width = rounded_up(call->E, LANES);
    w.length = padded_keys(call) + SPARE_KEYS;
    w.query_columns = memory;
    w.query_rows = w.query_columns + TILE_QUERIES * call->D;
    w.grad_columns = w.query_rows + TILE_QUERIES * w.query_width;
    w.grad_rows = w.grad_columns + TILE_QUERIES * call->E;
    w.query_sums = w.grad_rows + TILE_QUERIES * w.value_width;
    w.weights = w.query_sums + TILE_QUERIES * w.query_width;
    w.grads = w.weights + TILE_QUERIES * BLOCK;
    w.buffer = w.grads + TILE_QUERIES * BLOCK;
    return w;
}

/* Floats of scratch memory that one thread needs. */
EXPORT int64_t NAMED(backward_workspace)(const Call *call) {
    const int64_t query_width = rounded_up(call->D, LANES), value_width = rounded_up(call->E, LANES);
    return TILE_QUERIES * (call->D + call->E + 2 * query_width + value_width + 2 * BLOCK) +
           MOST_COLUMNS * max(query_width, value_width);
}

/* The length of the token axis of `grad_key` and `grad_value`. */
EXPORT int64_t NAMED(backward_length)(const Call *call) { return padded_keys(call) + SPARE_KEYS; }

static void start_tile(const Call *call, const Tile *tile, int64_t entry, int64_t head, const Workspace *w) {
    const int64_t first = tile->first_query, stop = tile->stop_query, count = rounded_up(stop - first, ROWS);
    pack_query_groups(call, tile, entry, head, w->buffer, w->query_columns);
    pack_groups(&call->grad_output, tile, entry, head, call->E, w->buffer, w->grad_columns);
    pack_rows(&call->query, entry, head, first, count, stop, call->D, w->query_width, w->query_rows);
    if (call->direction) to_exponentials(w->query_rows, count * w->query_width);
    pack_rows(&call->grad_output, entry, head, first, count, stop, call->E, w->value_width, w->grad_rows);
    if (call->dropped_words) { /* both products with dO are those of kept weights */
        for (int64_t n = 0; n < count * call->E; n++) w->grad_columns[n] *= call->kept_factor;
        for (int64_t n = 0; n < count * w->value_width; n++) w->grad_rows[n] *= call->kept_factor;
    }
    for (int64_t n = 0; n < TILE_QUERIES * w->query_width; n++) w->query_sums[n] = 0;
}

/* What the sum of a channel is multiplied by: for dot products the scale. */
INLINE float factor_of(const Call *call, int64_t channel) {
    return call->direction ? 4 * call->scale * call->direction[channel] : call->scale;
}

static void finish_tile(const Call *call, const Tile *tile, int64_t entry, int64_t head, const Workspace *w) {
    float *to = call->grad_query + row_index(call, entry, head, tile->first_query) * call->D;
    for (int64_t n = 0; n < tile->stop_query - tile->first_query; n++)
        for (int64_t c = 0; c < call->D; c++)
            to[n * call->D + c] = w->query_sums[n * w->query_width + c] * factor_of(call, c);
}

/* The derivative of the soft cap at the scores of LANES keys. */
INLINE Vector cap_derivative(const Rows *rows, const Row *row, Vector product, int64_t key) {
    const Vector t = tanh_of(score_before_cap(rows, row, product, key) * (1 / rows->call->cap));
    return 1.0f - t * t;
}

/* Where the gradients of biases of a row are summed, or null. */
typedef struct {
    float *before, *after; /* index j - i */
    float *clipped;        /* as in row_of */
} BiasSums;

/* One row. Before: `weights` holds q.k, and `grads` the products dO.v. After: `weights` holds P, 0 where dropped, and
   `grads` the gradients of scale q.k. Gradients of biases are added along the diagonals. `plain`: as if it could attend
   to all keys. */
INLINE void grads_of_row(const Rows *rows, int plain, int drops, int64_t query, int64_t first, int64_t stop,
                         float logsumexp, float delta, float *weights, float *grads, const BiasSums *sums) {
    const Row row = row_of(rows, query);
    const Bits word = query_word(rows->call, rows->word, query);
    for (int64_t key = first; key < stop; key += LANES) {
        const Vector product = load(weights + key - first) * rows->call->scale;
        const Vector score = plain ? product : final_score(rows, &row, product, key);
        const Vector power = (score - logsumexp) * LOG2_E;
        Vector weight = exp2_of(choose(power > 126.0f, broadcast(126), power));
        if (!plain) weight = choose(score == -INFINITE, broadcast(0), weight); /* even if the row is NaN */
        Vector from_value = load(grads + key - first), dropped = weight;
        if (drops) {
            const Integers is_kept = kept(rows->call, word, key);
            from_value = choose(is_kept, from_value, broadcast(0));
            dropped = choose(is_kept, weight, broadcast(0));
        }
        Vector grad = weight * (from_value - delta);
        store(weights + key - first, dropped);
        if (!plain) {
            grad = choose(weight == 0.0f, broadcast(0), grad);
            if (sums->after) store(sums->after + key - query, load(sums->after + key - query) + grad);
            if (rows->call->cap != 0) grad *= cap_derivative(rows, &row, product, key);
            if (sums->before) store(sums->before + key - query, load(sums->before + key - query) + grad);
            if (sums->clipped) {
                float *clipped = sums->clipped + clipped_index(rows->call, query, key);
                store(clipped, load(clipped) + grad);
            }
        }
        store(grads + key - first, grad);
    }
}

/* Sets a row of a block to 0 outside of the given keys, which may be none; the block begins at key `start`. */
INLINE void clear_outside(float *row, int64_t start, Range keys) {
    const int64_t first = min(keys.first, start + BLOCK);
    for (int64_t key = start; key < first; key++) row[key - start] = 0;
    for (int64_t key = max(start, keys.stop); key < start + BLOCK; key++) row[key - start] = 0;
}

/* Where the gradients of the biases of a head and part begin: index j - i. */
INLINE float *diagonals(const Call *call, float *grads, int64_t entry, int64_t head, int64_t part) {
    if (!grads) return 0;
    const int64_t length = call->I + call->J - 1 + 2 * MARGIN;
    return grads + ((entry * call->H + head) * call->num_parts + part) * length + MARGIN + call->I - 1;
}

/* P and dS of ROWS queries and a block of keys from `start` on: 0 outside of the given keys. Returns what pair_scores
   does. */
static int fill_group(const Rows *rows, const Workspace *w, int64_t entry, int64_t head, int64_t part, int64_t start,
                      Range keys) {
    const Call *call = rows->call;
    const int64_t group = rows->query - rows->tile_query, panels = key_unit(call, entry, head) * padded_keys(call);
    const int64_t first = keys.first, stop = keys.stop;
    float *weights = w->weights + group * BLOCK + first - start, *grads = w->grads + group * BLOCK + first - start;
    const int exact =
        pair_scores(rows, entry, head, w->query_columns + group * call->D, first, stop, weights, BLOCK, w->buffer);
    dot_products(w->grad_columns + group * call->E, call->packed_value_panels + panels * call->E, call->E, first, stop,
                 grads, BLOCK);
    if (has_fold_gradients(call)) add_fold_terms(rows, entry, head, first, stop, weights, grads, BLOCK);
    BiasSums sums = {diagonals(call, call->grad_before, entry, head, part),
                     diagonals(call, call->grad_after, entry, head, part), 0};
    const int bounded = is_bounded(rows), drops = call->dropped_words != 0;
    const int num_queries = (int)min(ROWS, rows->stop_query - rows->query);
    for (int r = 0; r < num_queries; r++, weights += BLOCK, grads += BLOCK) {
        const int64_t query = rows->query + r, row = row_index(call, entry, head, query);
        const float logsumexp = row_logsumexp(call, row), delta = call->delta[row];
        if (call->grad_clipped) sums.clipped = call->grad_clipped + row * call->clipped_width;
        if (bounded && !drops)
            grads_of_row(rows, 1, 0, query, first, stop, logsumexp, delta, weights, grads, 0);
        else if (bounded)
            grads_of_row(rows, 1, 1, query, first, stop, logsumexp, delta, weights, grads, 0);
        else
            grads_of_row(rows, 0, drops, query, first, stop, logsumexp, delta, weights, grads, &sums);
    }
    for (int r = 0; r < ROWS; r++) {
        const Row row = row_of(rows, rows->query + r);
        const Range allowed = bounded ? (Range){max(first, row.first), min(stop, row.stop)} : keys;
        const Range known = r < num_queries ? allowed : (Range){start, start};
        clear_outside(w->weights + (group + r) * BLOCK, start, known);
        clear_outside(w->grads + (group + r) * BLOCK, start, known);
    }
    return exact;
}

/* Adds dS of a group and the given keys of a block to the gradients of its queries, for additive scores to those of
   keys and direction too: they are no product. */
static void add_group(const Rows *rows, const Workspace *w, int64_t entry, int64_t head, int64_t part, int exact,
                      int64_t start, Range keys) {
    const Call *call = rows->call;
    const int64_t unit = key_unit(call, entry, head), share = unit * call->num_parts + part, width = w->query_width;
    const int64_t group = rows->query - rows->tile_query;
    const float *grads = w->grads + group * BLOCK + keys.first - start;
    const float *key_rows = call->packed_key_rows + (unit * padded_keys(call) + keys.first) * width;
    float *query_sums = w->query_sums + group * width;
    if (!call->direction) {
        add_product(grads, BLOCK, 1, key_rows, width, keys.stop - keys.first, query_sums, width, width, 0);
        return;
    }
    const int num_queries = (int)min(ROWS, rows->stop_query - rows->query);
    const HiddenRows h = {w->query_rows + group * width,
                          key_rows,
                          query_sums,
                          call->grad_key + (share * w->length + keys.first) * width,
                          call->grad_direction + share * width,
                          width};
    if (exact)
        add_exact(rows, entry, head, h, num_queries, grads, BLOCK, keys.first, keys.stop, w->buffer);
    else
        add_additive(h, num_queries, grads, BLOCK, keys.stop - keys.first);
}

/* The groups [first_row, stop_row) of a block of the map, and the keys that any of them may attend to. */
typedef struct {
    int64_t first_row, stop_row;
    Range keys;
} Filled;

/* Fills a block of the map, and adds it to the gradients of its queries. */
static Filled add_to_queries(const Call *call, const Tile *tile, const Segment *segment, int64_t entry, int64_t head,
                             int64_t part, int64_t start, const Workspace *w) {
    Filled filled = {TILE_QUERIES, 0, {start + BLOCK, start}};
    for (int64_t group = 0; tile->first_query + group < tile->stop_query; group += ROWS) {
        const Rows rows = rows_of(call, tile, segment, entry, head, tile->first_query + group);
        const Range keys = rounded_out(keys_of_rows(&rows, start, start + BLOCK), pair_unit(call));
        if (keys.first >= keys.stop) {
            if (filled.stop_row > 0) break; /* later queries attend to later keys only */
            continue;
        }
        const int exact = fill_group(&rows, w, entry, head, part, start, keys);
        add_group(&rows, w, entry, head, part, exact, start, keys);
        filled.first_row = min(filled.first_row, group), filled.stop_row = group + ROWS;
        filled.keys = (Range){min(filled.keys.first, keys.first), max(filled.keys.stop, keys.stop)};
    }
    return filled;
}

/* Adds a filled block of the map to the gradients of its keys and values; `sums`: where those of the part begin. */
static void add_to_keys(const Call *call, Filled filled, int64_t sums, int64_t start, const Workspace *w) {
    const int64_t first_row = filled.first_row, count = filled.stop_row - first_row;
    const int64_t first_key = filled.keys.first - (filled.keys.first - start) % ROWS;
    for (int64_t key = first_key; key < filled.keys.stop; key += ROWS) {
        const int64_t from = first_row * BLOCK + key - start;
        add_product(w->weights + from, 1, BLOCK, w->grad_rows + first_row * w->value_width, w->value_width, count,
                    call->grad_value + (sums + key) * w->value_width, w->value_width, w->value_width, 0);
        if (call->direction) continue; /* done by add_group */
        add_product(w->grads + from, 1, BLOCK, w->query_rows + first_row * w->query_width, w->query_width, count,
                    call->grad_key + (sums + key) * w->query_width, w->query_width, w->query_width, 0);
    }
}

static void run_tile(const Call *call, const Tile *tile, int64_t entry, int64_t head, int64_t part,
                     const Workspace *w) {
    const int64_t sums = (key_unit(call, entry, head) * call->num_parts + part) * w->length;
    start_tile(call, tile, entry, head, w);
    for (int64_t s = tile->first_segment; s < tile->stop_segment; s++) {
        const Segment *segment = call->segments + s;
        const Range keys = keys_of_tile(call, tile, segment);
        for (int64_t start = keys.first / PANEL * PANEL; start < keys.stop; start += BLOCK) {
            const Filled filled = add_to_queries(call, tile, segment, entry, head, part, start, w);
            if (filled.stop_row > 0) add_to_keys(call, filled, sums, start, w);
        }
    }
    finish_tile(call, tile, entry, head, w);
}

static void pack_block(const Call *call, int64_t unit, int64_t first, int64_t stop, float *buffer) {
    pack_key_panels(call, unit, first, stop, buffer);
    pack_panels(call, &call->value, unit, first, stop, call->E, buffer, call->packed_value_panels);
    pack_key_rows(call, unit, first, stop);
}

/* Multiplies the sums of a part by what their terms have in common. */
static void scale_keys(const Call *call, int64_t unit, int64_t part, const Workspace *w) {
    const int64_t share = unit * call->num_parts + part, width = w->query_width;
    float *sums = call->grad_key + share * w->length * width;
    for (int64_t n = 0; n < w->length; n++)
        for (int64_t c = 0; c < width; c++) sums[n * width + c] *= factor_of(call, c);
    if (call->direction)
        for (int64_t c = 0; c < width; c++) call->grad_direction[share * width + c] *= 2 * call->scale;
}

/* Gradients of queries, keys, values and biases: packs, then computes parts until none is left. */
EXPORT void NAMED(backward)(const Call *call, float *memory) {
    const Workspace w = workspace_in(call, memory);
    pack_all(call, pack_block, w.buffer);
    const int64_t units = call->B * call->G * call->num_parts;
    for (int64_t n = next_unit(call->counters + 2); n < units; n = next_unit(call->counters + 2)) {
        const int64_t unit = n / call->num_parts, part = n % call->num_parts;
        const int64_t entry = unit / call->G, shared = call->H / call->G;
        for (int64_t t = part; t < call->num_tiles; t += call->num_parts) {
            const Tile *tile = call->tiles + t;
            if (call->tiles_have_entries && tile->entry != entry) continue;
            for (int64_t head = unit % call->G * shared; head < (unit % call->G + 1) * shared; head++)
                run_tile(call, tile, entry, head, part, &w);
        }
        scale_keys(call, unit, part, &w);
    }
}
