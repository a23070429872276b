/* Statistics of the weights in one pass, without a second product.

   With the log-sum-exp of a row known, a weight is final when it is formed: w = exp(s - lse). So a statistic adds what it
   needs while the weights of ROWS queries and KEYS keys are in the first cache. Entropy needs no logarithm, because
   -log w = lse - s. A unit of work is one head and a part of its tiles; each part has its own sums over queries. */
#include "rows.h"

/* Statistics to compute; a null pointer leaves one out. */
typedef struct {
    float *entropy;  /* (B, H, I): -sum_j w log w */
    float *distance; /* (B, H, I): sum_j w |j - i + shift| */
    float *mass;     /* (B, H, I): sum_j w flags_j */
    const float *flags; /* (B, padded J) */
    float *received;    /* (B, H, parts, padded J): sums over queries, 0 at the start */
    float *cells;       /* (B, H, parts, cell_rows, cell_columns): sums over queries and keys, 0 at the start */
    float *top_weights; /* (B, H, I, k), 0 at the start: the largest weights, the largest first */
    int64_t *top_keys;  /* (B, H, I, k), -1 at the start */
    int64_t cell_rows, cell_columns, k, shift, num_parts;
} Statistics;

/* The statistics of one row while it is computed. */
typedef struct {
    const Statistics *wanted;
    const float *flags;
    float *received, *cells, *top_weights;
    int64_t *top_keys;
    Vector entropy, distance, mass;
} Sums;

EXPORT int64_t NAMED(statistics_workspace)(const Call *call) {
    return TILE_QUERIES * call->D + ROWS * KEYS + PANEL * call->D;
}

/* Inserts a weight into the k largest, in descending order. */
static void insert(float *weights, int64_t *keys, int64_t k, float weight, int64_t key) {
    int64_t n = k - 1;
    for (; n > 0 && weights[n - 1] < weight; n--) {
        weights[n] = weights[n - 1];
        keys[n] = keys[n - 1];
    }
    weights[n] = weight;
    keys[n] = key;
}

INLINE void keep_largest(Sums *sums, Vector weight, int64_t key) {
    const int64_t k = sums->wanted->k;
    if (!any_of(weight > sums->top_weights[k - 1])) return;
    for (int lane = 0; lane < LANES; lane++)
        if (weight[lane] > sums->top_weights[k - 1]) insert(sums->top_weights, sums->top_keys, k, weight[lane], key + lane);
}

/* Adds the weights of keys [first, stop) to the cells of their row of cells: column c has the keys n with
   n columns / J = c, rounded down. */
static void add_cells(const Call *call, const Sums *sums, int64_t first, int64_t stop, const float *weights) {
    const int64_t columns = sums->wanted->cell_columns;
    for (int64_t key = first; key < stop;) {
        const int64_t cell = key * columns / call->J, end = least(stop, ((cell + 1) * call->J + columns - 1) / columns);
        float total = 0;
        Vector totals = all(0);
        for (; key + LANES <= end; key += LANES) totals += load(weights + key - first);
        for (; key < end; key++) total += weights[key - first];
        sums->cells[cell] += total + sum_of(totals);
    }
}

/* One row: scores become weights, and every statistic takes them. */
INLINE void add_row(const Rows *rows, Sums *sums, int plain, int64_t query, int64_t first, int64_t stop, float logsumexp,
                    float *scores) {
    const Row row = row_of(rows, query);
    for (int64_t key = first; key < stop; key += LANES) {
        Vector score = load(scores + key - first) * rows->call->scale;
        if (!plain) score = changed(rows, &row, score, key);
        /* no weight is above 1, however the log-sum-exp was rounded */
        const Vector difference = score - logsumexp, log_weight = choose(difference > 0.0f, all(0), difference);
        const Vector weight = exp2_of(log_weight * LOG2_E);
        store(scores + key - first, weight);
        if (sums->wanted->entropy) sums->entropy -= weight * choose(log_weight < -1e30f, all(-1e30f), log_weight);
        if (sums->wanted->distance) {
            const Vector steps = __builtin_convertvector(lane_numbers(), Vector) + (float)(key - query + sums->wanted->shift);
            sums->distance += weight * choose(steps < 0.0f, -steps, steps);
        }
        if (sums->flags) sums->mass += weight * load(sums->flags + key);
        if (sums->received) store(sums->received + key, load(sums->received + key) + weight);
        if (sums->top_weights) keep_largest(sums, weight, key);
    }
    if (sums->cells) add_cells(rows->call, sums, first, least(stop, rows->call->J), scores);
}

