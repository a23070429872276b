/* Attention to chosen keys: output and log-sum-exp of every query. See chosen.h for the two ways to read keys. */
#include "chosen.h"

/* Keys that gathering rows take before the next ones: they stay in the L2 cache with their values. */
#define NEAR 2048

/* The scratch memory of a thread: queries and sums of a unit; queries, scores and sums of the rows that are computed
   together; and integers: where each query is in its ids, rows that chose a block, gathered keys. */
typedef struct {
    int64_t query_width, value_width;
    float *queries, *sums, *greatest, *totals, *few_queries, *scores, *few_sums, *factors, *buffer;
    int32_t *places, *keys;
    Listed list;
} Workspace;

/* Floats of scratch memory that one thread needs. */
EXPORT int64_t NAMED(chosen_workspace)(const Call *call) {
    const int64_t query_width = rounded_up(call->D, LANES), value_width = rounded_up(call->E, LANES);
    return (MOST_ROWS + ROWS) * (query_width + value_width) + 5 * MOST_ROWS + ROWS * (KEYS + 1) +
           PANEL * max(query_width, value_width) + KEYS;
}

static Workspace workspace_in(const Call *call, float *memory) {
    Workspace w = {rounded_up(call->D, LANES), rounded_up(call->E, LANES), memory, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {0, 0, 0}};
    w.sums = w.queries + MOST_ROWS * w.query_width;
    w.greatest = w.sums + MOST_ROWS * w.value_width;
    w.totals = w.greatest + MOST_ROWS;
    w.few_queries = w.totals + MOST_ROWS;
    w.scores = w.few_queries + ROWS * w.query_width;
    w.few_sums = w.scores + ROWS * KEYS;
    w.factors = w.few_sums + ROWS * w.value_width;
    w.buffer = w.factors + ROWS;
    w.places = (int32_t *)(w.buffer + PANEL * max(w.query_width, w.value_width));
    w.list.rows = w.places + MOST_ROWS;
    w.list.queries = w.list.rows + MOST_ROWS;
    w.keys = w.list.queries + MOST_ROWS;
    return w;
}

/* Turns the scores of a row into weights exp(score - greatest), with the greatest score so far. `factor` scales the
   earlier sums, whose weights are relative to an earlier greatest score. */
INLINE void weigh(const Workspace *w, int64_t row, int64_t length, float *scores, float *factor) {
    Vector top = broadcast(w->greatest[row]), sum = broadcast(0);
    for (int64_t n = 0; n < length; n += LANES) top = larger(load(scores + n), top);
    const float now = largest_of(top), base = now == -INFINITE ? 0 : now;
    for (int64_t n = 0; n < length; n += LANES) {
        const Vector weight = exp2_of((load(scores + n) - base) * LOG2_E);
        store(scores + n, weight);
        sum += weight;
    }
    *factor = exp2_of(broadcast((w->greatest[row] - base) * LOG2_E))[0];
    w->totals[row] = w->totals[row] * *factor + sum_of(sum);
    w->greatest[row] = now;
}

static void start_unit(const Unit *unit, const Workspace *w) {
    const Call *call = unit->call;
    const int64_t num_rows = unit->num_queries * unit->choice->shared;
    pack_unit(unit, &call->query, call->D, w->query_width, w->queries);
    for (int64_t n = 0; n < num_rows * w->value_width; n++) w->sums[n] = 0;
    for (int64_t n = 0; n < num_rows; n++) {
        w->greatest[n] = call->sink ? call->sink[head_of(unit, n)] : -INFINITE;
        w->totals[n] = call->sink ? 1 : 0;
    }
    for (int64_t n = 0; n < unit->num_queries; n++) w->places[n] = 0;
}

static void finish_unit(const Unit *unit, const Workspace *w) {
    const Call *call = unit->call;
    for (int64_t n = 0; n < unit->num_queries * unit->choice->shared; n++) {
        const float total = w->totals[n], inverse = total == 0 ? 0 : 1 / total;
        float *sums = w->sums + n * w->value_width;
        for (int64_t e = 0; e < w->value_width; e++) sums[e] *= inverse;
        const int64_t to = place(&call->output, unit->entry, head_of(unit, n), query_of(unit, n));
        write_vector(&call->output, to, call->E, sums);
        call->logsumexp[index_of(unit, n)] = w->greatest[n] + log_of(total);
    }
}

/* Adds the keys [first, stop) of a segment, whole panels and at most KEYS, to at most ROWS rows. */
static void add_panels(const Unit *unit, const Segment *segment, const Workspace *w, Listed list, int64_t first,
                       int64_t stop) {
    const Call *call = unit->call;
    const int64_t width = w->value_width;
    const int64_t start = key_unit(call, unit->entry, unit->head) * padded_keys(call) + first;
    const float *panels = call->packed_keys + start * call->D;
    row_products(w->few_queries, w->query_width, panels, call->D, stop - first, w->scores, KEYS);
    for (int64_t r = 0; r < list.count; r++) {
        finish_scores(unit, segment, list.rows[r], list.queries[r], first, stop, w->scores + r * KEYS);
        weigh(w, list.rows[r], stop - first, w->scores + r * KEYS, w->factors + r);
    }
    for (int64_t n = 0; n < ROWS * width; n++) w->few_sums[n] = 0;
    add_product(w->scores, KEYS, 1, call->packed_values + start * width, width, stop - first, w->few_sums, width, width,
                0);
    for (int64_t r = 0; r < list.count; r++) {
        float *sums = w->sums + list.rows[r] * width;
        for (int64_t e = 0; e < width; e += LANES)
            store(sums + e, load(sums + e) * w->factors[r] + load(w->few_sums + r * width + e));
    }
}

