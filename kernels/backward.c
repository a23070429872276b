/* Gradients of attention, without the matrix of weights.

   With the log-sum-exp of a row known, a weight is final when it is formed: P = exp(S - lse). The gradient of a score is
   dS = P (dP - delta), dP = dO V^T, and delta_i = sum over channels of dO_i O_i (Dao et al. 2022, arXiv:2205.14135).
   Weights and gradients of a tile of queries and BLOCK keys are kept, so that dQ = dS K, dK = dS^T Q and dV = P^T dO are
   the same product. A unit of work is one key head and a part of the queries; each part has its own sums for keys. */
#include "rows.h"

/* Keys of a block: a multiple of a panel and of ROWS, at every width of vectors. */
#define BLOCK 96

typedef struct {
    int64_t query_width, value_width, length;
    float *query_columns, *query_rows, *grad_columns, *grad_rows; /* of a tile */
    float *query_sums, *weights, *grads, *buffer;
} Workspace;

static Workspace workspace_in(const Call *call, float *memory) {
    Workspace w;
    w.query_width = rounded_up(call->D, LANES);
    w.value_width = rounded_up(call->E, LANES);
    w.length = rounded_up(call->J, PANEL) + BLOCK;
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
           MOST_COLUMNS * most(query_width, value_width);
}

/* Numbers of the token axis of `grad_key` and `grad_value`. */
EXPORT int64_t NAMED(backward_length)(const Call *call) { return rounded_up(call->J, PANEL) + BLOCK; }

static void start_tile(const Call *call, const Tile *tile, int64_t entry, int64_t head, const Workspace *w) {
    for (int64_t group = 0; tile->first_query + group < tile->stop_query; group += ROWS) {
        const int64_t query = tile->first_query + group, stop = tile->stop_query;
        pack_columns(&call->query, entry, head, query, ROWS, stop, call->D, w->buffer, w->query_columns + group * call->D);
        pack_columns(&call->grad_output, entry, head, query, ROWS, stop, call->E, w->buffer,
                     w->grad_columns + group * call->E);
        pack_rows(&call->query, entry, head, query, ROWS, stop, call->D, w->query_width,
                  w->query_rows + group * w->query_width);
        pack_rows(&call->grad_output, entry, head, query, ROWS, stop, call->E, w->value_width,
                  w->grad_rows + group * w->value_width);
    }
    for (int64_t n = 0; n < TILE_QUERIES * w->query_width; n++) w->query_sums[n] = 0;
}

static void finish_tile(const Call *call, const Tile *tile, int64_t entry, int64_t head, const Workspace *w) {
    float *to = call->grad_query + ((entry * call->H + head) * call->I + tile->first_query) * call->D;
    for (int64_t n = 0; n < tile->stop_query - tile->first_query; n++)
        for (int64_t c = 0; c < call->D; c++) to[n * call->D + c] = w->query_sums[n * w->query_width + c] * call->scale;
}

/* One row: `weights` holds products of query and keys, `grads` of output gradient and values; then weights, and the
   gradients of the products. Gradients of biases are added along the diagonals. */
INLINE void grads_of_row(const Rows *rows, int plain, int64_t query, int64_t first, int64_t stop, float logsumexp,
                         float delta, float *weights, float *grads, float *grad_before, float *grad_after) {
    const Call *call = rows->call;
    const Row row = row_of(rows, query);
    for (int64_t key = first; key < stop; key += LANES) {
        const Vector product = load(weights + key - first) * call->scale;
        const Vector score = plain ? product : changed(rows, &row, product, key);
        const Vector power = (score - logsumexp) * LOG2_E;
        Vector weight = exp2_of(choose(power > 126.0f, all(126), power));
        if (!plain) weight = choose(score == -INFINITE, all(0), weight); /* a row of NaN too stays in its keys */
        Vector grad = weight * (load(grads + key - first) - delta);
        store(weights + key - first, weight);
        if (!plain) {
            grad = choose(weight == 0.0f, all(0), grad);
            if (grad_after) store(grad_after + key - query, load(grad_after + key - query) + grad);
            if (call->cap != 0) {
                Vector shifted = product;
                if (rows->before) shifted += load(rows->before + key - query);
                const Vector t = tanh_of(shifted * (1 / call->cap));
                grad *= 1.0f - t * t;
            }
            if (grad_before) store(grad_before + key - query, load(grad_before + key - query) + grad);
        }
        store(grads + key - first, grad);
    }
}

INLINE void clear(float *numbers, int64_t count) {
    for (int64_t n = 0; n < count; n++) numbers[n] = 0;
}

/* Where the gradients of the biases of a head and part begin: index j - i. */
INLINE float *diagonals(const Call *call, float *grads, int64_t entry, int64_t head, int64_t part) {
    if (!grads) return 0;
    const int64_t length = call->I + call->J - 1 + 2 * MARGIN;
    return grads + ((entry * call->H + head) * call->num_parts + part) * length + MARGIN + call->I - 1;
}

