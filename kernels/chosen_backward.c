/* Gradients of attention to chosen keys; backward.c has the formulas. See chosen.h for the two ways to read keys.

   A unit of work is one key head and a part of the tiles; each part has its own sums for keys. */
#include "chosen.h"

/* Rows of a block of the map, and its keys: multiples of PANEL and of ROWS for every vector width. */
#define SIDE 96
/* Keys that gathering rows take before the next ones: they stay in the L2 cache with their values and gradients. */
#define NEAR 512

/* The scratch memory of a thread: queries, gradients of outputs and gradients of queries of a unit; the same of the rows
   that are computed together; their P and dS; and integers as in chosen.c. */
typedef struct {
    int64_t query_width, value_width, length;
    float *queries, *grads_out, *query_sums, *few_queries, *few_grads_out, *few_sums, *weights, *grads, *ones, *logsumexps, *deltas, *buffer;
    int32_t *places, *keys;
    Listed list;
} Workspace;

/* Floats of P and of dS: of a block, or of TOGETHER rows and KEYS gathered keys. */
#define NUM_PAIRS (SIDE * SIDE > TOGETHER * KEYS ? SIDE * SIDE : TOGETHER * KEYS)

/* Floats of scratch memory that one thread needs. */
EXPORT int64_t NAMED(chosen_backward_workspace)(const Call *call) {
    const int64_t query_width = rounded_up(call->D, LANES), value_width = rounded_up(call->E, LANES);
    return MOST_ROWS * (2 * query_width + value_width) + SIDE * (query_width + value_width) + ROWS * query_width +
           2 * NUM_PAIRS + TOGETHER + PANEL * max(query_width, value_width) + 5 * MOST_ROWS + KEYS;
}

static Workspace workspace_in(const Call *call, float *memory) {
    Workspace w = {rounded_up(call->D, LANES), rounded_up(call->E, LANES), 0, memory, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {0, 0, 0}};
    w.length = padded_keys(call) + SPARE_KEYS;
    w.grads_out = w.queries + MOST_ROWS * w.query_width;
    w.query_sums = w.grads_out + MOST_ROWS * w.value_width;
    w.few_queries = w.query_sums + MOST_ROWS * w.query_width;
    w.few_grads_out = w.few_queries + SIDE * w.query_width;
    w.few_sums = w.few_grads_out + SIDE * w.value_width;
    w.weights = w.few_sums + ROWS * w.query_width;
    w.grads = w.weights + NUM_PAIRS;
    w.ones = w.grads + NUM_PAIRS;
    w.logsumexps = w.ones + TOGETHER;
    w.deltas = w.logsumexps + MOST_ROWS;
    w.buffer = w.deltas + MOST_ROWS;
    w.places = (int32_t *)(w.buffer + PANEL * max(w.query_width, w.value_width));
    w.list.rows = w.places + MOST_ROWS;
    w.list.queries = w.list.rows + MOST_ROWS;
    w.keys = w.list.queries + MOST_ROWS;
    for (int r = 0; r < TOGETHER; r++) w.ones[r] = 1;
    return w;
}

static void start_unit(const Unit *unit, const Workspace *w) {
    pack_unit(unit, &unit->call->query, unit->call->D, w->query_width, w->queries);
    pack_unit(unit, &unit->call->grad_output, unit->call->E, w->value_width, w->grads_out);
    const int64_t num_rows = unit->num_queries * unit->choice->shared;
    for (int64_t n = 0; n < num_rows * w->query_width; n++) w->query_sums[n] = 0;
    for (int64_t n = 0; n < num_rows; n++) {
        w->logsumexps[n] = row_logsumexp(unit->call, index_of(unit, n));
        w->deltas[n] = unit->call->delta[index_of(unit, n)];
    }
    for (int64_t n = 0; n < unit->num_queries; n++) w->places[n] = 0;
}

static void finish_unit(const Unit *unit, const Workspace *w) {
    for (int64_t n = 0; n < unit->num_queries * unit->choice->shared; n++) {
        float *to = unit->call->grad_query + index_of(unit, n) * unit->call->D;
        for (int64_t c = 0; c < unit->call->D; c++) to[c] = w->query_sums[n * w->query_width + c] * unit->call->scale;
    }
}

/* Turns the scores of a row into weights P, and the products dO.v into dS = P (dO.v - delta). */
INLINE void differentiate(const Workspace *w, int64_t row, int64_t length, float *scores, float *grads) {
    const float logsumexp = w->logsumexps[row], delta = w->deltas[row];
    for (int64_t n = 0; n < length; n += LANES) {
        const Vector score = load(scores + n), power = (score - logsumexp) * LOG2_E;
        Vector weight = exp2_of(choose(power > 126.0f, broadcast(126), power));
        weight = choose(score == -INFINITE, broadcast(0), weight); /* even if the row is NaN */
        const Vector grad = choose(weight == 0.0f, broadcast(0), weight * (load(grads + n) - delta));
        store(scores + n, weight);
        store(grads + n, grad);
    }
}

