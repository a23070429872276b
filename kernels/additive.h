/* Additive scores v . tanh(q + k), without a tangent for each pair (Bahdanau et al. 2015, arXiv:1409.0473).

   tanh(q + k) = 1 - 2 / (1 + e^2q e^2k), so the exponentials are computed once for each query and each key. A pair
   needs one multiply-add and one reciprocal for each hidden unit, and four reciprocals share one division (Montgomery
   1987, "Speeding the Pollard and elliptic curve methods of factorization", section 10.3.1). A denominator is at most
   MOST, where a tangent is 1 in float32, so that the product of four is finite. The error of a tangent is below 5e-7.

   Where the exponential of an input is far from 1, or the input is no number, NaN is packed. A score that is not finite
   is computed again from the inputs themselves, with a tangent for each hidden unit. */
#ifndef ADDITIVE_H
#define ADDITIVE_H

#include "rows.h"

/* Greatest input whose exponential is packed, and greatest denominator. */
#define FARTHEST 40.0f
#define MOST 0x1p31f

/* e^2x with a relative error below 2e-7; NaN for |x| > FARTHEST.

   2x = n ln 2 + rest. The product of n and the first 17 bits of ln(2) / 2 is exact. */
INLINE Vector exponential_of(Vector x) {
    const Vector shifted = x * (2 * LOG2_E) + SHIFTER, n = shifted - SHIFTER;
    const Vector f = ((x - n * 0x1.62e4p-2f) - n * 0x1.7f7d1cp-21f) * (2 * LOG2_E);
    Vector p = broadcast(0.00015353906f);
    p = p * f + 0.00133990077f;
    p = p * f + 0.00961843692f;
    p = p * f + 0.05550331995f;
    p = p * f + 0.24022647738f;
    p = p * f + 0.69314718246f;
    p = p * f + 1.0f;
    return choose((x <= FARTHEST) & (x >= -FARTHEST), times_power_of_2(p, shifted), broadcast(__builtin_nanf("")));
}

/* Replaces numbers by their exponentials. */
INLINE void to_exponentials(float *numbers, int64_t count) {
    int64_t n = 0;
    for (; n + LANES <= count; n += LANES) store(numbers + n, exponential_of(load(numbers + n)));
    for (; n < count; n++) numbers[n] = exponential_of(broadcast(numbers[n]))[0];
}

/* Packs as pack_panels, pack_padded_rows and pack_groups do; for additive scores, the exponentials. */
INLINE void pack_key_panels(const Call *call, int64_t unit, int64_t first, int64_t stop, float *buffer) {
    pack_panels(call, &call->key, unit, first, stop, call->D, buffer, call->packed_keys);
    if (call->direction)
        to_exponentials(call->packed_keys + (unit * padded_keys(call) + first) * call->D, (stop - first) * call->D);
}

INLINE void pack_key_rows(const Call *call, int64_t unit, int64_t first, int64_t stop) {
    const int64_t width = rounded_up(call->D, LANES);
    pack_padded_rows(call, &call->key, unit, first, stop, call->D, call->packed_key_rows);
    if (call->direction)
        to_exponentials(call->packed_key_rows + (unit * padded_keys(call) + first) * width, (stop - first) * width);
}

INLINE void pack_query_groups(const Call *call, const Tile *tile, int64_t entry, int64_t head, float *buffer,
                              float *columns) {
    pack_groups(&call->query, tile, entry, head, call->D, buffer, columns);
    if (call->direction) to_exponentials(columns, rounded_up(tile->stop_query - tile->first_query, ROWS) * call->D);
}

/* 1 + e^2q e^2k; NaN stays NaN. */
INLINE Vector denominator_of(Vector query, Vector key) {
    const Vector d = query * key + 1.0f;
    return choose(d > MOST, broadcast(MOST), d);
}

