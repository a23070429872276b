/* The limit of the other kernels: multiply-adds in registers, without any memory.

   As many independent sums as the register tile of product.h has, so that no multiply-add waits for the one before. */
#include "product.h"

#define SUMS (2 * ROWS)

int64_t NAMED(limit)(int64_t);

/* Run `rounds` multiply-adds of each sum. Returns the number of floating-point operations, two a multiply-add. */
EXPORT int64_t NAMED(limit)(int64_t rounds) {
    const Vector factor = broadcast(0.999f), term = broadcast(1e-3f);
    Vector sums[SUMS];
    UNROLL for (int s = 0; s < SUMS; s++) sums[s] = broadcast((float)s);
    for (int64_t round = 0; round < rounds; round++) {
        UNROLL for (int s = 0; s < SUMS; s++) sums[s] = sums[s] * factor + term;
    }
    Vector total = sums[0];
    UNROLL for (int s = 1; s < SUMS; s++) total += sums[s];
    /* The sums are used, so the compiler keeps the loop. They tend to 1 and are never negative. */
    return sum_of(total) < 0 ? 0 : rounds * SUMS * LANES * 2;
}