/* P and dS of ROWS of the few rows, from row `group` on, which `list` names, and of the keys [first, stop); and the
   gradients of their queries. Behind the last key and the last row stand zeros. */
static void add_to_queries(const Unit *unit, const Segment *segment, const Workspace *w, Listed list, int64_t group,
                           int64_t first, int64_t stop) {
    const Call *call = unit->call;
    const int64_t start = key_unit(call, unit->entry, unit->head) * padded_keys(call) + first, width = w->query_width;
    float *weights = w->weights + group * SIDE, *grads = w->grads + group * SIDE;
    row_products(w->few_queries + group * width, width, call->packed_keys + start * call->D, call->D, stop - first,
                   weights, SIDE);
    row_products(w->few_grads_out + group * w->value_width, w->value_width,
                   call->packed_value_panels + start * call->E, call->E, stop - first, grads, SIDE);
    for (int64_t r = 0; r < ROWS; r++, weights += SIDE, grads += SIDE) {
        const int64_t length = r < list.count ? stop - first : 0;
        if (length) {
            finish_scores(unit, segment, list.rows[r], list.queries[r], first, stop, weights);
            differentiate(w, list.rows[r], length, weights, grads);
        }
        for (int64_t n = length; n < SIDE; n++) weights[n] = grads[n] = 0;
    }
    for (int64_t n = 0; n < ROWS * width; n++) w->few_sums[n] = 0;
    add_product(w->grads + group * SIDE, SIDE, 1, call->packed_key_rows + start * width, width, stop - first,
                w->few_sums, width, width, 0);
    for (int64_t r = 0; r < list.count; r++)
        for (int64_t c = 0; c < width; c++) w->query_sums[list.rows[r] * width + c] += w->few_sums[r * width + c];
}

/* Adds the keys of a segment to the gradients of at most SIDE rows and of the keys; `sums`: where the sums of the keys
   begin. */
static void add_block(const Unit *unit, const Segment *segment, const Workspace *w, Listed list, int64_t sums) {
    const Call *call = unit->call;
    const int64_t count = list.count, query_width = w->query_width, value_width = w->value_width;
    for (int64_t r = 0; r < rounded_up(count, ROWS); r++) { /* rows behind the last repeat it */
        const int64_t row = list.rows[min(r, count - 1)];
        for (int64_t c = 0; c < query_width; c++)
            w->few_queries[r * query_width + c] = w->queries[row * query_width + c];
        for (int64_t e = 0; e < value_width; e++)
            w->few_grads_out[r * value_width + e] = w->grads_out[row * value_width + e];
    }
    const Range keys = panels_of(unit, segment, list);
    for (int64_t first = keys.first; first < keys.stop; first += SIDE) {
        const int64_t stop = min(first + SIDE, keys.stop);
        for (int64_t group = 0; group < count; group += ROWS)
            add_to_queries(unit, segment, w, listed_from(list, group, ROWS), group, first, stop);
        for (int64_t key = first; key < stop; key += ROWS) {
            add_product(w->weights + key - first, 1, SIDE, w->few_grads_out, value_width, count,
                        call->grad_value + (sums + key) * value_width, value_width, value_width, 0);
            add_product(w->grads + key - first, 1, SIDE, w->few_queries, query_width, count,
                        call->grad_key + (sums + key) * query_width, query_width, query_width, 0);
        }
    }
}

static void add_blocks(const Unit *unit, const Workspace *w, int64_t sums) {
    Listed list = w->list;
    for (int64_t block; (block = next_block(unit, w->places)) < unit->choice->num_blocks;) {
        list_block(unit, block, w->places, &list);
        for (int64_t s = unit->tile->first_segment; s < unit->tile->stop_segment; s++) {
            const Segment segment = part_of(unit, unit->call->segments + s, unit->starts[block], unit->starts[block + 1]);
            if (segment.first_key >= segment.stop_key) continue;
            for (int64_t n = 0; n < list.count; n += SIDE)
                add_block(unit, &segment, w, listed_from(list, n, SIDE), sums);
        }
    }
}

/* sums of gathered keys += weights[r KEYS + k] * row r, of N rows. */
INLINE void add_to_gathered(const int N, const float *weights, const float *rows, int64_t width, Gathered chosen,
                            float *sums) {
    for (int64_t k = 0; k < chosen.count; k++) {
        float *sum = sums + chosen.keys[k] * width;
        for (int64_t c = 0; c < width; c += LANES) {
            Vector total = load(sum + c);
            UNROLL for (int r = 0; r < N; r++) total += broadcast(weights[r * KEYS + k]) * load(rows + r * width + c);
            store(sum + c, total);
        }
    }
}

