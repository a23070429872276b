/* The greatest numbers of a row.

   The k-th greatest is found by counting: floats are compared as integers in the same order, and some ten comparisons of
   a whole row take less time than to sort a part of it. */
#ifndef ORDERED_H
#define ORDERED_H

#include "pack.h"

/* A row of scores as integers in the same order, in the place of the scores; NaN is the greatest, -inf is LEAST. */
#define LEAST ((int32_t)0x807fffff)
typedef struct {
    const int32_t *numbers;
    int64_t length, least, greatest; /* of the numbers above LEAST */
} Ordered;

INLINE Integers select(Integers condition, Integers yes, Integers no) { return (condition & yes) | (~condition & no); }

INLINE Ordered ordered(float *scores, int64_t length) {
    const Integers last = (Integers){0} + 0x7fffffff;
    Integers least = last, greatest = (Integers){0} + LEAST;
    for (int64_t n = 0; n < length; n += LANES) {
        const Vector score = load(scores + n);
        const Integers bits = (Integers)score, now = select((Integers)(score != score), last, bits ^ ((bits >> 31) & last));
        greatest = select(now > greatest, now, greatest);
        least = select((now > LEAST) & (now < least), now, least);
        *(Integers *)(scores + n) = now;
    }
    Ordered row = {(const int32_t *)scores, length, least[0], greatest[0]};
    for (int lane = 1; lane < LANES; lane++) {
        row.least = min(row.least, least[lane]);
        row.greatest = max(row.greatest, greatest[lane]);
    }
    return row;
}

/* How many numbers are at least `least`. */
INLINE int64_t count_from(const Ordered *row, int64_t least) {
    Integers count[2] = {{0}, {0}};
    for (int64_t n = 0; n < row->length; n += PANEL) {
        count[0] -= *(const Integers *)(row->numbers + n) >= (int32_t)least;
        count[1] -= *(const Integers *)(row->numbers + n + LANES) >= (int32_t)least;
    }
    return total_of(count[0] + count[1]);
}

/* The k-th greatest of `count` numbers, which are more than k, and in `equal` how many of those equal to it are among the
   k. Interpolation of the counts takes a few steps where scores are spread evenly; every third step halves the
   interval. */
APART int64_t kth_greatest(const Ordered *row, int64_t k, int64_t count, int64_t *equal) {
    int64_t low = row->least, high = row->greatest + 1, above = 0; /* `count` from low on, `above` from high on */
    for (int step = 0; high - low > 1 && count > k; step++) {
        const double share = step % 3 == 2 ? 0.5 : (double)(count - k) / (double)(count - above);
        const int64_t middle = max(low + 1, min(high - 1, low + (int64_t)(share * (double)(high - low))));
        const int64_t found = count_from(row, middle);
        if (found >= k)
            low = middle, count = found;
        else
            high = middle, above = found;
    }
    *equal = count == k ? k : k - above;
    return low;
}

/* Writes the places of the k greatest numbers, plus `first`; of equal ones the first. */
APART void write_greatest(const Ordered *row, int64_t k, int64_t first, int32_t *ids, int32_t no_id) {
    const int64_t valid = row->greatest == LEAST ? 0 : count_from(row, (int64_t)LEAST + 1);
    int64_t least = (int64_t)LEAST + 1, equal = k, count = 0;
    if (valid > k) least = kth_greatest(row, k, valid, &equal);
    for (int64_t n = 0; n < row->length && count < k; n += LANES) {
        const Integers some = *(const Integers *)(row->numbers + n) >= (int32_t)least;
        for (uint64_t bits = lane_bits(some); bits && count < k; bits &= bits - 1) {
            const int64_t at = n + __builtin_ctzll(bits);
            if (row->numbers[at] == least && equal-- <= 0) continue;
            ids[count++] = (int32_t)(first + at);
        }
    }
    for (; count < k; count++) ids[count] = no_id;
}

#endif
