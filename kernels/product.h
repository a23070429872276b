/* The one product: ROWS x N vectors of sums in registers, over `length` terms.

   sums[r][n] += sum over l of a[r row + l step] * b[l width + n LANES], the register tile of Goto and van de Geijn
   ("Anatomy of high-performance matrix multiplication", 2008). All five products of attention are this one: scores, the
   output, and backward the gradients of weights, queries, and of keys and values together. */
#ifndef PRODUCT_H
#define PRODUCT_H

#include "vector.h"

#define DEFINE_PRODUCT(NAME, N)                                                                                \
    INLINE void NAME(const float *a, int64_t row, int64_t step, const float *b, int64_t width, int64_t length, \
                     Vector sums[ROWS][N]) {                                                                   \
        for (int64_t l = 0; l < length; l++) {                                                                 \
            Vector terms[N];                                                                                   \
            UNROLL for (int n = 0; n < N; n++) terms[n] = load(b + l * width + n * LANES);                     \
            UNROLL for (int r = 0; r < ROWS; r++) {                                                            \
                const Vector factor = broadcast(a[r * row + l * step]);                                        \
                UNROLL for (int n = 0; n < N; n++) sums[r][n] += factor * terms[n];                            \
            }                                                                                                  \
        }                                                                                                      \
    }

DEFINE_PRODUCT(product_1, 1)
DEFINE_PRODUCT(product_2, 2)

/* out[r out_row + e] = out[...] * factors[r] + the product, for e below `num_channels`, a multiple of LANES. */
#define DEFINE_ADD_PRODUCT(N)                                                                             \
    APART void add_product_##N(const float *a, int64_t row, int64_t step, const float *b, int64_t width,  \
                               int64_t length, float *out, int64_t out_row, const float *factors) {       \
        Vector sums[ROWS][N];                                                                             \
        UNROLL for (int r = 0; r < ROWS; r++) {                                                           \
            const float factor = factors ? factors[r] : 1.0f;                                             \
            UNROLL for (int n = 0; n < N; n++) sums[r][n] = load(out + r * out_row + n * LANES) * factor; \
        }                                                                                                 \
        product_##N(a, row, step, b, width, length, sums);                                                \
        UNROLL for (int r = 0; r < ROWS; r++) {                                                           \
            UNROLL for (int n = 0; n < N; n++) store(out + r * out_row + n * LANES, sums[r][n]);          \
        }                                                                                                 \
    }

DEFINE_ADD_PRODUCT(1)
DEFINE_ADD_PRODUCT(2)

INLINE void add_product(const float *a, int64_t row, int64_t step, const float *b, int64_t width, int64_t length,
                        float *out, int64_t out_row, int64_t num_channels, const float *factors) {
    int64_t e = 0;
    for (; e + 2 * LANES <= num_channels; e += 2 * LANES)
        add_product_2(a, row, step, b + e, width, length, out + e, out_row, factors);
    if (e < num_channels) add_product_1(a, row, step, b + e, width, length, out + e, out_row, factors);
}

/* Adds lanes `half` apart: of a where the bit `half` of a lane is 0, of b where it is 1. */
INLINE Vector folded(Vector a, Vector b, int half) {
    Vector low, high;
    UNROLL for (int lane = 0; lane < LANES; lane++) {
        low[lane] = lane & half ? b[lane - half] : a[lane];
        high[lane] = lane & half ? b[lane] : a[lane + half];
    }
    return low + high;
}

/* Lane n: the sum of the lanes of vectors[n]. */
INLINE Vector sums_of(Vector vectors[LANES]) {
    UNROLL for (int half = LANES / 2; half > 0; half /= 2) {
        UNROLL for (int n = 0; n < half; n++) vectors[n] = folded(vectors[n], vectors[n + half], half);
    }
    return vectors[0];
}

#endif
