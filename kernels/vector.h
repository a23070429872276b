/* Vectors of floats, as wide as the processor's registers, and the exponential.

   Written with the vector extensions of clang and gcc, so one source serves every processor. */
#ifndef VECTOR_H
#define VECTOR_H

#include "regard.h"

#if defined(__AVX512F__)
#define LANES 16
#define REGISTERS 32
#elif defined(__AVX__)
#define LANES 8
#define REGISTERS 16
#elif defined(__aarch64__)
#define LANES 4
#define REGISTERS 32
#else
#define LANES 4
#define REGISTERS 16
#endif

/* The register tile of a product has ROWS x 2 vectors: as many as the processor has registers for. */
#define ROWS (REGISTERS == 32 ? 12 : 6)

/* Keys in a panel: two vectors of scores. */
#define PANEL (2 * LANES)

#define UNROLL _Pragma("clang loop unroll(full)")

#define INLINE static inline __attribute__((always_inline))
/* A function of its own: its loop has all registers, whatever the code around it needs. */
#define APART static __attribute__((noinline, unused))

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* sums wrap around */
typedef uint8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

#define INFINITE __builtin_inff()
#define LOG2_E 1.44269504088896341f
#define LN_2 0.69314718055994531f

INLINE Vector broadcast(float x) { return x - (Vector){0}; }
INLINE Vector load(const float *p) { return *(const Vector *)p; }
INLINE void store(float *p, Vector x) { *(Vector *)p = x; }

INLINE Vector choose(Integers condition, Vector yes, Vector no) {
    return (Vector)((condition & (Integers)yes) | (~condition & (Integers)no));
}

INLINE Vector size_of(Vector x) { return (Vector)((Bits)x & 0x7fffffff); }

/* The larger of two; b where a is NaN, NaN where b is NaN. */
INLINE Vector larger(Vector a, Vector b) { return choose(a > b, a, b); }

/* Each lane gets the number `count` lanes further; the last ones get the first. */
INLINE Vector turned(Vector x, int count) {
    Vector y;
    UNROLL for (int lane = 0; lane < LANES; lane++) y[lane] = x[(lane + count) % LANES];
    return y;
}

/* The sum of all lanes. Halves are added until one number is left, so few steps wait for each other. */
INLINE float sum_of(Vector x) {
    UNROLL for (int half = LANES / 2; half > 0; half /= 2) x += turned(x, half);
    return x[0];
}

INLINE float largest_of(Vector x) {
    UNROLL for (int half = LANES / 2; half > 0; half /= 2) x = larger(x, turned(x, half));
    return x[0];
}

/* Whether a lane is not 0. */
INLINE int any_of(Integers x) {
#if __has_builtin(__builtin_reduce_or)
    return __builtin_reduce_or(x) != 0;
#else
    int32_t found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= x[lane];
    return found != 0;
#endif
}

INLINE int32_t total_of(Integers x) {
#if __has_builtin(__builtin_reduce_add)
    return __builtin_reduce_add(x);
#else
    int32_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += x[lane];
    return total;
#endif
}

/* A bit for each lane that is not 0; the lanes are 0 or -1. */
INLINE uint64_t lane_bits(Integers x) {
#if defined(__clang__)
    typedef _Bool Flags __attribute__((ext_vector_type(LANES)));
    const Flags flags = __builtin_convertvector(x, Flags);
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &flags, (LANES + 7) / 8);
    return bits & ((1u << LANES) - 1);
#else
    uint64_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits |= (uint64_t)(x[lane] & 1) << lane;
    return bits;
#endif
}

INLINE Integers lane_numbers(void) {
    Integers n;
    for (int lane = 0; lane < LANES; lane++) n[lane] = lane;
    return n;
}

/* 1.5 * 2^23: added to a number, it rounds the number to an integer and leaves this integer in the low bits. */
#define SHIFTER 12582912.0f

/* x 2^n for n + SHIFTER in `shifted`: n is added to the exponent. */
INLINE Vector times_power_of_2(Vector x, Vector shifted) { return (Vector)((Bits)x + ((Bits)shifted << 23)); }

/* 2^x with a relative error below 2e-7; 0 for x < -126, NaN for NaN. x is at most 127.

   x = n + f with an integer n and f in [-1/2, 1/2]. 2^f is a polynomial of degree 5. */
INLINE Vector exp2_of(Vector x) {
    Vector shifted = x + SHIFTER;
    Vector f = x - (shifted - SHIFTER);
    Vector p = broadcast(0.001326472731f);
    p = p * f + 0.009671512991f;
    p = p * f + 0.05550733581f;
    p = p * f + 0.24022242427f;
    p = p * f + 0.69314700365f;
    p = p * f + 1.0f;
    return choose(x < -126.0f, broadcast(0), times_power_of_2(p, shifted));
}

/* The natural logarithm of a number that is at least 0, in double precision; -inf for 0. */
INLINE float log_of(float x) {
    if (x == 0) return -INFINITE;
    if (!(x < INFINITE)) return x;
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    int exponent = (int)(bits >> 23) - 127;
    bits = (bits & 0x7fffff) | 0x3f800000;
    __builtin_memcpy(&x, &bits, 4);
    double m = x;
    if (m > 1.4142135623730951) {
        m /= 2;
        exponent++;
    }
    /* log m = 2 artanh((m - 1) / (m + 1)), |argument| < 0.172 */
    const double t = (m - 1) / (m + 1), t2 = t * t;
    const double series = 1 + t2 * (1.0 / 3 + t2 * (1.0 / 5 + t2 * (1.0 / 7 + t2 * (1.0 / 9 + t2 / 11))));
    return (float)(exponent * 0.6931471805599453 + 2 * t * series);
}

INLINE void wait_a_moment(void) {
#if defined(__x86_64__)
    __asm__ __volatile__("pause");
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

#endif
