/* Rotary positions: pairs of channels turn by position x frequency (Su et al. 2021, arXiv:2104.09864).

   One pass: a vector is read in its own dtype and strides, rotated in float32, and written once. Angles are integers in
   units of 2^-64 of a turn. Their products overflow where angles wrap around, so large positions lose no precision.
   Cosines and sines of TOKENS tokens are computed once for all batch entries and heads. The gradient turns backwards.
 */
#include "pack.h"

/* Tokens of a unit of work: their cosines and sines stay in the L1 cache. */
#define TOKENS 64

/* `output` = `vectors` rotated; both (B, H, n, D). Pair m has the channels m and m + num_pairs, or 2m and 2m + 1 if
   `interleaved`. Channels behind the pairs do not change. */
typedef struct {
    int64_t B, H, n, D, num_pairs, interleaved;
    int64_t direction; /* 1, or -1 for the gradient */
    Tensor vectors, output;
    const int64_t *positions;   /* (n,) */
    const int64_t *frequencies; /* (num_pairs,): 2^-64 of a turn for each position */
    int64_t *counters;          /* one number, 0 at the start */
} Rotation;

/* Floats of scratch memory that one thread needs. */
EXPORT int64_t NAMED(rotate_workspace)(const Rotation *r) {
    return TOKENS * 2 * rounded_up(r->num_pairs, LANES) + 2 * r->D;
}

/* Cosine and sine of `turns` x 2^-32 turns, to 1e-7.

   The angle is a number of quarter turns and a rest within an eighth of a turn. The polynomials are those of
   S. L. Moshier's Cephes library (sinf.c). */
INLINE void cosine_and_sine(Integers turns, Vector *cosine, Vector *sine) {
    const Bits quarters = ((Bits)turns + 0x20000000) >> 30;
    const Integers rest = (Integers)((Bits)turns - (quarters << 30));
    const Vector x = __builtin_convertvector(rest, Vector) * 1.46291807926715968e-9f, x2 = x * x; /* 2 pi / 2^32 */
    Vector s = x2 * -1.9515295891e-4f + 8.3321608736e-3f;
    s = (s * x2 - 1.6666654611e-1f) * x2 * x + x;
    Vector c = x2 * 2.443315711809948e-5f - 1.388731625493765e-3f;
    c = (c * x2 + 4.166664568298827e-2f) * x2 * x2 - 0.5f * x2 + 1.0f;
    const Integers is_odd = (Integers)(quarters << 31) >> 31; /* all bits of a lane, or none */
    const Bits of_cosine = ((quarters + 1) & 2) << 30, of_sine = (quarters & 2) << 30;
    *cosine = (Vector)((Bits)choose(is_odd, s, c) ^ of_cosine);
    *sine = (Vector)((Bits)choose(is_odd, c, s) ^ of_sine);
}

/* The cosines of a token, then its sines, `width` numbers each. */
static void fill_table(const Rotation *r, int64_t position, int64_t width, float *table) {
    int32_t *turns = (int32_t *)table; /* each is read before its place is overwritten */
    for (int64_t m = 0; m < r->num_pairs; m++)
        turns[m] = (int32_t)((uint64_t)position * (uint64_t)r->frequencies[m] >> 32);
    for (int64_t m = r->num_pairs; m < width; m++) turns[m] = 0;
    for (int64_t m = 0; m < width; m += LANES) {
        Vector cosine, sine;
        cosine_and_sine(*(const Integers *)(turns + m), &cosine, &sine);
        store(table + m, cosine);
        store(table + width + m, sine * (float)r->direction);
    }
}

/* One vector; pairs are `step` channels apart, and the channels of a pair `other`. */
INLINE void rotate_pairs(int64_t num_pairs, int64_t step, int64_t other, const float *cosines, const float *sines,
                         const float *restrict x, float *restrict y) {
    for (int64_t m = 0; m < num_pairs; m++) {
        const float a = x[m * step], b = x[m * step + other];
        y[m * step] = a * cosines[m] - b * sines[m];
        y[m * step + other] = a * sines[m] + b * cosines[m];
    }
}

/* The channels of a vector where they are, if they are contiguous numbers of float32; else null. */
INLINE float *in_place(const Tensor *t, int64_t start) {
    return t->dtype == FLOAT32 && t->strides[3] == 1 ? (float *)t->data + start : 0;
}

static void rotate_token(const Rotation *r, int64_t entry, int64_t head, int64_t token, const float *cosines,
                         const float *sines, float *buffer) {
    const int64_t pairs = r->num_pairs, from = place(&r->vectors, entry, head, token);
    const int64_t to = place(&r->output, entry, head, token);
    const float *x = in_place(&r->vectors, from);
    float *y = in_place(&r->output, to);
    if (!x) {
        read_vector(&r->vectors, from, r->D, buffer);
        x = buffer;
    }
    if (!y) y = buffer + r->D;
    if (r->interleaved)
        rotate_pairs(pairs, 2, 1, cosines, sines, x, y);
    else
        rotate_pairs(pairs, 1, pairs, cosines, sines, x, y);
    for (int64_t c = 2 * pairs; c < r->D; c++) y[c] = x[c];
    if (y == buffer + r->D) write_vector(&r->output, to, r->D, y);
}

/* Rotates TOKENS tokens of all heads at a time until none is left. */
EXPORT void NAMED(rotate)(const Rotation *r, float *memory) {
    const int64_t width = rounded_up(r->num_pairs, LANES), units = (r->n + TOKENS - 1) / TOKENS;
    float *buffer = memory + TOKENS * 2 * width;
    for (int64_t unit = next_unit(r->counters); unit < units; unit = next_unit(r->counters)) {
        const int64_t first = unit * TOKENS, count = min(TOKENS, r->n - first);
        for (int64_t t = 0; t < count; t++) fill_table(r, r->positions[first + t], width, memory + t * 2 * width);
        for (int64_t row = 0; row < r->B * r->H; row++)
            for (int64_t t = 0; t < count; t++) {
                const float *cosines = memory + t * 2 * width;
                rotate_token(r, row / r->H, row % r->H, first + t, cosines, cosines + width, buffer);
            }
    }
}
