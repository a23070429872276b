/* Gradients of additive scores. Vectors hold hidden units here, so that every sum stays in its lane.

   With y = tanh(q + k) / 2 = 1/2 - 1 / d, the derivative of the tangent is 4 (1/4 - y^2), and that of the score by its
   direction is 2 y. Four pairs share one division (see additive.h). */
#ifndef ADDITIVE_BACKWARD_H
#define ADDITIVE_BACKWARD_H

#include "additive.h"

/* Rows of vectors of hidden units: inputs or their exponentials, and the sums of gradients of the same rows. */
typedef struct {
    const float *queries, *keys;
    float *query_sums, *key_sums, *direction_sums;
    int64_t width;
} HiddenRows;

/* Half the tangents of four pairs. */
INLINE void half_tangents(const Vector d[4], Vector y[4]) {
    const Vector low = d[0] * d[1], high = d[2] * d[3], inverse = 1.0f / (low * high);
    const Vector of_low = inverse * high, of_high = inverse * low;
    y[0] = 0.5f - of_low * d[1], y[1] = 0.5f - of_low * d[0];
    y[2] = 0.5f - of_high * d[3], y[3] = 0.5f - of_high * d[2];
}

/* Adds the gradients `grads` of the scores of R queries (`stride` apart) and `num_keys` keys, a multiple of K. R K is
   4. `exact`: the rows hold the inputs, not their exponentials. */
INLINE void add_pairs(const int R, const int K, const int exact, HiddenRows h, const float *grads, int64_t stride,
                      int64_t num_keys) {
    for (int64_t c = 0; c < h.width; c += LANES) {
        Vector queries[4], query_sums[4] = {{0}}, direction_sum = load(h.direction_sums + c);
        UNROLL for (int r = 0; r < R; r++) queries[r] = load(h.queries + r * h.width + c);
        for (int64_t key = 0; key < num_keys; key += K) {
            Vector y[4], d[4], key_sums[4];
            UNROLL for (int m = 0; m < 4; m++) {
                const Vector k = load(h.keys + (key + m % K) * h.width + c);
                if (exact)
                    y[m] = 0.5f * tanh_of(queries[m / K] + k);
                else
                    d[m] = denominator_of(queries[m / K], k);
            }
            if (!exact) half_tangents(d, y);
            UNROLL for (int k = 0; k < K; k++) key_sums[k] = load(h.key_sums + (key + k) * h.width + c);
            UNROLL for (int m = 0; m < 4; m++) {
                const Vector grad = broadcast(grads[m / K * stride + key + m % K]);
                const Vector slope = 0.25f - y[m] * y[m];
                direction_sum += grad * y[m];
                query_sums[m / K] += grad * slope;
                key_sums[m % K] += grad * slope;
            }
            UNROLL for (int k = 0; k < K; k++) store(h.key_sums + (key + k) * h.width + c, key_sums[k]);
        }
        UNROLL for (int r = 0; r < R; r++) {
            float *sums = h.query_sums + r * h.width + c;
            store(sums, load(sums) + query_sums[r]);
        }
        store(h.direction_sums + c, direction_sum);
    }
}

/* The rows of later queries. */
INLINE HiddenRows later(HiddenRows h, int64_t num_queries) {
    h.queries += num_queries * h.width, h.query_sums += num_queries * h.width;
    return h;
}

/* Adds the gradients `grads` of the scores of some queries and keys, from exponentials. */
static inline void add_additive(HiddenRows h, int num_queries, const float *grads, int64_t stride, int64_t num_keys) {
    int r = 0;
    for (; r + 4 <= num_queries; r += 4) add_pairs(4, 1, 0, later(h, r), grads + r * stride, stride, num_keys);
    for (; r < num_queries; r++) add_pairs(1, 4, 0, later(h, r), grads + r * stride, stride, num_keys);
}

/* The same of the keys [first, stop), from the inputs. `buffer`: five rows. */
static inline void add_exact(const Rows *rows, int64_t entry, int64_t head, HiddenRows h, int num_queries,
                             const float *grads, int64_t stride, int64_t first, int64_t stop, float *buffer) {
    const Call *call = rows->call;
    const int64_t key_head = head / (call->H / call->G);
    for (int r = 0; r < num_queries; r++) {
        pack_rows(&call->query, entry, head, rows->query + r, 1, call->I, call->D, h.width, buffer);
        for (int64_t key = first; key < stop; key += 4) {
            HiddenRows four = later(h, r);
            pack_rows(&call->key, entry, key_head, key, 4, call->J, call->D, h.width, buffer + h.width);
            four.queries = buffer, four.keys = buffer + h.width;
            four.key_sums += (key - first) * h.width;
            add_pairs(1, 4, 1, four, grads + r * stride + key - first, stride, 4);
        }
    }
}

#endif
