/* Statistics of the weights in one pass, without a second product.

   The forward pass has left the log-sum-exp of each row, so a weight is final at once: w = exp(s - lse) (as in the
   backward pass of FlashAttention: Dao et al. 2022, arXiv:2205.14135). Every statistic is updated while the weights of
   ROWS queries and KEYS keys are in the L1 cache: first those of a row, then sums over the queries. Entropy needs no
   logarithm, because -log w = lse - s. A unit of work is one head and a part of its tiles; each part has its own sums
   over queries. */
#include "additive.h"
#include "cells.h"

/* Steps between a key and a query that are counted exactly. */
#define FAR_STEPS ((int64_t)1 << 30)

/* Floats of scratch memory that one thread needs. */
EXPORT int64_t NAMED(statistics_workspace)(const Call *call) {
    return TILE_QUERIES * call->D + (ROWS + 2) * KEYS + PANEL * call->D;
}

/* The weights of ROWS queries and the keys [first, stop), the queries' unit (entry, head), and where sums belong. */
typedef struct {
    const Rows *rows;
    const Statistics *wanted;
    int64_t entry, head, part, first, stop;
    float *weights; /* ROWS x KEYS */
} Block;

INLINE int64_t num_rows(const Block *block) { return min(ROWS, block->rows->stop_query - block->rows->query); }
INLINE int64_t unit_of(const Block *block) { return block->entry * block->rows->call->H + block->head; }

/* The index of a row in arrays (B, H, lists, I), for list n. */
INLINE int64_t listed_row(const Block *block, int64_t num_lists, int64_t n, int64_t query) {
    return (unit_of(block) * num_lists + n) * block->rows->call->I + query;
}

/* Turns the products of a row into weights, and adds its entropy and distance. */
INLINE void weigh_row(const Block *block, int plain, int64_t query, float *scores) {
    const Statistics *wanted = block->wanted;
    const Row row = row_of(block->rows, query);
    const int64_t index = row_index(block->rows->call, block->entry, block->head, query);
    const float logsumexp = row_logsumexp(block->rows->call, index);
    Vector entropy = broadcast(0), distance = broadcast(0);
    for (int64_t key = block->first; key < block->stop; key += LANES) {
        float *place = scores + key - block->first;
        Vector score = load(place) * block->rows->call->scale;
        if (!plain) score = final_score(block->rows, &row, score, key);
        const Vector log_weight = log_weight_of(score, logsumexp);
        const Vector weight = exp2_of(log_weight * LOG2_E);
        store(place, weight);
        if (wanted->entropy) entropy -= weight * choose(log_weight < -1e30f, broadcast(-1e30f), log_weight);
        if (wanted->distance) {
            const float first_step = (float)(key - query + wanted->shift);
            const Vector steps = __builtin_convertvector(lane_numbers(), Vector) + first_step;
            distance += weight * choose(steps < 0.0f, -steps, steps);
        }
    }
    if (wanted->entropy) wanted->entropy[index] += sum_of(entropy);
    if (wanted->distance) wanted->distance[index] += sum_of(distance);
}

/* Adds the weights at chosen distances j - i: one by one, and sums over the queries. */
static void add_offsets(const Block *block, int64_t query, const float *weights) {
    const Statistics *wanted = block->wanted;
    for (int64_t n = 0; n < wanted->num_offsets; n++) {
        const int64_t key = query + wanted->offsets[n];
        if (key >= block->first && key < block->stop)
            wanted->diagonals[listed_row(block, wanted->num_offsets, n, query)] += weights[key - block->first];
    }
    const int64_t first_key = query + wanted->first_sum, share = unit_of(block) * wanted->num_parts + block->part;
    float *sums = wanted->offset_sums + share * wanted->num_sums;
    const int64_t stop = min(block->stop, first_key + wanted->num_sums);
    for (int64_t key = max(block->first, first_key); key < stop; key++)
        sums[key - first_key] += weights[key - block->first];
}

/* Adds the weights on keys after the query, and on other keys with its token. */
static void add_related(const Block *block, int64_t query, const float *weights) {
    const Statistics *wanted = block->wanted;
    const Call *call = block->rows->call;
    const int64_t own_key = query - wanted->shift, row = row_index(call, block->entry, block->head, query);
    const int32_t *tokens = wanted->same ? wanted->key_tokens + block->entry * padded_keys(call) : 0;
    const int32_t token = tokens ? wanted->query_tokens[block->entry * call->I + query] : 0;
    Vector later = broadcast(0), same = broadcast(0);
    for (int64_t key = block->first; key < block->stop; key += LANES) {
        const Vector weight = load(weights + key - block->first);
        const Integers steps = lane_numbers() + (int32_t)max(-FAR_STEPS, min(key - own_key, FAR_STEPS));
        later += choose(steps > 0, weight, broadcast(0));
        if (tokens) same += choose((*(const Integers *)(tokens + key) == token) & (steps != 0), weight, broadcast(0));
    }
    if (wanted->later) wanted->later[row] += sum_of(later);
    if (tokens) wanted->same[row] += sum_of(same);
}

