/* Vectors of keys and values as they lie in memory: read in their own dtype, and fetched before they are read. */
#ifndef MATRIX_H
#define MATRIX_H

#include "pack.h"

/* Vectors as rows, `step` elements apart. */
typedef struct {
    const void *data;
    int64_t step, dtype;
} Matrix;

/* Rows and keys in bfloat16, for a processor that multiplies it: one instruction adds the products of two neighbours to
   each sum. It takes subnormal numbers for 0. */
#define PAIRS 3

/* Whether the scores of a call are computed in PAIRS. */
INLINE int in_pairs(const Call *call) {
#if defined(__AVX512BF16__)
    const int narrow = call->query.dtype == BFLOAT16 && call->key.dtype == BFLOAT16;
    return narrow && call->key.strides[3] == 1 && call->D % (2 * LANES) == 0;
#else
    (void)call;
    return 0;
#endif
}

/* sums + a b, in each lane. */
INLINE Vector plus_products(const int64_t dtype, Vector sums, Vector a, Vector b) {
#if defined(__AVX512BF16__)
    typedef __bf16 Pairs __attribute__((vector_size(4 * LANES)));
    if (dtype == PAIRS) return __builtin_ia32_dpbf16ps_512(sums, (Pairs)a, (Pairs)b);
#endif
    (void)dtype;
    return sums + a * b;
}

/* Turns rows of floats, which hold numbers of bfloat16, into PAIRS in place. The rows stay `width` floats apart. */
INLINE void narrow(float *rows, int64_t num_rows, int64_t width) {
    for (int64_t r = 0; r < num_rows; r++) {
        for (int64_t c = 0; c < width; c += LANES) {
            const Bits bits = (Bits)load(rows + r * width + c) >> 16;
            *(Halves *)((uint16_t *)(rows + r * width) + c) = __builtin_convertvector(bits, Halves);
        }
    }
}

INLINE int64_t bytes_of(int64_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

/* `count` vectors from token `first` on. It is the tensor itself if channels are contiguous and fill whole registers,
   else a copy. */
INLINE Matrix matrix_of(const Tensor *t, int64_t entry, int64_t head, int64_t first, int64_t count, int64_t channels,
                        int64_t width, float *copy) {
    if (t->strides[3] == 1 && channels == width) {
        const int64_t bytes = bytes_of(t->dtype);
        return (Matrix){(const char *)t->data + place(t, entry, head, first) * bytes, t->strides[2], t->dtype};
    }
    pack_rows(t, entry, head, first, count, first + count, channels, width, copy);
    return (Matrix){copy, width, FLOAT32};
}

/* Vectors that are read later: the address of the first, and bytes from one to the next. */
typedef struct {
    uint64_t address;
    int64_t step;
} Later;

INLINE Later later(const Tensor *t, int64_t entry, int64_t head, int64_t first) {
    const int64_t bytes = bytes_of(t->dtype);
    return (Later){(uint64_t)t->data + (uint64_t)(place(t, entry, head, first) * bytes), t->strides[2] * bytes};
}

/* Fetches the line of byte `offset` of a later vector into the L2 cache. It is not read, so there may be none. */
INLINE void fetch(Later vectors, int64_t number, int64_t offset) {
    __builtin_prefetch((const void *)(vectors.address + (uint64_t)(number * vectors.step + offset)), 0, 2);
}

/* Numbers from index `n` on: LANES of them, or the bits of 2 LANES of PAIRS. */
INLINE Vector load_as(const int64_t dtype, const void *data, int64_t n) {
    if (dtype == FLOAT32) return load((const float *)data + n);
    if (dtype == PAIRS) return load((const float *)((const uint16_t *)data + n));
    const Halves halves = *(const Halves *)((const uint16_t *)data + n);
    return dtype == BFLOAT16 ? from_bfloat16s(halves) : from_float16s(halves);
}

#endif