/* Weights and gradients of ROWS queries and the keys [start, start + BLOCK): 0 outside [*first, *stop). */
static void fill_group(const Rows *rows, const Workspace *w, int64_t entry, int64_t head, int64_t part, int64_t start,
                       int64_t first, int64_t stop) {
    const Call *call = rows->call;
    const int64_t group = rows->query - rows->tile_query, unit = entry * call->G + head / (call->H / call->G);
    const int64_t length = rounded_up(call->J, PANEL);
    float *weights = w->weights + group * BLOCK + first - start, *grads = w->grads + group * BLOCK + first - start;
    dot_products(w->query_columns + group * call->D, call->packed_keys + unit * length * call->D, call->D, first, stop,
                 weights, BLOCK);
    dot_products(w->grad_columns + group * call->E, call->packed_value_panels + unit * length * call->E, call->E, first,
                 stop, grads, BLOCK);
    float *grad_before = diagonals(call, call->grad_before, entry, head, part);
    float *grad_after = diagonals(call, call->grad_after, entry, head, part);
    const int plain = is_plain(rows, first, stop);
    for (int r = 0; r < ROWS; r++) {
        const int64_t query = rows->query + r, at = (entry * call->H + head) * call->I + query;
        float *row_weights = weights + r * BLOCK, *row_grads = grads + r * BLOCK;
        if (query >= rows->stop_query) {
            clear(row_weights - (first - start), BLOCK);
            clear(row_grads - (first - start), BLOCK);
            continue;
        }
        const float logsumexp = call->logsumexp[at] == -INFINITE ? INFINITE : call->logsumexp[at];
        if (plain)
            grads_of_row(rows, 1, query, first, stop, logsumexp, call->delta[at], row_weights, row_grads, 0, 0);
        else
            grads_of_row(rows, 0, query, first, stop, logsumexp, call->delta[at], row_weights, row_grads, grad_before,
                         grad_after);
        clear(row_weights - (first - start), first - start);
        clear(row_grads - (first - start), first - start);
        clear(row_weights + stop - first, start + BLOCK - stop);
        clear(row_grads + stop - first, start + BLOCK - stop);
    }
}

/* Adds one block of keys to the gradients of its queries, keys and values. */
static void add_block(const Call *call, const Tile *tile, const Segment *segment, int64_t entry, int64_t head,
                      int64_t part, int64_t start, const Workspace *w) {
    const int64_t unit = entry * call->G + head / (call->H / call->G), length = rounded_up(call->J, PANEL);
    int64_t first_row = TILE_QUERIES, stop_row = 0, first_key = start + BLOCK, stop_key = start;
    for (int64_t group = 0; tile->first_query + group < tile->stop_query; group += ROWS) {
        const Rows rows = rows_of(call, tile, segment, head, tile->first_query + group);
        int64_t first, stop;
        key_range(&rows, &first, &stop);
        first = most(start, first / PANEL * PANEL);
        stop = least(start + BLOCK, rounded_up(stop, PANEL));
        if (first >= stop) {
            if (stop_row > 0) break; /* later queries attend to later keys only */
            continue;
        }
        fill_group(&rows, w, entry, head, part, start, first, stop);
        add_product(w->grads + group * BLOCK + first - start, BLOCK, 1,
                    call->packed_key_rows + (unit * length + first) * w->query_width, w->query_width, stop - first,
                    w->query_sums + group * w->query_width, w->query_width, 0);
        first_row = least(first_row, group), stop_row = group + ROWS;
        first_key = least(first_key, first), stop_key = most(stop_key, stop);
    }
    if (stop_row == 0) return;
    const int64_t sums = (unit * call->num_parts + part) * w->length;
    for (int64_t key = first_key - (first_key - start) % ROWS; key < stop_key; key += ROWS) {
        const int64_t from = first_row * BLOCK + key - start;
        add_product(w->weights + from, 1, BLOCK, w->grad_rows + first_row * w->value_width, w->value_width,
                    stop_row - first_row, call->grad_value + (sums + key) * w->value_width, w->value_width, 0);
        add_product(w->grads + from, 1, BLOCK, w->query_rows + first_row * w->query_width, w->query_width,
                    stop_row - first_row, call->grad_key + (sums + key) * w->query_width, w->query_width, 0);
    }
}

static void run_tile(const Call *call, const Tile *tile, int64_t entry, int64_t head, int64_t part, const Workspace *w) {
    start_tile(call, tile, entry, head, w);
    for (int64_t s = tile->first_segment; s < tile->stop_segment; s++) {
        const Segment *segment = call->segments + s;
        const int64_t first = most(segment->first_key, tile->first_query + call->low);
        const int64_t stop = least(segment->stop_key, tile->stop_query - 1 + call->high);
        for (int64_t start = first / PANEL * PANEL; start < stop; start += BLOCK)
            add_block(call, tile, segment, entry, head, part, start, w);
    }
    finish_tile(call, tile, entry, head, w);
}

static void pack_block(const Call *call, int64_t unit, int64_t first, int64_t stop, float *buffer) {
    pack_panels(call, &call->key, unit, first, stop, call->D, buffer, call->packed_keys);
    pack_panels(call, &call->value, unit, first, stop, call->E, buffer, call->packed_value_panels);
    pack_padded_rows(call, &call->key, unit, first, stop, call->D, call->packed_key_rows);
}

/* Multiplies the sums of a part by the scale: they are gradients of products q.k. */
static void scale_keys(const Call *call, int64_t unit, int64_t part, const Workspace *w) {
    float *sums = call->grad_key + (unit * call->num_parts + part) * w->length * w->query_width;
    for (int64_t n = 0; n < w->length * w->query_width; n++) sums[n] *= call->scale;
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