/* The scores of one query with a panel, from exponentials. `query` has a number each ROWS. */
INLINE void scores_of_panel(const float *query, const float *panel, const float *direction, int64_t channels,
                            float *scores) {
    Vector halves[2] = {{0}};
    int64_t c = 0;
    for (; c + 4 <= channels; c += 4) {
        const float *v = direction + c;
        const float sum = 0.5f * ((v[0] + v[1]) + (v[2] + v[3]));
        UNROLL for (int n = 0; n < 2; n++) {
            Vector d[4];
            UNROLL for (int m = 0; m < 4; m++) d[m] =
                denominator_of(broadcast(query[(c + m) * ROWS]), load(panel + (c + m) * PANEL + n * LANES));
            const Vector low = d[0] * d[1], high = d[2] * d[3];
            const Vector terms = (v[0] * d[1] + v[1] * d[0]) * high + (v[2] * d[3] + v[3] * d[2]) * low;
            halves[n] += sum - terms / (low * high);
        }
    }
    for (; c < channels; c++) {
        UNROLL for (int n = 0; n < 2; n++) {
            const Vector d = denominator_of(broadcast(query[c * ROWS]), load(panel + c * PANEL + n * LANES));
            halves[n] += direction[c] * (0.5f - 1.0f / d);
        }
    }
    UNROLL for (int n = 0; n < 2; n++) store(scores + n * LANES, 2.0f * halves[n]);
}

/* The scores of one query with a panel, from the inputs. `buffer`: two rows of whole vectors. */
static inline void exact_scores(const Call *call, int64_t entry, int64_t head, int64_t query, int64_t first_key,
                                float *buffer, float *scores) {
    const int64_t width = rounded_up(call->D, LANES), key_head = head / (call->H / call->G);
    float *keys = buffer + width;
    pack_rows(&call->query, entry, head, query, 1, call->I, call->D, width, buffer);
    for (int64_t n = 0; n < PANEL; n++) {
        Vector sum = broadcast(0);
        pack_rows(&call->key, entry, key_head, first_key + n, 1, call->J, call->D, width, keys);
        for (int64_t c = 0; c < call->D; c += LANES)
            sum += load(call->direction + c) * tanh_of(load(buffer + c) + load(keys + c));
        scores[n] = sum_of(sum);
    }
}

/* Scores of ROWS queries with the panels of keys [first, stop), and whether some had to be computed from the inputs. */
static inline int additive_scores(const Rows *rows, int64_t entry, int64_t head, const float *queries,
                                  const float *panels, int64_t first, int64_t stop, float *scores, int64_t stride,
                                  float *buffer) {
    const Call *call = rows->call;
    const int num_queries = (int)min(ROWS, rows->stop_query - rows->query);
    int exact = 0;
    for (int64_t key = first; key < stop; key += PANEL) {
        for (int r = 0; r < num_queries; r++) {
            float *found = scores + r * stride + key - first;
            scores_of_panel(queries + r, panels + key * call->D, call->direction, call->D, found);
            const Vector low = load(found) * 0.0f, high = load(found + LANES) * 0.0f; /* 0, or NaN if not finite */
            if (any_of((low != 0.0f) | (high != 0.0f))) {
                exact_scores(call, entry, head, rows->query + r, key, buffer, found);
                exact = 1;
            }
        }
        for (int r = num_queries; r < ROWS; r++)
            for (int64_t n = 0; n < PANEL; n++) scores[r * stride + key - first + n] = 0;
    }
    return exact;
}

/* The keys [first, stop) of pair_scores are whole units of so many keys. */
INLINE int64_t pair_unit(const Call *call) { return call->direction ? PANEL : LANES; }

/* Dot products, or additive scores, of ROWS queries with the keys [first, stop) of panels, before they are scaled.
   Returns whether some additive score had to be computed from the inputs. `buffer`: two rows of whole vectors. */
INLINE int pair_scores(const Rows *rows, int64_t entry, int64_t head, const float *queries, int64_t first, int64_t stop,
                       float *scores, int64_t stride, float *buffer) {
    const Call *call = rows->call;
    const float *panels = call->packed_keys + key_unit(call, entry, head) * padded_keys(call) * call->D;
    if (call->direction)
        return additive_scores(rows, entry, head, queries, panels, first, stop, scores, stride, buffer);
    dot_products(queries, panels, call->D, first, stop, scores, stride);
    return 0;
}

#endif
