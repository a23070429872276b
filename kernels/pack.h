/* Copies of inputs in the layout that the products read: float32, without gaps, padded with zeros. */
#ifndef PACK_H
#define PACK_H

#include "vector.h"

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* The next unit of work: every thread that calls gets another one. */
INLINE int64_t next_unit(int64_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

INLINE float float_of_bits(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

/* A half-precision number, by its bits. A subnormal one is a difference of normal numbers, because the caller may have
   told the processor to take subnormal numbers of float32 for 0 (torch.set_flush_denormal). */
INLINE float from_float16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    const uint32_t moved = (magnitude << 13) + 0x38000000;
    if (magnitude >= 0x7c00) return float_of_bits(sign | (moved + 0x38000000));
    if (magnitude < 0x0400) return float_of_bits(sign | bits_of(float_of_bits(moved + 0x800000) - 0x1p-14f));
    return float_of_bits(sign | moved);
}

/* LANES numbers of half precision. */
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

INLINE Vector from_bfloat16s(Halves bits) { return (Vector)(__builtin_convertvector(bits, Bits) << 16); }

INLINE Vector from_float16s(Halves bits) {
#if defined(__F16C__) || defined(__aarch64__)
    typedef _Float16 Numbers __attribute__((vector_size(2 * LANES)));
    return __builtin_convertvector((Numbers)bits, Vector);
#else
    Vector numbers;
    for (int lane = 0; lane < LANES; lane++) numbers[lane] = from_float16(bits[lane]);
    return numbers;
#endif
}

/* Rounded to the nearest number of half precision, ties to even. */
INLINE uint16_t to_float16(float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;
    if (magnitude < 0x38800000) return sign | (bits_of(float_of_bits(magnitude) + 0.5f) - bits_of(0.5f));
    return sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
}

INLINE uint16_t to_bfloat16(float x) {
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* Where the vector of a token begins, as an index of elements. */
INLINE int64_t place(const Tensor *t, int64_t entry, int64_t head, int64_t token) {
    return entry * t->strides[0] + head * t->strides[1] + token * t->strides[2];
}

/* `count` channels of the vector at `start`. */
INLINE void read_vector(const Tensor *t, int64_t start, int64_t count, float *to) {
    const int64_t step = t->strides[3];
    if (t->dtype == FLOAT32) {
        const float *from = (const float *)t->data + start;
        if (step == 1)
            for (int64_t c = 0; c < count; c++) to[c] = from[c];
        else
            for (int64_t c = 0; c < count; c++) to[c] = from[c * step];
    } else {
        const uint16_t *from = (const uint16_t *)t->data + start;
        if (t->dtype == BFLOAT16)
            for (int64_t c = 0; c < count; c++) to[c] = float_of_bits((uint32_t)from[c * step] << 16);
        else
            for (int64_t c = 0; c < count; c++) to[c] = from_float16(from[c * step]);
    }
}

INLINE void write_vector(const Tensor *t, int64_t start, int64_t count, const float *from) {
    const int64_t step = t->strides[3];
    if (t->dtype == FLOAT32)
        for (int64_t c = 0; c < count; c++) ((float *)t->data)[start + c * step] = from[c];
    else if (t->dtype == BFLOAT16)
        for (int64_t c = 0; c < count; c++) ((uint16_t *)t->data)[start + c * step] = to_bfloat16(from[c]);
    else
        for (int64_t c = 0; c < count; c++) ((uint16_t *)t->data)[start + c * step] = to_float16(from[c]);
}

/* Vectors [first, first + count) as the rows of a matrix of `width` columns. Rows behind `length` are zeros. */
INLINE void pack_rows(const Tensor *t, int64_t entry, int64_t head, int64_t first, int64_t count, int64_t length,
                      int64_t channels, int64_t width, float *to) {
    for (int64_t n = 0; n < count; n++) {
        const int64_t known = first + n < length ? channels : 0;
        if (known) read_vector(t, place(t, entry, head, first + n), channels, to + n * width);
        for (int64_t c = known; c < width; c++) to[n * width + c] = 0;
    }
}

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

/* Four rows of four numbers, `row` apart, to four columns, `column` apart. */
INLINE void transpose_four(const float *from, int64_t row, float *to, int64_t column) {
    Four in[4], pairs[4];
    for (int n = 0; n < 4; n++) in[n] = *(const Four *)(from + n * row);
    pairs[0] = __builtin_shufflevector(in[0], in[1], 0, 4, 1, 5);
    pairs[1] = __builtin_shufflevector(in[2], in[3], 0, 4, 1, 5);
    pairs[2] = __builtin_shufflevector(in[0], in[1], 2, 6, 3, 7);
    pairs[3] = __builtin_shufflevector(in[2], in[3], 2, 6, 3, 7);
    *(Four *)(to) = __builtin_shufflevector(pairs[0], pairs[1], 0, 1, 4, 5);
    *(Four *)(to + column) = __builtin_shufflevector(pairs[0], pairs[1], 2, 3, 6, 7);
    *(Four *)(to + 2 * column) = __builtin_shufflevector(pairs[2], pairs[3], 0, 1, 4, 5);
    *(Four *)(to + 3 * column) = __builtin_shufflevector(pairs[2], pairs[3], 2, 3, 6, 7);
}

/* Vectors [first, first + count) as columns: to[c count + n] is channel c of vector n. `buffer`: count x channels. */
INLINE void pack_columns(const Tensor *t, int64_t entry, int64_t head, int64_t first, int64_t count, int64_t length,
                         int64_t channels, float *buffer, float *to) {
    const float *rows = buffer;
    int64_t row = channels;
    if (t->dtype == FLOAT32 && t->strides[3] == 1 && first + count <= length) /* read where they are */
        rows = (const float *)t->data + place(t, entry, head, first), row = t->strides[2];
    else
        pack_rows(t, entry, head, first, count, length, channels, channels, buffer);
    const int64_t fours = count % 4 == 0 ? channels / 4 * 4 : 0;
    for (int64_t n = 0; n < count && fours > 0; n += 4)
        for (int64_t c = 0; c < fours; c += 4)
            transpose_four(rows + n * row + c, row, to + c * count + n, count);
    for (int64_t c = fours; c < channels; c++)
        for (int64_t n = 0; n < count; n++) to[c * count + n] = rows[n * row + c];
}

#endif