/* Adds gathered keys to the gradients of N rows from `row` on, which are heads of one query, and of the keys. */
INLINE void add_keys(const int N, const Unit *unit, const Segment *segment, const Workspace *w, int64_t row,
                     Gathered chosen, int64_t sums) {
    const Call *call = unit->call;
    const int64_t query_width = w->query_width, value_width = w->value_width;
    const int64_t start = key_unit(call, unit->entry, unit->head) * padded_keys(call);
    const float *queries = w->queries + row * query_width, *grads_out = w->grads_out + row * value_width;
    const float *keys = call->packed_key_rows + start * query_width;
    gathered_products(N, queries, keys, query_width, chosen, w->weights);
    gathered_products(N, grads_out, call->packed_value_panels + start * value_width, value_width, chosen,
                      w->grads);
    for (int r = 0; r < N; r++) {
        finish_gathered(unit, segment, row + r, query_of(unit, row), chosen, w->weights + r * KEYS);
        differentiate(w, row + r, rounded_up(chosen.count, LANES), w->weights + r * KEYS, w->grads + r * KEYS);
    }
    add_gathered(N, w->grads, keys, query_width, chosen, w->ones, w->query_sums + row * query_width);
    add_to_gathered(N, w->weights, grads_out, value_width, chosen, call->grad_value + sums * value_width);
    add_to_gathered(N, w->grads, queries, query_width, chosen, call->grad_key + sums * query_width);
}

static void gather_segment(const Unit *unit, const Segment *segment, const Workspace *w, int64_t sums) {
    const int64_t shared = unit->choice->shared;
    for (int64_t n = 0; n < unit->num_queries; n++) {
        int64_t from = segment->first_key;
        for (Gathered chosen; (chosen = gather_keys(unit, segment, n, w->places + n, &from, w->keys)).count > 0;) {
            int64_t h = 0;
            for (; h + 4 <= shared; h += 4) add_keys(4, unit, segment, w, n * shared + h, chosen, sums);
            for (; h + 2 <= shared; h += 2) add_keys(2, unit, segment, w, n * shared + h, chosen, sums);
            if (h < shared) add_keys(1, unit, segment, w, n * shared + h, chosen, sums);
        }
    }
}

static void gather_all(const Unit *unit, const Workspace *w, int64_t sums) {
    for (int64_t s = unit->tile->first_segment; s < unit->tile->stop_segment; s++)
        for (int64_t first = 0; first < unit->call->J; first += NEAR) {
            const Segment segment = part_of(unit, unit->call->segments + s, first, first + NEAR);
            if (segment.first_key < segment.stop_key) gather_segment(unit, &segment, w, sums);
        }
}

/* Blocks are read as panels, gathered keys as rows. */
static void pack_block(const Call *call, int64_t unit, int64_t first, int64_t stop, float *buffer) {
    pack_panels(call, &call->key, unit, first, stop, call->D, buffer, call->packed_keys);
    pack_panels(call, &call->value, unit, first, stop, call->E, buffer, call->packed_value_panels);
    pack_padded_rows(call, &call->key, unit, first, stop, call->D, call->packed_key_rows);
}

static void pack_vectors(const Call *call, int64_t unit, int64_t first, int64_t stop, float *buffer) {
    (void)buffer;
    pack_padded_rows(call, &call->key, unit, first, stop, call->D, call->packed_key_rows);
    pack_padded_rows(call, &call->value, unit, first, stop, call->E, call->packed_value_panels);
}

/* Gradients of queries, keys and values: packs, then computes parts until none is left. */
EXPORT void NAMED(chosen_backward)(const Call *call, float *memory, const Choice *choice) {
    const Workspace w = workspace_in(call, memory);
    pack_all(call, choice->gathers ? pack_vectors : pack_block, w.buffer);
    const int64_t units = call->B * call->G * call->num_parts, of_key_head = call->H / call->G;
    for (int64_t n = next_unit(call->counters + 2); n < units; n = next_unit(call->counters + 2)) {
        const int64_t entry = n / call->num_parts / call->G, head = n / call->num_parts % call->G * of_key_head;
        for (int64_t t = n % call->num_parts; t < call->num_tiles; t += call->num_parts) {
            const Tile *tile = call->tiles + t;
            if (call->tiles_have_entries && tile->entry != entry) continue;
            for (int64_t h = head; h < head + of_key_head; h += choice->shared) {
                const Unit unit = unit_of(call, choice, tile, entry, h);
                start_unit(&unit, &w);
                if (choice->gathers)
                    gather_all(&unit, &w, n * w.length);
                else
                    add_blocks(&unit, &w, n * w.length);
                finish_unit(&unit, &w);
            }
        }
        float *sums = call->grad_key + n * w.length * w.query_width;
        for (int64_t c = 0; c < w.length * w.query_width; c++) sums[c] *= call->scale;
    }
}
