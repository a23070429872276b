/* Statistics of the weights in one pass, without a second product.

   The forward pass has left the log-sum-exp of each row, so a weight is final at once: w = exp(s - lse) (as in the
   backward pass of FlashAttention: Dao et al. 2022, arXiv:2205.14135). Every statistic is updated while the weights of
   ROWS queries and KEYS keys are in the L1 cache. Entropy needs no logarithm, because -log w = lse - s. A unit of work
   is one head and a part of its tiles; each part has its own sums over queries. */
#include "additive.h"

/* Statistics to compute; a null pointer leaves one out. */
typedef struct {
    float *entropy;     /* (B, H, I): -sum_j w log w */
    float *distance;    /* (B, H, I): sum_j w |j - i + shift| */
    float *mass;        /* (B, H, I): sum_j w flags_j */
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

/* Floats of scratch memory that one thread needs. */
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
        if (weight[lane] > sums->top_weights[k - 1])
            insert(sums->top_weights, sums->top_keys, k, weight[lane], key + lane);
}

/* Adds the weights of the keys [first, stop) to a row of cells. Key j belongs to column j columns / J, rounded down. */
static void add_cells(const Call *call, const Sums *sums, int64_t first, int64_t stop, const float *weights) {
    const int64_t columns = sums->wanted->cell_columns;
    for (int64_t key = first; key < stop;) {
        const int64_t cell = key * columns / call->J, end = min(stop, ((cell + 1) * call->J + columns - 1) / columns);
        float total = 0;
        Vector totals = broadcast(0);
        for (; key + LANES <= end; key += LANES) totals += load(weights + key - first);
        for (; key < end; key++) total += weights[key - first];
        sums->cells[cell] += total + sum_of(totals);
    }
}

/* Turns the products of a row into weights, and adds them to every statistic. */
INLINE void add_row(const Rows *rows, Sums *sums, int plain, int64_t query, int64_t first, int64_t stop,
                    float logsumexp, float *scores) {
    const Row row = row_of(rows, query);
    for (int64_t key = first; key < stop; key += LANES) {
        Vector score = load(scores + key - first) * rows->call->scale;
        if (!plain) score = final_score(rows, &row, score, key);
        /* The log-sum-exp is rounded, but no weight may be above 1. */
        const Vector difference = score - logsumexp, log_weight = choose(difference > 0.0f, broadcast(0), difference);
        const Vector weight = exp2_of(log_weight * LOG2_E);
        store(scores + key - first, weight);
        if (sums->wanted->entropy) sums->entropy -= weight * choose(log_weight < -1e30f, broadcast(-1e30f), log_weight);
        if (sums->wanted->distance) {
            const float first_step = (float)(key - query + sums->wanted->shift);
            const Vector steps = __builtin_convertvector(lane_numbers(), Vector) + first_step;
            sums->distance += weight * choose(steps < 0.0f, -steps, steps);
        }
        if (sums->flags) sums->mass += weight * load(sums->flags + key);
        if (sums->received) store(sums->received + key, load(sums->received + key) + weight);
        if (sums->top_weights) keep_largest(sums, weight, key);
    }
    if (sums->cells) add_cells(rows->call, sums, first, min(stop, rows->call->J), scores);
}

/* Empty sums of one row, and pointers to its numbers. */
static Sums start_row(const Call *call, const Statistics *wanted, int64_t entry, int64_t head, int64_t part,
                      int64_t query) {
    const int64_t unit = entry * call->H + head, row = unit * call->I + query, length = padded_keys(call);
    const int64_t cell_row = query * wanted->cell_rows / call->I, share = unit * wanted->num_parts + part;
    Sums sums = {wanted, 0, 0, 0, 0, 0, broadcast(0), broadcast(0), broadcast(0)};
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
    pair_scores(rows, entry, head, queries, first, stop, scores, KEYS, scores + ROWS * KEYS);
    const int plain = is_plain(rows, first, stop);
    for (int r = 0; r < ROWS && rows->query + r < rows->stop_query; r++) {
        const int64_t query = rows->query + r, row = row_index(call, entry, head, query);
        const float logsumexp = row_logsumexp(call, row);
        Sums sums = start_row(call, wanted, entry, head, part, query);
        if (plain)
            add_row(rows, &sums, 1, query, first, stop, logsumexp, scores + r * KEYS);
        else
            add_row(rows, &sums, 0, query, first, stop, logsumexp, scores + r * KEYS);
        if (wanted->entropy) wanted->entropy[row] += sum_of(sums.entropy);
        if (wanted->distance) wanted->distance[row] += sum_of(sums.distance);
        if (wanted->mass) wanted->mass[row] += sum_of(sums.mass);
    }
}

static void run_tile(const Call *call, const Statistics *wanted, const Tile *tile, int64_t entry, int64_t head,
                     int64_t part, float *queries, float *scores) {
    pack_query_groups(call, tile, entry, head, scores, queries);
    for (int64_t s = tile->first_segment; s < tile->stop_segment; s++) {
        const Segment *segment = call->segments + s;
        const Range range = keys_of_tile(call, tile, segment);
        for (int64_t start = range.first / PANEL * PANEL; start < range.stop; start += KEYS)
            for (int64_t group = 0; tile->first_query + group < tile->stop_query; group += ROWS) {
                const Rows rows = rows_of(call, tile, segment, entry, head, tile->first_query + group);
                const Range keys = keys_of_rows(&rows, start, start + KEYS);
                if (keys.first >= keys.stop) continue;
                add_keys(&rows, wanted, queries + group * call->D, scores, entry, head, part, keys.first, keys.stop);
            }
    }
}

static void pack_block(const Call *call, int64_t unit, int64_t first, int64_t stop, float *buffer) {
    pack_key_panels(call, unit, first, stop, buffer);
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