/* Adds the keys of a segment to the listed rows. */
static void add_block(const Unit *unit, const Segment *segment, const Workspace *w, Listed list) {
    const int64_t width = w->query_width;
    for (int64_t n = 0; n < list.count; n += ROWS) {
        const Listed group = listed_from(list, n, ROWS);
        for (int64_t r = 0; r < ROWS; r++) { /* rows behind the last repeat it */
            const float *query = w->queries + group.rows[min(r, group.count - 1)] * width;
            for (int64_t c = 0; c < width; c += LANES) store(w->few_queries + r * width + c, load(query + c));
        }
        const Range keys = panels_of(unit, segment, group);
        for (int64_t first = keys.first; first < keys.stop; first += KEYS)
            add_panels(unit, segment, w, group, first, min(first + KEYS, keys.stop));
    }
}

static void add_blocks(const Unit *unit, const Workspace *w) {
    Listed list = w->list;
    for (int64_t block; (block = next_block(unit, w->places)) < unit->choice->num_blocks;) {
        list_block(unit, block, w->places, &list);
        for (int64_t s = unit->tile->first_segment; s < unit->tile->stop_segment; s++) {
            const Segment segment = part_of(unit, unit->call->segments + s, unit->starts[block], unit->starts[block + 1]);
            if (segment.first_key < segment.stop_key) add_block(unit, &segment, w, list);
        }
    }
}

/* Adds gathered keys to N rows from `row` on, which are heads of one query. */
INLINE void add_keys(const int N, const Unit *unit, const Segment *segment, const Workspace *w, int64_t row,
                     Gathered chosen) {
    const Call *call = unit->call;
    const int64_t start = key_unit(call, unit->entry, unit->head) * padded_keys(call), query = query_of(unit, row);
    gathered_products(N, w->queries + row * w->query_width, call->packed_keys + start * w->query_width, w->query_width,
                      chosen, w->scores);
    for (int r = 0; r < N; r++) {
        finish_gathered(unit, segment, row + r, query, chosen, w->scores + r * KEYS);
        weigh(w, row + r, rounded_up(chosen.count, LANES), w->scores + r * KEYS, w->factors + r);
    }
    add_gathered(N, w->scores, call->packed_values + start * w->value_width, w->value_width, chosen, w->factors,
                 w->sums + row * w->value_width);
}

/* Adds the chosen keys of a segment to all rows of a unit. */
static void gather_segment(const Unit *unit, const Segment *segment, const Workspace *w) {
    const int64_t shared = unit->choice->shared;
    for (int64_t n = 0; n < unit->num_queries; n++) {
        int64_t from = segment->first_key;
        for (Gathered chosen; (chosen = gather_keys(unit, segment, n, w->places + n, &from, w->keys)).count > 0;) {
            int64_t h = 0;
            for (; h + 4 <= shared; h += 4) add_keys(4, unit, segment, w, n * shared + h, chosen);
            for (; h + 2 <= shared; h += 2) add_keys(2, unit, segment, w, n * shared + h, chosen);
            if (h < shared) add_keys(1, unit, segment, w, n * shared + h, chosen);
        }
    }
}

static void gather_all(const Unit *unit, const Workspace *w) {
    for (int64_t s = unit->tile->first_segment; s < unit->tile->stop_segment; s++)
        for (int64_t first = 0; first < unit->call->J; first += NEAR) {
            const Segment segment = part_of(unit, unit->call->segments + s, first, first + NEAR);
            if (segment.first_key < segment.stop_key) gather_segment(unit, &segment, w);
        }
}

/* Blocks are read as panels of keys, gathered keys as rows. */
static void pack_block(const Call *call, int64_t unit, int64_t first, int64_t stop, float *buffer) {
    pack_panels(call, &call->key, unit, first, stop, call->D, buffer, call->packed_keys);
    pack_padded_rows(call, &call->value, unit, first, stop, call->E, call->packed_values);
}

static void pack_vectors(const Call *call, int64_t unit, int64_t first, int64_t stop, float *buffer) {
    (void)buffer;
    pack_padded_rows(call, &call->key, unit, first, stop, call->D, call->packed_keys);
    pack_padded_rows(call, &call->value, unit, first, stop, call->E, call->packed_values);
}

/* Output and log-sum-exp: packs, then computes units until none is left. Units of one key head follow each other. */
EXPORT void NAMED(chosen)(const Call *call, float *memory, const Choice *choice) {
    const Workspace w = workspace_in(call, memory);
    pack_all(call, choice->gathers ? pack_vectors : pack_block, w.buffer);
    const int64_t entries = call->tiles_have_entries ? 1 : call->B, heads = call->H / choice->shared;
    const int64_t units = entries * heads * call->num_tiles;
    for (int64_t n = next_unit(call->counters + 2); n < units; n = next_unit(call->counters + 2)) {
        const Tile *tile = call->tiles + (call->num_tiles - 1 - n % call->num_tiles);
        const int64_t entry = call->tiles_have_entries ? tile->entry : n / call->num_tiles / heads;
        const Unit unit = unit_of(call, choice, tile, entry, n / call->num_tiles % heads * choice->shared);
        start_unit(&unit, &w);
        if (choice->gathers)
            gather_all(&unit, &w);
        else
            add_blocks(&unit, &w);
        finish_unit(&unit, &w);
    }
}