/* Adds weights times the numbers of their keys. Blocks whose numbers are all 0 cost nothing. */
static void add_numbers(const Block *block) {
    const Statistics *wanted = block->wanted;
    const int64_t length = padded_keys(block->rows->call);
    for (int64_t n = 0; n < wanted->num_numbers; n++) {
        const float *numbers = wanted->numbers + (unit_of(block) * wanted->num_numbers + n) * length;
        Integers found = {0};
        for (int64_t key = block->first; key < block->stop; key += LANES) found |= load(numbers + key) != 0.0f;
        if (!any_of(found)) continue;
        for (int64_t r = 0; r < num_rows(block); r++) {
            Vector sum = broadcast(0);
            for (int64_t key = block->first; key < block->stop; key += LANES)
                sum += load(block->weights + r * KEYS + key - block->first) * load(numbers + key);
            wanted->number_sums[listed_row(block, wanted->num_numbers, n, block->rows->query + r)] += sum_of(sum);
        }
    }
}

/* Adds the weights at chosen keys, which ascend, and their part of the entropy. */
static void add_chosen_keys(const Block *block) {
    const Statistics *wanted = block->wanted;
    int64_t n = 0, stop = wanted->num_chosen;
    while (n < stop) {
        const int64_t middle = (n + stop) / 2;
        if (wanted->chosen[middle] < block->first)
            n = middle + 1;
        else
            stop = middle;
    }
    for (; n < wanted->num_chosen && wanted->chosen[n] < block->stop; n++)
        for (int64_t r = 0; r < num_rows(block); r++) {
            const float weight = block->weights[r * KEYS + wanted->chosen[n] - block->first];
            const int64_t row = listed_row(block, 1, 0, block->rows->query + r);
            wanted->chosen_mass[row] += weight;
            if (weight > 0) wanted->chosen_entropy[row] -= weight * log_of(weight);
        }
}

/* Not inlined: beside it the register tile of the scores would not stay in the registers of AVX2. */
__attribute__((noinline)) static void add_block(const Block *block, float *sums) {
    const Statistics *wanted = block->wanted;
    const int plain = is_plain(block->rows, block->first, block->stop);
    for (int64_t r = 0; r < num_rows(block); r++) {
        const int64_t query = block->rows->query + r, row = listed_row(block, 1, 0, query);
        float *weights = block->weights + r * KEYS;
        if (plain)
            weigh_row(block, 1, query, weights);
        else
            weigh_row(block, 0, query, weights);
        if (wanted->k)
            keep_largest(weights, block->first, block->stop, wanted->k, wanted->top_weights + row * wanted->k,
                         wanted->top_keys + row * wanted->k);
        if (wanted->num_offsets || wanted->num_sums) add_offsets(block, query, weights);
        if (wanted->same || (wanted->later && block->stop > query - wanted->shift + 1))
            add_related(block, query, weights);
    }
    if (wanted->num_numbers) add_numbers(block);
    if (wanted->num_chosen) add_chosen_keys(block);
    if (wanted->received || wanted->cells) {
        const int64_t share = unit_of(block) * wanted->num_parts + block->part;
        add_columns(block->rows, wanted, share, num_rows(block), block->first, block->stop, block->weights, sums);
    }
}

static void run_tile(const Call *call, const Statistics *wanted, const Tile *tile, int64_t entry, int64_t head,
                     int64_t part, float *queries, float *weights) {
    float *sums = weights + ROWS * KEYS, *buffer = sums + 2 * KEYS;
    pack_query_groups(call, tile, entry, head, weights, queries);
    for (int64_t s = tile->first_segment; s < tile->stop_segment; s++) {
        const Segment *segment = call->segments + s;
        const Range range = keys_of_tile(call, tile, segment);
        for (int64_t start = range.first / PANEL * PANEL; start < range.stop; start += KEYS)
            for (int64_t group = 0; tile->first_query + group < tile->stop_query; group += ROWS) {
                const Rows rows = rows_of(call, tile, segment, entry, head, tile->first_query + group);
                const Range keys = rounded_out(keys_of_rows(&rows, start, start + KEYS), PANEL);
                if (keys.first >= keys.stop) continue;
                const Block block = {&rows, wanted, entry, head, part, keys.first, keys.stop, weights};
                pair_scores(&rows, entry, head, queries + group * call->D, keys.first, keys.stop, weights, KEYS,
                            buffer);
                add_block(&block, sums);
            }
    }
}

static void pack_block(const Call *call, int64_t unit, int64_t first, int64_t stop, float *buffer) {
    pack_key_panels(call, unit, first, stop, buffer);
}

/* The wanted statistics of every row: packs, then computes parts until none is left. */
EXPORT void NAMED(statistics)(const Call *call, float *memory, const Statistics *wanted) {
    float *queries = memory, *weights = queries + TILE_QUERIES * call->D, *buffer = weights + (ROWS + 2) * KEYS;
    pack_all(call, pack_block, buffer);
    const int64_t units = call->B * call->H * wanted->num_parts;
    for (int64_t n = next_unit(call->counters + 2); n < units; n = next_unit(call->counters + 2)) {
        const int64_t part = n % wanted->num_parts, unit = n / wanted->num_parts, entry = unit / call->H;
        for (int64_t t = part; t < call->num_tiles; t += wanted->num_parts) {
            const Tile *tile = call->tiles + t;
            if (!call->tiles_have_entries || tile->entry == entry)
                run_tile(call, wanted, tile, entry, unit % call->H, part, queries, weights);
        }
    }
}