/* The sums of one row: pointers to its numbers, and sums of its weights. */
static Sums sums_of(const Call *call, const Statistics *wanted, int64_t entry, int64_t head, int64_t part, int64_t query) {
    const int64_t unit = entry * call->H + head, row = unit * call->I + query, length = rounded_up(call->J, PANEL);
    const int64_t cell_row = query * wanted->cell_rows / call->I, share = unit * wanted->num_parts + part;
    Sums sums = {wanted, 0, 0, 0, 0, 0, all(0), all(0), all(0)};
    if (wanted->flags) sums.flags = wanted->flags + entry * length;
    if (wanted->received) sums.received = wanted->received + share * length;
    if (wanted->cells) sums.cells = wanted->cells + (share * wanted->cell_rows + cell_row) * wanted->cell_columns;
    if (wanted->k) sums.top_weights = wanted->top_weights + row * wanted->k;
    if (wanted->k) sums.top_keys = wanted->top_keys + row * wanted->k;
    return sums;
}

static void add_keys(const Rows *rows, const Statistics *wanted, const float *queries, float *scores, int64_t entry,
                     int64_t head, int64_t part, int64_t first, int64_t stop) {
    const Call *call = rows->call;
    const int64_t unit = entry * call->G + head / (call->H / call->G), length = rounded_up(call->J, PANEL);
    dot_products(queries, call->packed_keys + unit * length * call->D, call->D, first, stop, scores, KEYS);
    const int plain = is_plain(rows, first, stop);
    for (int r = 0; r < ROWS && rows->query + r < rows->stop_query; r++) {
        const int64_t query = rows->query + r, at = (entry * call->H + head) * call->I + query;
        Sums sums = sums_of(call, wanted, entry, head, part, query);
        const float logsumexp = call->logsumexp[at] == -INFINITE ? INFINITE : call->logsumexp[at];
        if (plain)
            add_row(rows, &sums, 1, query, first, stop, logsumexp, scores + r * KEYS);
        else
            add_row(rows, &sums, 0, query, first, stop, logsumexp, scores + r * KEYS);
        if (wanted->entropy) wanted->entropy[at] += sum_of(sums.entropy);
        if (wanted->distance) wanted->distance[at] += sum_of(sums.distance);
        if (wanted->mass) wanted->mass[at] += sum_of(sums.mass);
    }
}

static void run_tile(const Call *call, const Statistics *wanted, const Tile *tile, int64_t entry, int64_t head,
                     int64_t part, float *queries, float *scores) {
    for (int64_t group = 0; tile->first_query + group < tile->stop_query; group += ROWS)
        pack_columns(&call->query, entry, head, tile->first_query + group, ROWS, tile->stop_query, call->D, scores,
                     queries + group * call->D);
    for (int64_t s = tile->first_segment; s < tile->stop_segment; s++) {
        const Segment *segment = call->segments + s;
        const int64_t first = most(segment->first_key, tile->first_query + call->low) / PANEL * PANEL;
        const int64_t stop = least(segment->stop_key, tile->stop_query - 1 + call->high);
        for (int64_t start = first; start < stop; start += KEYS)
            for (int64_t group = 0; tile->first_query + group < tile->stop_query; group += ROWS) {
                const Rows rows = rows_of(call, tile, segment, head, tile->first_query + group);
                int64_t from, to;
                key_range(&rows, &from, &to);
                from = most(start, from / PANEL * PANEL);
                to = least(start + KEYS, rounded_up(to, PANEL));
                if (from < to)
                    add_keys(&rows, wanted, queries + group * call->D, scores, entry, head, part, from, to);
            }
    }
}

static void pack_block(const Call *call, int64_t unit, int64_t first, int64_t stop, float *buffer) {
    pack_panels(call, &call->key, unit, first, stop, call->D, buffer, call->packed_keys);
}

/* The wanted statistics of every row: packs, then computes parts until none is left. */
EXPORT void NAMED(statistics)(const Call *call, float *memory, const Statistics *wanted) {
    float *queries = memory, *scores = queries + TILE_QUERIES * call->D, *buffer = scores + ROWS * KEYS;
    pack_all(call, pack_block, buffer);
    const int64_t units = call->B * call->H * wanted->num_parts;
    for (int64_t n = next_unit(call->counters + 2); n < units; n = next_unit(call->counters + 2)) {
        const int64_t part = n % wanted->num_parts, unit = n / wanted->num_parts, entry = unit / call->H;
        for (int64_t t = part; t < call->num_tiles; t += wanted->num_parts) {
            const Tile *tile = call->tiles + t;
            if (!call->tiles_have_entries || tile->entry == entry)
                run_tile(call, wanted, tile, entry, unit % call->H, part, queries, scores);
        }
    }
}
