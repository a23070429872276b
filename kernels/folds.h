/* Statistics of each row that the forward pass computes beside the output, without a second pass over the keys; and
   their gradients.

   Weights so far are p = exp(score - greatest), and their total is t: the final weights are p / t. The entropy of a row
   is log t - sum p log p / t, and both terms are at least 0, so no digits cancel. If a later score is greater, every
   log p falls by the same difference. The total of the keys is summed apart, because t has the sink too. */
#ifndef FOLDS_H
#define FOLDS_H

#include "rows.h"

/* The sums of a tile: LANES numbers for each row, which are added at the end. */
typedef struct {
    float *weights;   /* p */
    float *logs;      /* p log p */
    float *distances; /* p |j - i + shift| */
} Folds;

/* Floats of scratch memory of a tile. */
#define FOLD_FLOATS (3 * TILE_QUERIES * LANES)

INLINE Folds folds_in(float *memory) {
    return (Folds){memory, memory + TILE_QUERIES * LANES, memory + 2 * TILE_QUERIES * LANES};
}

INLINE int has_folds(const Call *call) { return call->entropy || call->distance || call->top_weights; }

static inline void start_folds(const Call *call, const Tile *tile, int64_t entry, int64_t head, const Folds *folds) {
    for (int64_t n = 0; n < FOLD_FLOATS; n++) folds->weights[n] = 0;
    if (!call->top_weights) return;
    for (int64_t query = tile->first_query; query < tile->stop_query; query++) {
        const int64_t row = row_index(call, entry, head, query);
        call->top_weights[row] = -INFINITE, call->top_keys[row] = -1;
    }
}

/* Keeps the greatest score of a row and its first key, if `greatest` of the keys [first, stop) is greater. */
INLINE void keep_top(float greatest, const float *scores, int64_t first, int64_t stop, float *top_score,
                     int64_t *top_key) {
    if (!(greatest > *top_score)) return;
    *top_score = greatest;
    for (int64_t key = first; key < stop; key += LANES) {
        const uint64_t found = lane_bits(load(scores + key - first) == *top_score);
        if (!found) continue;
        *top_key = key + __builtin_ctzll(found);
        return;
    }
}

/* Sums over the keys of a row: LANES numbers each. */
typedef struct {
    Vector weights, logs, distances;
} RowSums;

/* Turns the scores of keys into weights exp(score - base), and sums them. `step`: from the query to the first key. */
INLINE RowSums sums_of_row(int has_entropy, int has_distance, float base, float step, int64_t count, float *scores) {
    RowSums sums = {broadcast(0), broadcast(0), broadcast(0)};
    Vector steps = __builtin_convertvector(lane_numbers(), Vector) + step;
    for (int64_t n = 0; n < count; n += LANES) {
        const Vector difference = load(scores + n) - base, weight = exp2_of(difference * LOG2_E);
        store(scores + n, weight);
        sums.weights += weight;
        if (has_entropy) sums.logs += weight * larger(difference, broadcast(-1e30f));
        if (has_distance) sums.distances += weight * size_of(steps);
        steps += (float)LANES;
    }
    return sums;
}

/* weights_of_row, which also adds to what a row carries: `number` is its place in the tile, `row` in the call. */
INLINE void folded_weights_of_row(const Rows *rows, int bounded, int64_t query, int64_t start, int64_t end,
                                  float *scores, float *greatest, float *total, float *factor, const Folds *folds,
                                  int64_t number, int64_t row) {
    const Call *call = rows->call;
    const Range keys = bounded ? bound_row(rows, query, start, end, scores) : (Range){start, end};
    const int64_t first = keys.first, stop = keys.stop;
    scores += first - start;
    const Vector top = scores_of_row(rows, bounded, query, first, stop, scores);
    const float before = *greatest, base = raise_greatest(top, greatest, factor);
    if (call->top_weights && query < rows->stop_query)
        keep_top(call->sink ? largest_of(top) : *greatest, scores, first, stop, call->top_weights + row,
                 call->top_keys + row);
    const float step = (float)(first - query + call->shift), fall = before == -INFINITE ? 0 : before - base;
    const RowSums sums = !call->distance  ? sums_of_row(1, 0, base, step, stop - first, scores)
                         : !call->entropy ? sums_of_row(0, 1, base, step, stop - first, scores)
                                          : sums_of_row(1, 1, base, step, stop - first, scores);
    *total = *total * *factor + sum_of(sums.weights);
    float *weights = folds->weights + number * LANES, *logs = folds->logs + number * LANES;
    float *distances = folds->distances + number * LANES;
    store(logs, (load(logs) + load(weights) * fall) * *factor + sums.logs);
    store(weights, load(weights) * *factor + sums.weights);
    store(distances, load(distances) * *factor + sums.distances);
}

/* Writes the statistics of a row. */
INLINE void finish_folds(const Call *call, const Folds *folds, int64_t number, int64_t row, float greatest,
                         float total) {
    const float inverse = total == 0 ? 0 : 1 / total;
    if (call->entropy) {
        const float weights = sum_of(load(folds->weights + number * LANES));
        const float logs = sum_of(load(folds->logs + number * LANES));
        call->entropy[row] = total == 0 ? 0 : (weights * log_of(total) - logs) * inverse;
    }
    if (call->distance) call->distance[row] = sum_of(load(folds->distances + number * LANES)) * inverse;
    if (call->top_weights)
        call->top_weights[row] =
            total == 0 ? 0 : exp2_of(broadcast((call->top_weights[row] - greatest) * LOG2_E))[0] * inverse;
}

INLINE int has_fold_gradients(const Call *call) { return call->grad_entropy || call->grad_distance; }

/* Adds c_ij of ROWS queries and the keys [first, stop) to `terms`. The gradient of a score is w_ij (c_ij - delta_i):
   c_ij is the gradient of the entropy times -log w_ij, and that of the distance times |j - i + shift|. */
static inline void add_fold_terms(const Rows *rows, int64_t entry, int64_t head, int64_t first, int64_t stop,
                           const float *products, float *terms, int64_t stride) {
    const Call *call = rows->call;
    const int plain = is_plain(rows, first, stop);
    for (int64_t query = rows->query; query < min(rows->query + ROWS, rows->stop_query); query++) {
        const int64_t index = row_index(call, entry, head, query);
        const float logsumexp = row_logsumexp(call, index);
        const float entropy = call->grad_entropy ? call->grad_entropy[index] : 0;
        const float distance = call->grad_distance ? call->grad_distance[index] : 0;
        const Row row = row_of(rows, query);
        Vector steps = __builtin_convertvector(lane_numbers(), Vector) + (float)(first - query + call->shift);
        for (int64_t key = first; key < stop; key += LANES) {
            Vector score = load(products + key - first) * call->scale;
            if (!plain) score = final_score(rows, &row, score, key);
            const Vector log_weight = larger(log_weight_of(score, logsumexp), broadcast(-1e30f));
            store(terms + key - first, load(terms + key - first) - entropy * log_weight + distance * size_of(steps));
            steps += (float)LANES;
        }
        products += stride, terms += stride;
    }
}

#endif
