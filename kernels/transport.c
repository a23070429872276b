/* Weights of a few queries of a recurrent layer with one decay a token (recurrence.h) on every earlier token.

   The weight of query i on token j is x . k_j, where x is the query transported back to the place behind token j. It
   goes on to the place before it:

       x <- d_j (x - (x . k_j) w_j)

   So a row takes one pass over its tokens, and no factors of chunks. A unit of work is a head: its rows read each token
   together. */
#include "rows.h"

/* Tokens after which it is asked whether all queries have decayed to 0, and with them all earlier weights. */
#define PAUSE 64

/* The query of row r is that of token tokens[r]; tokens ascend. Weights are 0 at the start. */
typedef struct {
    int64_t B, H, n, W, num_rows, until; /* weights on tokens from `until` on */
    Tensor query, key, address, decay;   /* query: (B, H, rows, W); others (B, H, n, ...); address may be null */
    const int64_t *tokens;
    float *weights;    /* (B, H, rows, n) */
    int64_t *counters; /* one number, 0 at the start */
} Transport;

/* Floats of scratch memory that one thread needs. */
EXPORT int64_t NAMED(transport_workspace)(const Transport *call) {
    return (call->num_rows + 2) * rounded_up(call->W, LANES);
}

/* The weight of a query on a token, which it then passes. */
INLINE float pass_token(float *x, const float *key, const float *address, float decay, int64_t width) {
    Vector sum = broadcast(0);
    for (int64_t c = 0; c < width; c += LANES) sum += load(x + c) * load(key + c);
    const float weight = sum_of(sum);
    for (int64_t c = 0; c < width; c += LANES) store(x + c, (load(x + c) - load(address + c) * weight) * decay);
    return weight;
}

/* Whether all numbers are 0. Those below the smallest normal number become 0, because a product of them and a decay is
   rounded back to them, and slow. */
static int have_faded(float *numbers, int64_t count) {
    Integers found = {0};
    for (int64_t n = 0; n < count; n += LANES) {
        const Vector x = load(numbers + n);
        const Integers stays = (x >= 0x1p-126f) | (x <= -0x1p-126f) | (x != x);
        store(numbers + n, choose(stays, x, broadcast(0)));
        found |= stays;
    }
    return !any_of(found);
}

static void run_head(const Transport *call, int64_t unit, float *queries) {
    const int64_t entry = unit / call->H, head = unit % call->H, width = rounded_up(call->W, LANES);
    float *key = queries + call->num_rows * width, *address = key + width;
    float *weights = call->weights + unit * call->num_rows * call->n;
    int64_t first = call->num_rows; /* of the rows that stand behind the present token */
    for (int64_t token = call->tokens[first - 1]; token >= call->until; token--) {
        float decay;
        for (; first > 0 && call->tokens[first - 1] >= token; first--)
            pack_rows(&call->query, entry, head, first - 1, 1, call->num_rows, call->W, width,
                      queries + (first - 1) * width);
        pack_rows(&call->key, entry, head, token, 1, call->n, call->W, width, key);
        pack_rows(&call->address, entry, head, token, 1, call->address.data ? call->n : 0, call->W, width, address);
        read_vector(&call->decay, place(&call->decay, entry, head, token), 1, &decay);
        for (int64_t row = first; row < call->num_rows; row++)
            weights[row * call->n + token] = pass_token(queries + row * width, key, address, decay, width);
        if (first == 0 && token % PAUSE == 0 && have_faded(queries, call->num_rows * width)) return;
    }
}

/* All weights: computes heads until none is left. */
EXPORT void NAMED(transport)(const Transport *call, float *memory) {
    for (int64_t unit = next_unit(call->counters); unit < call->B * call->H; unit = next_unit(call->counters))
        run_head(call, unit, memory);
}
